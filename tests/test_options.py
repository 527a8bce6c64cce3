"""No option is dropped: one that the store, the model or nobody has is refused by name, before anything is written."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrag import ConfigError, KVRagEngine, RepairConfig, Retention, SamplingConfig, StoreConfig
from kvrag.identity.fingerprint import chunk_key
from kvrag.misplaced import refuse_misplaced
from kvrag.store import KVStore, MemoryStore, TieredStore, open_store
from kvrag.testing.chunks import make_identity, make_kv
from kvrag.testing.models import tiny_model

STORED = [f.name for f in fields(StoreConfig)]
MAKERS: list[Callable[..., KVRagEngine]] = [KVRagEngine.from_pretrained, KVRagEngine.get]

HUGGING_FACE = [
    *(
        "attn_implementation",
        "cache_dir",
        "code_revision",
        "config",
        "device_map",
        "force_download",
        "from_tf",
        "gguf_file",
    ),
    *(
        "ignore_mismatched_sizes",
        "key_mapping",
        "local_files_only",
        "low_cpu_mem_usage",
        "max_memory",
        "offload_buffers",
    ),
    *("offload_folder", "proxies", "quantization_config", "state_dict", "subfolder", "token", "torch_dtype", "tp_plan"),
    *(
        "trust_remote_code",
        "use_cache",
        "use_kernels",
        "use_safetensors",
        "variant",
        "weights_only",
        "max_position_embeddings",
    ),
    *("rope_scaling", "sliding_window", "vocab_size", "hidden_size", "tie_word_embeddings", "output_loading_info"),
]
"""Options of transformers' ``from_pretrained`` and fields of configs: none may be taken for a misspelt one of ours."""


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("name", [*STORED, "encription_key", "ram_byte"])
def test_an_option_of_the_store_is_never_dropped(
    name: str, make: Callable[..., KVRagEngine], tiny_dir: str, tokenizer: Any, tmp_path: Path
) -> None:
    where = rf"no option '{name}'.*store_config=StoreConfig\("
    with pytest.raises(ConfigError, match=where):
        make(tiny_model(), tokenizer=tokenizer, kv_dir=tmp_path / "kv", **{name: "env:KK"})
    with pytest.raises(ConfigError, match=where):
        make(tiny_dir, kv_dir=tmp_path / "kv", **{name: "env:KK"})
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nonsense": 3}, "'nonsense' is given with a model that is loaded already"),
        ({"trust_remote_code": True}, "'trust_remote_code' is given with"),
        ({"revision": "abc"}, "'revision' is given with"),
        ({"kv_dirr": "x"}, "did you mean 'kv_dir'"),
        ({"dtype": "bfloat16"}, r"dtype is 'bfloat16'.*torch\.float32"),
        ({"dtype": torch.float16}, "dtype is torch.float16"),
        ({"device": "cuda"}, "cuda"),
        ({"device": "toaster"}, "toaster"),
    ],
)
def test_a_loaded_model_takes_no_option_that_would_change_nothing(
    options: dict[str, Any], message: str, make: Callable[..., KVRagEngine], tokenizer: Any
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tiny_model(), tokenizer=tokenizer, **options)


def test_a_loaded_model_on_another_device_is_named(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    monkeypatch.setattr(type(model), "device", torch.device("cuda:1"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device in ("cpu", "cuda:0"):
        with pytest.raises(ConfigError, match=f"device is '{device}', and the loaded model is on cuda:1"):
            KVRagEngine.from_pretrained(model, tokenizer=tokenizer, device=device)
    KVRagEngine.from_pretrained(model, tokenizer=tokenizer, device="cuda").close()


@pytest.mark.parametrize("options", [{"dtype": "float32", "device": "cpu"}, {"dtype": torch.float32}, {}])
def test_what_holds_of_a_loaded_model_may_be_said(options: dict[str, Any], tokenizer: Any) -> None:
    KVRagEngine.from_pretrained(tiny_model(), tokenizer=tokenizer, **options).close()


def test_where_a_tokenizer_is_may_be_said_beside_a_loaded_model(tiny_dir: str) -> None:
    engine = KVRagEngine.from_pretrained(tiny_model(), tokenizer=tiny_dir, local_files_only=True)
    assert engine.tokenizer.is_fast
    with pytest.raises(ConfigError, match="'attn_implementation'"):
        KVRagEngine.from_pretrained(tiny_model(), tokenizer=tiny_dir, attn_implementation="sdpa")


def test_options_of_transformers_are_not_taken_for_ours(tiny_dir: str) -> None:
    refuse_misplaced(HUGGING_FACE, ["kv_dir", "prefix", "dtype", "device", "revision", "namespace"], of="x")
    KVRagEngine.from_pretrained(tiny_dir, local_files_only=True, use_cache=True).close()


# -- configs -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "name", "near"),
    [
        (StoreConfig, "ram_byte", "ram_bytes"),
        (RepairConfig, "recompute_ration", "recompute_ratio"),
        (SamplingConfig, "temprature", "temperature"),
        (Retention, "prio", "priority"),
    ],
)
def test_a_misspelt_option_of_a_config_is_named_with_the_nearest(config: Any, name: str, near: str) -> None:
    message = f"{config.__name__} has no option '{name}'; did you mean '{near}'"
    with pytest.raises(ConfigError, match=message):
        config(**{name: 1})
    with pytest.raises(ConfigError, match=message):
        replace(config(), **{name: 1})


def test_configs_are_still_copied_and_pickled() -> None:
    for config in (StoreConfig(ram_bytes=5), RepairConfig(first_k=2), SamplingConfig(seed=3), Retention(90)):
        assert (
            pickle.loads(pickle.dumps(config))
            == copy.copy(config)
            == copy.deepcopy(config)
            == replace(config)
            == config
        )


@pytest.mark.parametrize("retention", [90, {"priority": 90}, "90"])
def test_a_retention_of_another_type_is_refused_before_anything_is_computed(
    retention: Any, engine: KVRagEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.loaded.lm, "forward", lambda *args, **kwargs: pytest.fail("a forward ran"))
    with pytest.raises(ConfigError, match=r"retention is .*90.*pass a kvrag\.Retention"):
        engine.precompute(["A text that is long enough to be a chunk of its own. " * 8], retention=retention)


@pytest.fixture(params=["memory", "tiered", "behind", "no disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KVStore]:
    """Every kind of store that puts with a retention."""
    config = StoreConfig(
        write_policy="back" if request.param == "behind" else "through",
        disk_min_priority=50 if request.param == "no disk" else 0,
    )
    store = MemoryStore(2**20) if request.param == "memory" else open_store(tmp_path, config)
    yield store
    store.close()


def test_no_store_takes_a_retention_of_another_type(store: KVStore) -> None:
    identity = make_identity()
    with pytest.raises(ConfigError, match="retention is 90"):
        store.put(identity, make_kv(identity), text=None, retention=90)  # type: ignore[arg-type]
    assert not store.contains(chunk_key(identity))
    assert store.index.keys() == []


@pytest.mark.parametrize("retention", [90, None])
def test_retaining_takes_a_retention_alone(retention: Any, tmp_path: Path) -> None:
    store = open_store(tmp_path, StoreConfig())
    assert isinstance(store, TieredStore)
    with pytest.raises(ConfigError, match=f"retention is {retention}"):
        store._disk.retain(["0" * 64], retention)  # type: ignore[attr-defined]
    store.close()
