"""The only module that knows transformers' internals: a causal LM as kvrag's stages see it.

Nothing is patched. A registered attention function (``AttentionInterface``) gives exact row limits, :class:`~kvrag.cache.KVBuffer`
gives scattered writes, and forward hooks on the key projection give position-free keys while a chunk is precomputed. The
implementation is switched for the duration of a forward only, so that a model handed in by the user behaves as before elsewhere.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from transformers import AttentionInterface, PreTrainedModel

from kvrag.attention import RowPlan, ragged_attention
from kvrag.cache import KVBuffer, LayerShape
from kvrag.errors import UnsupportedModelError
from kvrag.rope import RotaryTable, Rows

ACCEPTED = ("gemma2", "llama", "mistral", "phi3", "qwen2", "qwen3")
"""Values of ``config.model_type`` whose reuse is proven exact by ``tests/test_equivalence.py``."""

STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""RoPE types whose angles depend on the position alone, not on the length of the prompt."""

_NAME = "kvrag"  # neither "flash" nor "/": transformers gives both a meaning of their own


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    kvrag_plan: RowPlan,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Adapt :func:`ragged_attention` to transformers' attention interface; the mask is the plan's business."""
    out = ragged_attention(
        query, key, value, kvrag_plan, scale=scaling, window=sliding_window, softcap=softcap, sinks=s_aux
    )
    return out.transpose(1, 2), None


_locks: weakref.WeakKeyDictionary[PreTrainedModel, threading.RLock] = weakref.WeakKeyDictionary()
_locks_guard = threading.Lock()


def _lock_of(model: PreTrainedModel) -> threading.RLock:
    """Return the one lock of a model, however many engines use it: its attention is switched during a forward."""
    with _locks_guard:
        return _locks.setdefault(model, threading.RLock())


class StopForward(Exception):
    """Raised by a ``before_write`` callback to end a forward whose rest is not needed."""


class CausalLM:
    """A loaded model: forwards over chosen rows of a buffer, rotations, and capture of position-free keys.

    Parameters
    ----------
    model
        A causal LM of one of the :data:`ACCEPTED` architectures.

    Raises
    ------
    UnsupportedModelError
        If the architecture, its RoPE type or its attention is not one that reuse is proven for.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        check_supported(model.config)
        AttentionInterface.register(_NAME, _attention)
        self.model = model
        self.config = model.config.get_text_config()
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self._lock = _lock_of(model)
        self._base = model.base_model
        self._attentions = _attention_modules(model)
        self._apply = sys.modules[type(self._attentions[0]).__module__].apply_rotary_pos_emb
        self.shapes = self._prove_capture()

    @property
    def num_layers(self) -> int:
        """Number of decoder layers ``L``."""
        return len(self._attentions)

    @property
    def context_window(self) -> int:
        """Largest number of tokens of prompt and answer together."""
        return int(self.config.max_position_embeddings)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return int(self.config.vocab_size)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV per token over all layers, in the model's dtype."""
        return sum(s.num_heads * (s.key_dim + s.value_dim) for s in self.shapes) * self.dtype.itemsize

    def buffer(self, capacity: int, *, batch: int = 1) -> KVBuffer:
        """Allocate a KV buffer for this model; see :class:`~kvrag.cache.KVBuffer`."""
        return KVBuffer(self.shapes, capacity, dtype=self.dtype, device=self.device, batch=batch)

    def rotary(self, num_positions: int) -> RotaryTable:
        """Return the rotations of positions 0 to ``num_positions - 1``, float32."""
        rotary = self._base.rotary_emb
        positions = torch.arange(num_positions, device=self.device)[None]
        cos, sin = rotary(torch.empty((1, 1), dtype=torch.float32, device=self.device), positions)
        return RotaryTable(cos[0], sin[0], self._rotate, float(getattr(rotary, "attention_scaling", 1.0)))

    def _rotate(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        no_queries = keys[:, :0]
        return cast(torch.Tensor, self._apply(no_queries, keys, cos, sin)[1])

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        rows: Rows,
        buffer: KVBuffer,
        *,
        logits: int = 1,
        mass_rows: int = 0,
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

        Returns
        -------
        logits : torch.Tensor
            ``(B, logits, vocab)`` in the model's dtype; empty where none are asked for.
        mass : torch.Tensor or None
            Float32 ``(visible,)``: attention probability per key, summed over layers, heads and the last ``mass_rows`` rows.
        """
        ids = token_ids if token_ids.dim() == 2 else token_ids[None]
        hi = torch.arange(rows.start, rows.stop, device=self.device) if isinstance(rows, slice) else rows
        buffer.rows, buffer.visible = rows, int(hi[-1]) + 1
        plan = RowPlan(hi, buffer.visible)
        if mass_rows:
            plan.mass, plan.mass_rows = torch.zeros(buffer.visible, device=self.device), mass_rows
        with self._lock, self._own_attention():
            run, options = (self.model, {"logits_to_keep": logits}) if logits else (self._base, {})
            out = run(
                input_ids=ids.to(self.device),
                position_ids=hi[None].expand(ids.shape[0], -1),
                past_key_values=buffer,
                use_cache=True,
                kvrag_plan=plan,
                **options,
            )
        buffer.length = max(buffer.length, buffer.visible)
        return out.logits if logits else torch.empty(0), plan.mass

    @contextmanager
    def _own_attention(self) -> Iterator[None]:
        config, was_training = self.model.config, self.model.training
        before = config._attn_implementation
        config._attn_implementation = _NAME
        if was_training:
            self.model.eval()
        try:
            yield
        finally:
            config._attn_implementation = before
            if was_training:
                self.model.train()

    @contextmanager
    def capture(self) -> Iterator[dict[int, torch.Tensor]]:
        """Collect position-free keys of every forward inside: layer → ``(B, R, H_kv, D)``.

        The model is this thread's alone until the end: the hooks would see the forwards of others too.
        """
        with self._lock:
            captured: dict[int, torch.Tensor] = {}
            handles = [_hook(attention, layer, captured) for layer, attention in enumerate(self._attentions)]
            try:
                yield captured
            finally:
                for handle in handles:
                    handle.remove()

    @torch.inference_mode()
    def _prove_capture(self) -> list[LayerShape]:
        """Run a few tokens through the model and prove that captured keys, rotated, are the keys it attends to."""
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        num_tokens, start = 4, 3
        probe = _Recorder(seen)
        ids = torch.arange(num_tokens, device=self.device) + 1
        hi = torch.arange(start, start + num_tokens, device=self.device)
        with self._lock, self._own_attention(), self.capture() as captured:
            self.model(
                input_ids=ids[None] % self.vocab_size,
                position_ids=hi[None],
                past_key_values=probe,
                use_cache=True,
                kvrag_plan=RowPlan(hi - start, num_tokens),
            )
        self.shapes = [LayerShape(k.shape[1], k.shape[3], v.shape[3]) for k, v in seen]
        rotary = self.rotary(start + num_tokens)
        for layer, (keys, _) in enumerate(seen):
            turned = rotary.rotate(captured[layer][0].transpose(0, 1), hi)
            tolerance = 8 * torch.finfo(self.dtype).eps * float(keys.abs().max()) + 1e-6
            if not torch.allclose(turned, keys[0], atol=tolerance, rtol=0):
                raise UnsupportedModelError(
                    f"layer {layer} of {type(self.model).__name__} attends to other keys than its key projection, normalised and "
                    "rotated; kvrag can't move such keys. Use a model of an accepted architecture: "
                    + ", ".join(ACCEPTED)
                )
        return self.shapes


class _Recorder(KVBuffer):
    """A cache that stores nothing and notes the keys and values handed to it."""

    def __init__(self, seen: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__([], 0, dtype=torch.float32, device=torch.device("cpu"))
        self._seen = seen

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._seen.append((key_states, value_states))
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


def check_supported(config: Any) -> None:
    """Raise :class:`UnsupportedModelError` unless reuse is proven for this architecture and its RoPE type."""
    text = config.get_text_config()
    if text.model_type not in ACCEPTED:
        raise UnsupportedModelError(
            f"architecture {text.model_type!r} is not accepted yet; accepted architectures: {', '.join(ACCEPTED)}"
        )
    rope = getattr(text, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in STATIC_ROPE:
        raise UnsupportedModelError(
            f"RoPE type {kind!r} of this {text.model_type} model changes its angles with the prompt's length, so stored keys can't be "
            f"moved exactly; accepted RoPE types: {', '.join(STATIC_ROPE)}"
        )


def _attention_modules(model: PreTrainedModel) -> list[torch.nn.Module]:
    layers = getattr(model.base_model, "layers", None)
    if layers is None or not all(hasattr(layer, "self_attn") for layer in layers):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no decoder layers with 'self_attn'; load a causal LM of an accepted architecture: "
            + ", ".join(ACCEPTED)
        )
    return [layer.self_attn for layer in layers]


def _hook(
    attention: torch.nn.Module, layer: int, captured: dict[int, torch.Tensor]
) -> torch.utils.hooks.RemovableHandle:
    """Keep the output of the last module that shapes keys before RoPE: key norm, key projection, or fused projection."""
    dim = int(attention.head_dim)  # type: ignore[arg-type]
    source = getattr(attention, "k_norm", None) or getattr(attention, "k_proj", None)
    fused = source is None

    def keep(_: torch.nn.Module, __: tuple[Any, ...], output: torch.Tensor) -> None:
        if fused:
            config = attention.config
            start = config.num_attention_heads * dim  # type: ignore[union-attr, operator]
            output = output[..., start : start + config.num_key_value_heads * dim]  # type: ignore[union-attr, operator]
        captured[layer] = output.reshape(*output.shape[:2], -1, dim)

    module = attention.qkv_proj if fused else source
    return cast(torch.nn.Module, module).register_forward_hook(keep)
