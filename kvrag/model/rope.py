"""RoPE: rotate position-free keys to their final rows, and back, in float32 with a single cast.

A rotary embedding is linear in its table: ``rotate(k) = cos · k + sin · J(k)`` for any pairing
``J`` (halves, interleaved, partial, scaled). So the model's own function serves every layout, and
with ``-sin`` it is the inverse (RoFormer, arXiv 2104.09864).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from kvrag.errors import UnsupportedModelError

ApplyRotary = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``(keys (1, H, T, W), cos (1, T, R), sin (1, T, R)) -> keys`` with the model's own pairing."""

Tables = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of positions, both float32 ``(N, R)``."""

MakeTables = Callable[[torch.Tensor], Tables]
"""``positions (N,) -> cos, sin``."""

Index = slice | torch.Tensor
"""Positions of a prompt: a slice, or an int64 index tensor."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Rotation:
    """Rotation by tables and the model's own function, in ``width`` dimensions from ``start`` on.

    The other dimensions pass unchanged; ``width`` 0 is a layer without positions. ``magnitude`` is
    a factor in the tables (YaRN and longrope also scale the keys). With ``is_aligned``, column
    ``d`` of the table belongs to dimension ``start + d``; not where ``apply`` spreads half a table
    over pairs (GLM, GPT-J) or over halves (GPT-OSS).
    """

    name: str
    tables: MakeTables
    apply: ApplyRotary
    magnitude: float
    width: int
    start: int
    is_aligned: bool

    def at(self, positions: torch.Tensor) -> RotaryTable:
        """Return the table of these positions: row ``i`` rotates to ``positions[i]``."""
        return RotaryTable(self, *self.tables(positions))


class Pairing(NamedTuple):
    """Pairing of dimensions that rotate together, as neighbours or halves.

    ``first`` are the first dimensions of all pairs; ``sign`` is the angles' sign.
    """

    is_neighbours: bool
    first: slice
    sign: float


class RotaryTable:
    """Rotations of a prompt's positions 0 to ``N - 1``, for layers of the same kind.

    ``cos`` and ``sin`` are float32, ``(N, R)``.
    """

    def __init__(self, rotation: Rotation, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self.cos = cos
        self.sin = sin
        self.apply = rotation.apply
        self.magnitude = rotation.magnitude
        self.width = rotation.width
        self.start = rotation.start
        self.rotation = rotation
        self.unit_cos, self.unit_sin = (
            x if self.magnitude == 1.0 else x / self.magnitude for x in (cos, sin)
        )
        self.rotating = slice(self.start, self.start + self.width)

    def rotate(self, keys: torch.Tensor, rows: Index) -> torch.Tensor:
        """Rotate position-free keys ``(H, T, D)`` to the positions ``rows``.

        It computes in float32 and casts back once.
        """
        return self._apply(keys, self.cos[rows], self.sin[rows])

    def unrotate(self, keys: torch.Tensor, rows: Index) -> torch.Tensor:
        """Invert :meth:`rotate`: return position-free keys ``(H, T, D)``.

        It serves models that give only rotated keys.
        """
        cos, sin = self.cos[rows], self.sin[rows]
        # Not the magnitude's: vLLM rounds its tables to the model's dtype.
        square = cos * cos + sin * sin
        return self._apply(keys, cos / square, -sin / square)

    def unit_unrotate(self, vectors: torch.Tensor, rows: Index) -> torch.Tensor:
        """Rotate ``(H, T, D)`` back, without the magnitude.

        Differences of rotated keys carry the magnitude already.
        """
        return self._apply(vectors, self.unit_cos[rows], -self.unit_sin[rows])

    def partner(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return ``J(vectors)``, the factor of the sines: ``(H, T, width)`` for ``(H, T, D)``."""
        zero = torch.zeros_like(self.cos[None, :1])
        return self.apply(vectors[None, ..., self.rotating], zero, torch.ones_like(zero))[0]

    def add_unit_rotated(
        self,
        target: torch.Tensor,
        vectors: torch.Tensor,
        partner: torch.Tensor | None = None,
        *,
        rows: Index,
    ) -> None:
        """Add ``vectors``, ``(H, T, D)``, rotated to ``rows``, to ``target`` in place.

        The rotation leaves out the magnitude. ``partner`` is the result of :meth:`partner` for
        them; by default it is computed here.
        """
        if self.width:
            cos, sin = self._unit_columns
            # In float32, so that 16-bit values are rounded once.
            target[..., self.rotating] += (cos[rows] * vectors[..., self.rotating]).addcmul_(
                sin[rows], self.partner(vectors) if partner is None else partner
            )
        for fixed in (
            slice(0, self.start),
            slice(self.rotating.stop, target.shape[-1]),
        ):  # partial rotary
            if fixed.start < fixed.stop:
                target[..., fixed] += vectors[..., fixed]

    def pairs(self, count: int | None = None) -> tuple[torch.Tensor, torch.Tensor, bool] | None:
        """Return the pairs' cosine and sine, and whether pairs are neighbours.

        The tables are ``(count, width / 2)``, of the first positions (by default all).

        Other pairs are halves. The result is ``None`` if the rotation is of neither kind, or the
        rotating dimensions are not the first.
        """
        pairing = self._pairing
        if pairing is None:
            return None
        tables = self._spread(self.cos[:count], self.sin[:count])
        cos, sin = (x[:, pairing.first].contiguous() for x in tables)
        return cos, sin * pairing.sign, pairing.is_neighbours

    @cached_property
    def _unit_columns(self) -> Tables:
        return self._spread(self.unit_cos, self.unit_sin)

    def _spread(self, cos: torch.Tensor, sin: torch.Tensor) -> Tables:
        """Return cosines and sines with a column per dimension that rotates."""
        if self.rotation.is_aligned:
            return cos, sin
        return spread(self.apply, cos, sin, self.width)

    @cached_property
    def _pairing(self) -> Pairing | None:
        """Pairing of the rotation; found once, because that reads from the device."""
        if not self.width or self.width % 2 or self.start:
            return None
        count = torch.arange(1, self.width + 1, dtype=torch.float32, device=self.cos.device)
        found = self.partner(count[None, None])[0, 0]
        sign = -float(found[0].sign())  # some rotate the other way (nanochat)
        tables = self._spread(self.cos[:3], self.sin[:3])
        half = self.width // 2
        for is_neighbours, first, second in (
            (False, slice(0, half), slice(half, None)),
            (True, slice(0, None, 2), slice(1, None, 2)),
        ):
            partner = torch.empty_like(count)
            partner[first] = -count[second]
            partner[second] = count[first]
            if torch.equal(found * sign, partner) and all(
                torch.equal(x[:, first], x[:, second]) for x in tables
            ):
                return Pairing(is_neighbours, first, sign)
        return None

    def _apply(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        if not self.width:
            return keys
        if self.width == keys.shape[-1]:
            return self.apply(keys.float()[None], cos[None], sin[None])[0].to(keys.dtype)
        rotated = self.apply(keys[..., self.rotating].float()[None], cos[None], sin[None])[0]
        return torch.cat(
            [keys[..., : self.start], rotated.to(keys.dtype), keys[..., self.rotating.stop :]],
            dim=-1,
        )


Rotations = Sequence[RotaryTable]
"""Rotations of a prompt's positions: a table per layer.

Layers of the same kind share a table (Gemma 3 has two kinds).
"""


class RotaryTables:
    """Rotary tables of a model, kept from prompt to prompt; ``rotations`` has one per layer.

    Tables for more than ``limit`` positions are not kept.
    """

    def __init__(self, rotations: Sequence[Rotation], limit: int) -> None:
        self._rotations = rotations
        self._limit = limit
        self._kept: Rotations = ()

    def of(self, num_positions: int, device: torch.device) -> Rotations:
        """Return the rotations of at least ``num_positions`` positions per layer, in float32."""
        if self._kept and num_positions <= min(self._limit, len(self._kept[0].cos)):
            return self._kept
        # With room for longer prompts.
        count = max(num_positions, min(2 * num_positions, self._limit))
        positions = torch.arange(count, device=device)
        made = {each: each.at(positions) for each in set(self._rotations)}
        found = [made[each] for each in self._rotations]
        if num_positions <= self._limit:
            self._kept = found
        return found

    def check(self, positions: torch.Tensor, name: str) -> None:
        """Refuse a model of this name if angles at a position depend on the prompt's length.

        Raises ``UnsupportedModelError``.
        """
        for rotation in set(self._rotations):
            sides = zip(rotation.tables(positions[:3]), rotation.tables(positions), strict=True)
            if not all(torch.equal(short, long[:3]) for short, long in sides):
                raise UnsupportedModelError(
                    f"the rotary angles of {name} ({rotation.name}) change with the prompt's "
                    "length, so stored keys can't be moved exactly"
                )


def _no_tables(positions: torch.Tensor) -> Tables:
    empty = positions.new_empty((len(positions), 0), dtype=torch.float32)
    return empty, empty


# Keys without positions.
NO_ROTATION = Rotation("none", _no_tables, lambda keys, _cos, _sin: keys, 1.0, 0, 0, True)


def spread(apply: ApplyRotary, cos: torch.Tensor, sin: torch.Tensor, width: int) -> Tables:
    """Return the cosine and sine of every rotating dimension, both ``(N, width)``.

    They are the factors that ``apply`` makes of its tables ``(N, R)``.
    """
    ones = torch.ones((1, 1, len(cos), width), dtype=cos.dtype, device=cos.device)
    zeros = torch.zeros_like(cos)[None]
    # J(1): a sign, or a ratio of scales.
    signs = apply(ones[:, :, :1], zeros[:, :1], torch.ones_like(cos[None, :1]))
    return apply(ones, cos[None], zeros)[0, 0], (apply(ones, zeros, sin[None]) / signs)[0, 0]


def in_order(apply: ApplyRotary, cos: torch.Tensor, width: int) -> ApplyRotary:
    """Return a rotation that leaves dimensions at their places.

    Some rotations gather the even dimensions in the first half before they rotate halves
    (DeepSeek). Then the keys that this result takes are gathered already, so it can be inverted.
    """
    places = torch.arange(width, dtype=cos.dtype, device=cos.device)
    one = torch.ones_like(cos[None, :1])
    order = apply(places[None, None, None], one, torch.zeros_like(one))[0, 0, 0].long()
    if torch.equal(order, places.long()):
        return apply
    back = order.argsort()
    return lambda keys, cos, sin: apply(keys[..., back], cos, sin)


def adapt(function: Callable[..., Any]) -> ApplyRotary | None:
    """Adapt a modelling module's rotation to ``ApplyRotary``; ``None`` for unknown arguments."""
    parameters = list(inspect.signature(function).parameters)
    if parameters[:4] == ["q", "k", "cos", "sin"]:
        return lambda keys, cos, sin: function(keys[:, :0], keys, cos, sin)[1]
    if parameters[1:3] == ["cos", "sin"]:  # a tensor alone (Gemma 4)
        return function
    if parameters == ["tensor", "sin", "cos"]:  # GPT-J: (B, T, H, D), sine first
        return lambda keys, cos, sin: function(keys.transpose(1, 2), sin, cos).transpose(1, 2)
    return None


def complex_product(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Multiply pairs of neighbours as complex numbers: the rotation by a complex table."""
    pairs = torch.view_as_complex(keys.reshape(*keys.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * torch.complex(cos, sin)[:, None]).flatten(-2)


def from_module(
    module: torch.nn.Module,
    kinds: Sequence[str],
    is_complex: bool,
    is_sine_first: bool,
    axes: Sequence[int],
    positions: torch.Tensor,
) -> Tables:
    """Return the tables of a rotary module.

    ``kinds`` holds the layer type, if it asks for that; ``axes`` are those before the positions.
    """
    made = module(
        torch.empty((1, 1), dtype=torch.float32, device=positions.device),
        positions.expand(*axes, -1),
        *kinds,
    )
    if is_complex:
        cos, sin = made.real, made.imag
    else:
        cos, sin = reversed(made) if is_sine_first else made
    return cos[0].float(), sin[0].float()


def from_sinusoids(buffer: torch.Tensor, positions: torch.Tensor) -> Tables:
    """Return the tables of a buffer of sinusoids, sine first (GPT-J before transformers 5.24)."""
    sin, cos = buffer.to(positions.device)[positions].float().chunk(2, dim=-1)
    return cos, sin
