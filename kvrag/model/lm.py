"""A causal LM as the stages see it: forwards over chosen rows, rotations, and capture of position-free keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from kvrag.errors import UnsupportedModelError
from kvrag.model.key_sources import attention_modules, decoder_of
from kvrag.model.kv import KVBuffer, LayerShape
from kvrag.model.packing import Packing
from kvrag.model.rope import Rotations, Rows
from kvrag.model.rotary import Turning
from kvrag.model.rows import RowPlan
from kvrag.model.support import check_placement, check_supported, context_window, regime_limit
from kvrag.model.switch import ATTENTION, DENSE, Call, StopForward, lock_of, switched
from kvrag.model.traits import LayerTraits, accepted, observe, probe_positions, prove


class CausalLM:
    """A loaded model: forwards over chosen rows of a buffer, rotations, and capture of position-free keys.

    Parameters
    ----------
    model
        A decoder-only causal LM on one device.

    Raises
    ------
    UnsupportedModelError
        If its KV can't be moved: what its config shows, and what one forward of a few tokens proves about its keys and masks.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        check_supported(model.config)
        check_placement(model)
        self.model = model
        self.config = model.config
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self._lock = lock_of(model)
        self._base = decoder_of(model)
        self._attentions = attention_modules(model)
        self.traits: list[LayerTraits] = []
        self._turnings: list[Turning] = []
        self._kinds: list[int] = []
        self._capturing: dict[int, torch.Tensor] | None = None
        self._accepted = {True: accepted(model), False: accepted(self._base)}
        self._prove_capture()

    @property
    def num_layers(self) -> int:
        """Number of decoder layers ``L``."""
        return len(self._attentions)

    @property
    def is_dense(self) -> bool:
        """Whether its attention can't be replaced: it asks for no attention function and gets a mask instead."""
        return self._is_dense

    @property
    def context_window(self) -> int:
        """Largest number of tokens of prompt and answer together."""
        return context_window(self.config)

    @property
    def reuse_window(self) -> int:
        """Largest number of tokens of prompt and answer together that stored KV holds for.

        Less than the context window where longer prompts turn by other angles (longrope): those are computed.
        """
        return min(self.context_window, regime_limit(self.config) or self.context_window)

    @property
    def shapes(self) -> list[LayerShape]:
        """Shape of each layer's KV."""
        return [trait.shape for trait in self.traits]

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return int(self.config.vocab_size)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV per token over all layers, in the model's dtype."""
        return sum(s.num_heads * (s.key_dim + s.value_dim) for s in self.shapes) * self.dtype.itemsize

    def buffer(self, capacity: int, *, batch: int = 1) -> KVBuffer:
        """Allocate a KV buffer for this model; see :class:`~kvrag.model.kv.KVBuffer`."""
        tells_offsets = bool(getattr(self.config, "attn_temperature_tuning", False))
        buffer = KVBuffer(
            self.shapes, capacity, dtype=self.dtype, device=self.device, batch=batch, tells_offsets=tells_offsets
        )
        if self.reuse_window < self.context_window and batch == 1:
            buffer.token_ids = torch.zeros(capacity, dtype=torch.int64)
        return buffer

    def rotary(self, num_positions: int) -> Rotations:
        """Return the rotations of positions 0 to ``num_positions - 1`` in every layer, float32."""
        positions = torch.arange(num_positions, device=self.device)
        return Rotations([turning.at(positions) for turning in self._turnings], self._kinds)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        rows: Rows,
        buffer: KVBuffer,
        *,
        logits: int = 1,
        mass_rows: int = 0,
        mass_layers: range | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute rows of a prompt against everything before them in the buffer, and write their KV into it.

        Parameters
        ----------
        token_ids
            Ids of these rows, ``(R,)`` or ``(B, R)``, int64.
        rows
            Their positions, ascending: a slice where they are contiguous, else an int64 tensor ``(R,)``.
        buffer
            Row index = position. Every row up to the last of ``rows`` must be valid or among ``rows``.
        logits
            How many last rows need logits; 0 skips the language model's head.
        mass_rows
            How many last rows' attention to collect; 0 for none.
        mass_layers
            Layers whose attention to collect; ``None``: all. The rest is not computed where it isn't needed for anything else.

        Returns
        -------
        logits : torch.Tensor
            ``(B, logits, vocab)`` in the model's dtype; empty where none are asked for.
        mass : torch.Tensor or None
            Float32 ``(visible,)``: attention probability per key, summed over these layers, heads and the last ``mass_rows`` rows.
        """
        ids = token_ids if token_ids.dim() == 2 else token_ids[None]
        if buffer.token_ids is not None:
            ids, rows = self._outgrow(ids, rows, buffer, buffer.token_ids)
        hi = torch.arange(rows.start, rows.stop, device=self.device) if isinstance(rows, slice) else rows
        buffer.rows, buffer.visible = rows, int(hi[-1]) + 1
        plan = RowPlan(hi, buffer.visible)
        if mass_rows:
            plan.mass, plan.mass_rows = torch.zeros(buffer.visible, device=self.device), mass_rows
        with self._lock:
            out = self._run(ids.to(self.device), hi, buffer, plan, logits, mass_layers or range(self.num_layers))
            if self._capturing is not None:
                self._capture_cached(buffer, rows, self._capturing)
        buffer.length = max(buffer.length, buffer.visible)
        return out, plan.mass

    def can_pack(self, num_positions: int) -> bool:
        """Whether runs that end before this position can share a forward: no window cuts them, and only ``position_ids`` tell positions."""
        is_told_otherwise = self._is_dense or getattr(self.config, "attn_temperature_tuning", False)
        is_told = "position_ids" in self._accepted[False] and not is_told_otherwise
        return is_told and all(trait.reach.is_whole(num_positions) for trait in self.traits)

    @torch.inference_mode()
    def forward_packed(self, token_ids: torch.Tensor, packing: Packing, buffer: KVBuffer) -> None:
        """Compute several runs of rows behind one prefix in one forward; see :meth:`can_pack`.

        Parameters
        ----------
        token_ids
            Ids of all runs, one after the other, int64 ``(R,)``.
        packing
            Their limits and positions.
        buffer
            The prefix's rows, and room for ``R`` more, which are written.
        """
        rows = slice(packing.prefix, packing.prefix + len(token_ids))
        hi = torch.arange(rows.start, rows.stop, device=self.device)
        buffer.rows, buffer.visible = rows, rows.stop
        with self._lock:
            plan = RowPlan(hi, rows.stop, packing=packing)
            self._run(token_ids[None].to(self.device), packing.positions, buffer, plan, 0, range(0))
            if self._capturing is not None:
                self._capture_cached(buffer, rows, self._capturing, packing.positions)
        buffer.length = rows.stop

    def _outgrow(
        self, ids: torch.Tensor, rows: Rows, buffer: KVBuffer, known: torch.Tensor
    ) -> tuple[torch.Tensor, Rows]:
        """Where an answer outgrows the angles that its prompt has (longrope), compute all rows anew, as transformers does."""
        known[rows if isinstance(rows, slice) else rows.cpu()] = ids[0].cpu()
        is_crossing = isinstance(rows, slice) and 0 < buffer.length <= self.reuse_window < rows.stop
        return (known[None, : rows.stop], slice(0, rows.stop)) if is_crossing else (ids, rows)  # type: ignore[union-attr]

    def _run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        buffer: KVBuffer,
        plan: RowPlan,
        logits: int,
        mass_layers: range,
    ) -> torch.Tensor:
        options: dict[str, Any] = {"position_ids": positions[None].expand(ids.shape[0], -1), "logits_to_keep": logits}
        if self._is_dense:  # ALiBi is made from the mask of padding
            options["attention_mask"] = positions.new_ones((ids.shape[0], plan.num_keys))
        names = self._accepted[bool(logits)]
        options = {name: value for name, value in options.items() if name in names}
        run = self.model if logits else self._base
        name = DENSE if self._is_dense else ATTENTION
        weighed = [self._attentions[layer] for layer in mass_layers] if plan.mass is not None else []
        final = self._final if logits or not weighed else id(weighed[-1])
        call = Call(plan, self._reach, frozenset(map(id, weighed)), final, logits)
        with switched(self.model, name, call), self._weighed(plan, weighed), suppress(StopForward):
            out = run(input_ids=ids, past_key_values=buffer, use_cache=True, **options)
            if logits:
                return cast(torch.Tensor, out.logits[:, -logits:])
        return torch.empty(0)

    @contextmanager
    def _weighed(self, plan: RowPlan, attentions: list[torch.nn.Module]) -> Iterator[None]:
        """Collect the mass of attention that can't be replaced from the weights that it returns."""
        if plan.mass is None or not self._is_dense:
            yield
            return

        def collect(_: torch.nn.Module, __: object, output: tuple[torch.Tensor, torch.Tensor]) -> None:
            assert plan.mass is not None
            plan.mass += output[1][:, :, -plan.mass_rows :].float().sum(dim=(0, 1, 2))

        handles = [attention.register_forward_hook(collect) for attention in attentions]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def capture(self) -> Iterator[dict[int, torch.Tensor]]:
        """Collect position-free keys of every forward inside: layer → ``(B, R, H_kv, D)``.

        The model is this thread's alone until the end: the hooks would see the forwards of others too.
        """
        with self._lock:
            captured: dict[int, torch.Tensor] = {}
            handles = [
                trait.source.attach(self._attentions[layer], layer, captured)
                for layer, trait in enumerate(self.traits)
                if trait.source is not None
            ]
            self._capturing = captured
            try:
                yield captured
            finally:
                self._capturing = None
                for handle in handles:
                    handle.remove()

    def _capture_cached(
        self, buffer: KVBuffer, rows: Rows, captured: dict[int, torch.Tensor], positions: Rows | None = None
    ) -> None:
        """Turn back the fresh keys of the layers whose position-free keys no submodule gives; a row's index is its position by default."""
        layers = [layer for layer, trait in enumerate(self.traits) if trait.source is None]
        rotations = self.rotary(buffer.visible) if layers else None
        for layer in layers:
            assert rotations is not None
            keys = buffer.keys(layer)[:, :, rows]
            free = rotations[layer].unrotate(keys.flatten(0, 1), rows if positions is None else positions)
            captured[layer] = free.reshape(keys.shape).transpose(1, 2)

    @torch.inference_mode()
    def _prove_capture(self) -> None:
        """Run a few tokens through the model and prove that captured keys, rotated, are the keys it attends to."""
        positions = torch.tensor(probe_positions(self.context_window), device=self.device)
        with self._lock:
            observed = observe(self.model, self._attentions, positions)
            self.traits = prove(self.model, self._attentions, observed, positions)
        self._is_dense = not observed.masks
        self._final = next(reversed(observed.masks), None)
        self._reach = {id(a): t.reach for a, t in zip(self._attentions, self.traits, strict=True)}
        for trait in self.traits:
            if trait.turning not in self._turnings:
                self._turnings.append(trait.turning)
            self._kinds.append(self._turnings.index(trait.turning))
        self._check_angles(positions)

    def _check_angles(self, positions: torch.Tensor) -> None:
        """Refuse a model whose angles at a position depend on what comes after it, unless it is known from which length on they do."""
        if self.reuse_window < self.context_window:
            return
        for turning in self._turnings:
            short, long = turning.tables(positions[:3]), turning.tables(positions)
            if not all(torch.equal(a, b[:3]) for a, b in zip(short, long, strict=True)):
                raise UnsupportedModelError(
                    f"the rotary angles of {type(self.model).__name__} ({turning.name}) change with the prompt's length, so stored keys "
                    "can't be moved exactly"
                )
