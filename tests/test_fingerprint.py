"""Addresses: golden values, and every field participates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvrag.fingerprint import canonical, chunk_key, content_key, digest, ids_digest, namespace_digest
from kvrag.loading import ModelSource, load, model_fingerprint, resolve_dtype
from kvrag.testing.models import save_tiny_model, tiny_model
from kvrag.testing.tokenizers import tiny_tokenizer
from kvrag.types import ChunkIdentity

IDENTITY = ChunkIdentity("model", namespace_digest("default"), ids_digest([1, 2]), (3, 4, 5))


def test_keys_are_those_of_format_1() -> None:
    """A change here is a change of the store format: raise FORMAT_VERSION."""
    assert chunk_key(IDENTITY) == "9c9c17c8bb090f738c06fcca4040bd44e0e4d3595b707ebeddf7955742e66d72"
    assert content_key(IDENTITY) == "c6da08c140c41d7f949e0fc9624c5d670f41e2010fc97523a779ecfab120478e"


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"namespace": namespace_digest("x")},
        {"prefix": ids_digest([])},
        {"token_ids": (3, 4)},
        {"token_ids": (5, 4, 3)},
    ],
    ids=["model", "namespace", "prefix", "length", "order"],
)
def test_every_field_participates(change: dict[str, Any]) -> None:
    assert chunk_key(replace(IDENTITY, **change)) != chunk_key(IDENTITY)


def test_the_content_key_leaves_out_the_prefix_alone() -> None:
    assert content_key(replace(IDENTITY, prefix="other")) == content_key(IDENTITY)
    assert content_key(replace(IDENTITY, model="other")) != content_key(IDENTITY)


def test_no_field_can_imitate_another() -> None:
    assert canonical({"a": b"bc", "d": b""}) != canonical({"a": b"b", "d": b"c"})
    assert canonical({"ab": b"c"}) != canonical({"a": b"bc"})
    assert canonical({"a": b"1", "b": b"2"}) == canonical({"b": b"2", "a": b"1"})
    assert digest("x", {"a": b""}) != digest("y", {"a": b""})


def test_the_models_fingerprint_changes_with_what_changes_kv(tokenizer: Any) -> None:
    def of(model: Any, tok: Any = tokenizer) -> str:
        return load(ModelSource(model, tok)).fingerprint

    base = of(tiny_model())
    assert of(tiny_model()) == base
    other_rope = tiny_model()
    other_rope.config.rope_parameters = {**other_rope.config.rope_parameters, "rope_theta": 5e5}
    variants = [
        of(tiny_model(seed=1)),
        of(tiny_model(dtype=torch.float16)),
        of(tiny_model("qwen2")),
        of(other_rope),
    ]
    more_words = tiny_tokenizer()
    more_words.add_tokens(["harbourmaster"])
    variants.append(of(tiny_model(), more_words))
    assert len({base, *variants}) == 6


def test_local_weights_are_known_by_content(tmp_path: Any) -> None:
    one = load(ModelSource(save_tiny_model(tmp_path / "a"))).fingerprint
    same = load(ModelSource(save_tiny_model(tmp_path / "b"))).fingerprint
    other = load(ModelSource(save_tiny_model(tmp_path / "c", seed=5))).fingerprint
    assert one == same != other


def test_dtype_names_are_understood(tiny_dir: str) -> None:
    assert resolve_dtype(ModelSource(tiny_dir, dtype="bfloat16")) is torch.bfloat16
    assert resolve_dtype(ModelSource(tiny_dir, dtype=torch.float16)) is torch.float16
    assert resolve_dtype(ModelSource(tiny_dir, device="cpu")) is torch.float32


def test_the_fingerprint_of_weights_participates(tokenizer: Any) -> None:
    lm = load(ModelSource(tiny_model(seed=9), tokenizer)).lm
    assert model_fingerprint(lm, tokenizer, "commit:a") != model_fingerprint(lm, tokenizer, "commit:b")
