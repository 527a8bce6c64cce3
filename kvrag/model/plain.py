"""Models whose chunks are not reused: the reason, by config or module tree, and their answers.

Models that pass this deny list are then proven or refused by :mod:`.traits` and :mod:`.proof`. Any
model that ``generate`` can run answers with transformers' own forward, attention and cache.
``generate`` prepares the first call (``custom_generate`` is its documented hook). A prompt can be
read in pieces, with a snapshot of the cache behind each, from which a later prompt continues.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Cache,
    PreTrainedModel,
)

from kvrag.errors import ModelError, UnsupportedModelError
from kvrag.kv.snapshot import Layers, Snapshot, rows_of
from kvrag.model.forward import evaluating
from kvrag.model.lock import lock_of, text_config, text_model_of
from kvrag.runtime import Cancel

UNLIMITED = 2**20  # context window of a model with KV reuse if its config names no limit
NO_LIMIT = 2**31 - 1  # the same without KV reuse (state space models)

# ``ids (R,) int64 -> logits (R, vocab)``: appends rows to the rows computed before.
Extend = Callable[[Tensor], Tensor]

_LEARNED = (
    "adds a learned embedding of the absolute position to each token, so a chunk's KV fits one "
    "position only: reuse is possible there alone, as a prefix"
)
_STATE = (
    "keeps a running state instead of keys and values per token, "
    "so a chunk's part of it can't be stored and moved"
)
_MIXED = (
    "mixes attention with layers that keep a running state over all tokens before, "
    "so a chunk's part of it can't be stored and moved"
)

# Known families that would fail the proof at load, but only after their weights have been read.
_BY_NAME: dict[str, str] = {
    **dict.fromkeys(
        ("biogpt", "ctrl", "gpt2", "gpt_bigcode", "gpt_neo", "openai-gpt", "opt", "xglm"), _LEARNED
    ),
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"), _STATE),
    **dict.fromkeys(("bamba", "jamba", "nemotron_h", "recurrent_gemma", "zamba", "zamba2"), _MIXED),
}

_STATEFUL_LAYERS = ("linear_attention", "mamba", "conv", "recurrent", "moe_mamba", "ssm")


def check_supported(config: Any) -> None:
    """Raise :class:`UnsupportedModelError` if the config shows that the KV can't be moved."""
    reason = refusal(config)
    if reason is not None:
        raise UnsupportedModelError(f"architecture {config.model_type!r} {reason}")


def refusal(config: Any) -> str | None:
    """Return the reason to refuse a model of this config, as the rest of a sentence, if any.

    Of a model that also sees, the config of its text decoder counts.
    """
    if is_encoder_decoder(config):
        return (
            "is an encoder-decoder: its decoder attends to an encoded input, "
            "not to a prompt's own keys and values"
        )
    config = config.get_text_config(decoder=True)
    if config.model_type == "falcon" and config.alibi:
        return (
            "adds ALiBi once in one of transformers' own attentions and twice in the one that "
            "takes a mask, and kvrag can only run the latter"
        )
    if config.model_type in _BY_NAME:
        return _BY_NAME[config.model_type]
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    stateful = sorted(kind for kind in kinds if kind.startswith(_STATEFUL_LAYERS))
    if stateful:
        return f"{_MIXED} (layer types: {', '.join(stateful)})"
    for rope in rope_parameters(config):
        if "dynamic" in str(rope.get("rope_type", "default")):
            return (
                f"has RoPE type {rope['rope_type']!r}, which changes its angles with the prompt's "
                "length, so stored keys can't be moved; set another rope_type, such as 'yarn'"
            )
    return None


def is_encoder_decoder(config: Any) -> bool:
    """Whether a model of this config, or the text model in it, is an encoder-decoder."""
    return any(
        getattr(part, "is_encoder_decoder", False)
        for part in (config, config.get_text_config(decoder=True))
    )


def rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Return the RoPE parameters of a config: a single set, or a set per layer type."""
    found = getattr(config, "rope_parameters", None) or {}
    return [value for value in found.values() if isinstance(value, dict)] or [found]


def regime_limit(config: Any) -> int | None:
    """Return the longest prompt that is rotated by the angles of short prompts.

    Longrope (Phi 3) and dynamic RoPE have other angles for longer prompts. For other RoPE types,
    the length doesn't matter: ``None``.
    """
    ropes = [r for r in rope_parameters(config) if r.get("rope_type") in ("longrope", "dynamic")]
    name = "original_max_position_embeddings"
    own = getattr(config, name, None) or context_window(config)
    return min((int(rope.get(name) or own) for rope in ropes), default=None)


def check_placement(model: PreTrainedModel) -> None:
    """Raise :class:`UnsupportedModelError` unless all weights of a model are on a single device."""
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    devices = {str(parameter.device) for parameter in model.parameters()}
    is_sharded = any(type(parameter).__name__ == "DTensor" for parameter in model.parameters())
    if max(len(places), len(devices)) > 1 or {"disk", "meta"} & (places | devices) or is_sharded:
        where = ", ".join(sorted(places or devices))
        raise UnsupportedModelError(
            f"the weights of {type(model).__name__} are spread over several places ({where}), "
            "and kvrag keeps KV on one device; load the whole model onto one with "
            'device="cuda" or device_map={"": 0}, in a smaller dtype or quantised '
            "if it does not fit"
        )


def context_window(config: Any, unlimited: int = UNLIMITED) -> int:
    """Return the largest number of tokens of prompt plus answer.

    It is ``unlimited`` if the config names no limit (ALiBi).
    """
    names = ("max_position_embeddings", "max_seq_len", "n_positions", "max_sequence_length")
    found = (getattr(config, name, None) for name in names)
    # XLNet writes -1.
    return next((value for value in found if isinstance(value, int) and value > 0), unlimited)


def check_generates(model_or_config: Any) -> None:
    """Raise :class:`ModelError` unless a model, or the model of a config, is a causal LM."""
    is_model = isinstance(model_or_config, PreTrainedModel)
    config = model_or_config.config if is_model else model_or_config
    reason = None
    if is_encoder_decoder(config):
        reason = f"{config.model_type!r} is an encoder-decoder, and kvrag answers with causal LMs"
    elif is_model and not model_or_config.can_generate():
        reason = f"{type(model_or_config).__name__} has no language model's head to answer with"
    elif not is_model and auto_class(config) is None:
        reason = (
            f"transformers has no causal LM for {config.model_type!r} "
            "(it may need sound, or answer by an encoder)"
        )
    if reason is not None:
        raise ModelError(
            f"{reason}; load a model that AutoModelForCausalLM or AutoModelForImageTextToText takes"
        )


def auto_class(config: Any) -> Any:
    """Return the class of transformers that loads the model of a config; ``None`` if none does."""
    code = getattr(config, "auto_map", None) or {}
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if auto.__name__ in code or type(config) in auto._model_mapping:
            return auto
    return None


@dataclass(frozen=True, slots=True)
class Pieces:
    """Whether a model reads a prompt in pieces as it reads it whole; ``reason`` says why not.

    ``snapshot`` is the state behind some prompt. Without bytes, it fits behind any rows.
    """

    reason: str | None
    snapshot: Snapshot | None = None

    @property
    def state_bytes(self) -> int:
        """Bytes of a snapshot; 0 if the model keeps rows alone."""
        return self.snapshot.num_bytes if self.snapshot else 0


class HistoryRows(NamedTuple):
    """First rows of a prompt that an earlier request has computed."""

    snapshot: Snapshot
    rows: Layers
    num_rows: int


class PlainLM:
    """Loaded model whose chunks are not reused: any model that ``AutoModelForCausalLM`` gives.

    It answers the calls of :class:`~kvrag.model.CausalLM` that a request makes. ``refusal`` is the
    reason, as a sentence. ``reuse_window`` is the largest number of tokens for which the rows of a
    beginning hold. ``pieces`` is known once a beginning was to be reused.
    """

    refusal: str
    kv_bytes_per_token: None = None  # not known: it keeps its KV in a cache of its own
    recorded: None = None

    def __init__(self, model: PreTrainedModel, refusal: str) -> None:
        self.model = model
        self.refusal = refusal
        self.config = text_config(model)
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.vocab_size = int(self.config.vocab_size)
        self.context_window = context_window(self.config, NO_LIMIT)
        rope = getattr(self.config, "rope_parameters", None) or {}
        # It stretches its angles beyond the length that the model was trained at.
        if rope.get("rope_type") == "dynamic":
            self.context_window = int(self.context_window * float(rope.get("factor", 1.0)))
        self.reuse_window = regime_limit(self.config) or NO_LIMIT
        self.pieces: Pieces | None = None

    @torch.inference_mode()
    def prefill(
        self,
        token_ids: Tensor,
        *,
        max_new_tokens: int,
        stops: Collection[int] = (),
        history: HistoryRows | None = None,
        cancel: Cancel = None,
        max_bytes: int = NO_LIMIT,
    ) -> tuple[Tensor, Run]:
        """Run a prompt, ids ``(N,)`` int64, behind the rows of ``history``.

        Returns the logits ``(vocab,)`` of its last row, and the run, which appends rows. The run
        keeps a snapshot behind every number of first rows in ``stops``, as long as they take at
        most ``max_bytes``. ``CancelledError`` is raised between these pieces if ``cancel`` is set.
        """
        run = Run(self, token_ids.to(self.device)[None], max_new_tokens, history)
        return run.prefill(stops, cancel, max_bytes), run


class Run:
    """Prompt with its answer so far: the ids, and the arguments that carry the model's cache.

    A call appends tokens. ``snapshots`` are by the number of rows before them.
    """

    def __init__(
        self,
        lm: PlainLM,
        ids: Tensor,
        max_new_tokens: int,
        history: HistoryRows | None,
    ) -> None:
        self._model = text_model_of(lm.model)
        self._ids = ids
        self._num_rows = 0
        holders = [m for m in self._model.modules() if hasattr(m, "rope_deltas")]
        self._deltas = dict[torch.nn.Module, Any].fromkeys(holders)
        with self._alone():
            found = loop_arguments(
                self._model,
                ids,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                num_beams=1,
                pad_token_id=0,
            )
        self._kwargs = {name: value for name, value in found.items() if name not in _OF_LOOP}
        self.snapshots = dict[int, Snapshot]()
        if history is not None:
            self._num_rows = history.num_rows
            self._kwargs[self._cache_name] = history.snapshot.restored(history.rows)

    @contextmanager
    def _alone(self, cancel: Cancel = None) -> Iterator[None]:
        """Hold the model, in evaluation mode, with this prompt's offsets of positions.

        Qwen-VL keeps the offset behind the last image in the model, where its owner may need it.
        """
        with lock_of(self._model).unless(cancel), evaluating(self._model):
            self._exchange_deltas()
            try:
                yield
            finally:
                self._exchange_deltas()

    def _exchange_deltas(self) -> None:
        for holder, delta in self._deltas.items():
            self._deltas[holder] = holder.rope_deltas
            holder.rope_deltas = delta

    @property
    def _cache_name(self) -> str:
        for name, value in self._kwargs.items():
            if isinstance(value, Cache):
                return name
        raise UnsupportedModelError("it keeps its state outside of transformers' caches")

    @property
    def rows(self) -> Layers:
        """Keys and values of the layers that keep every row."""
        return rows_of(self._kwargs[self._cache_name])

    @torch.inference_mode()
    def snap(self) -> None:
        """Keep a snapshot behind the rows computed so far."""
        self.snapshots[self._num_rows] = Snapshot.of(self._kwargs[self._cache_name], self._num_rows)

    def kept(self) -> tuple[Layers, Mapping[int, Snapshot]]:
        """Return the rows and the snapshots of a finished request, with one behind its answer."""
        self.snap()
        return self.rows, self.snapshots

    def prefill(self, stops: Collection[int], cancel: Cancel, max_bytes: int) -> Tensor:
        """Compute the prompt's rows; return the last row's logits ``(vocab,)``."""
        total = self._ids.shape[1]
        for stop in sorted({*stops, total}):
            if stop > self._num_rows:
                logits = self._forward(stop, cancel)
                if stop in stops:
                    self.snap()
                if sum(each.num_bytes for each in self.snapshots.values()) > max_bytes:
                    del self.snapshots[stop]
        return logits

    def _forward(self, stop: int, cancel: Cancel = None) -> Tensor:
        """Compute the rows up to ``stop``; return the last row's logits ``(vocab,)``."""
        model = self._model
        total = self._ids.shape[1]
        behind = self._num_rows and self._kwargs.get("use_cache")
        given = {name: _head(value, stop, total) for name, value in self._kwargs.items()}
        with self._alone(cancel):
            inputs = model.prepare_inputs_for_generation(
                self._ids[:, :stop],
                next_sequence_length=stop - self._num_rows if behind else None,
                is_first_iteration=not self._num_rows,
                **given,
            )
            out = model(**inputs, return_dict=True)
        if stop == total:
            self._kwargs = model._update_model_kwargs_for_generation(out, self._kwargs)
        self._num_rows = stop
        # Cloned, because a view would keep the logits of every row.
        return cast(Tensor, out.logits[0, -1].clone())

    @torch.inference_mode()
    def __call__(self, ids: Tensor) -> Tensor:
        """Append tokens, with a forward per token as ``generate`` does; return their logits.

        Some caches don't take several tokens at a time.
        """
        rows = []
        for token in ids.to(self._ids.device):
            self._ids = torch.cat([self._ids, token.reshape(1, 1)], dim=1)
            rows.append(self._forward(self._ids.shape[1]))
        return torch.stack(rows)


def _head(value: Any, stop: int, total: int) -> Any:
    """Return the first ``stop`` elements of an argument with an element per token."""
    if isinstance(value, Tensor) and value.dim() > 1 and value.shape[-1] == total:
        return value[..., :stop]
    return value


# Arguments of ``generate``'s loop that are not the model's.
_OF_LOOP = {
    "logits_processor",
    "stopping_criteria",
    "generation_config",
    "synced_gpus",
    "streamer",
}


def loop_arguments(model: PreTrainedModel, ids: Tensor, **options: Any) -> dict[str, Any]:
    """Return the arguments that ``generate`` would start its loop with."""
    found: dict[str, Any] = {}

    def take(_: PreTrainedModel, input_ids: Tensor, **arguments: Any) -> Tensor:
        found.update(arguments)
        return input_ids

    model.generate(ids, custom_generate=take, attention_mask=torch.ones_like(ids), **options)
    return found
