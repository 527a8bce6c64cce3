"""Connector that vLLM loads.

::

    connector ─┬→ scheduler ─→ planning, private ┐
               └→ worker ─→ blending, own, proof ┴→ messages
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
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvrag import ConfigError, StoreConfig
from kvrag.config import as_config
from vllm_kvrag.messages import Jobs
from vllm_kvrag.own import sleep_while_waiting
from vllm_kvrag.report import Counts, Metrics
from vllm_kvrag.scheduler import SchedulerSide
from vllm_kvrag.worker import WorkerSide

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
    :class:`kvrag.StoreConfig`; ``repair``, ``prefix`` and ``context`` (docs/how-to/vllm.md).
    Raises ``ConfigError`` if vLLM can't use this store.
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
        if option("weights", None) is not None:
            raise ConfigError(
                "vLLM's own model computes what is reused, so no weights are shared or copied; "
                "leave 'weights' out of kv_connector_extra_config"
            )
        reason = refusal(vllm_config, kv_cache_config)
        if reason is not None:
            raise ConfigError(f"vLLM can't use this store: {reason}")
        if vllm_config.device_config.device_type == "cpu":
            sleep_while_waiting()
        self._is_worker = role == KVConnectorRole.WORKER
        # In blend mode the worker writes what clients precompute.
        writes = self._is_worker and mode == "blend"
        given = option("store_config", None if writes else {"read_only": True})
        config = as_config(StoreConfig, given, option="store_config") or StoreConfig()
        if self._is_worker:
            self._worker = WorkerSide(vllm_config, kv_cache_config, config)
        else:
            self._scheduler = SchedulerSide(vllm_config, config, is_exact=mode == "prefix")

    # -- the scheduler ---------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return how many tokens after the computed tokens are loaded, and whether beside steps."""
        return self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Note the request's load for the next step, now that its blocks are known."""
        own = list(blocks.get_block_ids()[0]) if num_external_tokens else []
        self._scheduler.allocated(request, own, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Pass this step's loads to the worker."""
        return self._scheduler.jobs()

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return what the response says about the request's KV; its blocks are free."""
        return False, self._scheduler.finished(request)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the worker's report."""
        self._scheduler.hear(connector_output.kv_connector_worker_meta)

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """Take the description of the worker's model."""
        for each in metadata.values():
            self._scheduler.hear(each)

    # -- the worker ------------------------------------------------------------------------------

    def get_handshake_metadata(self) -> Any:
        """Describe the worker's model to the scheduler."""
        return self._worker.handshake()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Load the KV of this step, or begin to."""
        # vLLM's second model runner calls this outside of a forward's context, with arguments.
        is_idle = forward_context.attn_metadata is None and not kwargs
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Jobs)
        self._worker.load(metadata, is_idle=is_idle)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose KV is loaded."""
        return None, self._worker.ended(finished_req_ids) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that could not be filled."""
        return self._worker.failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Report ended loads to the scheduler."""
        return self._worker.report()

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
        return None if self._is_worker else self._scheduler.counted()

    def get_finished_count(self) -> int:
        """Return how many workers report a load: rank 0 alone."""
        return 1

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
        (self._worker if self._is_worker else self._scheduler).close()


def refusal(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """Return why vLLM's cache can't take stored rows, and what to do; ``None`` if it can."""
    cache = vllm_config.cache_config
    transfer = vllm_config.kv_transfer_config
    model = vllm_config.model_config
    runner = model.runner_type
    dtype = str(model.dtype).removeprefix("torch.")
    parallel = vllm_config.parallel_config
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    # With windows only, vLLM frees the blocks before the window and can't compute failed loads.
    # Latent attention is of a class below.
    is_full = len(specs) == 1 and type(specs[0]) is FullAttentionSpec
    reasons = [
        (runner == "generate", f"its runner is {runner!r}, and only answers are blended"),
        (transfer.is_kv_consumer, f"kv_role is {transfer.kv_role!r}; pass 'kv_consumer'"),
        (
            cache.cache_dtype in ("auto", dtype),
            f"kv_cache_dtype is {cache.cache_dtype!r}; leave it at 'auto', or pass "
            f"--kv-cache-dtype {dtype} if it is the checkpoint's",
        ),
        (
            parallel.world_size == parallel.tensor_parallel_size
            and parallel.decode_context_parallel_size == 1
            and parallel.distributed_executor_backend != "external_launcher",
            "several devices share it in another way than heads; pass --tensor-parallel-size "
            "without the other sizes (--pipeline-, --prefill-context- and "
            "--decode-context-parallel-size) and without an external launcher",
        ),
        (  # a forward of experts waits for those of all replicas
            parallel.data_parallel_size == 1 or parallel.is_moe_model is False,
            "its experts are shared among replicas (--data-parallel-size)",
        ),
        (
            vllm_config.speculative_config is None,
            "it decodes speculatively, and a draft model has layers of its own",
        ),
        (
            vllm_config.offload_config.prefetch.offload_group_size == 0,
            "its weights are copied layer by layer for one forward at a time; leave out "
            "--offload-group-size",
        ),
        (is_full, "its cache is not one group of full attention"),
        # A chunk may be erased or found damaged after the scheduler has counted its tokens.
        (
            transfer.kv_load_failure_policy == "recompute",
            "kv_load_failure_policy must be 'recompute'",
        ),
    ]
    return next((reason for holds, reason in reasons if not holds), None)
