"""Calls that overlap: a deletion wins over all that began before it, and writers share their work."""

import enum
import os
import signal
import subprocess
import sys
import threading
import unicodedata
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from kit import Forwards, at_once
from texts import make_chunks

from kvrag import InputError, KVRagEngine
from kvrag.precompute import documents
from kvrag.precompute.documents import Claims
from kvrag.precompute.run import Precompute
from kvrag.types import ChunkKey

TEXTS = make_chunks(6, words=42)
IDS = [f"d{number}" for number in range(6)]


@pytest.fixture
def engine(tiny_dir, tmp_path) -> Iterator[KVRagEngine]:
    engine = KVRagEngine.from_pretrained(tiny_dir, kv_dir=tmp_path / "kv", context=None)
    yield engine
    engine.close()


def meanwhile(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Run an action once, after the first batch was computed and before it is stored."""
    real = Precompute._encode
    todo = [action]

    def encode(self: Precompute, chunks: Any) -> Any:
        found = real(self, chunks)
        if todo:
            todo.pop()()
        return found

    monkeypatch.setattr(Precompute, "_encode", encode)


def kept(engine: KVRagEngine) -> list[str]:
    """Texts of which a prompt reuses KV."""
    return [text for text in TEXTS if engine.prefill(f"{text} Who?", mode="stitch").cached_tokens]


WAYS: dict[str, Callable[[KVRagEngine], object]] = {
    "ids": lambda engine: engine.delete(["c/" + name for name in IDS]),
    "collection": lambda engine: engine.delete(collection="c"),
    "namespace": lambda engine: engine.clear(namespace="default"),
    "everything": lambda engine: engine.clear(),
}


def test_looks_that_fail_meanwhile_drop_nothing(engine, monkeypatch):
    looks = {"erased": lambda _: None, "known": lambda _: set(), "document_texts": lambda *_: []}
    meanwhile(monkeypatch, lambda: vars(engine.store.catalog).update(looks))
    assert engine.precompute(TEXTS, ids=IDS, batch_size=2).stored == 6


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("is_other", [False, True], ids=["itself", "another engine"])
@pytest.mark.parametrize("way", WAYS)
def test_a_deletion_wins_over_an_indexing_that_began_before(
    engine, tiny_dir, monkeypatch, way, is_other
):
    other = engine
    if is_other:
        other = KVRagEngine.from_pretrained(tiny_dir, kv_dir=engine.kv_dir, context=None)
    meanwhile(monkeypatch, lambda: WAYS[way](other))
    report = engine.precompute(TEXTS, ids=IDS, collection="c", batch_size=2)
    assert (report.stored, engine.document_ids(), kept(engine)) == (0, [], [])
    assert sorted(name for name, _ in report.failed) == [f"c/{name}" for name in IDS]
    assert all("deleted meanwhile" in why for _, why in report.failed)
    assert engine.precompute(TEXTS, ids=IDS).stored == 6, "what begins later is stored"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_deletion_by_another_process_wins(engine, monkeypatch):
    code = (
        "from kvrag.config import StoreConfig; from kvrag.store import open_store; import sys\n"
        "store = open_store(sys.argv[1], StoreConfig())\n"
        "space = store.names.namespace('default')\n"
        "[store.forget(space, name) for name in sys.argv[2:]]"
    )
    command = [sys.executable, "-c", code, str(engine.kv_dir), *IDS[:4]]
    meanwhile(monkeypatch, lambda: subprocess.run(command, check=True, timeout=120))
    report = engine.precompute(TEXTS, ids=IDS)
    assert (report.stored, engine.document_ids()) == (2, IDS[4:])
    assert kept(engine) == TEXTS[4:]


def test_a_text_that_another_document_has_keeps_its_kv(engine, monkeypatch):
    meanwhile(monkeypatch, lambda: engine.delete(["one"]))
    report = engine.precompute([TEXTS[0], TEXTS[0]], ids=["one", "two"])
    assert (report.stored, engine.document_ids()) == (1, ["two"])
    assert [name for name, _ in report.failed] == ["one"]
    assert kept(engine) == TEXTS[:1]
    assert engine.delete(["two"]) == 1


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_of_two_texts_of_an_id_the_later_stays(engine, monkeypatch):
    engine.precompute(TEXTS[2:3], ids=["d"])
    meanwhile(monkeypatch, lambda: engine.precompute(TEXTS[1:2], ids=["d"]))
    report = engine.precompute(TEXTS[:1], ids=["d"])
    assert "got another text" in report.failed[0][1]
    assert kept(engine) == TEXTS[1:2]
    assert engine.delete(["d"]) == 1
    assert kept(engine) == []


@pytest.mark.parametrize("is_cleared", [False, True])
def test_texts_whose_old_kv_is_evicted_meanwhile_are_stored_unless_a_deletion_wins(
    engine, monkeypatch, is_cleared
):
    engine.precompute(TEXTS)
    store, real = engine.store, engine.store.put_all

    def put_all(chunks, **options):
        if is_cleared and any(new.text and new.doc_ids for new in chunks):
            engine.clear()
        return real(chunks, **options)

    monkeypatch.setattr(store, "put_all", put_all)
    meanwhile(monkeypatch, lambda: store.delete(store.catalog.keys()))
    report = engine.precompute(TEXTS, prefix="Answer in verse.", batch_size=2)
    assert (report.stored, len(report.failed)) == ((0, 6) if is_cleared else (6, 0))
    assert len(kept(engine)) == report.stored


@pytest.mark.parametrize("batch_size", [1, 8])
def test_each_of_the_texts_with_the_same_token_ids_has_the_kv(engine, monkeypatch, batch_size):
    encoder = engine.loaded.encoder
    real, forms = encoder.chunk_ids, [f"{TEXTS[0]} caf\u00e9", f"{TEXTS[0]} cafe\u0301"]
    monkeypatch.setattr(encoder, "chunk_ids", lambda text: real(unicodedata.normalize("NFC", text)))
    report = engine.precompute(forms, ids=["nfc", "nfd"], batch_size=batch_size)
    assert (report.stored + report.skipped, report.failed) == (2, [])
    assert engine.delete(["nfd"]) == 0
    assert engine.delete(["nfc"]) == 1


def test_chunks_that_another_writer_computes_are_not_computed_again(engine, tiny_dir, monkeypatch):
    other = KVRagEngine.from_pretrained(tiny_dir, kv_dir=engine.kv_dir, context=None)
    for each in (engine, other):
        each.precompute(["warm " * 40])
    real = Precompute._encode
    computed = list[int]()

    def encode(self: Precompute, chunks: Any) -> Any:
        computed.extend([chunk.identity.token_ids for chunk in chunks])
        return real(self, chunks)

    monkeypatch.setattr(Precompute, "_encode", encode)
    monkeypatch.setattr(documents, "POLL_S", 0.005)
    reports = list[Any]()
    at_once(
        *[
            lambda e=e: reports.append(e.precompute(TEXTS, ids=IDS, batch_size=1))
            for e in (engine, other)
        ]
    )
    assert len(computed) == len(set(computed)) == 6
    assert [report.stored + report.skipped for report in reports] == [6, 6]
    assert [report.failed for report in reports] == [[], []]


@pytest.mark.skipif(sys.platform != "linux", reason="the locks are Linux's")
def test_a_claim_ends_with_its_process(tmp_path):
    key = ChunkKey("ab" * 32)
    told, tell = os.pipe()
    writer = os.fork()
    if writer == 0:
        try:
            claims = Claims(tmp_path / "claims").__enter__()
            os.write(tell, b"yes" if claims.take(key) else b"no")
            signal.pause()
        finally:
            os._exit(1)
    assert os.read(told, 3) == b"yes"
    with Claims(tmp_path / "claims") as mine:
        assert not mine.take(key)
        assert mine.take(ChunkKey("cd" * 32))
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        os.close(told), os.close(tell)
        assert mine.take(key)


def test_a_store_for_reading_only_says_so(engine, tiny_dir, monkeypatch):
    engine.precompute(TEXTS[:1], ids=["d"])
    reader = KVRagEngine.from_pretrained(
        tiny_dir, kv_dir=engine.kv_dir, context=None, store_config={"read_only": True}
    )
    forwards = Forwards(monkeypatch)
    report = reader.precompute(TEXTS[1:2], ids=["e"])
    assert "reading only" in report.failed[0][1]
    assert not forwards.count, "nothing is computed in vain"


class Colour(enum.StrEnum):
    RED = "red"


GOOD = [1, 0, np.int64(7), uuid.UUID(int=3), "a", np.str_("b"), Colour.RED]
BAD = [1.0, b"a", True, None, ("a",)]


def stores(engine: KVRagEngine) -> dict[str, Any]:
    langchain = pytest.importorskip("langchain_kvrag")
    from langchain_core.embeddings import DeterministicFakeEmbedding
    from langchain_core.vectorstores import InMemoryVectorStore

    embedding = DeterministicFakeEmbedding(size=4)
    inner = InMemoryVectorStore(embedding)
    return {
        "own": langchain.KVRagVectorStore(embedding=embedding, llm=engine, collection="own"),
        "wrapped": langchain.KVRagVectorStore(inner, llm=engine, collection="wrapped"),
    }


@pytest.mark.parametrize("name", GOOD, ids=repr)
def test_an_id_of_another_type_is_the_same_in_all_calls(engine, name):
    for store in stores(engine).values():
        assert store.add_texts(TEXTS[:1], ids=[name]) == [
            str.__str__(str(getattr(name, "value", name)))
        ]
        assert [found.page_content for found in store.get_by_ids([name])] == TEXTS[:1]
        store.add_texts(TEXTS[1:2], ids=[name])
        assert [found.page_content for found in store.kv_documents()] == TEXTS[1:2]
        store.delete([name])
        assert (store.kv_documents(), engine.document_ids()) == ([], [])


@pytest.mark.parametrize("name", BAD, ids=repr)
def test_an_id_that_is_none_is_refused_both_ways(engine, name):
    for store in stores(engine).values():
        if name is not None:  # the store makes an id
            with pytest.raises(InputError, match="pass a string, a whole number or a UUID"):
                store.add_texts(TEXTS[:1], ids=[name])
        for method in (store.delete, store.get_by_ids):
            with pytest.raises(InputError, match="pass a string, a whole number or a UUID"):
                method([name])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_kv_follows_the_index_when_calls_overlap(engine, monkeypatch):
    from langchain_core.documents import Document

    for name, store in stores(engine).items():
        documents_ = [
            Document(page_content=text, id=each) for each, text in zip(IDS, TEXTS, strict=True)
        ]
        meanwhile(monkeypatch, lambda store=store: store.delete(IDS[:5]))
        store.add_documents(documents_)
        assert engine.document_ids(collection=name) == [f"{name}/d5"]
        other = Document(page_content=TEXTS[0], id="d5")
        meanwhile(monkeypatch, lambda store=store, other=other: store.inner.add_documents([other]))
        store.add_documents([Document(page_content=TEXTS[1], id="d5")])
        assert kept(engine) == TEXTS[:1], "the text that the index holds"
        threads = threading.active_count()
        store.delete(["d5"])
        assert (engine.document_ids(), kept(engine)) == ([], [])
        assert threading.active_count() <= threads
