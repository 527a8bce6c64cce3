"""Candidates of a decoder: its attention modules, sources of keys, rotations and reaches.

Structure gives candidates, not proof: :mod:`.traits` finds out which of them hold for a layer.

* A **key source** is the output of a submodule of the attention, which holds the keys before
  rotation, with the layout of this output.
* A **rotation** is a source of tables (a rotary module, or a buffer of sinusoids) with a rotation
  of the modelling module.
* A **reach** is a window of the config, or of a row; the model's own mask function decides.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from kvrag.errors import UnsupportedModelError
from kvrag.model.forward import MaskFunction
from kvrag.model.lock import text_parts
from kvrag.model.rope import (
    NO_ROTATION,
    ApplyRotary,
    MakeTables,
    Rotation,
    adapt,
    complex_product,
    from_module,
    from_sinusoids,
    in_order,
    spread,
)
from kvrag.model.rows import EVERYTHING, Reach

ATTENTION_NAMES = ("self_attn", "attention", "attn", "self_attention")
# Parts of a layer that carry a state from token to token.
STATEFUL_NAMES = (
    "mamba",
    "linear_attn",
    "conv",
    "short_conv",
    "recurrent",
    "temporal_block",
    "ssm",
)
NORM_NAMES = ("k_norm", "k_layernorm", "key_layernorm")
# Last modules that shape keys before rotation; a norm comes after its projection.
SOURCE_NAMES = (
    *NORM_NAMES,
    "k_proj",
    "qkv_proj",
    "query_key_value",
    "Wqkv",
    "c_attn",
    "kv_a_proj_with_mqa",
)

# Axes before the positions: a batch, or time, height and width as well (Qwen before 5.24).
_AXES = ((1,), (3, 1))

# ``output of a submodule -> keys (B, T, H, D)``.
HeadLayout = Callable[[Tensor], Tensor]


# Position-free keys of a forward, ``(B, T, H, D)``, by layer.
Captured = dict[int, Tensor]


@dataclass(frozen=True, slots=True)
class KeySource:
    """Source of position-free keys: a submodule's output, read by ``layout``.

    ``name`` is the submodule's name in the attention module.
    """

    name: str
    layout: HeadLayout

    def attach(
        self,
        attention: Module,
        layer: int,
        captured: Captured,
        is_ours: Callable[[], bool],
    ) -> RemovableHandle:
        """Put the keys of an attention module's forwards into ``captured``, if they are ours."""

        def keep(_: Module, __: object, output: Tensor) -> None:
            if is_ours():
                captured[layer] = self.layout(output)

        return attention.get_submodule(self.name).register_forward_hook(keep)


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the text decoder: the model without its head, and without towers for images."""
    text = next(text_parts(model), model)
    if text.base_model is not text:
        return text.base_model
    # Llama 4's base_model_prefix names a part that its text model lacks.
    return next((child for child in text.children() if isinstance(child, PreTrainedModel)), text)


def attention_modules(model: PreTrainedModel) -> list[Module]:
    """Return the attention modules of all decoder layers, in order.

    Raises ``UnsupportedModelError`` if a layer is without attention.
    """
    stacks = [
        {layer: _attentions_of(layer) for layer in module}
        for module in decoder_of(model).modules()
        if isinstance(module, torch.nn.ModuleList)
    ]
    best = max(stacks, key=lambda stack: sum(map(len, stack.values())), default={})
    attentions = list(chain.from_iterable(best.values()))
    if not attentions:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no decoder layers with attention that kvrag knows "
            f"({', '.join(ATTENTION_NAMES)}), so no keys and values per token to store"
        )
    mixers = {name for layer in best for name in STATEFUL_NAMES if hasattr(layer, name)}
    mixers = mixers or {type(layer).__name__ for layer, found in best.items() if not found}
    if mixers:
        reason = (
            "their state sums up all tokens before, so a chunk's part can't be stored and moved"
        )
        if not mixers & set(STATEFUL_NAMES):
            reason = "kvrag moves the keys and values of attention to the prompt's own tokens alone"
        raise UnsupportedModelError(
            f"{type(model).__name__} mixes attention with layers of another kind "
            f"({', '.join(sorted(mixers))}): {reason}"
        )
    return attentions


def _attentions_of(layer: Module) -> list[Module]:
    """Return the attention of a layer, or of a part of it (DBRX); a few have two (LongCat)."""
    for part in (layer, *layer.children()):
        modules = (getattr(part, name, None) for name in ATTENTION_NAMES)
        found = next((module for module in modules if isinstance(module, Module)), None)
        if found is not None:
            return list(found) if isinstance(found, torch.nn.ModuleList) else [found]
    return []


def key_sources(
    attention: Module, outputs: dict[str, Any], heads: int, dim: int
) -> Iterator[tuple[KeySource, Tensor]]:
    """Yield candidates with the keys ``(B, T, H, D)`` that they gave in a forward.

    ``outputs`` are the outputs of its submodules, by name. ``heads`` and ``dim`` describe the keys
    as they reach the cache, where their heads may be repeated.
    """
    if getattr(attention, "clip_qkv", None) or getattr(
        getattr(attention, "config", None), "clip_qkv", None
    ):
        # Clipping follows the projection and shows only on large keys: read the keys at the cache.
        return
    for name in SOURCE_NAMES:
        output = outputs.get(name)
        if isinstance(output, Tensor):
            for layout in _layouts(output, heads, dim):
                yield KeySource(name, layout), layout(output)


def _layouts(output: Tensor, heads: int, dim: int) -> Iterator[HeadLayout]:
    if output.dim() == 4:
        if output.shape[2:] == (heads, dim):
            yield lambda out: out
        if (output.shape[1], output.shape[3]) == (heads, dim):
            yield lambda out: out.transpose(1, 2)
        return
    total, rest = divmod(output.shape[-1], dim)
    if output.dim() != 3 or rest:
        return
    if total == heads:
        yield lambda out: out.reshape(*out.shape[:2], heads, dim)
        return
    if heads == 1:  # behind a latent: in order, or to be rotated with even dimensions first
        yield lambda out: out[..., None, -dim:]
        yield lambda out: torch.cat([out[..., None, -dim::2], out[..., None, 1 - dim :: 2]], dim=-1)
    first = total - 2 * heads  # queries, then keys, then values
    if first >= heads:
        yield lambda out: out[..., first * dim : (first + heads) * dim].reshape(
            *out.shape[:2], heads, dim
        )
    for count in range(1, min(heads, total - 1) + 1):
        # Each group's queries, key and value lie side by side.
        if total % count == 0 and heads % count == 0:
            yield partial(_grouped, groups=count, repeats=heads // count, dim=dim)


def _grouped(output: Tensor, *, groups: int, repeats: int, dim: int) -> Tensor:
    keys = output.reshape(*output.shape[:2], groups, -1, dim)[..., -2, :]
    if repeats > 1:
        return keys.repeat_interleave(repeats, dim=2)
    return keys


def rotations(base: Module, attention: Module, key_dim: int) -> list[Rotation]:
    """List the ways in which an attention module could rotate keys of this head dim.

    The list includes :data:`~kvrag.model.rope.NO_ROTATION`. ``base`` is the model without its head.
    """
    module = sys.modules[type(attention).__module__]
    functions = [
        f for n, f in vars(module).items() if "apply_rotary" in n and inspect.isfunction(f)
    ]
    known = [*filter(None, map(adapt, functions))]
    found = [NO_ROTATION]
    for name, make, is_complex in _tables(base, attention):
        for rotation in [complex_product] if is_complex else known:
            found += _fitting(name, make, rotation, key_dim, next(base.parameters()).device)
    return found


def scaled(attention: Module, rotation: Rotation, key_dim: int) -> Iterator[Rotation]:
    """Yield the rotation of keys that are scaled after it, by the weights of a norm (HunYuan).

    A key's length is the same before and after a rotation. So these keys are the scaled keys of
    position 0, rotated between a division and a multiplication by the weights.
    """
    for name in NORM_NAMES:
        norm = getattr(attention, name, None)
        weight = getattr(norm, "weight", None)
        if rotation.width and isinstance(weight, Tensor) and weight.shape == (key_dim,):
            yield replace(rotation, apply=partial(_between, rotation, norm), is_aligned=False)


def _between(
    rotation: Rotation,
    norm: Any,
    keys: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """Rotate keys that a norm scales; its weights are read anew, for they may change in place."""
    scale = norm(torch.ones_like(norm.weight[None]))[0].detach().float()
    scale = scale[rotation.start : rotation.start + rotation.width]
    return rotation.apply(keys / scale, cos, sin).mul_(scale)


def _tables(base: Module, attention: Module) -> Iterator[tuple[str, MakeTables, bool]]:
    """Yield every source of tables once: ``(name, tables, whether they are complex)``."""
    device = next(base.parameters()).device
    candidates = [*attention.modules(), *(m for n, m in base.named_children() if "rot" in n)]
    for module in dict.fromkeys(m for m in candidates if "Rotary" in type(m).__name__):
        for kind in _layer_types(module):
            kinds = [] if kind is None else [kind]
            two = torch.arange(2, device=device)
            for axes in _AXES:
                try:
                    made = module(torch.empty((1, 1), device=device), two.expand(*axes, -1), *kinds)
                    is_complex = isinstance(made, Tensor) and made.is_complex()
                    is_sine_first = not made[0][0, 0].any()  # at position 0 (GPT-J)
                    tables = partial(from_module, module, kinds, is_complex, is_sine_first, axes)
                    tables(two)
                except (TypeError, ValueError, LookupError, AttributeError, RuntimeError):
                    continue  # not the tables of a text decoder
                yield kind or "rope", tables, is_complex
                break
    sinusoids = getattr(attention, "embed_positions", None)
    if isinstance(sinusoids, Tensor) and sinusoids.dim() == 2:
        yield "sinusoids", partial(from_sinusoids, sinusoids), False


def _layer_types(module: Module) -> Sequence[str | None]:
    if "layer_type" not in inspect.signature(type(module).forward).parameters:
        return [None]
    kinds = (
        getattr(module, "layer_types", None) or getattr(module.config, "layer_types", None) or []
    )
    return sorted(set(kinds)) or [None]


def _fitting(
    name: str, make: MakeTables, apply: ApplyRotary, key_dim: int, device: torch.device
) -> Iterator[Rotation]:
    """Yield rotations by these tables with the right shape: at the front or the end of the key."""
    cos, sin = make(torch.arange(2, device=device))
    magnitude = float(cos[0].abs().max())  # position 0 isn't rotated
    for width in (cos.shape[-1], 2 * cos.shape[-1]):
        if width > key_dim:
            continue
        keys = torch.ones((1, 1, 2, width), device=device)
        try:
            if apply(keys, cos[None], sin[None]).shape != keys.shape:
                continue
        except (RuntimeError, ValueError, IndexError):
            continue
        apply = in_order(apply, cos, width)
        is_aligned = width == cos.shape[-1] and all(
            torch.allclose(a, b, atol=1e-6)
            for a, b in zip(spread(apply, cos, sin, width), (cos, sin), strict=True)
        )
        for start in dict.fromkeys((0, key_dim - width)):
            yield Rotation(name, make, apply, magnitude, width, start, is_aligned)


def read_mask(mask: MaskFunction, config: Any, far: int, device: torch.device) -> Reach | None:
    """Find the reach of a mask function by evaluating it; ``None`` if no :class:`Reach` says it.

    The config is not trusted: it may name a window that a layer doesn't apply, or leave out a
    window. ``far`` is the last position of the context window.
    """

    def visible(row: int, num_keys: int) -> Tensor:
        at = torch.tensor([row], device=device)
        return mask(0, 0, at, torch.arange(num_keys, device=device)).expand(num_keys)

    def agrees(reach: Reach, row: int) -> bool:
        # Keys after the row are in the future: no reach shows them.
        keys = torch.arange(row + 8, device=device)
        at = torch.tensor([row], device=device)
        return bool((visible(row, row + 8) == (keys <= row) & (keys >= reach.lo(at, at))).all())

    limits = {
        getattr(config, "sliding_window", None),
        getattr(config, "attention_chunk_size", None),
    }
    sizes = [
        int(n) for n in (*limits, int(visible(far, far + 1).sum())) if isinstance(n, int) and n
    ]
    rows = {0, 1, far // 2, far, *(k * n + d for n in sizes for k in (1, 2) for d in (-1, 0, 1))}
    for reach in (EVERYTHING, *(Reach(window=n) for n in sizes), *(Reach(chunk=n) for n in sizes)):
        if all(agrees(reach, row) for row in rows if 0 <= row <= far):
            return reach
    return None
