"""Causal LM: forwards over chosen rows, rotations, and capture of position-free keys."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import DynamicCache, PreTrainedModel

from kvrag.errors import UnsupportedModelError
from kvrag.identity.model import LiveIdentity
from kvrag.model.attention import Mass, largest
from kvrag.model.candidates import Captured, attention_modules, decoder_of
from kvrag.model.forward import (
    Attentions,
    BeforeWrite,
    Forward,
    StopForward,
    running,
    switched,
)
from kvrag.model.lock import lock_of, text_config, text_model_of
from kvrag.model.plain import (
    Extend,
    PlainLM,
    check_placement,
    check_supported,
    context_window,
    regime_limit,
)
from kvrag.model.rope import RotaryTables, Rotations
from kvrag.model.rows import KVBuffer, Pair, Rows
from kvrag.model.shared import MAX_TOGETHER, Found, NextRows, Portion
from kvrag.model.steps import Recordings
from kvrag.model.traits import CACHE, accepted, find_traits, observe, sample_positions


class CausalLM:
    """Loaded decoder-only causal LM on a single device.

    Attributes
    ----------
    refusal
        ``None``: chunks are reused. See :class:`~kvrag.model.plain.PlainLM`.
    model, text_model
        The model, and the part that computes text, with its head: mostly the model itself.
    config
        Config of the text decoder.
    traits, shapes
        Per layer that keeps KV: its traits, and the shape of its KV.
    num_layers, depth
        Number of layers that keep KV, and of attention modules: more, where some read the KV of
        an earlier layer (Gemma 4).
    context_window, reuse_window
        Largest number of tokens of prompt plus answer, and the largest for which stored KV holds:
        less, where longer prompts rotate by other angles (longrope).
    is_dense
        Whether its attention can't be replaced, and gets a mask instead.
    kv_bytes_per_token
        Bytes of KV per token over all layers, in the model's dtype.
    most_timed
        Most rows of the forwards that its costs are measured by.
    lock
        Lock of the model, which also batches the rows of all requests.
    records, recorded
        Whether forwards are recorded (``None``: not known yet), and the recorded forwards once
        :meth:`record` has made their pool.

    Raises
    ------
    UnsupportedModelError
        If its KV can't be moved, by its config or by a forward of a few tokens, or if its weights
        are spread over several devices.
    """

    refusal: None = None

    def __init__(self, model: PreTrainedModel) -> None:
        check_supported(model.config)
        check_placement(model)
        self.model = model
        self.text_model = text_model_of(model)
        self.config = text_config(model)
        self.device = model.device
        self.dtype = model.dtype
        self.vocab_size = int(self.config.vocab_size)
        self.context_window = context_window(self.config)
        self.reuse_window = min(
            self.context_window, regime_limit(self.config) or self.context_window
        )
        self._captured: Captured | None = None
        self.lock = lock_of(model)
        self.records: bool | None = None
        self.recorded: Recordings | None = None
        self.find_traits()
        self.most_timed = self.reuse_window // 2
        self.depth = len(self._attentions)
        self.num_layers = len(self.traits)
        self.shapes = [trait.shape for trait in self.traits]
        self.kv_bytes_per_token: int = self.dtype.itemsize * sum(
            s.num_heads * (s.key_dim + s.value_dim) for s in self.shapes
        )

    def find_traits(self) -> None:
        """Find the traits of all layers; a model that another engine runs finds them by itself."""
        self._base = decoder_of(self.model)
        self._attentions = attention_modules(self.model)
        self._accepted = {True: accepted(self.text_model), False: accepted(self._base)}
        self._observe_traits()

    @torch.inference_mode()
    def _observe_traits(self) -> None:
        """Find the traits of all layers by a forward of a few tokens.

        Captured keys, once rotated, must be the keys that the model attends to.
        """
        positions = torch.tensor(sample_positions(self.context_window), device=self.device)
        with self.lock:
            seen = observe(self.model, self._attentions, positions)
            self.traits = find_traits(self.model, self._attentions, seen, positions)
        self.is_dense = not seen.masks
        ids = [id(attention) for attention in self._attentions]
        called = list(seen.masks)
        writers = [called.index(ids[t.modules[0]]) for t in self.traits] if called else []
        tells_offsets = bool(getattr(self.config, "attn_temperature_tuning", False))
        self._switch = Attentions(
            self.device,
            {ids[module]: trait.reach for trait in self.traits for module in trait.modules},
            called[max(writers, default=0) :],
            {ids[m]: n for n, trait in enumerate(self.traits) for m in trait.modules[1:]},
            tells_offsets,
            self.is_dense,
            frozenset(layer for layer, trait in enumerate(self.traits) if trait.is_latent),
        )
        # A shared step lets a module expand the latents of all requests, but no other keys.
        expands = any(trait.expands and not trait.is_latent for trait in self.traits)
        self._can_pack = "position_ids" in self._accepted[False] and not (
            self.is_dense or tells_offsets or expands
        )
        # Not beyond the length at which the angles are others (longrope).
        self._tables = RotaryTables([trait.rotation for trait in self.traits], self.reuse_window)
        # Where the length at which the angles change is known, prompts beyond it reuse nothing.
        if self.reuse_window == self.context_window:
            self._tables.check(positions, type(self.model).__name__)

    def record(self, num_slots: int, **options: Any) -> None:
        """Allocate a pool of slots, and record forwards over it from now on.

        ``options`` are those of :class:`~kvrag.model.steps.Recordings`. Raises torch's error if
        memory runs out.
        """
        self.recorded = Recordings(self, num_slots, **options)

    def buffer(self, capacity: int, *, batch: int = 1, run: range | None = None) -> KVBuffer:
        """Allocate the KV of a request, on a run of slots if given, or of a batch of chunks."""
        if run is not None and self.recorded is not None:
            return self.recorded.buffer(run, capacity)
        return KVBuffer.empty(
            self.shapes,
            capacity,
            dtype=self.dtype,
            device=self.device,
            batch=batch,
            keeps_ids=self.reuse_window < self.context_window and batch == 1,
        )

    def cached(self, cache: DynamicCache) -> list[Pair]:
        """Return the keys and values that transformers cached, in the order of a buffer."""
        return [
            self._switch.in_order(index, (layer.keys, layer.values))
            for index, layer in enumerate(cache.layers)
        ]

    def rotary(self, num_positions: int) -> Rotations:
        """Return the rotations of at least ``num_positions`` positions per layer, in float32.

        They are kept for the next prompts.
        """
        return self._tables.of(num_positions, self.device)

    @property
    def can_share_forwards(self) -> bool:
        """Whether a forward may compute rows of several requests.

        False where positions don't come from ``position_ids`` alone (ALiBi, Llama 4), angles
        change with the prompt's length (longrope), or a layer makes the keys that it attends to
        from its cached ones (JetMoe).
        """
        return self._can_pack and self.reuse_window == self.context_window

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        rows: Rows,
        kv: KVBuffer,
        *,
        logits: int = 1,
        mass_rows: int = 0,
        mass_layers: range | None = None,
        before_write: BeforeWrite | None = None,
    ) -> Found:
        # Long by its docstring, because every stage calls it.
        """Compute rows over all keys that they see in a buffer, and write their KV into it.

        Parameters
        ----------
        token_ids
            Ids of the rows, ``(R,)`` or ``(B, R)``, int64.
        rows
            Rows to compute.
        kv
            Buffer of the request. A slot that a row sees must be written before, or be among
            ``rows``.
        logits
            Number of last rows that need logits; 0 skips the language model's head.
        mass_rows, mass_layers
            Number of last rows to collect attention mass from, and in which attention modules (by
            default all). Layers after the last that logits or mass need are not computed.
        before_write
            Called in every layer before its fresh rows are written; may change the buffer in place.

        Returns
        -------
        logits : torch.Tensor
            ``(B, logits, vocab)`` in the model's dtype; empty if ``logits`` is 0.
        mass : torch.Tensor or None
            Float32 ``(rows.stop,)``: attention mass per key (:class:`~kvrag.model.attention.Mass`),
            summed over these layers.

        Raises
        ------
        ValueError
            If the rows are of several requests, and this model can't compute them together.
        """
        if rows.first is not None and not self._can_pack:
            raise ValueError(
                "this model computes one request at a time; see CausalLM.can_share_forwards"
            )
        piece = Portion(token_ids, rows, kv, logits, mass_rows, mass_layers, before_write)
        if self.recorded is not None and piece.is_recordable:
            return self.recorded.forward(piece)
        return self.launch(piece)

    @torch.inference_mode()
    def launch(self, piece: Portion) -> Found:
        """Compute rows as :meth:`forward` does, alone and unrecorded."""
        rows, kv = piece.rows, piece.kv
        ids = piece.token_ids if piece.token_ids.dim() == 2 else piece.token_ids[None]
        if kv.token_ids is not None:
            ids, rows = self._outgrow(ids, rows, kv.token_ids)
        mass = None
        if piece.mass_rows:
            mass = Mass(
                torch.zeros(rows.stop, dtype=torch.float32, device=self.device), piece.mass_rows
            )
        forward = Forward(
            rows,
            kv,
            self._switch,
            mass=mass,
            outputs=piece.logits,
            before_write=piece.before_write,
            # A recording holds its own rows alone.
            lock=None if rows.is_fixed else self.lock,
        )
        if mass is not None:
            layers = piece.mass_layers or range(self.depth)
            forward.weighed = [id(self._attentions[i]) for i in layers]
            forward.tail = forward.tail if piece.logits else forward.weighed[-1:]
        with self.lock:
            out = self._run(ids.to(self.device, non_blocking=True), forward, piece.logits)
            # Steps between its layers capture, too; this forward comes last and overwrites theirs.
            if self._captured is not None and not rows.is_fixed:
                self._capture_cached(kv, rows, self._captured)
        return out, None if mass is None else mass.total

    @torch.inference_mode()
    def step(self, pieces: Sequence[Portion]) -> Sequence[torch.Tensor]:
        """Compute the next row of every request in a single pass over the weights.

        Returns logits ``(1, vocab)`` per request. Several requests need :attr:`can_share_forwards`.
        """
        if len(pieces) == 1:
            alone = pieces[0]
            return [self.forward(alone.token_ids, alone.rows, alone.kv)[0][0]]
        ids = torch.cat([piece.token_ids for piece in pieces])[None].to(self.device)
        with self.lock:
            return self._run(ids, NextRows(pieces, self._switch), len(pieces))[0][:, None].unbind()

    def extension(self, kv: KVBuffer, length: int) -> Extend:
        """Return a function that computes the rows after the first ``length``, with their logits.

        A single row is computed together with the rows of other requests that decode, where the
        model can.
        """

        def extend(ids: torch.Tensor) -> torch.Tensor:
            nonlocal length
            rows = Rows.span(length, length + len(ids))
            length = rows.stop
            if len(ids) > 1 or kv.start is not None:
                return self.forward(ids, rows, kv, logits=len(ids))[0][0]
            return self.lock.step(
                Portion(ids, rows, kv, logits=1),
                self.step,
                limit=MAX_TOGETHER if self.can_share_forwards else 1,
            )

        return extend

    def _outgrow(
        self, ids: torch.Tensor, rows: Rows, known: torch.Tensor
    ) -> tuple[torch.Tensor, Rows]:
        """Return the ids and rows to compute: all, once an answer outgrows its angles (longrope).

        transformers also computes all rows again there. ``known`` collects the ids.
        """
        slots = rows.slots
        known[slots if isinstance(slots, slice) else slots.cpu()] = ids[0].cpu()
        # Rows that cross the length at which the angles change are neighbours.
        if isinstance(slots, slice) and 0 < slots.start <= self.reuse_window < rows.stop:
            return known[None, : rows.stop], Rows.span(0, rows.stop)
        return ids, rows

    def _run(self, ids: torch.Tensor, forward: Forward, logits: int) -> torch.Tensor:
        positions = forward.positions[None].expand(ids.shape[0], -1)
        options: dict[str, Any] = {
            "position_ids": positions,
            # The mass needs its rows in every layer; a model may drop others early (Gemma 4).
            "logits_to_keep": logits and max(logits, forward.mass.rows if forward.mass else 0),
            **dict.fromkeys(CACHE, forward),
        }
        if self.is_dense:  # ALiBi is made from the padding mask
            options["attention_mask"] = positions.new_ones((ids.shape[0], forward.limits.num_keys))
        options = {
            name: value for name, value in options.items() if name in self._accepted[bool(logits)]
        }
        run = self.text_model if logits else self._base
        hooks = ExitStack()
        with switched(self.model, forward), hooks, suppress(StopForward):
            if self.is_dense and forward.mass is not None:
                self._weigh(forward, forward.mass, hooks)
            out = run(input_ids=ids, use_cache=True, **options)
            if logits:
                return cast(torch.Tensor, out.logits[:, -logits:])
        return torch.empty(0, dtype=torch.float32)

    def _weigh(self, forward: Forward, mass: Mass, hooks: ExitStack) -> None:
        """Collect the mass of attention that can't be replaced, from its returned weights."""

        def collect(_: object, __: object, output: Pair) -> None:
            if running() is forward:
                found = largest(
                    output[1].float(), self.shapes[0].num_heads, output[1].shape[2], -mass.rows
                )
                mass.total.add_(found.sum(dim=(0, 1)))

        for attention in self._attentions:
            if id(attention) in forward.weighed:
                hooks.enter_context(attention.register_forward_hook(collect))

    @contextmanager
    def capture(self) -> Iterator[Captured]:
        """Collect position-free keys of this thread's forwards: layer → ``(B, R, H_kv, D)``.

        kvrag's other threads wait meanwhile.
        """
        with self.lock, ExitStack() as hooks:
            captured = Captured()
            owner = threading.get_ident()

            def is_ours() -> bool:
                return threading.get_ident() == owner and not self.lock.is_stepping

            for layer, trait in enumerate(self.traits):
                if trait.source is not None:
                    attention = self._attentions[trait.modules[0]]
                    hooks.enter_context(trait.source.attach(attention, layer, captured, is_ours))
            self._captured = captured
            try:
                yield captured
            finally:
                self._captured = None

    def _capture_cached(self, kv: KVBuffer, rows: Rows, captured: Captured) -> None:
        """Un-rotate the fresh keys of layers where no submodule gives position-free keys."""
        positions = rows.slots if rows.positions is None else rows.positions
        layers = [n for n, trait in enumerate(self.traits) if trait.source is None]
        tables = self.rotary(rows.stop) if layers else ()
        for layer in layers:
            keys = kv.keys(layer)[:, :, rows.slots]
            captured[layer] = (
                tables[layer]
                .unrotate(keys.flatten(0, 1), positions)
                .reshape(keys.shape)
                .transpose(1, 2)
            )


@dataclass(frozen=True, slots=True, weakref_slot=True)
class LoadedModel:
    """Model ready for use, with its encoder and its identity.

    ``encoder`` is made from the tokenizer by the loader; ``shares`` is another loaded model with
    the same weights, if any.
    """

    lm: CausalLM | PlainLM
    encoder: Any
    identity: LiveIdentity
    shares: LoadedModel | None = None

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model, part of every chunk key.

        It is looked up at every access: adapters may have been switched, or weights changed in
        place.
        """
        return self.identity.fingerprint

    @property
    def reusable(self) -> CausalLM:
        """Model with reusable KV; raises ``UnsupportedModelError`` with the reason without it."""
        if self.lm.refusal is not None:
            raise UnsupportedModelError(
                f"{self.lm.refusal}; it answers by full prefill, and nothing can be stored"
            )
        return self.lm
