"""Addresses: golden values, and every field participates."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import raising
from transformers import GPTQConfig

import kvrag.identity.fingerprint
from kvrag import ConfigError
from kvrag.config import KV_DTYPES, StoreConfig
from kvrag.identity.describe import (
    attention_text,
    config_text,
    quantisation_text,
    rope_text,
    tokenizer_digest,
)
from kvrag.identity.fingerprint import (
    ModelIdentity,
    canonical,
    chunk_key,
    content_key,
    digest,
    ids_digest,
    namespace_digest,
)
from kvrag.identity.model import describe
from kvrag.model.load import load
from kvrag.model.source import ModelSource, resolve_dtype
from kvrag.store import TieredStore, open_store
from kvrag.testing.chunks import make_kv, same_bits
from kvrag.testing.models import tiny_model
from kvrag.testing.tokenizers import tiny_tokenizer
from kvrag.types import ChunkIdentity, ChunkKV, Hole, LayerKV

IDENTITY = ChunkIdentity("model", namespace_digest("default"), ids_digest([1, 2]), (3, 4, 5))

MODEL = ModelIdentity(
    weights="commit:abc",
    config='{"hidden_size":64}',
    tokenizer="t",
    rope='{"rope_theta":10000.0}',
    regime="",
    attention="[]",
    dtype="torch.float32",
    quantisation="",
    adapters="",
    extra_keys={"team": "search"},
)

# Golden values. A change of any literal below is a change of the format: raise FORMAT_VERSION and say so in docs/format.md.


def test_canonical_bytes_are_those_of_format_4():
    assert canonical({"b": b"\x01\x02", "a": b""}) == (
        b"\x01\x00\x00\x00a\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00b\x02\x00\x00\x00\x00\x00\x00\x00\x01\x02"
    )
    assert canonical({}) == b""


def test_keys_are_those_of_format_4():
    assert kvrag.identity.fingerprint.FORMAT_VERSION == 4
    assert chunk_key(IDENTITY) == "9546392707e0d27b99b14a695be6833e8aeaa9466f0f7cd8cedaa86c4539b766"
    assert (
        content_key(IDENTITY) == "2954c176142cd4766bcf86f1148c898404b65b7f542981d74913625f73692e36"
    )


def test_digests_are_those_of_format_4():
    assert (
        namespace_digest("default")
        == "sha256:58da2ee63bee290b687f519e3785e855b0a1d530af84b41fbf32d43e6634f303"
    )
    assert (
        ids_digest([1, 2])
        == "sha256:a9481d6e1528210943911686157a5a9627ab7cd6ef2e89d78c14120b36634af2"
    )
    assert (
        MODEL.fingerprint
        == "sha256:fb4139aa0c4696b3938a5f7a4cccfd776634b2565d4f89b475d3038ad1267e4b"
    )


# -- fields of a chunk's identity ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"namespace": namespace_digest("x")},
        {"prefix": ids_digest([])},
        {"context": ids_digest([7, 8])},
        {"token_ids": (3, 4)},
        {"token_ids": (5, 4, 3)},
        {"token_ids": (3, 4, 6)},
        *({"kv_dtype": kv_dtype} for kv_dtype in KV_DTYPES if kv_dtype != "auto"),
    ],
)
def test_every_field_of_a_chunks_identity_participates(change):
    changed = replace(IDENTITY, **change)
    assert chunk_key(changed) != chunk_key(IDENTITY)
    assert (content_key(changed) == content_key(IDENTITY)) is (
        change.keys() <= {"prefix", "context"}
    )


def test_format_version_participates(monkeypatch):
    before = (chunk_key.__wrapped__(IDENTITY), MODEL.fingerprint, ids_digest([1]))
    monkeypatch.setattr(kvrag.identity.fingerprint, "FORMAT_VERSION", 99)
    after = (chunk_key.__wrapped__(IDENTITY), MODEL.fingerprint, ids_digest([1]))
    assert all(old != new for old, new in zip(before, after, strict=True))


def test_no_field_can_imitate_another():
    assert canonical({"a": b"bc", "d": b""}) != canonical({"a": b"b", "d": b"c"})
    assert canonical({"ab": b"c"}) != canonical({"a": b"bc"})
    assert canonical({"a": b"1", "b": b"2"}) == canonical({"b": b"2", "a": b"1"})
    assert digest("x", {"a": b""}) != digest("y", {"a": b""})
    swapped = [
        replace(IDENTITY, prefix=prefix, context=context) for prefix, context in ("ab", "ba")
    ]
    assert chunk_key(swapped[0]) != chunk_key(swapped[1])


# -- fields of a model's identity ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weights", "commit:abd"),
        ("config", '{"hidden_size":65}'),
        ("tokenizer", "u"),
        ("rope", '{"rope_theta":500000.0}'),
        ("regime", "long"),
        ("attention", '["sliding"]'),
        ("dtype", "torch.bfloat16"),
        ("quantisation", '{"bits":4}'),
        ("adapters", "sha256:1"),
        *(
            ("extra_keys", keys)
            for keys in ({}, {"team": "sales"}, {"group": "search"}, {"team": "search", "x": ""})
        ),
    ],
)
def test_every_field_of_a_models_identity_participates(field, value):
    assert replace(MODEL, **{field: value}).fingerprint != MODEL.fingerprint


def test_no_field_of_a_models_identity_is_forgotten():
    (mark,) = test_every_field_of_a_models_identity_participates.pytestmark
    assert {field for field, _ in mark.args[1]} == set(ModelIdentity.__dataclass_fields__)


# -- what is read off a loaded model ---------------------------------------------------------------------------------------


def fingerprint_of(model: Any, tokenizer: Any) -> str:
    return load(ModelSource(model, tokenizer)).fingerprint


def test_weights_dtype_architecture_and_tokenizer_tell_models_apart(tokenizer):
    models = [
        tiny_model(),
        tiny_model(seed=1),
        tiny_model(dtype=torch.float16),
        tiny_model("qwen2"),
    ]
    more_words = tiny_tokenizer()
    add_word(more_words)
    found = [
        *(fingerprint_of(model, tokenizer) for model in models),
        fingerprint_of(tiny_model(), more_words),
    ]
    assert len(set(found)) == 5
    assert fingerprint_of(tiny_model(), tiny_tokenizer()) == found[0], "the same model twice"


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


@pytest.mark.parametrize(
    ("text", "attribute", "values"),
    [
        (rope_text, "rope_parameters", [{"rope_theta": 5e5}, {"rope_theta": 1e4}]),
        (config_text, "rms_norm_eps", [1e-6, 1e-3]),
        (
            quantisation_text,
            "quantization_config",
            [GPTQ, {**GPTQ, "group_size": 64}, {**GPTQ, "bits": 8}, None],
        ),
        (quantisation_text, "quantization_config", [GPTQConfig(bits=bits) for bits in (4, 8)]),
    ],
)
def test_what_is_read_from_the_config(text, attribute, values):
    config, found = tiny_model().config, []
    for value in values:
        setattr(config, attribute, value)
        found.append(text(config))
    assert len(set(found)) == len(values)
    config._name_or_path, config.use_cache, config.dtype = "elsewhere", False, torch.float16
    assert text(config) == found[-1], "what changes no KV does not count"


@pytest.mark.parametrize("attribute", ["scaling", "sliding_window"])
def test_attention_settings_are_read_from_the_layers(attribute):
    model = tiny_model("mistral")
    before = attention_text(model)
    setattr(model.model.layers[1].self_attn, attribute, 3)
    assert attention_text(model) != before
    assert attention_text(model.train()) == attention_text(model.eval())


# -- tokenizers --------------------------------------------------------------------------------------------------------------


def add_word(tokenizer: Any) -> None:
    tokenizer.add_tokens(["harbourmaster"])


def lower_case(tokenizer: Any) -> None:
    from tokenizers import normalizers

    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()


def drop_merge(tokenizer: Any) -> None:
    from tokenizers import Tokenizer

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["model"]["merges"].pop()
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))


def other_eos(tokenizer: Any) -> None:
    tokenizer.eos_token = "<pad>"


@pytest.mark.parametrize("change", [add_word, lower_case, drop_merge, other_eos])
def test_tokenizer_content_counts(change):
    tokenizer = tiny_tokenizer()
    before = tokenizer_digest(tokenizer)
    change(tokenizer)
    assert tokenizer_digest(tokenizer) != before


def test_how_a_tokenizer_was_called_last_does_not_count():
    tokenizer = tiny_tokenizer()
    before = tokenizer_digest(tokenizer)
    tokenizer(["a", "b c d"], padding=True, truncation=True, max_length=3)
    assert json.loads(tokenizer.backend_tokenizer.to_str())["truncation"] is not None
    assert tokenizer_digest(tokenizer) == before


class SlowTokenizer:
    """A tokenizer without a backend: a vocabulary, and files beside it."""

    bos_token_id, eos_token_id = 1, 2
    added_tokens_decoder: dict[int, str] = {}  # noqa: RUF012

    def __init__(self, merges: str = "a b", words: tuple[str, ...] = ("a", "b")) -> None:
        self.merges, self.words = merges, words

    def get_vocab(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(self.words)}

    def save_vocabulary(self, folder: str) -> None:
        (Path(folder) / "merges.txt").write_text(self.merges)


def test_a_slow_tokenizer_counts_with_vocabulary_and_files():
    variants = [SlowTokenizer(), SlowTokenizer(merges="b a"), SlowTokenizer(words=("a", "c"))]
    assert len({tokenizer_digest(tokenizer) for tokenizer in variants}) == 3
    assert tokenizer_digest(SlowTokenizer()) == tokenizer_digest(SlowTokenizer())


def test_what_has_no_files_and_no_order_is_described_too(monkeypatch):
    with_files = tokenizer_digest(SlowTokenizer())

    monkeypatch.setattr(SlowTokenizer, "save_vocabulary", raising(NotImplementedError))
    assert tokenizer_digest(SlowTokenizer()) != with_files
    config = tiny_model().config
    config.no_rope_layers = {"b", "a"}
    assert '"no_rope_layers":["a","b"]' in rope_text(config)


# -- the rest of the way from a source to its fingerprint --------------------------------------------------------------------


def test_each_description_reaches_the_identity(tokenizer):
    model = tiny_model("gemma2")
    found = describe(model, tokenizer, "commit:1", regime="short")
    assert found == ModelIdentity(
        weights="commit:1",
        config=config_text(model.config),
        tokenizer=tokenizer_digest(tokenizer),
        rope=rope_text(model.config),
        regime="short",
        attention=attention_text(model),
        dtype="torch.float32",
        quantisation="",
        adapters="",
    )
    assert "sliding_window" in found.attention


def test_extra_keys_tell_kv_apart_but_share_the_weights(tiny_dir):
    plain = load(ModelSource(tiny_dir))
    keyed = load(ModelSource(tiny_dir, extra_keys={"team": "search"}))
    again = load(ModelSource(tiny_dir, extra_keys={"team": "search"}))
    assert keyed.lm is plain.lm
    assert keyed.fingerprint == again.fingerprint != plain.fingerprint
    with pytest.raises(ConfigError, match="extra_keys"):
        ModelSource(tiny_dir, extra_keys={"a": 1})
    kept = load(ModelSource(tiny_dir, revision="kept", extra_keys={"a": "b"}))
    assert load(ModelSource(tiny_dir, revision="kept")).lm is kept.lm, (
        "whoever has other keys keeps the weights loaded"
    )


def test_dtype_names_are_understood(tiny_dir):
    assert resolve_dtype(ModelSource(tiny_dir, dtype="bfloat16")) is torch.bfloat16
    assert resolve_dtype(ModelSource(tiny_dir, dtype="torch.bfloat16")) is torch.bfloat16
    assert resolve_dtype(ModelSource(tiny_dir, dtype=torch.float16)) is torch.float16
    assert resolve_dtype(ModelSource(tiny_dir, device="cpu")) is torch.float32


# -- a collision of digests --------------------------------------------------------------------------------------------------

CONFIGS = {
    "memory": (False, StoreConfig()),
    "disk": (True, StoreConfig(ram_bytes=0)),
    "both": (True, StoreConfig()),
}


def open_as(tier: str, path: Path) -> TieredStore:
    is_on_disk, config = CONFIGS[tier]
    return open_store(path / "store" if is_on_disk else None, config)


@pytest.fixture
def colliding(monkeypatch):
    """Every key is the same one: as if SHA-256 gave the same digest for different chunks."""
    monkeypatch.setattr(kvrag.identity.fingerprint, "key_digest", lambda domain, fields: "0" * 64)


def constant_kv(value: float) -> ChunkKV:
    return ChunkKV((LayerKV(torch.full((2, 3, 4), value), torch.full((2, 3, 2), value)),))


@pytest.mark.usefixtures("colliding")
@pytest.mark.parametrize("tier", CONFIGS)
def test_a_collision_of_digests_is_caught_by_the_stored_identity(tier, tmp_path):
    mine = ChunkIdentity("model", "namespace", "prefix", (1, 2, 3))
    others = [
        replace(mine, token_ids=(1, 2, 4)),
        replace(mine, model="other"),
        replace(mine, namespace="other"),
        replace(mine, prefix="other"),
    ]
    store = open_as(tier, tmp_path)
    kv = make_kv(mine)
    for other in others:
        assert chunk_key(other) == chunk_key(mine), "the hook did not reach the keys"
        assert store.put(mine, kv, text=None) > 0
        assert same_bits(store.get(mine), kv)
        assert store.get(other) is None
        assert isinstance(store.get_many([other], timeout_s=30.0)[0], Hole)
        store.delete([chunk_key(mine)])
    store.close()


@pytest.mark.usefixtures("colliding")
@pytest.mark.parametrize("tier", CONFIGS)
def test_a_chunk_whose_key_is_taken_is_not_lost_silently(tier, tmp_path):
    """Storing it may fail or replace the other one, but nothing is ever read back as what it is not."""
    first, second = (
        ChunkIdentity("model", "namespace", "prefix", ids) for ids in ((1, 2, 3), (7, 8, 9))
    )
    store = open_as(tier, tmp_path)
    kvs = {first: constant_kv(1.0), second: constant_kv(2.0)}
    for identity, kv in kvs.items():
        store.put(identity, kv, text=None)
    for identity, kv in kvs.items():
        found = store.get(identity)
        assert found is None or same_bits(found, kv)
    store.close()
