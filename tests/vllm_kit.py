"""What the tests of vLLM's connector share: vLLM's interface as it was in 0.32.0, a model with stored chunks, and a cache to load into."""

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvrag import KVRagEngine

HAS_VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(
    not HAS_VLLM, reason="vLLM is not installed here; `make vllm-test` runs this where it is"
)
BLOCK, BLOCKS = 16, 40
TESTED = (
    "gemma2",
    "gemma3_text",
    "glm4",
    "granite",
    "llama",
    "mistral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)
"""Types of models that the tests run in vLLM."""


@contextmanager
def unchanged_class(model: torch.nn.Module) -> Iterator[None]:
    """Undo what vLLM does to the class of a transformers' decoder that it runs: models of later tests are of the same class."""
    changed = type(model.base_model)
    bases, own = changed.__bases__, dict(vars(changed))
    yield
    changed.__bases__ = bases
    for name in ("__init__", "__call__"):
        if name in own:
            setattr(changed, name, own[name])
        elif name in vars(changed):
            delattr(changed, name)


RECORDED = {
    "__init__": ("self", "vllm_config", "role", "kv_cache_config"),
    "get_num_new_matched_tokens": ("self", "request", "num_computed_tokens"),
    "update_state_after_alloc": ("self", "request", "blocks", "num_external_tokens"),
    "build_connector_meta": ("self", "scheduler_output"),
    "request_finished": ("self", "request", "block_ids"),
    "bind_connector_metadata": ("self", "connector_metadata"),
    "start_load_kv": ("self", "forward_context", "kwargs"),
    "wait_for_layer_load": ("self", "layer_name"),
    "save_kv_layer": ("self", "layer_name", "kv_layer", "attn_metadata", "kwargs"),
    "wait_for_save": ("self",),
    "get_block_ids_with_load_errors": ("self",),
    "get_finished": ("self", "finished_req_ids"),
    "get_finished_count": ("self",),
    "update_connector_output": ("self", "connector_output"),
    "get_handshake_metadata": ("self",),
    "set_xfer_handshake_metadata": ("self", "metadata"),
    "build_connector_worker_meta": ("self",),
    "get_kv_connector_stats": ("self",),
    "build_kv_connector_stats": ("data",),
    "shutdown": ("self",),
}
"""Parameters of the methods that the connector has."""


class RecordedBase:
    def __init__(self, vllm_config, role, kv_cache_config):
        self._kv_transfer_config = vllm_config.kv_transfer_config

    def bind_connector_metadata(self, connector_metadata):
        self._metadata = connector_metadata

    def _get_connector_metadata(self):
        return self._metadata


@dataclass
class RecordedStats:
    data: dict[str, Any] = field(default_factory=dict)


class RecordedMetrics:
    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        self.per_engine_labelvalues = per_engine_labelvalues


_BASE = "vllm.distributed.kv_transfer.kv_connector.v1"
MODULES: dict[str, dict[str, Any]] = {
    f"{_BASE}.base": {
        "KVConnectorBase_V1": RecordedBase,
        "KVConnectorMetadata": type("KVConnectorMetadata", (), {}),
        "KVConnectorHandshakeMetadata": type("KVConnectorHandshakeMetadata", (), {}),
        "KVConnectorWorkerMetadata": type("KVConnectorWorkerMetadata", (), {}),
        "KVConnectorRole": SimpleNamespace(SCHEDULER=0, WORKER=1),
    },
    f"{_BASE}.metrics": {
        "KVConnectorStats": RecordedStats,
        "KVConnectorPromMetrics": RecordedMetrics,
    },
    "vllm.logger": {"init_logger": lambda name: SimpleNamespace(warning=lambda *_: None)},
    "vllm.config": {
        "set_current_vllm_config": None,
        **{name: type(name, (), {}) for name in ("LoadConfig", "ModelConfig", "VllmConfig")},
    },
    "vllm": {"__version__": "0"},
    "vllm.model_executor.layers.attention": {"Attention": type("Attention", (), {})},
    "vllm.model_executor.model_loader": {
        "DefaultModelLoader": type("DefaultModelLoader", (), {}),
        "register_model_loader": None,
    },
    "vllm.distributed.device_communicators.shm_broadcast": {
        "SpinCondition": type("SpinCondition", (), {"wait": lambda *_, **__: None})
    },
    "vllm.distributed.parallel_state": {"get_tp_group": None},
    "vllm.forward_context": {
        "get_forward_context": None,
        "override_forward_context": nullcontext,
        "set_forward_context": None,
    },
    "vllm.lora.layers": {"LoRAMapping": None},
    "vllm.v1.attention.backend": {"CommonAttentionMetadata": None},
    "vllm.v1.kv_cache_interface": {"FullAttentionSpec": type("FullAttentionSpec", (), {})},
}


@dataclass
class Setting:
    """A model in a directory, and an engine on it with stored chunks."""

    engine: KVRagEngine
    model: str


class Layer:
    """A layer's part of vLLM's cache, ``[blocks, heads, slots, keys | values]``, filled as its Triton and FlashAttention backends do."""

    def __init__(self, heads: int, dim: int) -> None:
        self.kv_cache, self.dim = torch.zeros(BLOCKS, heads, BLOCK, 2 * dim), dim

    def write(self, key, value, slots):
        keys, values = self.kv_cache.transpose(1, 2).split(self.dim, dim=-1)
        keys[slots // BLOCK, slots % BLOCK] = key
        values[slots // BLOCK, slots % BLOCK] = value

    def rows(self, blocks):
        """Keys and values ``(H, T, D)`` of these blocks."""
        return self.kv_cache[blocks].transpose(0, 1).flatten(1, 2).split(self.dim, dim=-1)


class Cache:
    """What a blender asks of vLLM's model, for these layers of its cache."""

    block_size = BLOCK
    aside = staticmethod(nullcontext)
    adapters = dict
    mapping = None

    @staticmethod
    def use(mapping: None) -> None:
        """No adapters."""

    def __init__(self, layers: list[Layer], *, pauses: bool = True) -> None:
        self._layers, self.pauses = layers, pauses

    def write(self, index: int, *rows: Any) -> None:
        self._layers[index].write(*rows)


def config_of(setting: Setting, **changes) -> SimpleNamespace:
    extra = {"kv_dir": str(setting.engine.kv_dir)} | changes.pop("extra", {})
    model = {"model": setting.model, "dtype": torch.float32}
    own = (
        {
            "cache_dtype": "auto",
            "world_size": 1,
            "tensor_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "distributed_executor_backend": None,
            "data_parallel_size": 1,
            "is_moe_model": True,
            "speculative_config": None,
            "offload_group_size": 0,
            "kv_load_failure_policy": "recompute",
            "is_kv_consumer": True,
            "kv_role": "kv_consumer",
            "runner_type": "generate",
            "tokenizer": setting.model,
            "revision": None,
            "device": "cpu",
            "device_type": "cpu",
        }
        | model
        | changes
    )
    transfer = SimpleNamespace(
        get_from_extra_config=lambda name, default: extra.get(name, default), **own
    )
    one = SimpleNamespace(block_size=BLOCK, **own)
    parts = {"device_config": one, "model_config": one, "cache_config": one, "parallel_config": one}
    parts |= {"offload_config": SimpleNamespace(prefetch=one)}
    return SimpleNamespace(
        kv_transfer_config=transfer, speculative_config=own["speculative_config"], **parts
    )


def connect(connector, setting: Setting, **changes) -> Any:
    spec_class = sys.modules["vllm.v1.kv_cache_interface"].FullAttentionSpec
    spec = spec_class.__new__(spec_class)
    groups = [SimpleNamespace(kv_cache_spec=each) for each in changes.pop("specs", [spec])]
    role = getattr(connector.KVConnectorRole, changes.pop("role", "WORKER"))
    own = config_of(setting, **changes)
    return connector.KVRagConnector(own, role, SimpleNamespace(kv_cache_groups=groups))


def step_of(*, is_idle: bool = False) -> SimpleNamespace:
    """The context of a forward, or of a step without one."""
    return SimpleNamespace(attn_metadata=None if is_idle else {})


def connector_module(patch: pytest.MonkeyPatch) -> Any:
    """The connector's module, on vLLM or on the recording."""
    if not HAS_VLLM:
        for name, members in MODULES.items():
            for end in [m.start() for m in re.finditer(r"\.|$", name)]:
                patch.setitem(
                    sys.modules, name[:end], sys.modules.get(name[:end]) or ModuleType(name[:end])
                )
            vars(sys.modules[name]).update(members)
        for name in (
            "connector",
            "loader",
            "messages",
            "own",
            "proof",
            "ranks",
            "report",
            "scheduler",
            "worker",
        ):
            patch.delitem(sys.modules, f"vllm_kvrag.{name}", raising=False)
    return importlib.import_module("vllm_kvrag.connector")


# -- vLLM's scheduler and prefix cache, in small ------------------------------------------------------


class Request:
    """vLLM's request: the hash of a block depends on the hash before, its token ids and, in the first, on the salt."""

    def __init__(self, request_id: str, ids: list[int], max_tokens: int = 8, **own: Any) -> None:
        self.request_id, self.prompt_token_ids, self.max_tokens = request_id, ids, max_tokens
        self.tokens, self.num_prompt_tokens, self.block_hashes = list(ids), len(ids), []
        self.num_computed, self.blocks, self.num_cached, self.status = 0, [], 0, "waiting"
        self.lora_request = self.cache_salt = self.prompt_embeds = self.kv_transfer_params = None
        self.mm_features: list[Any] = []
        self.skip_reading_prefix_cache = self.resumable = False
        self.size = own.pop("size", BLOCK)
        vars(self).update(own)
        self.update_block_hashes()

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    def update_block_hashes(self) -> None:
        while (len(self.block_hashes) + 1) * self.size <= len(self.tokens):
            start = len(self.block_hashes) * self.size
            before = self.block_hashes[-1] if self.block_hashes else None
            salt = self.cache_salt if start == 0 else None
            self.block_hashes.append(hash((before, *self.tokens[start : start + self.size], salt)))


@dataclass
class Block:
    """A block of the cache: whose it is now, its hash, and who computed each row otherwise than a full prefill would."""

    number: int
    owners: set[str] = field(default_factory=set)
    hash: int | None = None
    rows: dict[int, tuple[tuple[int, ...], str | None]] = field(default_factory=dict)


class Scheduler:
    """vLLM 0.32's scheduler with loads beside the steps: hits, allocation, delayed caching, failed blocks, preemption, aborts.

    It checks at each hit that no row was approximated for another request, and that hashes belong to the rows' token ids.
    """

    def __init__(self, mode: Any, num_blocks: int, size: int, random: Random) -> None:
        self.mode, self.size, self.random = mode, size, random
        self.free = [Block(number) for number in range(num_blocks)]
        self.cached: dict[int, list[Block]] = {}
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.jobs: dict[str, Any] = {}
        self.received: set[str] = set()
        self.failed: set[str] = set()
        self.num_hits = self.num_own_hits = self.num_preempted = 0

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def _hits(self, request: Request) -> list[Block]:
        found = []
        most = 0 if request.skip_reading_prefix_cache else (len(request.tokens) - 1) // self.size
        for place, each in enumerate(request.block_hashes[:most]):
            if each not in self.cached:
                break
            block = self.cached[each][0]
            ids = tuple(request.tokens[: (place + 1) * self.size])
            for row in range(self.size):
                seen, who = block.rows[row]
                assert seen == ids[: place * self.size + row + 1], "another text's block"
                assert who in (None, request.request_id), "approximate rows of another request"
                self.num_own_hits += who is not None
            self.num_hits += 1
            found.append(block)
        return found

    def _take(self, request: Request, count: int) -> bool:
        missing = count - len(request.blocks)
        if missing > len(self.free):
            return False
        for _ in range(missing):
            block = self.free.pop(0)
            self._forget(block)
            block.owners, block.rows = {request.request_id}, {}
            request.blocks.append(block)
        return True

    def _forget(self, block: Block) -> None:
        if block.hash is not None:
            self.cached[block.hash].remove(block)
            if not self.cached[block.hash]:
                del self.cached[block.hash]
            block.hash = None

    def _cache(self, request: Request, num_tokens: int) -> None:
        num_full = num_tokens // self.size
        for place in range(request.num_cached, num_full):
            block = request.blocks[place]
            assert block.hash is None
            block.hash = request.block_hashes[place]
            self.cached.setdefault(block.hash, []).append(block)
        request.num_cached = max(request.num_cached, num_full)

    def _release(self, request: Request) -> None:
        for block in reversed(request.blocks):
            block.owners.discard(request.request_id)
            if not block.owners:
                self.free.append(block)
        request.blocks, request.num_cached, request.num_computed = [], 0, 0

    def _compute(self, request: Request, start: int, stop: int, exact: int | None = None) -> None:
        """Write rows; they are exact before ``exact``, or if all rows before are."""
        is_exact = True
        for row in range(stop):
            block, place = request.blocks[row // self.size], row % self.size
            if row < start:
                is_exact = is_exact and block.rows[place][1] is None
                continue
            assert block.owners == {request.request_id}, "rows written to a block of others"
            is_exact = is_exact and (exact is None or row < exact)
            who = None if is_exact else request.request_id
            block.rows[place] = tuple(request.tokens[: row + 1]), who

    def step(self) -> list[Any]:
        """Run a step; return the jobs that began."""
        is_preempted = False
        for request in list(self.running):
            if request.status != "running":
                continue
            while not self._take(request, len(request.tokens) // self.size + 1):
                is_preempted = True
                last = self.running.pop()
                self._release(last)
                last.status = "preempted"
                self.waiting.insert(0, last)
                self.num_preempted += 1
                if last is request:
                    break
            if request.status == "running":
                self._decode(request)
        if not is_preempted:
            self._admit()
        jobs = self.mode.jobs().jobs
        self.jobs |= {job.request_id: job for job in jobs}
        return jobs

    def _decode(self, request: Request) -> None:
        self._compute(request, request.num_computed, len(request.tokens))
        request.num_computed = len(request.tokens)
        self._cache(request, request.num_computed)
        # As greedy answers, the same for the same prompt.
        request.tokens.append(sum(request.tokens) % 3)
        request.update_block_hashes()
        if request.num_output_tokens >= request.max_tokens:
            self.finish(request.request_id)

    def _admit(self) -> None:
        for request in sorted(self.waiting, key=lambda each: each.status != "remote"):
            request_id = request.request_id
            if request.status == "remote":
                if request_id not in self.received:
                    continue
                self.received.discard(request_id)
                if request_id in self.failed and not request.num_computed:
                    self._release(request)
                else:
                    self._cache(request, request.num_computed)
                self.failed.discard(request_id)
            external = 0
            if request.num_computed == 0:
                hits = self._hits(request)
                external, is_async = self.mode.match(request, len(hits) * self.size)
                assert is_async == (external > 0)
                new = -(-len(request.tokens) // self.size) - len(hits)
                if new > len([b for b in self.free if b not in hits]):
                    return
                for block in hits:
                    block.owners.add(request_id)
                    if block in self.free:
                        self.free.remove(block)
                request.blocks, request.num_cached = list(hits), len(hits)
                request.num_computed = len(hits) * self.size + external
            assert self._take(request, -(-len(request.tokens) // self.size))
            self.mode.allocated(request, [b.number for b in request.blocks], external)
            if external:
                request.status = "remote"
                continue
            self.waiting.remove(request)
            self.running.append(request)
            request.status = "running"
            self._decode(request)

    def end_job(self, request_id: str, *, succeeds: bool) -> None:
        """A job writes its rows, or fails; the scheduler hears of it."""
        job, request = self.jobs.pop(request_id), self.requests[request_id]
        assert [b.number for b in request.blocks][: len(job.blocks)] == job.blocks
        if succeeds:
            is_precompute = job.precompute is not None
            self._compute(request, job.start, job.stop, 0 if is_precompute else job.plan)
        elif request.status == "remote":
            assert job.start % self.size == 0
            request.num_computed = job.start
            self.failed.add(request_id)
        if request.status == "remote":
            self.received.add(request_id)
        else:
            self._release(request)
            del self.requests[request_id]

    def finish(self, request_id: str) -> Any:
        """End a request, or abort it; its blocks stay as long as a job may write to them."""
        request = self.requests[request_id]
        said = self.mode.finished(request)
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        request.status = "finished"
        self.received.discard(request_id)
        if request_id not in self.jobs:
            self._release(request)
            del self.requests[request_id]
        return said
