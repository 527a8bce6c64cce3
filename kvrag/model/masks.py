"""Who sees whom, read from the model's own mask functions: a config may name a window that a layer doesn't apply, and the reverse."""

from __future__ import annotations

from typing import Any

import torch

from kvrag.model.forward import MaskFunction
from kvrag.model.rows import EVERYTHING, Reach
from kvrag.model.support import UNLIMITED, context_window


def read_mask(mask: MaskFunction, config: Any, device: torch.device) -> Reach | None:
    """Find the reach that a mask function means, by evaluating it; ``None`` if it is of no kind that a :class:`Reach` can say."""
    far = min(context_window(config), UNLIMITED) - 1
    seen = int(_visible(mask, far, far + 1, device).sum())
    limits = {getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None), seen}
    sizes = [int(limit) for limit in limits if isinstance(limit, int) and limit]
    for reach in (EVERYTHING, *(Reach(window=n) for n in sizes), *(Reach(chunk=n) for n in sizes)):
        rows = {0, 1, far // 2, far, *(k * n + d for n in sizes for k in (1, 2) for d in (-1, 0, 1))}
        if all(_agrees(mask, reach, row, device) for row in rows if 0 <= row <= far):
            return reach
    return None


def _visible(mask: MaskFunction, row: int, num_keys: int, device: torch.device) -> torch.Tensor:
    keys = torch.arange(num_keys, device=device)
    return mask(0, 0, torch.tensor([row], device=device), keys).expand(num_keys)


def _agrees(mask: MaskFunction, reach: Reach, row: int, device: torch.device) -> bool:
    num_keys = row + 8  # a few keys of the future, none of which may be seen
    keys = torch.arange(num_keys, device=device)
    at = torch.tensor([row], device=device)
    expected = (keys <= row) & (keys >= reach.lo(at, at))
    return bool((_visible(mask, row, num_keys, device) == expected).all())
