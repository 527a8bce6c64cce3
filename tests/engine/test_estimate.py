"""Arithmetic of KV sizes, against figures computed by hand."""

import pytest
from kit import lm_of
from transformers import AutoConfig

from kvrag.cli.estimate import shape_of
from kvrag.errors import ConfigError, ModelError
from kvrag.evaluate.estimate import (
    PRESETS,
    ModelShape,
    human_bytes,
    kv_bytes_per_token,
    preset,
    shape_from_config,
)

KIB = 1024


@pytest.mark.parametrize(
    ("name", "kib"),
    [
        ("llama-3.1-8b", 128),
        ("smollm2-135m", 22.5),
        ("qwen2.5-0.5b", 12),
        ("qwen2.5-3b", 36),
        ("qwen2.5-7b", 56),
        ("llama-3.1-70b", 320),
    ],
)
def test_bytes_per_token_of_known_models_in_bf16(name, kib):
    assert kv_bytes_per_token(PRESETS[name], "bfloat16") == kib * KIB


def test_float32_doubles_and_the_checkpoints_dtype_is_the_default():
    shape = PRESETS["smollm2-135m"]
    assert kv_bytes_per_token(shape, "float32") == 2 * kv_bytes_per_token(shape) == 46080
    assert kv_bytes_per_token(ModelShape(1, 1, 1, "float32")) == 8


@pytest.mark.parametrize(
    "name",
    [
        "Llama-3.1-8B",
        "meta-llama/Llama-3.1-8B-Instruct",
        "meta-llama/Meta-Llama-3.1-8B",
        "llama-3.1-8b",
    ],
)
def test_a_preset_is_found_by_the_names_people_use(name):
    assert preset(name) == ModelShape(32, 8, 128)
    assert preset("no-such-model-9b") is None


CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
}


def test_shape_from_config_computes_what_a_config_leaves_out():
    assert shape_from_config(CONFIG) == PRESETS["smollm2-135m"]
    no_gqa = {k: v for k, v in CONFIG.items() if k != "num_key_value_heads"}
    assert shape_from_config(no_gqa).num_kv_heads == 9
    assert shape_from_config({**CONFIG, "head_dim": 128}).head_dim == 128
    assert shape_from_config(
        {**CONFIG, "num_key_value_heads": None, "head_dim": None}
    ) == ModelShape(30, 9, 64)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_shape_from_config_reads_the_dtype_old_and_new(key):
    assert shape_from_config({**CONFIG, key: "float32"}).dtype == "float32"
    assert shape_from_config({**CONFIG, key: "torch.float16"}).dtype == "float16"


def test_shape_from_config_finds_the_text_part():
    assert shape_from_config(
        {"model_type": "mm", "torch_dtype": "float16", "text_config": CONFIG}
    ) == ModelShape(30, 3, 64, "float16")


def test_layers_that_share_kv_or_differ_count_as_they_are():
    kinds = ["sliding_attention"] * 4 + ["full_attention"]
    e2b = {"num_hidden_layers": 35, "num_kv_shared_layers": 20, "layer_types": kinds * 7}
    e2b |= {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256}
    found = shape_from_config({**e2b, "global_head_dim": 512})
    assert str(found) == "12 layers × 1 KV heads × 256 + 3 layers × 1 KV heads × 512"
    assert kv_bytes_per_token(found) == 18 * KIB
    few = {**e2b, "global_head_dim": 512, "num_global_key_value_heads": 4}
    assert shape_from_config({**few, "attention_k_eq_v": True}).others[0].num_kv_heads == 4
    assert shape_from_config({**few, "attention_k_eq_v": False}) == found


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text", "gemma4-key-values"])
def test_the_shape_of_a_config_is_that_of_the_model(name):
    lm = lm_of(name)
    shape = shape_from_config(lm.config.to_dict())
    assert kv_bytes_per_token(shape, "float32") == lm.kv_bytes_per_token


@pytest.mark.parametrize(
    "config", [{}, {"num_hidden_layers": 2}, {**CONFIG, "num_attention_heads": 0}]
)
def test_a_config_that_does_not_tell_is_refused(config):
    if config.get("num_attention_heads") == 0:
        config = {**config, "head_dim": None}
    with pytest.raises(ModelError, match="does not give"):
        shape_from_config(config)


LATENT = {**CONFIG, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}


def test_latent_attention_keeps_a_latent_and_a_rotary_key():
    shape = shape_from_config({**LATENT, "num_hidden_layers": 61})
    assert shape == PRESETS["deepseek-v3"]
    assert kv_bytes_per_token(shape, "bfloat16") == 61 * 576 * 2
    assert kv_bytes_per_token(PRESETS["minicpm3-4b"], "bfloat16") == 62 * 288 * 2


@pytest.mark.parametrize(
    "more", [{"index_head_dim": 128}, {"linear_attn_config": {"num_heads": 4}}, {"state_size": 16}]
)
def test_layers_that_keep_more_than_keys_and_values_are_refused(more):
    with pytest.raises(ModelError, match="plain keys and values"):
        shape_from_config({**LATENT, **more})


def test_an_unknown_dtype_is_named():
    with pytest.raises(ConfigError, match="'int3'"):
        kv_bytes_per_token(PRESETS["qwen2.5-3b"], "int3")


@pytest.mark.parametrize(
    ("write", "numbers", "expected"),
    [
        (
            human_bytes,
            (0, 512, 1023, 23040, 131072, 64 * 2**20),
            "0 B|512 B|1023 B|22.5 KiB|128 KiB|64 MiB",
        ),
        (human_bytes, (12.5 * 2**40, 2000 * 2**40), "12.5 TiB|2000 TiB"),
    ],
)
def test_sizes_are_written_for_people(write, numbers, expected):
    assert "|".join(map(write, numbers)) == expected


def test_a_shape_may_be_given_in_numbers():
    assert shape_of("32x8x128") == PRESETS["llama-3.1-8b"]
    with pytest.raises(ModelError):
        shape_of("32x0x128")


@pytest.mark.parametrize(
    "name", ["qwen3_next", "falcon_h1", "lfm2", "bamba", "granitemoehybrid", "qwen3_5_text"]
)
def test_layers_that_keep_a_state_are_not_estimated_as_keys_and_values(name):
    with pytest.raises(ModelError, match="does not keep plain keys and values"):
        shape_from_config(AutoConfig.for_model(name).to_dict())


def test_a_config_without_layers_is_refused():
    with pytest.raises(ModelError, match="0 of its layers keep KV"):
        shape_from_config(
            {"num_hidden_layers": 0, "num_attention_heads": 4, "hidden_size": 64, "head_dim": 16}
        )
