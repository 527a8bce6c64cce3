"""One forward, as transformers sees it: the cache that its layers write to, and the attention and the mask that it finds by name.

Nothing is patched. For the time of a forward the model's config names kvrag's attention; transformers dispatches to :func:`_attention`
and :func:`_mask`, and they ask which forward of kvrag's runs in this thread. In any other thread the model's own attention runs: a model
that was handed in stays usable by its owner meanwhile. Where attention can't be replaced (it never asks for an attention function),
the model's own mask is evaluated at the rows' true positions instead.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel

from kvrag.errors import UnsupportedModelError
from kvrag.model.attention import Mass, ragged_attention
from kvrag.model.kv import KVBuffer
from kvrag.model.rows import EVERYTHING, Limits, Reach, Rows

ATTENTION = "kvrag"
"""Name of the implementation: neither "flash" nor "/", to which transformers gives a meaning of its own."""

EAGER = "eager"
"""Transformers' reference attention: the code of the modelling file itself."""

MaskFunction = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]
"""``(batch, head, query position, key position) -> visible``: how transformers writes a mask."""

BeforeWrite = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""``(layer, all keys, all values, fresh keys, fresh values)``, tensors ``(1, H_kv, ·, D)``: may change the buffers in place."""

_UNDERSTOOD = frozenset(
    # The limits come from the model's own mask function (see traits), the rows from Rows, and dropout is off outside training.
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
class Observed:
    """What a forward at load notes: the mask function of each attention module by ``id``, ``None`` for a mask of another origin."""

    masks: dict[int, MaskFunction | None] = field(default_factory=dict)
    made: dict[int, tuple[torch.Tensor, MaskFunction]] = field(default_factory=dict)


class Forward(Cache):  # type: ignore[misc]
    """One forward over chosen rows of a buffer.

    Parameters
    ----------
    rows, kv
        What is computed, and where it is written.
    device
        Of the model.
    reach
        How far back each attention module sees, by its ``id``.
    weighed
        The ``id``s of the modules whose attention is collected in ``mass``.
    mass
        Collects attention mass, or ``None``.
    final
        The ``id`` of the last attention module that is needed: what it returns matters for the last ``outputs`` rows alone, because
        nothing mixes rows after it.
    outputs
        Last rows that somebody will look at.
    before_write
        Called in each layer before its fresh rows are written, or ``None``.
    tells_offsets
        Whether a layer takes the positions of its fresh rows from the cache's length (Llama 4 scales queries by them): then the length
        that it is told is such that counting on from it gives the rows' own positions, scattered or not.
    is_dense
        Whether the attention can't be replaced, and gets a mask.
    """

    def __init__(
        self,
        rows: Rows,
        kv: KVBuffer,
        device: torch.device,
        *,
        reach: Mapping[int, Reach] | None = None,
        weighed: frozenset[int] = frozenset(),
        mass: Mass | None = None,
        final: int | None = None,
        outputs: int = 0,
        before_write: BeforeWrite | None = None,
        tells_offsets: bool = False,
        is_dense: bool = False,
    ) -> None:
        super().__init__(layers=[])
        self.hi = rows.indices(device)
        self.limits = Limits(self.hi, rows.stop, rows.positions, rows.first, rows.prefix)
        self.positions = self.hi if rows.positions is None else rows.positions
        self.reach, self.weighed, self.mass, self.final, self.outputs = reach or {}, weighed, mass, final, outputs
        self.is_dense, self.observed = is_dense, None
        self._rows, self._kv, self._before_write, self._tells_offsets = rows, kv, before_write, tells_offsets

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the fresh rows of a layer in place and return every row up to the forward's last."""
        stop, slots = self._rows.stop, self._rows.slots
        keys, values = (x[:, :, :stop] for x in self._kv.layers[layer_idx])
        if self._before_write is not None:
            self._before_write(layer_idx, keys, values, key_states, value_states)
        keys[:, :, slots] = key_states
        values[:, :, slots] = value_states
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int | torch.Tensor:
        """Return how many rows stand before the fresh ones, where these are contiguous."""
        if isinstance(self._rows.slots, slice):
            return int(self._rows.slots.start)
        return self.hi - torch.arange(len(self.hi), device=self.hi.device) if self._tells_offsets else self._rows.stop

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the visible length and offset 0: a row's index is its position."""
        return self._rows.stop, 0

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """Attend in one layer; in the last layer that is needed, only for the rows that somebody will look at: the others get zeros.

        Raises
        ------
        StopForward
            If nobody looks at the layer's output at all.
        """
        mass = self.mass if id(module) in self.weighed else None
        if id(module) != self.final:
            return ragged_attention(query, key, value, self.limits, mass=mass, **options)
        total, wanted = query.shape[2], max(self.outputs, 0 if mass is None else mass.rows)
        if wanted >= total:
            out = ragged_attention(query, key, value, self.limits, mass=mass, **options)
        else:
            out = query.new_zeros((*query.shape[:3], value.shape[-1]))
            if wanted:
                last = slice(total - wanted, total)
                out[:, :, last] = ragged_attention(
                    query[:, :, last], key, value, self.limits.last(wanted), mass=mass, **options
                )
        if not self.outputs:
            raise StopForward
        return out

    def dense_mask(self, batch_size: int, mask_function: MaskFunction, dtype: torch.dtype) -> torch.Tensor:
        """Evaluate the model's own mask at the rows' positions: ``(B, 1, R, N)``, 0 where a key is seen, else the lowest number."""
        keys = torch.arange(self.limits.num_keys, device=self.hi.device)[None]
        visible = mask_function(0, 0, self.hi[:, None], keys).expand(len(self.hi), keys.shape[1])
        mask = torch.zeros(visible.shape, dtype=dtype, device=keys.device)
        mask = mask.masked_fill_(~visible, torch.finfo(dtype).min)[None, None].expand(batch_size, 1, -1, -1)
        if self.observed is not None:
            self.observed.made[id(mask)] = mask, mask_function  # the tensor is kept, so that its id stays its own
        return mask


class _Current(threading.local):
    """What runs in this thread: a forward of kvrag's, or transformers' own attention of a name."""

    running: Forward | str | None = None


_current = _Current()
_ATTENTIONS, _MASKS = AttentionInterface(), AttentionMaskInterface()
_own: dict[int, tuple[str, bool]] = {}
"""By ``id`` of a config: the attention that the model has outside kvrag's forwards, and whether it can't be replaced."""


def running() -> Forward | str | None:
    """Return what runs in this thread under kvrag's name: hooks leave the forwards of other threads alone."""
    return _current.running


@contextmanager
def switched(model: PreTrainedModel, what: Forward | str) -> Iterator[None]:
    """Run the model's forwards of this thread inside as ``what``, without dropout; the caller holds the model's lock.

    Parameters
    ----------
    model
        The model.
    what
        A forward, or the name of one of transformers' attentions.
    """
    config = model.config
    before = config._attn_implementation
    if id(config) not in _own:
        weakref.finalize(config, _own.pop, id(config), None)
    if before != ATTENTION:  # else a forked process found it so
        _own[id(config)] = before or EAGER, isinstance(what, Forward) and what.is_dense
    config._attn_implementation = ATTENTION
    _current.running = what
    try:
        with evaluating(model):
            yield
    finally:
        config._attn_implementation = _own[id(config)][0] if before == ATTENTION else before
        _current.running = None


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Have a model in evaluation mode inside, without dropout."""
    was_training = model.training
    if was_training:
        model.eval()
    try:
        yield
    finally:
        if was_training:
            model.train()


_locks: weakref.WeakKeyDictionary[PreTrainedModel, threading.RLock] = weakref.WeakKeyDictionary()
_locks_guard = threading.Lock()


def lock_of(model: PreTrainedModel) -> threading.RLock:
    """Return the one lock of a model, however many engines use it: its attention is switched during a forward."""
    with _locks_guard:
        return _locks.setdefault(model, threading.RLock())


def _forget_locks() -> None:
    """Start afresh in a forked process: the threads that held the locks are not there."""
    global _locks_guard
    _locks_guard = threading.Lock()
    _locks.clear()


os.register_at_fork(after_in_child=_forget_locks)


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
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Adapt :func:`ragged_attention` to transformers' attention interface; the forward knows which keys its rows see."""
    forward = _current.running
    if not isinstance(forward, Forward):
        options = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux}
        others |= {name: given for name, given in options.items() if given is not None}
        return _attention_of(module, forward)(module, query, key, value, attention_mask, **others)
    if not others.keys() <= _UNDERSTOOD or not getattr(module, "is_causal", True):
        refuse_unknown(module, others)
    if forward.observed is not None:
        forward.observed.masks[id(module)] = forward.observed.made.get(id(attention_mask), (None, None))[1]
    out = forward.attend(
        module,
        query,
        key,
        value,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        reach=forward.reach.get(id(module), EVERYTHING),
        softcap=softcap,
        sinks=s_aux,
    )
    return out.transpose(1, 2), None


def _attention_of(module: Any, name: str | None) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """Return transformers' attention of this name; ``None``: the one that the module's model has outside kvrag's forwards."""
    name = _own[id(module.config)][0] if name is None else name
    by_default = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    found: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = _ATTENTIONS.get(name, by_default)
    return found


def _mask(batch_size: int, *, mask_function: MaskFunction, config: Any = None, **options: Any) -> torch.Tensor | None:
    """Make no mask where the attention needs none, and the model's own one for forwards that are not kvrag's."""
    forward = _current.running
    if not isinstance(forward, Forward):
        name, is_dense = _own[id(config)] if forward is None else (forward, False)
        make = _MASKS[EAGER if is_dense else name]
        return make(  # type: ignore[no-any-return]
            batch_size=batch_size, mask_function=mask_function, config=config, **options
        )
    if forward.is_dense or forward.observed is not None:
        return forward.dense_mask(batch_size, mask_function, options["dtype"])
    return None


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
            f"{type(module).__name__} passes {', '.join(sorted(unknown))} to its attention function, which kvrag doesn't apply; {then}"
        )


_ATTENTIONS.register(ATTENTION, _attention)
_MASKS.register(ATTENTION, _mask)
