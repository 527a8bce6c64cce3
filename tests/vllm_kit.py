"""What the tests of vLLM's connector share: vLLM's interface as it was in 0.32.0, a model with stored chunks, and a cache to load into."""

import importlib.util
import re
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvrag import KVRagEngine
from kvrag.identity.fingerprint import chunk_key
from vllm_kvrag.heads import Heads

HAS_VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(
    not HAS_VLLM, reason="vLLM is not installed here; `make vllm-test` runs this where it is"
)
BLOCK, BLOCKS = 16, 40

RECORDED = {
    "__init__": ("self", "vllm_config", "role", "kv_cache_config"),
    "get_num_new_matched_tokens": ("self", "request", "num_computed_tokens"),
    "update_state_after_alloc": ("self", "request", "blocks", "num_external_tokens"),
    "build_connector_meta": ("self", "scheduler_output"),
    "request_finished": ("self", "request", "block_ids"),
    "start_load_kv": ("self", "forward_context", "kwargs"),
    "wait_for_layer_load": ("self", "layer_name"),
    "save_kv_layer": ("self", "layer_name", "kv_layer", "attn_metadata", "kwargs"),
    "wait_for_save": ("self",),
    "get_block_ids_with_load_errors": ("self",),
    "shutdown": ("self",),
}
"""Parameters of the methods that the connector has."""


class RecordedBase:
    def __init__(self, vllm_config, role, kv_cache_config):
        self._kv_transfer_config = vllm_config.kv_transfer_config

    def bind_connector_metadata(self, metadata):
        self._metadata = metadata

    def _get_connector_metadata(self):
        return self._metadata


MODULES: dict[str, dict[str, Any]] = {
    "vllm.distributed.kv_transfer.kv_connector.v1.base": {
        "KVConnectorBase_V1": RecordedBase,
        "KVConnectorMetadata": type("KVConnectorMetadata", (), {}),
        "KVConnectorRole": SimpleNamespace(SCHEDULER=0, WORKER=1),
    },
    "vllm.logger": {"init_logger": lambda name: SimpleNamespace(warning=lambda *_: None)},
    "vllm.v1.kv_cache_interface": {"FullAttentionSpec": type("FullAttentionSpec", (), {})},
    "vllm.model_executor.models.utils": {
        "extract_layer_index": lambda name: int(re.findall(r"\.(\d+)\.", name)[0])
    },
}


@dataclass
class Setting:
    """A model in a directory, an engine on it with stored chunks, and the exported file."""

    engine: KVRagEngine
    model: str
    file: Path
    ids: list[list[int]] = field(default_factory=list)
    head: list[int] = field(default_factory=list)

    def prompt(self, number: int, question: str = "\n\nWho asks for a box?") -> list[int]:
        return [*self.head, *self.ids[number], *self.engine.loaded.encoder.live_ids(question)]

    def heads(self, namespace: str = "default") -> Heads:
        return Heads(self.engine.store, self.engine.loaded.fingerprint, namespace)


class Layer:
    """A layer's part of vLLM's cache, ``[blocks, heads, slots, keys | values]``, filled as its Triton and FlashAttention backends do."""

    def __init__(self, heads: int, dim: int) -> None:
        self.kv_cache, self.impl, self.dim = torch.zeros(BLOCKS, heads, BLOCK, 2 * dim), self, dim

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        keys, values = kv_cache.transpose(1, 2).split(self.dim, dim=-1)
        keys[slot_mapping // BLOCK, slot_mapping % BLOCK] = key
        values[slot_mapping // BLOCK, slot_mapping % BLOCK] = value

    def rows(self, blocks):
        """Keys and values ``(H, T, D)`` of these blocks."""
        return self.kv_cache[blocks].transpose(0, 1).flatten(1, 2).split(self.dim, dim=-1)


def config_of(setting: Setting, **changes) -> SimpleNamespace:
    extra = {"kv_dir": str(setting.engine.kv_dir), "model": str(setting.file)}
    config = setting.engine.loaded.lm.model.config
    model = {
        "model": setting.model,
        "hf_config": config,
        "dtype": torch.float32,
        "quantization": None,
    }
    own = (
        {
            "cache_dtype": "auto",
            "world_size": 1,
            "speculative_config": None,
            "kv_load_failure_policy": "recompute",
        }
        | model
        | changes
    )
    transfer = SimpleNamespace(
        get_from_extra_config=lambda name, default: extra.get(name, default), **own
    )
    one = SimpleNamespace(block_size=BLOCK, **own)
    parts = {"model_config": one, "cache_config": one, "parallel_config": one}
    return SimpleNamespace(
        kv_transfer_config=transfer, speculative_config=own["speculative_config"], **parts
    )


def connect(connector, setting: Setting, **changes) -> Any:
    spec = connector.FullAttentionSpec.__new__(connector.FullAttentionSpec)
    groups = [SimpleNamespace(kv_cache_spec=each) for each in changes.pop("specs", [spec])]
    own, role = config_of(setting, **changes), connector.KVConnectorRole.WORKER
    return connector.KVRagConnector(own, role, SimpleNamespace(kv_cache_groups=groups))


def request_of(ids: list[int], **own) -> SimpleNamespace:
    none = {"lora_request": None, "mm_features": [], "cache_salt": None, "prompt_embeds": None}
    return SimpleNamespace(
        request_id="r", prompt_token_ids=ids, num_prompt_tokens=len(ids), **(none | own)
    )


def schedule(own: Any, request: SimpleNamespace, blocks: list[int], computed: int = 0) -> int:
    """Ask, allocate and hand over, as the scheduler does; return how many tokens are to be loaded."""
    count, is_async = own.get_num_new_matched_tokens(request, computed)
    assert not is_async
    own.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: (blocks,)), count)
    own.bind_connector_metadata(own.build_connector_meta(None))
    return count


def transfer_of(setting: Setting) -> Any:
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector="KVRagConnector",
        kv_connector_module_path="vllm_kvrag.connector",
        kv_role="kv_consumer",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={
            "kv_dir": str(setting.engine.kv_dir),
            "model": str(setting.file),
        },
    )


def damage(setting: Setting, number: int) -> None:
    """Change a byte of a stored chunk's tensors."""
    (parts, _) = setting.heads().match(setting.prompt(number))
    (path,) = Path(setting.engine.kv_dir or "").rglob(f"{chunk_key(parts[1])}*")
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.chmod(0o600)
    path.write_bytes(content)


def assert_same_answer(one: Any, other: Any) -> None:
    """Greedy answers are the same, and log-probabilities but for float32's rounding (4e-6 was seen)."""
    assert one.token_ids == other.token_ids
    for left, right in zip(one.logprobs, other.logprobs, strict=True):
        for token in left.keys() & right.keys():
            assert left[token].logprob == pytest.approx(right[token].logprob, abs=1e-4)
