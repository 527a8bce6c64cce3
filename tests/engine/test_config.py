"""Configs check themselves, and no option is dropped: one that nobody has is refused by name, before anything is written."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import astuple, fields, replace

import pytest
import torch
from pydantic import TypeAdapter

from kvrag import ConfigError, KVRagEngine, RepairConfig, Retention, SamplingConfig, StoreConfig
from kvrag.config import as_config, option_field, refuse_misplaced
from kvrag.testing.models import tiny_model

STORED = [f.name for f in fields(StoreConfig)]
MAKERS: list[Callable[..., KVRagEngine]] = [KVRagEngine.from_pretrained, KVRagEngine.get]

HUGGING_FACE = """
attn_implementation cache_dir code_revision config device_map force_download from_tf gguf_file
ignore_mismatched_sizes key_mapping local_files_only low_cpu_mem_usage max_memory offload_buffers offload_folder
proxies quantization_config state_dict subfolder token torch_dtype tp_plan trust_remote_code use_cache
use_kernels use_safetensors variant weights_only max_position_embeddings rope_scaling sliding_window vocab_size
hidden_size tie_word_embeddings output_loading_info
"""
"""Options of transformers' ``from_pretrained`` and fields of configs: none may be taken for a misspelt one of ours."""


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("name", [*STORED, "encription_key", "ram_byte"])
def test_an_option_of_the_store_is_never_dropped(name, make, tiny_dir, tokenizer, tmp_path):
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
    options, message, make, tokenizer
):
    with pytest.raises(ConfigError, match=message):
        make(tiny_model(), tokenizer=tokenizer, **options)


def test_a_loaded_model_on_another_device_is_named(tokenizer, monkeypatch):
    model = tiny_model()
    monkeypatch.setattr(type(model), "device", torch.device("cuda:1"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device in ("cpu", "cuda:0"):
        with pytest.raises(
            ConfigError, match=f"device is '{device}', and the loaded model is on cuda:1"
        ):
            KVRagEngine.from_pretrained(model, tokenizer=tokenizer, device=device)
    KVRagEngine.from_pretrained(model, tokenizer=tokenizer, device="cuda").close()


@pytest.mark.parametrize(
    "options", [{"dtype": "float32", "device": "cpu"}, {"dtype": torch.float32}, {}]
)
def test_what_holds_of_a_loaded_model_may_be_said(options, tokenizer):
    KVRagEngine.from_pretrained(tiny_model(), tokenizer=tokenizer, **options).close()


def test_where_a_tokenizer_is_may_be_said_beside_a_loaded_model(tiny_dir):
    engine = KVRagEngine.from_pretrained(tiny_model(), tokenizer=tiny_dir, local_files_only=True)
    assert engine.tokenizer.is_fast
    with pytest.raises(ConfigError, match="'attn_implementation'"):
        KVRagEngine.from_pretrained(tiny_model(), tokenizer=tiny_dir, attn_implementation="sdpa")


def test_options_of_transformers_are_not_taken_for_ours(tiny_dir):
    refuse_misplaced(
        HUGGING_FACE.split(),
        ["kv_dir", "prefix", "dtype", "device", "revision", "namespace"],
        of="x",
    )
    KVRagEngine.from_pretrained(tiny_dir, local_files_only=True, use_cache=True).close()


# -- configs -------------------------------------------------------------------------------------------------------------------


def test_configs_are_still_copied_and_pickled():
    for config in (
        StoreConfig(ram_bytes=5),
        RepairConfig(first_k=2),
        SamplingConfig(seed=3),
        Retention(90),
    ):
        copies = (
            pickle.loads(pickle.dumps(config)),
            copy.copy(config),
            copy.deepcopy(config),
            replace(config),
        )
        assert copies == (config,) * 4


FAULTS: dict[type, list[tuple[dict[str, object], str]]] = {
    StoreConfig: [
        ({"ram_bytes": -1}, "ram_bytes is -1; it should be greater than or equal to 0"),
        ({"ram_bytes": "2 gibs"}, "ram_bytes: '2 gibs' is no size; write bytes, or a number with"),
        ({"disk_bytes": 1.5}, "disk_bytes is 1.5; it should be a valid integer"),
        ({"min_chunk_tokens": 0}, "min_chunk_tokens is 0"),
        ({"gpu_fraction": 2}, "gpu_fraction is 2; it should be less than or equal to 1"),
        (
            {"load_timeout_s": float("nan")},
            "load_timeout_s is nan; it should be greater than or equal to 0",
        ),
        ({"durability": "durably"}, "durability is 'durably'; it should be 'durable' or"),
        ({"kv_dtype": "int3"}, "kv_dtype is 'int3'; it should be 'auto', 'int8'"),
        ({"read_only": 1}, "read_only is 1; it should be a valid boolean"),
        ({"read_only": True, "on_miss": "store"}, "a read_only store takes nothing"),
        ({"event_log": 5}, "event_log is 5; it should be a valid string"),
        ({"on_event": 5}, "on_event is 5; it should be callable"),
    ],
    RepairConfig: [
        ({"strategy": "querry"}, "'querry'; it should be .*'query'"),
        ({"strategy": None}, "should be 'none', 'all'"),
        ({"recompute_ratio": 1.01}, "recompute_ratio is 1.01.* less than or equal to 1$"),
        *(({"recompute_ratio": bad}, "ratio is") for bad in (-0.1, float("nan"), "0.1", True)),
        ({"shift": 2}, "shift"),
        *(({"first_k": bad}, "first_k") for bad in (-1, 1.5)),
        ({"probe_span": (0.8, 0.3)}, "probe_span is .*two numbers that ascend"),
        *(
            ({"probe_span": bad}, "probe_span")
            for bad in ((0.0, 1.5), 0.5, (False, True), (float("nan"), 1.0))
        ),
    ],
    SamplingConfig: [
        ({"logit_bias": {1: 200}}, "logit_bias holds 200; it should be less than or equal to 100"),
        ({"logit_bias": {-1: 2}}, "logit_bias holds -1; it should be greater than or equal to 0"),
        ({"logit_bias": "x"}, "logit_bias is 'x'; it must be a dict by token id, or pairs"),
        ({"stop_token_ids": [3, -1]}, "stop_token_ids holds -1; it should be greater"),
        ({"top_k": -5}, "top_k is -5; it should be greater than or equal to -1"),
    ],
}


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [(config, *row) for config, rows in FAULTS.items() for row in rows],
    ids=lambda each: str(each)[:40],
)
def test_a_value_that_can_not_be_is_named_with_the_part_at_fault(config, options, message):
    with pytest.raises(ConfigError, match=message):
        config(**options)


GONE = """
index write_policy host_min_priority disk_min_priority namespace_secret mac_key ram_dtype gpu_dtype
"""


@pytest.mark.parametrize("name", GONE.split())
def test_options_of_earlier_versions_are_refused(name):
    with pytest.raises(ConfigError, match=f"StoreConfig has no option '{name}'"):
        StoreConfig(**{name: "env:KK"})


def test_a_positional_value_is_named_by_its_field():
    with pytest.raises(ConfigError, match=r"RepairConfig\.recompute_ratio is 7"):
        RepairConfig("query", 7)
    with pytest.raises(ConfigError, match="RepairConfig: "):
        RepairConfig(*astuple(RepairConfig()), 9)


def test_a_config_is_taken_as_a_dict_too():
    assert as_config(StoreConfig, {"ram_bytes": 5}, option="store_config") == StoreConfig(
        ram_bytes=5
    )
    assert as_config(StoreConfig, None, option="store_config") is None
    with pytest.raises(
        ConfigError,
        match=r"repair is 'all'; pass a kvrag\.RepairConfig, a dict of its options, 'auto', 'fast' or 'careful'",
    ):
        as_config(RepairConfig, "all", option="repair")
    from_json = TypeAdapter(RepairConfig).validate_json('{"probe_span": [0.1, 0.5]}')
    assert from_json == RepairConfig(probe_span=(0.1, 0.5))
    assert hash(from_json) == hash(RepairConfig(probe_span=[0.1, 0.5]))


@pytest.mark.parametrize("config", [StoreConfig, RepairConfig, SamplingConfig, Retention])
def test_every_option_has_a_schema_and_a_help(config):
    schema = TypeAdapter(config).json_schema()
    assert not schema["additionalProperties"]
    assert set(schema["properties"]) == {f.name for f in fields(config)}
    assert all(field["description"] for field in schema["properties"].values())
    assert (
        TypeAdapter(config).validate_python(TypeAdapter(config).dump_python(config())) == config()
    )


def test_options_can_be_offered_elsewhere_without_their_ranges():
    kind, field = option_field(SamplingConfig, "top_k")
    assert kind == int | None
    assert field.default is None
    assert str(field.description).startswith("Top-k filter")


@pytest.mark.parametrize("retention", [90, "90"])
def test_a_retention_of_another_type_is_refused_before_anything_is_computed(
    retention, engine, monkeypatch
):
    monkeypatch.setattr(
        engine.loaded.lm, "forward", lambda *args, **kwargs: pytest.fail("a forward ran")
    )
    with pytest.raises(ConfigError, match=r"retention is .*90.*pass a kvrag\.Retention"):
        engine.precompute(
            ["A text that is long enough to be a chunk of its own. " * 8], retention=retention
        )


@pytest.mark.parametrize("retention", [90, None])
def test_stored_chunks_keep_their_retention_if_another_type_is_given(retention, engine):
    with pytest.raises(ConfigError, match=f"retention is {retention}"):
        engine.retain(["a"], retention=retention)
