"""Connector that vLLM loads.

::

    connector ─→ blend ─→ planning, private │ blending, proof
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from kvrag import ConfigError, StoreConfig
from kvrag.adapters import as_config, open_store
from vllm_kvrag.blend import BlendMode
from vllm_kvrag.report import Counts, Metrics

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class KVRagConnector(KVConnectorBase_V1):
    """Reuse the KV of stored chunks in vLLM.

    ``kv_connector_extra_config`` takes ``kv_dir``, the store; ``mode``: ``"prefix"`` (default)
    loads exact beginnings of prompts only, ``"blend"`` reuses chunks anywhere in a prompt and
    repairs them; ``namespace`` (default: ``"default"``); ``store_config``, fields of
    :class:`kvrag.StoreConfig`; ``repair``, ``prefix``, ``context`` and ``weights``
    (docs/how-to/vllm.md). Raises ``ConfigError`` if vLLM can't use this store.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        option = self._kv_transfer_config.get_from_extra_config
        kv_dir = option("kv_dir", None)
        if not kv_dir:
            raise ConfigError("kv_connector_extra_config needs kv_dir, the store")
        mode = option("mode", "prefix")
        if mode not in ("prefix", "blend"):
            raise ConfigError(f"mode is {mode!r}; pass 'prefix' or 'blend'")
        is_worker = role == KVConnectorRole.WORKER
        # In blend mode the worker writes what clients precompute.
        reads = mode == "prefix" or not is_worker
        given = option("store_config", {"read_only": True} if reads else None)
        config = as_config(StoreConfig, given, option="store_config") or StoreConfig()
        self._store = open_store(kv_dir, config)
        self._mode = BlendMode(
            vllm_config,
            kv_cache_config,
            self._store,
            config,
            is_worker=is_worker,
            is_exact=mode == "prefix",
        )

    # -- the scheduler ---------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return how many tokens after the computed tokens are loaded, and whether beside steps."""
        return self._mode.match(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Note the request's load for the next step, now that its blocks are known."""
        own = list(blocks.get_block_ids()[0]) if num_external_tokens else []
        self._mode.allocated(request, own, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Pass this step's loads to the worker."""
        return self._mode.metadata(scheduler_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return what the response says about the request's KV; its blocks are free."""
        return False, self._mode.finished(request)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the worker's report."""
        self._mode.hear(connector_output.kv_connector_worker_meta)

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """Take the description of the worker's model."""
        for each in metadata.values():
            self._mode.hear(each)

    # -- the worker ------------------------------------------------------------------------------

    def get_handshake_metadata(self) -> Any:
        """Describe the worker's model to the scheduler."""
        return self._mode.handshake()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take what the scheduler passes for the step that begins."""
        super().bind_connector_metadata(connector_metadata)
        self._mode.begin(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Load the KV of this step, or begin to."""
        # vLLM's second model runner calls this outside of a forward's context, with arguments.
        is_idle = forward_context.attn_metadata is None and not kwargs
        self._mode.load(self._get_connector_metadata(), forward_context, is_idle=is_idle)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose KV is loaded."""
        return None, self._mode.ended(finished_req_ids) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that could not be filled."""
        return self._mode.failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Report ended loads to the scheduler."""
        return self._mode.worker_metadata()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: no layer of this step waits for KV."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Save nothing: vLLM's own KV is not of single chunks."""

    def wait_for_save(self) -> None:
        """Return at once: nothing is saved."""

    # -- both ------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> Counts | None:
        """Return the counts since the last call."""
        return self._mode.counted()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Counts:
        """Return the counts that another process has sent."""
        return Counts(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> Metrics:
        """Return the counters for Prometheus."""
        return Metrics(*args)

    def shutdown(self) -> None:
        """End the work and close the store."""
        self._mode.close()
        self._store.close()
