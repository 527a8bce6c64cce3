"""Forward as transformers sees it: a cache that its layers write to, an attention and a mask.

During a forward, the text decoder's config names kvrag's attention. transformers dispatches to
:func:`_attention` and :func:`_mask`, which look up the forward that runs in this thread. In any
other thread the model's own attention runs, so its owner can use the model meanwhile. Attention
that calls no attention function can't be replaced; it gets the model's own mask, evaluated at the
rows' true positions.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel

from kvrag.model.attention import UNDERSTOOD, Mass, ragged_attention, refuse_unknown
from kvrag.model.linear import FORWARD, may_be_plain
from kvrag.model.lock import ModelLock, text_config
from kvrag.model.rows import EVERYTHING, KVBuffer, Limits, Pair, Reach, Rows
from kvrag.runtime import EXITING, RUNTIME

ATTENTION = "kvrag"  # without "flash" and "/", which transformers treats specially
EAGER = "eager"  # transformers' reference attention: the code of the modelling file itself

# Outputs of an attention, and its weights if it returns them.
Attended = tuple[Tensor, Tensor | None]

# ``(batch, head, query position, key position) -> visible``: transformers' form of a mask.
MaskFunction = Callable[[int, int, Tensor, Tensor], Tensor]

# ``(layer, all keys, all values, fresh keys, fresh values)``: may change the buffers in place.
# Tensors are ``(1, H_kv, ·, D)``.
BeforeWrite = Callable[..., None]


class StopForward(Exception):
    """Signal inside a forward that its remaining layers are not needed."""


@dataclass(slots=True)
class Observed:
    """Mask functions of attention modules, by ``id``, that a forward at load records.

    ``masks`` has ``None`` for a mask of another origin. ``made`` maps the memory of a mask tensor,
    which a model may cut, to the tensor and its function. ``given`` are the keys and values that
    the modules attend to.
    """

    masks: dict[int, MaskFunction | None] = field(default_factory=dict)
    made: dict[int, tuple[Tensor, MaskFunction]] = field(default_factory=dict)
    given: dict[int, Pair] = field(default_factory=dict)

    def note(self, module: int, keys: Tensor, values: Tensor, mask: Tensor | None) -> None:
        """Record what the module of this ``id`` is given."""
        self.given[module] = (keys, values)
        made = None if mask is None else self.made.get(mask.untyped_storage().data_ptr())
        self.masks[module] = None if made is None else made[1]


@dataclass(frozen=True, slots=True)
class Attentions:
    """Attention modules of a model, by ``id``: their reach, and the tail of modules.

    The ``tail`` is the last module that writes KV, and the modules after it: what a row becomes
    there, no other row reads. ``reads`` has the layer whose KV a module reads instead of its own.
    With ``is_dense``, the modules can't be replaced, and get a mask. With ``tells_offsets``, a
    layer counts the positions of its fresh rows from the cache's length (Llama 4), so the forward
    reports lengths from which this gives the rows' own positions, scattered or not. ``latent``
    holds the layers that cache a latent without positions, then a rotary key, and make keys and
    values of both (latent attention).
    """

    device: torch.device
    reach: Mapping[int, Reach] = field(default_factory=dict)
    tail: Sequence[int] = ()
    reads: Mapping[int, int] = field(default_factory=dict)
    tells_offsets: bool = False
    is_dense: bool = False
    latent: frozenset[int] = frozenset()

    def in_order(self, layer: int, pair: Pair) -> Pair:
        """Swap what a layer caches and what a buffer holds: the rotating tensor comes first."""
        if layer in self.latent:
            return pair[1], pair[0]
        return pair


class Forward(Cache):  # type: ignore[misc]
    """Forward over chosen rows of a buffer; see :meth:`~kvrag.model.CausalLM.forward`.

    ``mass`` is collected from the modules in ``weighed`` (``id`` values). In the modules ``tail``,
    only the last rows with a needed output or mass are computed; without outputs, the forward ends
    there. In every layer, it pauses for steps that wait in ``lock``.
    """

    def __init__(
        self,
        rows: Rows,
        kv: KVBuffer,
        attentions: Attentions,
        *,
        mass: Mass | None = None,
        outputs: int = 0,
        before_write: BeforeWrite | None = None,
        lock: ModelLock | None = None,
    ) -> None:
        super().__init__(layers=[])
        self.hi = rows.indices(attentions.device)
        self.limits = Limits(self.hi, rows.stop, rows.positions, rows.first, rows.is_fixed)
        self.positions = self.hi if rows.positions is None else rows.positions
        self.tail = attentions.tail if outputs else attentions.tail[:1]
        self.is_dense = attentions.is_dense
        self.mass = mass
        self.outputs = outputs
        self.weighed: Sequence[int] = ()
        self.observed: Observed | None = None
        self._rows = rows
        self._kv = kv
        self._before_write = before_write
        self._attentions = attentions
        self._lock = lock
        self._ends = {len(self.hi): self.limits}  # by number of last rows

    def _pause(self) -> None:
        lock = self._lock
        # A batch of steps goes on: it computes for requests of other threads, too.
        if lock is None or lock.is_stepping:
            return
        if lock.pending or EXITING.is_set():
            lock.give_way()

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *_: object,
        **__: object,
    ) -> Pair:
        """Write a layer's fresh rows in place and return all rows up to the forward's last."""
        self._pause()
        stop = self._rows.stop
        slots = self._rows.slots if isinstance(self._rows.slots, slice) else self.hi
        if self._kv.arrivals:
            self._kv.wait_for(layer_idx)
        keys, values = self._kv.layers[layer_idx]
        keys = keys[:, :, :stop]
        values = values[:, :, :stop]
        fresh_keys, fresh_values = self._attentions.in_order(layer_idx, (key_states, value_states))
        if self._kv.start is not None:  # a NaN, though hidden, would reach requests beside
            fresh_keys, fresh_values = fresh_keys.nan_to_num(), fresh_values.nan_to_num()
        if self._before_write is not None:
            self._before_write(layer_idx, keys, values, fresh_keys, fresh_values)
        keys[:, :, slots] = fresh_keys
        values[:, :, slots] = fresh_values
        return self._attentions.in_order(layer_idx, (keys, values))

    def get_seq_length(self, layer_idx: int = 0) -> int | Tensor:
        """Return the number of rows before the fresh rows, if these are contiguous.

        Scattered rows get an offset per row (``tells_offsets``), or the number of all rows.
        """
        if isinstance(self._rows.slots, slice):
            return int(self._rows.slots.start)
        if self._attentions.tells_offsets:
            return self.hi - torch.arange(len(self.hi), device=self.hi.device)
        return self._rows.stop

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of visible rows, and offset 0: a row's index is its position."""
        return self._rows.stop, 0

    def attend(
        self,
        module: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scores: Mapping[str, Any],
    ) -> Tensor:
        """Attend in the module of this ``id``; ``scores`` are options of :func:`ragged_attention`.

        The rows of the query are the forward's last (Gemma 4 drops the others where nothing needs
        them). Rows that are not computed are zeros. :class:`StopForward` is raised at the end of
        the tail if no output is needed.
        """
        if module in self._attentions.reads:
            self._pause()
        options = {
            **scores,
            "reach": self._attentions.reach.get(module, EVERYTHING),
            "mass": self.mass if module in self.weighed else None,
        }
        total = query.shape[2]
        wanted = total
        if module in self.tail:
            wanted = min(total, max(self.outputs, 0 if self.mass is None else self.mass.rows))
        if wanted not in self._ends:
            self._ends[wanted] = self.limits.last(wanted)
        limits = self._ends[wanted]
        if wanted == total:
            out = ragged_attention(query, keys, values, limits, **options)
        else:
            out = query.new_zeros((*query.shape[:3], values.shape[-1]))
            if wanted:
                out[:, :, total - wanted :] = ragged_attention(
                    query[:, :, total - wanted :], keys, values, limits, **options
                )
        if not self.outputs and module in self.tail[-1:]:
            raise StopForward
        return out

    def dense_mask(
        self, batch_size: int, mask_function: MaskFunction, dtype: torch.dtype
    ) -> Tensor:
        """Evaluate the model's own mask at the rows' positions.

        Returns ``(B, 1, R, N)``: 0 where a key is seen, else the lowest number of the dtype.
        """
        keys = torch.arange(self.limits.num_keys, device=self.hi.device)[None]
        visible = mask_function(0, 0, self.hi[:, None], keys).expand(len(self.hi), keys.shape[1])
        mask = torch.zeros(visible.shape, dtype=dtype, device=keys.device)
        mask = mask.masked_fill_(~visible, torch.finfo(dtype).min)[None, None].expand(
            batch_size, 1, -1, -1
        )
        if self.observed is not None:
            # The tensor is kept, so that its memory is not reused.
            self.observed.made[mask.untyped_storage().data_ptr()] = (mask, mask_function)
        return mask


class _Current(threading.local):
    """State of this thread: kvrag's running forward, or the name of transformers' own attention."""

    running: Forward | str | None = None


@dataclass(slots=True)
class _Own:
    """Attention of a model outside kvrag's forwards."""

    attention: str = EAGER
    is_dense: bool = False


_current = _Current()
_ATTENTIONS = AttentionInterface()
_MASKS = AttentionMaskInterface()


def own_attention(config: Any) -> str:
    """Return the name of a model's own attention, also while a forward of any thread runs."""
    name = config._attn_implementation or EAGER
    return RUNTIME.of(config, _Own).attention if name == ATTENTION else str(name)


def running() -> Forward | str | None:
    """Return the forward, or attention name, that runs in this thread under kvrag's name."""
    return _current.running


@contextmanager
def switched(model: PreTrainedModel, what: Forward | str) -> Iterator[None]:
    """Switch the model's forwards of this thread to kvrag's forward, or to a named attention.

    Dropout is off meanwhile. The caller holds the model's lock. Switches nest: inside a forward
    that pauses, another forward may run.
    """
    config = text_config(model)
    own = RUNTIME.of(config, _Own)
    outer = _current.running
    was_plain = FORWARD.is_plain
    # Else it is nested in another switch.
    if config._attn_implementation != ATTENTION:
        own.attention = own_attention(config)
        own.is_dense = isinstance(what, Forward) and what.is_dense
    config._attn_implementation = ATTENTION
    _current.running = what
    FORWARD.is_plain = may_be_plain(model.device)
    try:
        with evaluating(model):
            yield
    finally:
        FORWARD.is_plain = was_plain
        _current.running = outer
        if outer is None:
            config._attn_implementation = own.attention


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Put a model in evaluation mode for the duration of a ``with`` block, then its parts back."""
    training = [part for part in model.modules() if part.training] if model.training else []
    try:
        yield model.eval() if training else model
    finally:
        for part in training:
            part.training = True


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **others: Any,
) -> Attended:
    """Adapt :func:`ragged_attention` to transformers' attention interface.

    The forward knows which keys its rows see.
    """
    forward = _current.running
    if not isinstance(forward, Forward):
        return _attention_of(module, forward)(module, query, key, value, attention_mask, **others)
    scale, softcap, sinks = (others.pop(name, None) for name in ("scaling", "softcap", "s_aux"))
    if not others.keys() <= UNDERSTOOD or not getattr(module, "is_causal", True):
        refuse_unknown(module, others)
    if forward.observed is not None:
        forward.observed.note(id(module), key, value, attention_mask)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out = forward.attend(
        id(module), query, key, value, {"scale": scale, "softcap": softcap, "sinks": sinks}
    )
    # Contiguous, as transformers' own attentions return it: some models view it in another shape.
    return out.transpose(1, 2).contiguous(), None


def _attention_of(module: Any, name: str | None) -> Callable[..., Attended]:
    """Return transformers' attention of this name, by default the model's own."""
    if name is None:
        name = own_attention(module.config)
    by_default = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return cast(Callable[..., Attended], _ATTENTIONS.get(name, by_default))


def _mask(
    batch_size: int, *, mask_function: MaskFunction, config: Any = None, **options: Any
) -> Tensor | None:
    """Make the mask of a forward: the model's own outside kvrag's forwards.

    kvrag's attention needs no mask; a dense model and the forward at load do.
    """
    forward = _current.running
    if not isinstance(forward, Forward):
        own = RUNTIME.of(config, _Own) if forward is None else _Own(forward)
        make: Callable[..., Tensor | None] = _MASKS[EAGER if own.is_dense else own.attention]
        return make(batch_size=batch_size, mask_function=mask_function, config=config, **options)
    if forward.is_dense or forward.observed is not None:
        return forward.dense_mask(batch_size, mask_function, options["dtype"])
    return None


_ATTENTIONS.register(ATTENTION, _attention)
_MASKS.register(ATTENTION, _mask)
