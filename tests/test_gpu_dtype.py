"""Rounding in the accelerator's memory alone: the same gate, the same labels, the same bits at every read. The host's memory stands in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from texts import make_chunks

from kvrag import Chunk, ConfigError, KVRagEngine, RepairConfig, StoreConfig
from kvrag.blend.quantise import convert as convert_kv
from kvrag.blend.quantise import pack
from kvrag.precompute.quantise_check import Gate
from kvrag.store import MemoryTier, TieredStore, on_accelerator, open_store, opening
from kvrag.testing.chunks import make_identity, make_kv, same_bits

CHUNKS = make_chunks(3, words=30, seed=17)
PROMPT = ["Read this.\n", Chunk(CHUNKS[0]), "\nWho?"]
HERE = RepairConfig(strategy="none")
PATIENT_S = 30.0
MakeEngine = Callable[..., KVRagEngine]


def pretend(store: TieredStore, _: Any, config: StoreConfig, budget: int = 2**20, **__: Any) -> bool:
    """Put the accelerator's tier in the host's memory."""
    as_type = opening.converter(convert_kv, config.gpu_dtype)
    store.put_above(MemoryTier(budget, name="gpu", convert=as_type))
    return True


def make(engine_of: MakeEngine, **options: Any) -> KVRagEngine:
    return engine_of(prefix="Read this.\n", store_config=StoreConfig(**options))


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrag.engine.on_accelerator", pretend)


@pytest.mark.parametrize("budget", [0, 2**20])
@pytest.mark.parametrize("gpu_dtype", ["int8", "fp8", "int4"])
def test_every_read_is_rounded_and_what_is_below_stays_exact(tmp_path: Any, gpu_dtype: Any, budget: int) -> None:
    config = StoreConfig(gpu_dtype=gpu_dtype, min_free_bytes=0)
    below, store = (open_store(tmp_path / "kv", config) for _ in range(2))
    pretend(store, None, config, budget)
    identity = make_identity()
    exact = make_kv(identity)
    store.put(identity, exact, text=None)
    for _ in range(3):
        assert same_bits(store.get(identity), pack(exact, gpu_dtype))
        assert same_bits(store.get_many([identity], timeout_s=PATIENT_S)[0], pack(exact, gpu_dtype))
    assert store.stats()["gpu"].num_bytes == (pack(exact, gpu_dtype).num_bytes if budget else 0)
    assert same_bits(below.get(identity), exact)
    for each in (store, below):
        each.close()


def test_codes_from_below_may_be_read_once(tmp_path: Any) -> None:
    config = StoreConfig(kv_dtype="int8", gpu_dtype="auto", min_free_bytes=0)
    store = open_store(tmp_path / "kv", config)
    pretend(store, None, config)
    identity = make_identity()
    codes = pack(make_kv(identity), "int8")
    identity = type(identity)(**{**{f: getattr(identity, f) for f in identity.__slots__}, "kv_dtype": "int8"})
    store.put(identity, codes, text=None)
    for _ in range(2):
        found = store.get(identity)
        assert same_bits(found, convert_kv(codes, "auto"))
        assert found is not None
        assert found.kv_dtype == "int8"
    store.close()


@pytest.mark.usefixtures("with_gpu")
def test_answers_are_labelled_as_rounded(engine_of: MakeEngine) -> None:
    engine = make(engine_of, gpu_dtype="int8")
    engine.precompute(CHUNKS)
    first, second = (engine.prefill(PROMPT, mode="stitch", repair=HERE) for _ in range(2))
    assert torch.equal(first.logits, second.logits), "the first read comes from below, where the KV is exact"
    assert (first.exactness, first.kv_dtype, second.kv_dtype) == ("repaired", "int8", "int8")
    assert engine.prefill(PROMPT, mode="prefix").exactness == "full"
    assert engine.store.stats()["gpu"].chunks > 0


def test_without_an_accelerator_nothing_is_rounded_nor_refused(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrag.precompute.quantise_check.judge", lambda *_: pytest.fail("there is nothing to judge"))
    engine = make(engine_of, gpu_dtype="int4", gpu_bytes=2**20)
    engine.precompute(CHUNKS)
    assert engine.prefill(PROMPT, mode="stitch", repair=HERE).exactness == "exact"
    assert engine.store_config.gpu_dtype is None
    answering = make(engine_of, gpu_dtype="int4")  # whose first call is an answer
    assert answering.prefill(PROMPT, mode="stitch", repair=HERE).kv_dtype == "auto"


@pytest.mark.usefixtures("with_gpu")
def test_it_passes_the_same_gate(engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refuse(gate: Gate, loaded: object) -> None:
        asked.append(gate.kv_dtype)
        raise ConfigError("this model does not bear it")

    monkeypatch.setattr(Gate, "admit", refuse)
    engine = make(engine_of, gpu_dtype="int4")
    with pytest.raises(ConfigError, match="does not bear"):
        engine.precompute(CHUNKS)
    with pytest.raises(ConfigError, match="does not bear"):
        engine.prefill(PROMPT)
    assert asked == ["int4", "int4"]
    assert engine.store.catalog.keys() == []


@pytest.mark.parametrize(
    ("kv", "ram", "gpu", "read"),
    [
        ("auto", None, "int8", "int8"),
        ("auto", None, "auto", "auto"),
        ("int8", None, "auto", "int8"),
        ("int8", None, "int8", "int8"),
        ("auto", "fp8", "fp8", "fp8"),
        ("auto", "auto", "int4", "int4"),
        ("int8", "int8", "int8", "int8"),
        ("int8", "auto", "auto", "int8"),
    ],
)
def test_what_is_read_follows_from_all_tiers(kv: Any, ram: Any, gpu: Any, read: str) -> None:
    assert StoreConfig(kv_dtype=kv, ram_dtype=ram, gpu_dtype=gpu).read_dtype == read


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_dtype": "int8", "gpu_dtype": "int4"}, "gpu_dtype is 'int4' above kv_dtype='int8'.*rounded once"),
        ({"ram_dtype": "int8", "gpu_dtype": "fp8"}, "gpu_dtype is 'fp8' above .*ram_dtype='int8'"),
    ],
)
def test_nothing_is_rounded_twice(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        StoreConfig(**options)


def test_the_tier_is_built_with_its_type() -> None:
    store = open_store(None, StoreConfig())
    config = StoreConfig(gpu_bytes=2**20, gpu_fraction=1.0, gpu_dtype="int8")
    assert on_accelerator(store, torch.device("meta"), config, convert=convert_kv)
    store.put(make_identity(), make_kv(make_identity()), text=None)
    kv = store.get(make_identity())
    assert kv is not None
    assert (kv.kv_dtype, kv.layers[0].keys.device.type) == ("int8", "meta")
