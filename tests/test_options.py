"""No option is dropped: one that the store, the model or nobody has is refused by name, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrag import ConfigError, KVRagEngine, StoreConfig
from kvrag.config import refuse_misplaced
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
