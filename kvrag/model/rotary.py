"""Where a model's rotary tables come from, and its own rotation behind one signature.

Tables: a rotary module (``(cos, sin)``, or complex numbers), one table per layer type where the module asks for the type, or a buffer of
sinusoids (GPT-J). Rotation: the function of the modelling module, whatever its arguments. Every pair is a candidate
(:class:`Turning`); :mod:`.probe` finds out which one a layer uses.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvrag.model.rope import ApplyRotary, RotaryTable, spread

MakeTables = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""``positions (N,) -> cos, sin``, float32 ``(N, R)`` each."""


@dataclass(frozen=True, slots=True)
class Turning:
    """One way of turning keys: where its tables come from, the rotation, and which dimensions turn.

    ``name`` says it in a word; the other fields are those of :class:`~kvrag.model.rope.RotaryTable`.
    """

    name: str
    tables: MakeTables
    apply: ApplyRotary
    magnitude: float
    width: int
    start: int
    is_aligned: bool

    def at(self, positions: torch.Tensor) -> RotaryTable:
        """Return the rotations of these positions: row ``i`` of the table turns to ``positions[i]``."""
        cos, sin = self.tables(positions)
        return RotaryTable(cos, sin, self.apply, self.magnitude, self.width, self.start, self.is_aligned)


def _no_tables(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    empty = torch.empty((len(positions), 0), device=positions.device)
    return empty, empty


STILL = Turning("none", _no_tables, lambda keys, _cos, _sin: keys, 1.0, 0, 0, True)
"""Keys without positions."""


def turnings(base: torch.nn.Module, attention: torch.nn.Module, key_dim: int) -> list[Turning]:
    """List the ways in which this attention module could turn its keys, :data:`STILL` among them.

    Parameters
    ----------
    base
        The model without its head.
    attention
        One of its attention modules.
    key_dim
        Head dim ``D`` of its keys.
    """
    found = [STILL]
    for name, make, is_complex in _sources(base, attention):
        rotations = [_complex_product] if is_complex else _rotations(attention)
        for rotation in rotations:
            found += _fitting(name, make, rotation, key_dim)
    return found


def _sources(base: torch.nn.Module, attention: torch.nn.Module) -> Iterator[tuple[str, MakeTables, bool]]:
    """Yield every source of tables once: ``(name, tables, whether they were complex)``."""
    modules = [*attention.modules(), *(m for n, m in base.named_children() if "rot" in n)]
    seen: set[int] = set()
    for module in modules:
        if "Rotary" not in type(module).__name__ or id(module) in seen:
            continue
        seen.add(id(module))
        for kind in _layer_types(module):
            tables = _from_module(module, kind)
            try:
                _, is_complex = tables(torch.arange(2, device=_device_of(base)))
            except (TypeError, ValueError, KeyError, AttributeError, RuntimeError):
                continue  # not the tables of a text decoder
            yield kind or "rope", _real(tables), is_complex
    sinusoids = getattr(attention, "embed_positions", None)
    if isinstance(sinusoids, torch.Tensor) and sinusoids.dim() == 2:
        yield "sinusoids", _from_sinusoids(sinusoids), False


def _layer_types(module: torch.nn.Module) -> Sequence[str | None]:
    if "layer_type" not in inspect.signature(type(module).forward).parameters:
        return [None]
    kinds = getattr(module, "layer_types", None) or getattr(module.config, "layer_types", None) or []
    return sorted(set(kinds)) or [None]


def _device_of(base: torch.nn.Module) -> torch.device:
    return next(base.parameters()).device


def _from_module(
    module: torch.nn.Module, kind: str | None
) -> Callable[[torch.Tensor], tuple[tuple[torch.Tensor, torch.Tensor], bool]]:
    def tables(positions: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], bool]:
        like = torch.empty((1, 1), dtype=torch.float32, device=positions.device)
        made = module(like, positions[None], *([] if kind is None else [kind]))
        if isinstance(made, torch.Tensor) and made.is_complex():
            return (made[0].real.float(), made[0].imag.float()), True
        cos, sin = made
        return (cos[0].float(), sin[0].float()), False

    return tables


def _real(tables: Callable[[torch.Tensor], tuple[tuple[torch.Tensor, torch.Tensor], bool]]) -> MakeTables:
    return lambda positions: tables(positions)[0]


def _from_sinusoids(buffer: torch.Tensor) -> MakeTables:
    def tables(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sin, cos = buffer.to(positions.device)[positions].float().chunk(2, dim=-1)
        return cos, sin

    return tables


def _rotations(attention: torch.nn.Module) -> list[ApplyRotary]:
    """Return the rotations that the modelling module defines, behind our signature."""
    module = sys.modules[type(attention).__module__]
    functions = [f for n, f in vars(module).items() if "apply_rotary" in n and inspect.isfunction(f)]
    return [adapted for adapted in map(_adapt, functions) if adapted is not None]


def _adapt(function: Callable[..., Any]) -> ApplyRotary | None:
    parameters = list(inspect.signature(function).parameters)
    if parameters[:4] == ["q", "k", "cos", "sin"]:
        return lambda keys, cos, sin: function(keys[:, :0], keys, cos, sin)[1]
    if parameters == ["tensor", "sin", "cos"]:  # GPT-J: (B, T, H, D), sine first
        return lambda keys, cos, sin: function(keys.transpose(1, 2), sin, cos).transpose(1, 2)
    return None


def _complex_product(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Multiply pairs of neighbours as complex numbers: all that can be done with a complex table."""
    pairs = torch.view_as_complex(keys.reshape(*keys.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * torch.complex(cos, sin)[:, None]).flatten(-2)


def _fitting(name: str, make: MakeTables, rotation: ApplyRotary, key_dim: int) -> Iterator[Turning]:
    """Yield the turnings of these tables by this rotation that have the right shape: at the front of the key, or at its end."""
    two = torch.arange(2)
    device = make(two)[0].device
    cos, sin = make(two.to(device))
    magnitude = float(cos[0].abs().max())  # position 0 doesn't turn
    for width in (cos.shape[-1], 2 * cos.shape[-1]):
        if width > key_dim:
            continue
        try:
            out = rotation(torch.ones((1, 1, 2, width), device=device), cos[None], sin[None])
        except (RuntimeError, ValueError, IndexError):
            continue
        if out.shape != (1, 1, 2, width):
            continue
        is_aligned = width == cos.shape[-1] and all(
            torch.allclose(a, b, atol=1e-6) for a, b in zip(spread(rotation, cos, sin, width), (cos, sin), strict=True)
        )
        for start in dict.fromkeys((0, key_dim - width)):
            yield Turning(name, make, rotation, magnitude, width, start, is_aligned)
