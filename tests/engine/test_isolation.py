"""Isolation, through the engine: who has not the namespace and the keys gets no hit, and an answer all the same."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from texts import make_chunks

from kvrag import Chunk, KVRagEngine, StoreConfig

pytestmark = pytest.mark.filterwarnings("ignore:chunks were encoded behind another prefix")

CHUNKS = make_chunks(3, words=30, seed=5)
A, B = bytes(range(32)), bytes(range(32, 64))

HAS_CRYPTOGRAPHY = importlib.util.find_spec("cryptography") is not None
KEYS: dict[str, dict[str, bytes]] = {
    "none": {},
    **({"A": {"encryption_key": A}, "B": {"encryption_key": B}} if HAS_CRYPTOGRAPHY else {}),
}
needs_cryptography = pytest.mark.skipif(
    not HAS_CRYPTOGRAPHY, reason="cryptography is not installed"
)
Open = Callable[..., KVRagEngine]


def config_of(keys: str, **options: Any) -> StoreConfig:
    sources: dict[str, Any] = {
        option: functools.partial(bytes, key) for option, key in KEYS[keys].items()
    }
    return StoreConfig(durability="cache", **sources, **options)


@pytest.fixture
def open_engine(tiny_dir: str, tmp_path: Path) -> Iterator[Open]:
    """Opens engines on one model and one directory, and closes each before the next."""
    made: list[KVRagEngine] = []

    def make(keys: str, namespace: str = "default", **options: Any) -> KVRagEngine:
        if made:
            made.pop().close()
        config = config_of(keys, **options)
        made.append(
            KVRagEngine.from_pretrained(
                tiny_dir, kv_dir=tmp_path / "kv", namespace=namespace, store_config=config
            )
        )
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def prompts() -> list[Any]:
    """Chunks that are found by scanning, and chunks that are named."""
    body = "\n\n".join(CHUNKS)
    return [
        [{"role": "user", "content": f"{body}\n\nWho?"}],
        ["Notes: ", *map(Chunk, CHUNKS), "\nWho?"],
    ]


def hits(engine: KVRagEngine, prompt: Any) -> int:
    return engine.explain(prompt).hits


@pytest.mark.parametrize("owner", KEYS)
def test_no_other_namespace_and_no_other_keys_get_a_hit(open_engine: Open, owner: str) -> None:
    """The same texts, model and directory: every pair of keys, and of namespaces."""
    engine = open_engine(owner, "tenant")
    assert engine.precompute(CHUNKS, ids=["a", "b", "c"]).stored == len(CHUNKS)
    for keys, namespace in itertools.product(KEYS, ("tenant", "other")):
        engine = open_engine(keys, namespace)
        is_owner = (keys, namespace) == (owner, "tenant")
        assert engine.document_ids() == [] or is_owner
        for prompt in prompts():
            assert hits(engine, prompt) == (len(CHUNKS) if is_owner else 0)
        if not is_owner:
            assert engine.delete(["a", "b", "c"]) == 0
    engine = open_engine(owner, "tenant")
    assert sorted(engine.document_ids()) == ["a", "b", "c"]
    assert all(hits(engine, prompt) == len(CHUNKS) for prompt in prompts())


@pytest.mark.parametrize("keys", KEYS)
def test_answers_with_keys_are_those_without(open_engine: Open, tiny_dir: str, keys: str) -> None:
    plain = KVRagEngine.from_pretrained(tiny_dir)
    plain.precompute(CHUNKS)
    open_engine(keys).precompute(CHUNKS)
    engine = open_engine(keys, ram_bytes=0)
    for prompt in prompts():
        expected, found = (each.prefill(prompt, mode="stitch") for each in (plain, engine))
        assert found.exactness == "repaired"
        assert found.cached_tokens == expected.cached_tokens
        assert torch.equal(found.logits, expected.logits)
    plain.close()


@pytest.mark.parametrize("keys", KEYS)
def test_documents_come_and_go_as_without_keys(
    open_engine: Open, tmp_path: Path, keys: str
) -> None:
    engine = open_engine(keys)
    engine.precompute(CHUNKS[:2], ids=["a", "b"])
    assert engine.precompute(CHUNKS[:2], ids=["a", "b"]).skipped == 2
    engine.precompute([CHUNKS[2]], ids=["a"])  # another text under a known id
    assert [hits(engine, ["x ", Chunk(text)]) for text in CHUNKS] == [0, 1, 1]
    engine = open_engine(keys)
    assert sorted(engine.document_ids()) == ["a", "b"]
    assert engine.delete(["a", "b"]) == 2
    assert [hits(engine, ["x ", Chunk(text)]) for text in CHUNKS] == [0, 0, 0]
    assert len(list((tmp_path / "kv" / "objects").rglob("*.safetensors"))) == 1, "the prefix"


@needs_cryptography
def test_a_lost_key_costs_time_and_nothing_else(open_engine: Open) -> None:
    keys = "A"
    open_engine(keys).precompute(CHUNKS)
    engine = open_engine("none")
    for prompt in prompts():
        found = engine.prefill(prompt, mode="stitch")
        assert found.exactness == "full"
        assert torch.equal(found.logits, engine.prefill(prompt, mode="full").logits)
    assert engine.precompute(CHUNKS).stored == len(CHUNKS)  # beside those of the key
    assert hits(open_engine(keys), prompts()[0]) == len(CHUNKS)


@pytest.mark.parametrize("keys", KEYS)
def test_neither_keys_nor_texts_are_logged(
    open_engine: Open, caplog: pytest.LogCaptureFixture, keys: str
) -> None:
    with caplog.at_level(logging.DEBUG, logger="kvrag"):
        open_engine(keys).precompute(CHUNKS, ids=["a", "b", "c"])
        engine = open_engine("none" if keys != "none" else list(KEYS)[-1])
        engine.prefill(prompts()[0], mode="stitch")
        said = caplog.text + repr(engine.store_config) + repr(engine.store.names)
    for key in (A, B):
        assert key.hex() not in said
        assert repr(key) not in said
    assert not any(text[:40] in said for text in CHUNKS)


@needs_cryptography
def test_get_shares_engines_by_the_name_of_the_key(
    tiny_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRAG_TEST_A", A.hex())
    monkeypatch.setenv("KVRAG_TEST_B", B.hex())
    configs = [StoreConfig(encryption_key=f"env:KVRAG_TEST_{name}") for name in "AAB"]
    first, same, other = (
        KVRagEngine.get(tiny_dir, kv_dir=tmp_path, store_config=config) for config in configs
    )
    assert first is same
    assert first is not other
    first.close()
    other.close()
