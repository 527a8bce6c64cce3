"""kvrag's attention, switched in for the duration of a forward: transformers dispatches to it by name, and nothing is patched.

Three names. ``kvrag`` replaces the attention function and makes no mask: the plan has exact limits. ``kvrag_dense`` serves attention that
can't be replaced (it never asks for an attention function): it gets the model's own mask, evaluated at the rows' true positions.
``kvrag_probe`` does both at load and notes which mask each layer would have had.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from kvrag.errors import UnsupportedModelError
from kvrag.model.attention import ragged_attention
from kvrag.model.rows import EVERYTHING, Reach, RowPlan
from kvrag.threads import fork_lock

ATTENTION, DENSE, PROBE = "kvrag", "kvrag_dense", "kvrag_probe"
"""Names of the implementations: neither "flash" nor "/", to which transformers gives a meaning of their own."""

MaskFunction = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]
"""``(batch, head, query position, key position) -> visible``: how transformers writes a mask."""

_UNDERSTOOD = frozenset(
    # The limits come from the model's own mask function (see probe), the rows from the plan, and dropout is off outside training.
    (
        "sliding_window",
        "position_ids",
        "cache_position",
        "dropout",
        "use_cache",
        "output_attentions",
        "output_router_logits",
    )
)


class StopForward(Exception):
    """Raised inside a forward to end it where its rest is not needed."""


@dataclass(slots=True)
class Call:
    """One forward: its limits, the reach of each attention module by ``id``, and what a probe notes.

    ``weighed`` are the ``id``s of the modules whose attention is collected, where the plan collects any. ``final`` is that of the last
    attention module that is needed: what it returns matters for the last ``outputs`` rows alone, because nothing mixes rows after it.
    """

    plan: RowPlan
    reach: Mapping[int, Reach] = field(default_factory=dict)
    weighed: frozenset[int] = frozenset()
    final: int | None = None
    outputs: int = 0
    masks: dict[int, tuple[torch.Tensor, MaskFunction]] = field(default_factory=dict)
    noted: dict[int, MaskFunction | None] = field(default_factory=dict)
    unweighed: RowPlan = field(init=False)

    def __post_init__(self) -> None:
        self.unweighed = self.plan.without_mass()


class _Current(threading.local):
    call: Call


_current = _Current()
_locks: weakref.WeakKeyDictionary[PreTrainedModel, threading.RLock] = weakref.WeakKeyDictionary()
_locks_guard = fork_lock()


def lock_of(model: PreTrainedModel) -> threading.RLock:
    """Return the one lock of a model, however many engines use it: its attention is switched during a forward."""
    with _locks_guard:
        return _locks.setdefault(model, fork_lock())


@contextmanager
def switched(model: PreTrainedModel, name: str, call: Call) -> Iterator[None]:
    """Run the model's forwards inside with kvrag's attention ``name`` and no dropout; the caller holds the model's lock."""
    config, was_training = model.config, model.training
    before = config._attn_implementation
    config._attn_implementation = name
    _current.call = call
    if was_training:
        model.eval()
    try:
        yield
    finally:
        config._attn_implementation = before
        del _current.call
        if was_training:
            model.train()


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Adapt :func:`ragged_attention` to transformers' attention interface; the mask is the plan's business."""
    refuse_unknown(module, others)
    call = _current.call

    def attend(rows: torch.Tensor, plan: RowPlan) -> torch.Tensor:
        return ragged_attention(
            rows,
            key,
            value,
            plan,
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            reach=call.reach.get(id(module), EVERYTHING),
            softcap=softcap,
            sinks=s_aux,
        )

    plan = call.plan if id(module) in call.weighed else call.unweighed
    out = attend(query, plan) if id(module) != call.final else _last_rows(query, value.shape[-1], plan, call, attend)
    return out.transpose(1, 2), None


def _last_rows(
    query: torch.Tensor,
    value_dim: int,
    plan: RowPlan,
    call: Call,
    attend: Callable[[torch.Tensor, RowPlan], torch.Tensor],
) -> torch.Tensor:
    """Attend in the last layer that is needed: for the rows that somebody will look at, the others get zeros.

    Raises
    ------
    StopForward
        If nobody looks at the layer's output at all.
    """
    total, wanted = query.shape[2], max(call.outputs, plan.mass_rows)
    out = attend(query, plan) if wanted >= total else query.new_zeros((*query.shape[:3], value_dim))
    if 0 < wanted < total:
        out[:, :, total - wanted :] = attend(query[:, :, total - wanted :], plan.last(wanted))
    if not call.outputs:
        raise StopForward
    return out


def refuse_unknown(
    module: torch.nn.Module, others: Mapping[str, object], then: str = "the model is answered by full computation"
) -> None:
    """Refuse options that may change the attention: dropping one silently would give a wrong answer; ``then`` says what is left."""
    unknown = [
        name for name, given in others.items() if name not in _UNDERSTOOD and given is not None and given is not False
    ]
    if others.get("is_causal") is False or not getattr(module, "is_causal", True):
        unknown.append("is_causal=False")
    elif "is_causal" in unknown:
        unknown.remove("is_causal")
    if unknown:
        raise UnsupportedModelError(
            f"{type(module).__name__} passes {', '.join(sorted(unknown))} to its attention function, which kvrag doesn't apply; "
            f"{then}"
        )


def _noting_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    call = _current.call
    call.noted[id(module)] = call.masks[id(attention_mask)][1] if id(attention_mask) in call.masks else None
    return _attention(module, query, key, value, attention_mask, **options)


def _dense_mask(
    batch_size: int, *, mask_function: MaskFunction, dtype: torch.dtype, device: torch.device, **_: object
) -> torch.Tensor:
    """Evaluate the model's own mask at the rows' positions: ``(B, 1, R, N)``, 0 where a key is seen, else the lowest number."""
    call = _current.call
    queries = call.plan.hi.to(device)[:, None]
    keys = torch.arange(call.plan.num_keys, device=device)[None]
    visible = mask_function(0, 0, queries, keys).expand(len(queries), keys.shape[1])
    mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, torch.finfo(dtype).min)
    return mask[None, None].expand(batch_size, 1, -1, -1)


def _noting_mask(batch_size: int, *, mask_function: MaskFunction, **options: Any) -> torch.Tensor:
    mask = _dense_mask(batch_size, mask_function=mask_function, **options)
    _current.call.masks[id(mask)] = (mask, mask_function)  # the tensor is kept, so that its id stays its own
    return mask


AttentionInterface.register(ATTENTION, _attention)
AttentionInterface.register(PROBE, _noting_attention)
AttentionMaskInterface.register(PROBE, _noting_mask)
AttentionMaskInterface.register(DENSE, _dense_mask)
