"""KVPrefetchHandler and KVPrecompute: what was retrieved is in memory before it is asked for, and a step that changes no document."""

import logging

import pytest
from kit import kept, raising, settle
from langchain_core.documents import Document
from langchain_core.language_models import FakeListLLM
from langchain_core.messages import SystemMessage

from kvrag import ConfigError, InputError, Retention, precompute_kv
from langchain_kvrag import ChatKVRag, KVPrecompute, KVPrefetchHandler, KVRagVectorStore


def in_memory(chat: ChatKVRag) -> int:
    return chat.engine.stats()["store"]["host"].chunks


@pytest.fixture
def retriever(chat, options, embedding, chunks):
    """A retriever over chunks whose KV is on disk only, as after a restart."""
    store = KVRagVectorStore.from_texts(chunks, embedding, llm=chat)
    chat.engine.close()
    assert in_memory(chat) == 0
    return store.as_retriever(search_kwargs={"k": 3})


def test_retrieved_chunks_are_loaded(retriever, chat):
    documents = retriever.invoke("x", config={"callbacks": [KVPrefetchHandler(chat)]})
    settle()
    assert in_memory(chat) == 1 + len(documents)  # and the prefix
    before = chat.engine.stats()["store"]["disk"].hits
    message = chat.invoke(
        "\n\n".join(d.page_content for d in documents) + "\n\nWho?", mode="stitch"
    )
    assert message.response_metadata["kvrag"]["exactness"] == "repaired"
    assert chat.engine.stats()["store"]["disk"].hits == before


async def test_it_works_in_an_event_loop(retriever, chat):
    await retriever.ainvoke("x", config={"callbacks": [KVPrefetchHandler(chat)]})
    settle()
    assert in_memory(chat) == 4


def test_unknown_and_empty_texts_are_fine(retriever, chat):
    assert chat.engine.prefetch(["never seen " * 30]).found == 1  # the prefix
    assert chat.engine.prefetch(["never seen " * 30], namespace="other").found == 0
    handler = KVPrefetchHandler(chat)
    handler.on_retriever_end([])
    handler.on_retriever_end([Document(page_content=" ")])
    settle()
    assert in_memory(chat) == 1


def test_a_fault_is_logged_and_harms_nobody(retriever, chat, monkeypatch, caplog):
    monkeypatch.setattr(chat.engine.store, "prefetch", raising(OSError, "the disk is gone"))
    with caplog.at_level(logging.WARNING):
        assert len(retriever.invoke("x", config={"callbacks": [KVPrefetchHandler(chat)]})) == 3
        settle()
    assert "could not be prefetched" in caplog.text


def test_other_models_are_refused():
    with pytest.raises(ConfigError, match="FakeListLLM"):
        KVPrefetchHandler(FakeListLLM(responses=["x"]))


async def test_the_transformer_precomputes_and_changes_nothing(chat, chunks):
    documents = [Document(page_content=chunk, id=str(i)) for i, chunk in enumerate(chunks[:2])]
    step = KVPrecompute(chat)
    assert step.transform_documents(documents) == documents
    assert kept(chat, chunks) == [0, 1]
    await step.atransform_documents([Document(page_content=chunks[3])])
    assert kept(chat, chunks) == [0, 1, 3]
    with pytest.raises(ConfigError, match="FakeListLLM"):
        KVPrecompute(FakeListLLM(responses=["x"]))


def test_the_transformer_warns_or_raises(chat):
    twice = [Document(page_content="one", id="a"), Document(page_content="two", id="a")]
    with pytest.warns(UserWarning, match="two different texts"):
        assert KVPrecompute(chat).transform_documents(twice) == twice
    with pytest.raises(InputError, match="two different texts"):
        KVPrecompute(chat, on_error="raise").transform_documents(twice)


def test_the_transformer_passes_collection_and_worth_on(chat, chunks):
    document = Document(page_content=chunks[0], id="a")
    KVPrecompute(chat, collection="manuals", retention=Retention(60)).transform_documents(
        [document]
    )
    engine = chat.engine
    assert engine.document_ids() == ["manuals/a"]
    (key,) = engine.store.catalog.document_keys(
        engine.store.names.namespace(engine.namespace), "manuals/a"
    )
    told = engine.store.retention(key)
    assert told is not None
    assert told.priority == 60
    with pytest.warns(UserWarning, match="has no id, and is to be in the collection"):
        KVPrecompute(chat, collection="manuals").transform_documents(
            [Document(page_content=chunks[1])]
        )
    with pytest.raises(InputError, match="collection is"):
        KVPrecompute(chat, collection="")


@pytest.mark.parametrize("way", ["step", "method", "store", "function"])
def test_a_prefix_of_messages_is_what_the_model_is_shown(chat, chunks, embedding, way):
    prefix = [SystemMessage("Answer from the notes.")]
    if way == "step":
        step = KVPrecompute(chat, prefix=prefix, on_error="raise")
        step.transform_documents([Document(page_content=chunks[0])])
    elif way == "method":
        assert chat.precompute_kv([chunks[0]], prefix=prefix).stored == 1
    elif way == "store":
        KVRagVectorStore.from_texts(
            [chunks[0]], embedding, llm=chat, prefix=prefix, on_error="raise"
        )
    else:
        assert precompute_kv([chunks[0]], llm=chat, prefix=prefix).stored == 1
    spans = chat.explain([*prefix, ("human", f"{chunks[0]}\n\nWho?")]).spans
    assert [span.hit for span in spans if span.kind in ("prefix", "chunk")] == [True, True]


def test_an_error_names_an_option_of_a_component_as_users_write_it(embedding, chat):
    for name, value, options in (
        ("metric", "cosine", {"embedding": embedding}),
        ("batch_size", 0, {"embedding": embedding, "llm": chat}),
    ):
        with pytest.raises(ConfigError, match=f"{name} is {value!r}; it should") as raised:
            KVRagVectorStore(**{name: value}, **options)
        assert "_Options" not in str(raised.value)
