"""Collections: documents are stored as ``collection/id``, found by their own ids in it, and never mistaken for others."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from texts import make_chunks

from kvrag import InputError, Retention, delete_kv, precompute_kv, sync_kv

CHUNKS = make_chunks(4, words=30, seed=61)


def test_documents_of_a_collection_are_known_by_their_ids_in_it(engine):
    engine.precompute(CHUNKS[:2], ids=["a", "cars/b"], collection="manuals/")
    engine.precompute(CHUNKS[2:3], ids=["a"], collection="letters")
    engine.precompute(CHUNKS[3:], ids=["a"])
    assert engine.document_ids() == ["a", "letters/a", "manuals/a", "manuals/cars/b"]
    assert engine.retain(["a"], collection="letters", retention=Retention(60)) == 1
    assert engine.retain(["letters/a"], collection="letters", retention=Retention(60)) == 0
    assert engine.delete("a", collection="manuals") == 1
    assert engine.document_ids(collection="manuals") == ["manuals/cars/b"]
    assert engine.delete(["b"], collection="manuals/cars") == 1
    assert engine.delete(["a", "gone"]) == 1
    assert engine.document_ids() == ["letters/a"]
    assert engine.delete([], collection="letters") == 0, "no document is not the whole collection"
    assert engine.delete(collection="letters/") == 1
    assert engine.document_ids() == []


def test_a_text_that_changes_is_replaced_in_its_collection_alone(engine):
    engine.precompute(CHUNKS[:1], ids=["a"], collection="manuals")
    engine.precompute(CHUNKS[1:2], ids=["a"], collection="letters")
    assert engine.precompute(CHUNKS[2:3], ids=["a"], collection="manuals").stored == 1
    assert [engine.explain([{"role": "user", "content": chunk}]).hits for chunk in CHUNKS[:3]] == [
        0,
        1,
        1,
    ]


@pytest.mark.parametrize(
    "call",
    ["precompute", "delete", "retain", "document_ids", "precompute_kv", "delete_kv", "sync_kv"],
)
@pytest.mark.parametrize("nothing", ["", "/", "//", 7])
def test_what_is_no_name_is_refused_and_nothing_happens(engine, call, nothing):
    engine.precompute(CHUNKS[:1], ids=["/a"])
    calls: dict[str, Callable[[], object]] = {
        "precompute": lambda: engine.precompute(CHUNKS[1:2], ids=["a"], collection=nothing),
        "delete": lambda: engine.delete(["a"], collection=nothing),
        "retain": lambda: engine.retain(["a"], collection=nothing, retention=Retention(1)),
        "document_ids": lambda: engine.document_ids(collection=nothing),
        "precompute_kv": lambda: precompute_kv([], llm=engine, collection=nothing),
        "delete_kv": lambda: delete_kv([], llm=engine, collection=nothing),
        "sync_kv": lambda: sync_kv([], llm=engine, ids=[], collection=nothing),
    }
    with pytest.raises(InputError, match="collection is"):
        calls[call]()
    assert engine.document_ids() == ["/a"]


def test_a_document_of_a_collection_needs_an_id(engine):
    with pytest.raises(
        InputError, match="document 0 has no id, and is to be in the collection 'manuals'"
    ):
        engine.precompute(CHUNKS[:1], collection="manuals")
    with pytest.raises(InputError, match="document 1 has no id"):
        precompute_kv(CHUNKS[:2], llm=engine, ids=["a", None], collection="manuals")
    with pytest.raises(InputError, match="document 0 has the id 7; give"):
        engine.delete([7])
    assert engine.store.catalog.keys() == []


def test_the_hooks_mean_the_documents_of_their_collection(engine):
    documents = [SimpleNamespace(page_content=chunk, id=str(n)) for n, chunk in enumerate(CHUNKS)]
    precompute_kv(documents[:3], llm=engine, collection="manuals")
    precompute_kv(documents[3:], llm=engine)
    assert engine.document_ids() == ["3", "manuals/0", "manuals/1", "manuals/2"]
    assert delete_kv(documents[:1], llm=engine, collection="manuals") == 1
    assert delete_kv("1", llm=engine, collection="manuals") == 1
    assert delete_kv([], llm=engine, collection="manuals") == 0, "nothing is not everything"
    report = sync_kv(documents[:2], llm=engine, collection="manuals")
    assert (report.added, report.removed) == (2, 1)
    assert engine.document_ids() == ["3", "manuals/0", "manuals/1"]


def test_a_document_that_is_empty_now_is_deleted_from_its_collection_alone(engine):
    precompute_kv(CHUNKS[:1], llm=engine, ids=["a"], collection="manuals")
    precompute_kv(CHUNKS[1:2], llm=engine, ids=["a"])
    precompute_kv([" "], llm=engine, ids=["a"], collection="manuals")
    assert engine.document_ids() == ["a"]
    precompute_kv([" "], llm=engine, ids=["a"])
    assert engine.document_ids() == []
