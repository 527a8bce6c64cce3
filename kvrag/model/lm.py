"""A causal LM as the stages see it: forwards over chosen rows, rotations, and capture of position-free keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from kvrag.errors import UnsupportedModelError
from kvrag.model.attention import Mass
from kvrag.model.forward import BeforeWrite, Forward, StopForward, lock_of, running, switched
from kvrag.model.key_sources import attention_modules, decoder_of
from kvrag.model.kv import KVArena, KVBuffer, LayerShape
from kvrag.model.plain import Extend
from kvrag.model.rope import Rotations
from kvrag.model.rotary import Turning
from kvrag.model.rows import Rows
from kvrag.model.support import check_placement, check_supported, context_window, regime_limit
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
        self._base = decoder_of(model)
        self._attentions = attention_modules(model)
        self.traits: list[LayerTraits] = []
        self._turnings: list[Turning] = []
        self._kinds: list[int] = []
        self._captured: dict[int, torch.Tensor] | None = None
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

    def arena(self, slots: int, *, batch: int = 1) -> KVArena:
        """Allocate KV in slots, for one request or several; see :class:`~kvrag.model.kv.KVArena`."""
        keeps_ids = self.reuse_window < self.context_window and batch == 1
        return KVArena(self.shapes, slots, dtype=self.dtype, device=self.device, batch=batch, keeps_ids=keeps_ids)

    def buffer(self, capacity: int, *, batch: int = 1) -> KVBuffer:
        """Allocate the KV of one request, or of a batch of chunks."""
        return self.arena(capacity, batch=batch).view(0, capacity)

    def rotary(self, num_positions: int) -> Rotations:
        """Return the rotations of positions 0 to ``num_positions - 1`` in every layer, float32."""
        positions = torch.arange(num_positions, device=self.device)
        return Rotations([turning.at(positions) for turning in self._turnings], self._kinds)

    @property
    def can_share_forwards(self) -> bool:
        """Whether rows of several requests may be computed in one forward.

        Not where a model takes positions from anything but ``position_ids`` (ALiBi, Llama 4), or changes its angles with the length
        of the prompt (longrope): those run one request at a time.
        """
        return self._can_pack and self.reuse_window == self.context_window

    def can_pack(self, num_positions: int) -> bool:
        """Whether chunks that end before this position can share one prefix in a forward: no layer's reach cuts them."""
        return self._can_pack and all(trait.reach.is_whole(num_positions) for trait in self.traits)

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
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute rows against everything that they see in a buffer, and write their KV into it.

        Parameters
        ----------
        token_ids
            Ids of these rows, ``(R,)`` or ``(B, R)``, int64.
        rows
            What to compute; see :class:`~kvrag.model.rows.Rows`.
        kv
            The request's buffer, or the arena for rows of several requests. Every slot that a row sees must be written before, or be
            among ``rows``.
        logits
            How many last rows need logits; 0 skips the language model's head.
        mass_rows
            How many last rows' attention to collect; 0 for none.
        mass_layers
            Layers whose attention to collect; ``None``: all. The rest is not computed where it isn't needed for anything else.
        before_write
            Called in each layer before its fresh rows are written; may change the buffer in place.

        Returns
        -------
        logits : torch.Tensor
            ``(B, logits, vocab)`` in the model's dtype; empty where none are asked for.
        mass : torch.Tensor or None
            Float32 ``(rows.stop,)``: attention probability per key, summed over these layers, heads and the last ``mass_rows`` rows.

        Raises
        ------
        ValueError
            If the rows are of several requests or chunks, and this model can't compute them together.
        """
        if rows.first is not None and not self._can_pack:
            raise ValueError("this model computes one request at a time; see CausalLM.can_share_forwards")
        ids = token_ids if token_ids.dim() == 2 else token_ids[None]
        if kv.token_ids is not None:
            ids, rows = self._outgrow(ids, rows, kv.token_ids)
        mass = Mass(torch.zeros(rows.stop, device=self.device), mass_rows) if mass_rows else None
        layers = mass_layers or range(self.num_layers)
        weighed = [id(self._attentions[layer]) for layer in layers] if mass is not None else []
        forward = Forward(
            rows,
            kv,
            self.device,
            reach=self._reach,
            weighed=frozenset(weighed),
            mass=mass,
            final=self._final if logits or not weighed else weighed[-1],
            outputs=logits,
            before_write=before_write,
            tells_offsets=self._tells_offsets,
            is_dense=self._is_dense,
        )
        with lock_of(self.model):
            out = self._run(ids.to(self.device), forward, logits)
            if self._captured is not None:
                self._capture_cached(kv, rows, self._captured)
        return out, None if mass is None else mass.total

    def extension(self, kv: KVBuffer, length: int) -> Extend:
        """Return what computes the rows that follow the first ``length`` of a buffer, with logits for each."""

        def extend(ids: torch.Tensor) -> torch.Tensor:
            nonlocal length
            logits, _ = self.forward(ids, Rows.span(length, length + len(ids)), kv, logits=len(ids))
            length += len(ids)
            return logits[0]

        return extend

    def _outgrow(self, ids: torch.Tensor, rows: Rows, known: torch.Tensor) -> tuple[torch.Tensor, Rows]:
        """Where an answer outgrows the angles that its prompt has (longrope), compute all rows again, as transformers does."""
        is_contiguous = isinstance(rows.slots, slice)
        known[rows.slots if is_contiguous else rows.slots.cpu()] = ids[0].cpu()  # type: ignore[union-attr]
        is_crossing = is_contiguous and 0 < rows.slots.start <= self.reuse_window < rows.stop  # type: ignore[union-attr]
        return (known[None, : rows.stop], Rows.span(0, rows.stop)) if is_crossing else (ids, rows)

    def _run(self, ids: torch.Tensor, forward: Forward, logits: int) -> torch.Tensor:
        positions = forward.positions[None].expand(ids.shape[0], -1)
        options: dict[str, Any] = {"position_ids": positions, "logits_to_keep": logits}
        if self._is_dense:  # ALiBi is made from the mask of padding
            options["attention_mask"] = positions.new_ones((ids.shape[0], forward.limits.num_keys))
        names = self._accepted[bool(logits)]
        options = {name: value for name, value in options.items() if name in names}
        run = self.model if logits else self._base
        with switched(self.model, forward), self._weighing(forward), suppress(StopForward):
            out = run(input_ids=ids, past_key_values=forward, use_cache=True, **options)
            if logits:
                return cast(torch.Tensor, out.logits[:, -logits:])
        return torch.empty(0)

    @contextmanager
    def _weighing(self, forward: Forward) -> Iterator[None]:
        """Collect the mass of attention that can't be replaced from the weights that it returns."""
        mass = forward.mass
        if mass is None or not self._is_dense:
            yield
            return

        def collect(_: torch.nn.Module, __: object, output: tuple[torch.Tensor, torch.Tensor]) -> None:
            if running() is forward:
                mass.total.add_(output[1][:, :, -mass.rows :].float().sum(dim=(0, 1, 2)))

        handles = [a.register_forward_hook(collect) for a in self._attentions if id(a) in forward.weighed]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def capture(self) -> Iterator[dict[int, torch.Tensor]]:
        """Collect position-free keys of every forward of this thread inside: layer → ``(B, R, H_kv, D)``.

        kvrag's other threads wait until the end; forwards of anyone else's threads are left alone.
        """
        with lock_of(self.model):
            captured: dict[int, torch.Tensor] = {}
            handles = [
                trait.source.attach(self._attentions[layer], layer, captured)
                for layer, trait in enumerate(self.traits)
                if trait.source is not None
            ]
            self._captured = captured
            try:
                yield captured
            finally:
                self._captured = None
                for handle in handles:
                    handle.remove()

    def _capture_cached(self, kv: KVBuffer, rows: Rows, captured: dict[int, torch.Tensor]) -> None:
        """Turn back the fresh keys of the layers whose position-free keys no submodule gives."""
        layers = [layer for layer, trait in enumerate(self.traits) if trait.source is None]
        rotations = self.rotary(rows.stop) if layers else None
        for layer in layers:
            assert rotations is not None
            keys = kv.keys(layer)[:, :, rows.slots]
            free = rotations[layer].unrotate(keys.flatten(0, 1), rows.own_positions)
            captured[layer] = free.reshape(keys.shape).transpose(1, 2)

    @torch.inference_mode()
    def _prove_capture(self) -> None:
        """Run a few tokens through the model and prove that captured keys, rotated, are the keys it attends to."""
        positions = torch.tensor(probe_positions(self.context_window), device=self.device)
        with lock_of(self.model):
            observed = observe(self.model, self._attentions, positions)
            self.traits = prove(self.model, self._attentions, observed, positions)
        self._is_dense = not observed.masks
        self._final = next(reversed(observed.masks), None)
        self._reach = {id(a): t.reach for a, t in zip(self._attentions, self.traits, strict=True)}
        self._tells_offsets = bool(getattr(self.config, "attn_temperature_tuning", False))
        self._can_pack = "position_ids" in self._accepted[False] and not (self._is_dense or self._tells_offsets)
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
