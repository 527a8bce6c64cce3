"""Rotary positions: rotate position-free keys to their final rows, and back, in float32 with one cast.

A rotary embedding is linear in its table: ``rotate(k) = cos · k + sin · J(k)``, whatever the pairing ``J`` (halves, interleaved,
partial). So the model's own function serves every layout: with ``-sin`` it is the inverse, and no formula of ours can disagree
with the model's (RoFormer, arXiv 2104.09864).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

ApplyRotary = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``(keys (1, H, T, D), cos (1, T, R), sin (1, T, R)) -> keys`` with the model's own pairing."""

Rows = slice | torch.Tensor
"""Rows of a prompt: a slice, or an int64 index tensor."""


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Rotations of the positions 0 to ``N - 1`` of one prompt.

    Parameters
    ----------
    cos, sin
        Float32 tables ``(N, R)`` as the model's rotary module gives them, ``magnitude`` included.
    apply
        The model's own rotation.
    magnitude
        Factor in ``cos`` and ``sin`` (YaRN and longrope scale the keys as well as turning them).
    """

    cos: torch.Tensor
    sin: torch.Tensor
    apply: ApplyRotary
    magnitude: float = 1.0

    def rotate(self, keys: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Turn position-free keys ``(H, T, D)`` to the positions ``rows`` as the model does; float32 inside, cast back once."""
        return self._turn(keys, self.cos[rows], self.sin[rows])

    def unit_rotate(self, vectors: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Turn ``(H, T, D)`` without the magnitude: for differences of keys, which carry it already."""
        return self._turn(vectors, self.cos[rows] / self.magnitude, self.sin[rows] / self.magnitude)

    def unit_unrotate(self, vectors: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Invert :meth:`unit_rotate`."""
        return self._turn(vectors, self.cos[rows] / self.magnitude, -self.sin[rows] / self.magnitude)

    def add_unit_rotated(self, target: torch.Tensor, vector: torch.Tensor, rows: Rows) -> None:
        """Add one vector, turned to each of the rows, to ``target`` in place.

        The same as ``target += unit_rotate(vector.expand(...), rows)`` in two fused passes and without a copy of the target's size:
        the partner ``J(vector)`` is the same for all rows.

        Parameters
        ----------
        target
            ``(H, T, D)``, any dtype; changed.
        vector
            Float32 ``(H, 1, D)``.
        rows
            ``T`` positions.
        """
        width = self.cos.shape[-1]
        zero, one = torch.zeros_like(self.cos[:1]), torch.ones_like(self.cos[:1])
        partner = self.apply(vector[None], zero[None], one[None])[0, ..., :width]
        turning = target[..., :width]
        if target.dtype == torch.float32:
            turning.addcmul_(self.cos[rows] / self.magnitude, vector[..., :width])
            turning.addcmul_(self.sin[rows] / self.magnitude, partner)
        else:  # one rounding, not two
            turning += self.cos[rows] / self.magnitude * vector[..., :width] + self.sin[rows] / self.magnitude * partner
        if width < target.shape[-1]:  # dimensions that don't turn (partial rotary)
            target[..., width:] += vector[..., width:]

    def _turn(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return self.apply(keys.float()[None], cos[None], sin[None])[0].to(keys.dtype)
