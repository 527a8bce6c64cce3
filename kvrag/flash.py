"""kvrag's attention for models that transformers runs, with its ``generate``, caches and padding.

transformers dispatches to :func:`kvrag_kernels.ragged_attention` by name. Instead of a mask of rows
× keys, a forward carries the rows' indices and the padding's bounds. Every layer adds its window,
which was read from the model's own mask function at installation.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

import kvrag_kernels
from kvrag.errors import InputError, UnsupportedModelError
from kvrag.model.attention import refuse_unknown
from kvrag.model.candidates import attention_modules
from kvrag.model.forward import MaskFunction
from kvrag.model.lm import CausalLM
from kvrag.model.lock import lock_of, text_config
from kvrag.model.rows import Reach

NAME = "kvrag_rows"  # without "flash" and "/", which transformers treats specially

_reaches = weakref.WeakKeyDictionary[Module, Reach]()
_before = weakref.WeakKeyDictionary[PreTrainedModel, str | None]()


_Limits = tuple[Tensor, Tensor, Tensor]
# Rows of a forward that are compared with the model's own mask: the last sees through any packing.
_SAMPLE = 5


@dataclass(slots=True)
class _Forward:
    """State that the layers of a forward share.

    Indices count from the sequence's first token, padding included. ``rows``, int64 ``(R,)``, are
    the rows' indices. ``bounds`` are the first and last real key of every batch entry, both int64
    ``(B, 1)``; ``None`` without padding. ``offset`` is the index of the first key that the cache
    returns (a sliding cache drops the oldest). ``seen``, bool ``(B, S, K)``, holds the keys that
    the model's own mask function shows to the rows ``sample``, int64 ``(S,)``.
    """

    rows: Tensor
    bounds: tuple[Tensor, Tensor] | None
    offset: int
    seen: Tensor
    sample: Tensor
    limits: dict[tuple[object, ...], _Limits] = field(default_factory=dict)

    def limits_of(self, reach: Reach, query: Tensor, keys: Tensor) -> _Limits:
        """Return ``hi``, ``lo`` and the plan for a layer, made once for layers of the same kind."""
        kind = (reach, query.shape, keys.shape, query.dtype)
        if kind not in self.limits:
            if self.bounds is not None and reach.chunk is not None:
                raise InputError(
                    "chunked attention can't take a padded batch; pass prompts one at a time"
                )
            self._check(reach)
            hi = self.rows[-query.shape[2] :]  # a model may drop the first (Gemma 4)
            lo = reach.lo(hi, hi)
            if self.bounds is not None:
                hi = torch.minimum(hi, self.bounds[1])
                lo = torch.maximum(lo, self.bounds[0])
            hi, lo = ((x - self.offset).int() for x in (hi, lo))
            self.limits[kind] = hi, lo, kvrag_kernels.ragged_plan(query, keys, hi, lo)
        return self.limits[kind]

    def _check(self, reach: Reach) -> None:
        rows = self.rows[self.sample][:, None]
        keys = torch.arange(self.seen.shape[2], device=rows.device) + self.offset
        expected = (keys <= rows) & (keys >= reach.lo(rows, rows))
        if not bool((self.seen == expected).all()):
            raise InputError(
                "the model's mask is not causal attention with this layer's window (packed "
                "sequences?); call uninstall_flash_attention(model) before such a forward"
            )


class _RowsMask(Tensor):
    """Rows in place of a mask, int64 ``(1, 1, R, 1)``, with the state of a forward.

    A cut of the rows, which a model may make, keeps the state.
    """

    kvrag: _Forward

    def __getitem__(self, index: Any) -> _RowsMask:
        """Cut the mask."""
        found = cast(_RowsMask, super().__getitem__(index))
        found.kvrag = self.kvrag
        return found


def _rows_mask(
    batch_size: int,
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **_: object,
) -> _RowsMask:
    """Return the rows of a forward, with the state that its layers share."""
    rows = torch.arange(q_length, device=device) + q_offset
    sample = torch.linspace(
        0, q_length - 1, min(q_length, _SAMPLE), dtype=torch.float32, device=device
    ).long()
    keys = torch.arange(kv_length, device=device)[None] + kv_offset
    seen = [
        mask_function(b, 0, rows[sample][:, None], keys).expand(len(sample), kv_length)
        for b in range(batch_size)
    ]
    # Blocks of rows that see each other, such as an image's, may lie between the samples.
    ahead = [mask_function(b, 0, rows[:-1], rows[:-1] + 1).any() for b in range(batch_size)]
    if q_length > 1 and bool(torch.stack(ahead).any()):
        raise InputError(
            "rows of this forward see later rows (an image's?); "
            "call uninstall_flash_attention(model) before it"
        )
    mask = rows[None, None, :, None].clone().as_subclass(_RowsMask)
    mask.kvrag = _Forward(rows, _bounds(attention_mask), int(kv_offset), torch.stack(seen), sample)
    return mask


def _bounds(attention_mask: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Return the first and last real key of every batch entry, or ``None`` without padding.

    Raises ``InputError`` for padding between real tokens.
    """
    if attention_mask is None or bool(attention_mask.all()):
        return None
    real = attention_mask.bool()
    count = real.sum(dim=1, keepdim=True)
    first = real.int().argmax(dim=1, keepdim=True)
    last = first + count - 1
    index = torch.arange(real.shape[1], device=real.device)
    if not bool((real == ((index >= first) & (index <= last))).all()):
        raise InputError(
            "attention_mask has padding between real tokens; "
            "kvrag's attention takes padding at the left or the right only"
        )
    return first, last


def _rows_attention(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    **others: object,
) -> tuple[Tensor, None]:
    """Adapt :func:`kvrag_kernels.ragged_attention` to transformers' attention interface."""
    refuse_unknown(module, others, "call uninstall_flash_attention(model)")
    forward = getattr(attention_mask, "kvrag", None)
    reach = _reaches.get(module)
    name = type(module).__name__
    if reach is None:
        raise InputError(
            f"kvrag's attention is not installed in the model of this {name}; "
            "call install_flash_attention(model)"
        )
    if forward is None:
        raise InputError(
            f"{name} got a 4-D mask; "
            "pass a 2-D attention mask, or call uninstall_flash_attention(model)"
        )
    if dropout or (torch.is_grad_enabled() and query.requires_grad):
        raise InputError(
            "kvrag's attention has no gradient and no dropout; "
            "run the model under torch.inference_mode()"
        )
    hi, lo, plan = cast(_Forward, forward).limits_of(reach, query, key)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out, _ = kvrag_kernels.ragged_attention(
        query, key, value, hi, lo, scale=scale, softcap=softcap or 0.0, sinks=s_aux, plan=plan
    )
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, _rows_attention)
AttentionMaskInterface.register(NAME, _rows_mask)


def install_flash_attention(model: PreTrainedModel) -> int:
    """Make transformers compute a model's attention with kvrag's kernels.

    It holds until :func:`uninstall_flash_attention`, for ``generate`` and your own forwards, with
    any cache of transformers; :class:`~kvrag.KVRagEngine` doesn't need it. Padding at either side,
    sliding windows, soft caps and sinks give the result of torch's attention, up to rounding.
    Inference only; idempotent. Returns the number of attention layers: all of them.

    Raises
    ------
    UnsupportedModelError
        If the model's attention can't be replaced, or its mask is of a kind that kvrag doesn't
        know.
    """
    if model in _before:
        return len(attention_modules(model))
    lm = CausalLM(model)
    if lm.is_dense:
        raise UnsupportedModelError(
            f"{type(model).__name__} asks for no attention function: its own can't be replaced"
        )
    modules = attention_modules(model)
    with lock_of(model):
        _reaches.update({modules[m]: trait.reach for trait in lm.traits for m in trait.modules})
        before = text_config(model)._attn_implementation
        if before == NAME:  # a copy: the original's attention is unknown
            before = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
        _before[model] = before
        text_config(model)._attn_implementation = NAME
    return len(modules)


def uninstall_flash_attention(model: PreTrainedModel) -> None:
    """Restore a model's own attention, if kvrag's was installed."""
    with lock_of(model):
        if model not in _before:
            return
        text_config(model)._attn_implementation = _before.pop(model)
        for module in attention_modules(model):
            _reaches.pop(module, None)


def _head_dim(config: Any) -> int:
    """Return the head dim of keys, of a model's config or a layer's."""
    # The first is that of latent attention, whose config means the rotary part by head_dim.
    dims = (getattr(config, name, None) for name in ("qk_head_dim", "head_dim"))
    return int(next(filter(None, dims), config.hidden_size // config.num_attention_heads))


def flash_attention_tier(model: PreTrainedModel | None = None) -> str:
    """Return the tier of kvrag's attention: ``"sm90"`` (Hopper), ``"mma"`` or ``"torch"``.

    ``"mma"`` is for other CUDA devices. The tier depends on a model's head dims, dtype and device;
    without a model, they are 128, bfloat16, and the current CUDA device if there is a CUDA device,
    else the CPU.
    """
    if model is not None:
        config = text_config(model)
        layers = getattr(config, "per_layer_config", None) or [config]
        tiers = {
            kvrag_kernels.tier(_head_dim(layer), model.dtype, model.device) for layer in layers
        }
        value_dim = getattr(config, "v_head_dim", None)
        if value_dim is not None and value_dim != _head_dim(config):
            return "torch"
        return min(tiers, key=("torch", "mma", "sm90").index)
    return kvrag_kernels.tier(
        128, torch.bfloat16, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    )
