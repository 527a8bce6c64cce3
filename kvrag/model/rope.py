"""Rotary positions: rotate position-free keys to their final rows, and back, in float32 with one cast.

A rotary embedding is linear in its table: ``rotate(k) = cos · k + sin · J(k)``, whatever the pairing ``J`` (halves, interleaved,
partial). So the model's own function serves every layout: with ``-sin`` it is the inverse, and no formula of ours can disagree
with the model's (RoFormer, arXiv 2104.09864).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

ApplyRotary = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``(keys (1, H, T, W), cos (1, T, R), sin (1, T, R)) -> keys`` with the model's own pairing."""

Index = slice | torch.Tensor
"""Positions of a prompt: a slice, or an int64 index tensor."""


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Rotations of the positions 0 to ``N - 1`` of one prompt, for layers of one kind.

    Parameters
    ----------
    cos, sin
        Float32 tables ``(N, R)`` as the model's rotary module gives them, ``magnitude`` included.
    apply
        The model's own rotation of the ``width`` dimensions that turn.
    magnitude
        Factor in ``cos`` and ``sin`` (YaRN and longrope scale the keys as well as turning them).
    width
        How many dimensions turn, from ``start`` on; the others pass as they are. 0: none, a layer without positions.
    start
        First dimension that turns.
    is_aligned
        Whether column ``d`` of the table belongs to dimension ``start + d``. It does not where ``apply`` spreads half a table over
        pairs (GLM, GPT-J) or over halves (GPT-OSS).
    """

    cos: torch.Tensor
    sin: torch.Tensor
    apply: ApplyRotary
    magnitude: float = 1.0
    width: int = -1
    start: int = 0
    is_aligned: bool = True
    unit_cos: torch.Tensor = field(init=False)
    unit_sin: torch.Tensor = field(init=False)
    _spread: list[tuple[torch.Tensor, torch.Tensor]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        is_unit = self.magnitude == 1.0
        object.__setattr__(self, "unit_cos", self.cos if is_unit else self.cos / self.magnitude)
        object.__setattr__(self, "unit_sin", self.sin if is_unit else self.sin / self.magnitude)
        if self.width < 0:
            object.__setattr__(self, "width", self.cos.shape[-1])

    def rotate(self, keys: torch.Tensor, rows: Index) -> torch.Tensor:
        """Turn position-free keys ``(H, T, D)`` to the positions ``rows`` as the model does; float32 inside, cast back once."""
        return self._turn(keys, self.cos[rows], self.sin[rows])

    def unrotate(self, keys: torch.Tensor, rows: Index) -> torch.Tensor:
        """Invert :meth:`rotate`: the position-free keys of ``(H, T, D)``, for models that give only turned ones."""
        square = self.magnitude * self.magnitude
        return self._turn(keys, self.cos[rows] / square, -self.sin[rows] / square)

    def unit_rotate(self, vectors: torch.Tensor, rows: Index) -> torch.Tensor:
        """Turn ``(H, T, D)`` without the magnitude: for differences of keys, which carry it already."""
        return self._turn(vectors, self.unit_cos[rows], self.unit_sin[rows])

    def unit_unrotate(self, vectors: torch.Tensor, rows: Index) -> torch.Tensor:
        """Invert :meth:`unit_rotate`."""
        return self._turn(vectors, self.unit_cos[rows], -self.unit_sin[rows])

    def without_magnitude(self, differences: torch.Tensor) -> torch.Tensor:
        """Return differences of turned keys ``(H, T, D)``, turned back by :meth:`unit_unrotate`, as differences of stored keys.

        What :meth:`rotate` makes of these carries the magnitude once.
        """
        if self.magnitude == 1.0 or not self.width:
            return differences
        stored = differences.clone()
        stored[..., self._turning] /= self.magnitude
        return stored

    def partner(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return ``J(vectors)``, ``(H, C, width)`` for ``(H, C, D)``: what the sines multiply, the same at every row."""
        turning = vectors[..., self._turning]
        if not self.width:
            return turning
        zero, one = torch.zeros_like(self.cos[:1]), torch.ones_like(self.cos[:1])
        return self.apply(turning[None], zero[None], one[None])[0]

    def add_unit_rotated(self, target: torch.Tensor, vector: torch.Tensor, partner: torch.Tensor, rows: Index) -> None:
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
        turns = self._turning
        turning = target[..., turns]
        if self.width:
            cos, sin = self._columns()
            if target.dtype == torch.float32:
                turning.addcmul_(cos[rows], vector[..., turns])
                turning.addcmul_(sin[rows], partner)
            else:  # one rounding, not two
                turning += cos[rows] * vector[..., turns] + sin[rows] * partner
        for still in (slice(0, turns.start), slice(turns.stop, target.shape[-1])):  # they don't turn (partial rotary)
            if still.start < still.stop:
                target[..., still] += vector[..., still]

    def pairs(self) -> tuple[torch.Tensor, torch.Tensor, bool] | None:
        """Return the cosine and sine of each pair, ``(N, width / 2)``, and whether pairs are neighbours rather than halves.

        ``None`` if the rotation is of neither kind, or the dimensions that turn are not the first.
        """
        half, is_odd = divmod(self.width, 2)
        if not self.width or is_odd or self.start:
            return None
        count = torch.arange(1.0, self.width + 1, device=self.cos.device)
        found = self.partner(count[None, None])[0, 0]
        sign = -float(found[0].sign())  # some turn the other way (nanochat)
        is_halves = torch.equal(found * sign, torch.cat([-count[half:], count[:half]]))
        is_neighbours = torch.equal(found * sign, torch.stack([-count[1::2], count[::2]], dim=1).flatten())
        if not (is_halves or is_neighbours):
            return None
        columns = (self.cos, self.sin) if self.is_aligned else spread(self.apply, self.cos, self.sin, self.width)
        first, second = (slice(0, half), slice(half, None)) if is_halves else (slice(0, None, 2), slice(1, None, 2))
        if not all(torch.equal(x[:3, first], x[:3, second]) for x in columns):
            return None
        cos, sin = (x[:, first].contiguous() for x in columns)
        return cos, sin * sign, is_neighbours

    @property
    def _turning(self) -> slice:
        return slice(self.start, self.start + self.width)

    def _columns(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return unit tables with a column per turning dimension, read off the model's own rotation where they are not aligned."""
        if self.is_aligned:
            return self.unit_cos, self.unit_sin
        if not self._spread:
            self._spread.append(spread(self.apply, self.unit_cos, self.unit_sin, self.width))
        return self._spread[0]

    def _turn(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        if not self.width:
            return keys
        if self.width == keys.shape[-1]:
            return self.apply(keys.float()[None], cos[None], sin[None])[0].to(keys.dtype)
        turned = self.apply(keys[..., self._turning].float()[None], cos[None], sin[None])[0].to(keys.dtype)
        return torch.cat([keys[..., : self.start], turned, keys[..., self.start + self.width :]], dim=-1)


@dataclass(frozen=True, slots=True)
class Rotations:
    """The rotations of one prompt's positions in every layer: one table per kind of layer.

    Parameters
    ----------
    tables
        One per kind (Gemma 3 turns its local layers otherwise than its global ones; some layers of SmolLM 3 don't turn at all).
    kinds
        For each layer the index of its table.
    """

    tables: Sequence[RotaryTable]
    kinds: Sequence[int]

    def __getitem__(self, layer: int) -> RotaryTable:
        """Return the table of a layer."""
        return self.tables[self.kinds[layer]]


def spread(apply: ApplyRotary, cos: torch.Tensor, sin: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosine and sine that each turning dimension meets, ``(N, width)`` each, as ``apply`` uses the tables ``(N, R)``."""
    ones = torch.ones((1, 1, len(cos), width), dtype=cos.dtype, device=cos.device)
    zeros = torch.zeros_like(cos)[None]
    signs = apply(ones[:, :, :1], zeros[:, :1], torch.ones_like(cos[None, :1]))  # J(1): +1 or -1
    return apply(ones, cos[None], zeros)[0, 0], (apply(ones, zeros, sin[None]) * signs)[0, 0]
