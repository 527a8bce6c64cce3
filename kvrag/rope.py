"""Rotary positions: rotate position-free keys to their final rows, and back, in float32 with one cast.

A rotary embedding is linear in its table: ``rotate(k) = cos · k + sin · J(k)``, whatever the pairing ``J`` (halves, interleaved,
partial). So the model's own function serves every layout: with ``-sin`` it is the inverse, and no formula of ours can disagree
with the model's (RoFormer, arXiv 2104.09864).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

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
    unit_cos: torch.Tensor = field(init=False)
    unit_sin: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        is_unit = self.magnitude == 1.0
        object.__setattr__(self, "unit_cos", self.cos if is_unit else self.cos / self.magnitude)
        object.__setattr__(self, "unit_sin", self.sin if is_unit else self.sin / self.magnitude)

    def rotate(self, keys: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Turn position-free keys ``(H, T, D)`` to the positions ``rows`` as the model does; float32 inside, cast back once."""
        return self._turn(keys, self.cos[rows], self.sin[rows])

    def unit_rotate(self, vectors: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Turn ``(H, T, D)`` without the magnitude: for differences of keys, which carry it already."""
        return self._turn(vectors, self.unit_cos[rows], self.unit_sin[rows])

    def unit_unrotate(self, vectors: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Invert :meth:`unit_rotate`."""
        return self._turn(vectors, self.unit_cos[rows], -self.unit_sin[rows])

    def partner(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return ``J(vectors)``, ``(H, C, R)`` for ``(H, C, D)``: what the sines multiply, the same at every row."""
        zero, one = torch.zeros_like(self.cos[:1]), torch.ones_like(self.cos[:1])
        return self.apply(vectors[None], zero[None], one[None])[0, ..., : self.cos.shape[-1]]

    def add_unit_rotated(self, target: torch.Tensor, vector: torch.Tensor, partner: torch.Tensor, rows: Rows) -> None:
        """Add one vector, turned to each of the rows, to ``target`` in place.

        The same as ``target += unit_rotate(vector.expand(...), rows)`` in two fused passes and without a copy of the target's size.

        Parameters
        ----------
        target
            ``(H, T, D)``, any dtype; changed.
        vector, partner
            Float32 ``(H, 1, D)``, and its :meth:`partner`.
        rows
            ``T`` positions.
        """
        width = self.cos.shape[-1]
        turning = target[..., :width]
        if target.dtype == torch.float32:
            turning.addcmul_(self.unit_cos[rows], vector[..., :width])
            turning.addcmul_(self.unit_sin[rows], partner)
        else:  # one rounding, not two
            turning += self.unit_cos[rows] * vector[..., :width] + self.unit_sin[rows] * partner
        if width < target.shape[-1]:  # dimensions that don't turn (partial rotary)
            target[..., width:] += vector[..., width:]

    def _turn(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return self.apply(keys.float()[None], cos[None], sin[None])[0].to(keys.dtype)
