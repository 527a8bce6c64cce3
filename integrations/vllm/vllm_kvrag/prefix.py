"""Prefix mode of the connector: load the KV of a prompt's stored beginning.

vLLM's scheduler asks how many tokens of a prompt have KV in the store. Its worker reads the KV and
rotates the keys to their positions. The attention's own function writes them to vLLM's cache, so
their layout in the cache stays vLLM's concern.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvrag import ConfigError
from kvrag.adapters import ChunkKV, TieredStore, rope_text
from vllm_kvrag.exported import TESTED, Exported, Turn, read_turns, weights_of
from vllm_kvrag.heads import Heads, Parts, cut

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger(f"vllm.{__name__}")  # vLLM shows its own loggers only


@dataclass(frozen=True, slots=True)
class Load:
    """Rows ``start`` to ``stop`` of a prompt, and the prompt's blocks in vLLM's cache.

    The parts cover the prompt from its first token on.
    """

    parts: Parts
    start: int
    stop: int
    blocks: list[int]

    def slots(self, block_size: int) -> torch.Tensor:
        """Return the slot of every row in vLLM's cache."""
        rows = torch.arange(self.start, self.stop)
        return torch.tensor(self.blocks)[rows // block_size] * block_size + rows % block_size


@dataclass
class Loads(KVConnectorMetadata):
    """Loads for the worker before its next forward."""

    loads: list[Load] = field(default_factory=list)


class PrefixMode:
    """Load the KV of a prompt's stored beginning, within the step.

    Raises ``ConfigError`` if vLLM computes with another model, dtype or cache than the stored KV.
    """

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, store: TieredStore
    ) -> None:
        option = vllm_config.kv_transfer_config.get_from_extra_config
        self._path = option("model", None)
        if not self._path:
            raise ConfigError(
                "kv_connector_extra_config needs model, the file of vllm_kvrag.export_model, or "
                "'mode': 'blend'"
            )
        self._exported = Exported.read(self._path)
        reason = refusal(vllm_config, kv_cache_config, self._exported)
        if reason:
            raise ConfigError(f"vLLM can't use this store: {reason}")
        self._block_size = vllm_config.cache_config.block_size
        self._store = store
        self._heads = Heads(self._store, self._exported.fingerprint, option("namespace", "default"))
        # By request: its stored parts, and its first row to load.
        self._found = dict[str, tuple[Parts, int]]()
        self._loads: list[Load] = []
        self._turns: list[Turn | None] = []
        self._failed = set[int]()

    # -- the scheduler ---------------------------------------------------------------------------

    def match(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many tokens after the computed tokens have KV in the store.

        They are loaded within the step.
        """
        if has_own_kv(request):
            return 0, False
        parts, count = self._heads.match(request.prompt_token_ids)
        self._found[request.request_id] = parts, num_computed_tokens
        # The last token is computed, because its logits start the answer.
        return max(0, min(count, request.num_prompt_tokens - 1) - num_computed_tokens), False

    def allocated(self, request: Request, blocks: list[int], num_external_tokens: int) -> None:
        """Note the request's load for the next step, now that its blocks are known."""
        parts, start = self._found.pop(request.request_id, ((), 0))
        if num_external_tokens > 0:
            self._loads.append(Load(parts, start, start + num_external_tokens, blocks))

    def metadata(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Pass this step's loads to the worker."""
        loads = self._loads
        self._loads = []
        return Loads(loads)

    def finished(self, request: Request) -> dict[str, Any] | None:
        """Forget a request that ended before it was admitted."""
        self._found.pop(request.request_id, None)
        return None

    # -- the worker ------------------------------------------------------------------------------

    def load(
        self, metadata: KVConnectorMetadata, forward_context: ForwardContext, *, is_idle: bool
    ) -> None:
        """Load the KV of this step; returns when it is loaded."""
        assert isinstance(metadata, Loads)
        for load in metadata.loads:
            rows = list(cut(load.parts, load.start, load.stop))
            kvs = [self._store.get(identity) for identity, _, _ in rows]
            found = [
                (kv, first, last)
                for kv, (_, first, last) in zip(kvs, rows, strict=True)
                if kv is not None
            ]
            # Erased or damaged since the scheduler asked: vLLM computes these rows.
            if len(found) < len(rows):
                logger.warning("stored KV of a prompt is gone; vLLM computes it")
                self._failed.update(
                    load.blocks[load.start // self._block_size : -(-load.stop // self._block_size)]
                )
                continue
            for name, layer in forward_context.no_compile_layers.items():
                if hasattr(layer, "kv_cache"):
                    self._fill(layer, extract_layer_index(name), load, found)

    def _fill(
        self, layer: Any, index: int, load: Load, found: list[tuple[ChunkKV, int, int]]
    ) -> None:
        """Write a layer's rows to vLLM's cache with the function that its attention uses."""
        device = layer.kv_cache.device
        if not self._turns:
            self._turns = read_turns(self._path, device)
        layers = [(kv.layers[index], first, last) for kv, first, last in found]
        keys = torch.cat([each.keys[:, first:last] for each, first, last in layers], dim=1).to(
            device
        )
        values = torch.cat([each.values[:, first:last] for each, first, last in layers], dim=1).to(
            device
        )
        turn = self._turns[index]
        if turn is not None:
            keys = turn.rotate(keys, slice(load.start, load.stop))
        rows = [x.transpose(0, 1).contiguous() for x in (keys, values)]  # (T, H, D)
        layer.impl.do_kv_cache_update(
            layer, *rows, layer.kv_cache, load.slots(self._block_size).to(device)
        )

    def failed_blocks(self) -> set[int]:
        """Return the blocks that could not be filled in this step."""
        failed = self._failed
        self._failed = set()
        return failed

    def ended(self, finished: set[str]) -> set[str]:
        """Return no request: all KV is loaded within the step."""
        return set()

    def worker_metadata(self) -> None:
        """Report nothing to the scheduler."""

    def hear(self, metadata: Any) -> None:
        """Take no report of the worker."""

    def handshake(self) -> None:
        """Tell the scheduler nothing."""

    def counted(self) -> None:
        """Count nothing."""

    def close(self) -> None:
        """Release nothing."""


def has_own_kv(request: Request) -> bool:
    """Whether a request's KV depends on more than its token ids."""
    return bool(
        request.lora_request
        or request.mm_features
        or request.cache_salt
        or request.prompt_embeds is not None
        or not request.prompt_token_ids
    )


def refusal(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, exported: Exported
) -> str | None:
    """Return why vLLM's cache can't take the KV of an exported model; ``None`` if it can."""
    model = vllm_config.model_config
    rope = rope_text(model.hf_config.get_text_config())
    is_same = exported.weights in weights_of(model.model, model.hf_config)
    reasons = [
        (
            exported.model_type in TESTED,
            f"it was never tested with {exported.model_type}, but with {', '.join(TESTED)}",
        ),
        (
            is_same,
            "the model's weights are not those that were exported; name the same model, or the "
            "same directory",
        ),
        (
            rope == exported.rope,
            f"the model's RoPE parameters are {rope}, and {exported.rope} were exported",
        ),
        (
            str(model.dtype) == exported.dtype,
            f"it computes in {model.dtype}, and the stored KV is in {exported.dtype}",
        ),
        (model.quantization is None, f"the model is quantised ({model.quantization})"),
    ]
    own = next((reason for holds, reason in reasons if not holds), None)
    return own or cache_refusal(vllm_config, kv_cache_config)


def cache_refusal(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """Return why vLLM's cache can't take rows of any model; ``None`` if it can."""
    cache = vllm_config.cache_config
    transfer = vllm_config.kv_transfer_config
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    # With windows only, vLLM frees the blocks before the window and can't compute failed loads.
    # Latent attention is of a class below.
    is_full = len(specs) == 1 and type(specs[0]) is FullAttentionSpec
    reasons = [
        (
            cache.cache_dtype == "auto",
            f"kv_cache_dtype is {cache.cache_dtype!r}; leave it at 'auto'",
        ),
        (vllm_config.parallel_config.world_size == 1, "the model is split among several devices"),
        (
            vllm_config.speculative_config is None,
            "it decodes speculatively, and a draft model has layers of its own",
        ),
        (is_full, "its cache is not one group of full attention"),
        # A chunk may be erased or found damaged after the scheduler has counted its tokens.
        (
            transfer.kv_load_failure_policy == "recompute",
            "kv_load_failure_policy must be 'recompute'",
        ),
    ]
    return next((reason for holds, reason in reasons if not holds), None)
