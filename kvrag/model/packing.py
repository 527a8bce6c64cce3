"""Many chunks in one forward, packed behind one prefix: indices and positions only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Packing:
    """Several runs of rows in one forward, each behind the same prefix and blind to the others: a row's index is not its position.

    Parameters
    ----------
    prefix
        First keys, which all rows see.
    lo
        Int64 tensor ``(R,)``: index of the first key of each row's own run.
    positions
        Int64 tensor ``(R,)``: position of each row.
    """

    prefix: int
    lo: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def of(cls, prefix: int, lengths: Sequence[int], device: torch.device) -> Packing:
        """Lay runs of these lengths one after the other behind a prefix; every position follows from the prefix's end."""
        sizes = torch.tensor(lengths, device=device)
        starts = (prefix + sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        return cls(prefix, starts, torch.arange(prefix, prefix + sum(lengths), device=device) - starts + prefix)
