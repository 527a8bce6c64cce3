"""KVPrecompute: a step of a pipeline that changes no document."""

import pytest
from langchain_core.documents import Document
from langchain_core.language_models import FakeListLLM
from lc_kept import kept

from kvrag import ConfigError, InputError, Retention
from langchain_kvrag import KVPrecompute


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
    KVPrecompute(chat, collection="manuals", retention=Retention(60)).transform_documents([document])
    engine = chat.engine
    assert engine.document_ids() == ["manuals/a"]
    (key,) = engine.store.catalog.document_keys(engine.store.names.namespace(engine.namespace), "manuals/a")
    told = engine.store.retention(key)
    assert told is not None
    assert told.priority == 60
    with pytest.warns(UserWarning, match="has no id, and is to be in the collection"):
        KVPrecompute(chat, collection="manuals").transform_documents([Document(page_content=chunks[1])])
    with pytest.raises(InputError, match="collection is"):
        KVPrecompute(chat, collection="")
