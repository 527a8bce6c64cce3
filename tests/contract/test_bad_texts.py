"""A text that can't be encoded, or that the model can't read: it is named, and costs no other document its KV."""

import json
import warnings
from typing import Any

import httpx
import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore
from llama_index.core.schema import TextNode
from server_kit import served
from texts import make_chunks

from kvrag import InputError, KVRagClient, KVRagEngine, StoreError, precompute_kv, sync_kv
from kvrag.server import ServerConfig
from kvrag.testing.models import tiny_model
from kvrag.testing.tokenizers import tiny_tokenizer
from langchain_kvrag import KVRagVectorStore
from llama_index.llms.kvrag import PrecomputeKV
from llama_index.vector_stores.kvrag import KVRagVectorStore as LlamaStore

TEXTS = make_chunks(5, words=40)
IDS = [f"d{number}" for number in range(5)]
GOOD = ["d0", "d1", "d3", "d4"]
BAD = {
    "half a pair of surrogates": ("\ud835", "UTF-8"),
    "a token without an embedding": ("<late>", "embeddings"),
}


class LengthEmbedding(Embeddings):
    """Embeddings of any text; real ones replace what they can't encode."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [[float(len(text)), 1.0] for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return [1.0, 1.0]


every_fault = pytest.mark.parametrize("fault", BAD)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture
def tokenizer():
    """A tokenizer that has learnt a token since the model was made."""
    made = tiny_tokenizer()
    made.add_tokens(["<late>"])
    return made


@pytest.fixture
def engine(model, tokenizer, tmp_path):
    return KVRagEngine.from_pretrained(model, tokenizer=tokenizer, kv_dir=tmp_path, context=None)


def texts_with(fault: str) -> list[str]:
    return [*TEXTS[:2], f"{TEXTS[2]} {BAD[fault][0]} the end", *TEXTS[3:]]


def to_engine(engine: KVRagEngine, texts: list[str]) -> Any:
    return engine.precompute(texts, ids=IDS).failed


def to_hook(engine: KVRagEngine, texts: list[str]) -> Any:
    with pytest.raises(StoreError, match="d2"):
        precompute_kv(texts, llm=engine, ids=IDS)


def to_sync(engine: KVRagEngine, texts: list[str]) -> Any:
    return sync_kv(texts, llm=engine, ids=IDS).precompute.failed


def to_langchain(engine: KVRagEngine, texts: list[str]) -> Any:
    llm = engine
    store = KVRagVectorStore(embedding=LengthEmbedding(), llm=llm)
    store.add_documents([Document(text, id=name) for text, name in zip(texts, IDS, strict=True)])
    return sync_kv(store, llm=llm).precompute.failed


def to_wrapped(engine: KVRagEngine, texts: list[str]) -> None:
    inner = InMemoryVectorStore(LengthEmbedding())
    KVRagVectorStore(inner, llm=engine).add_texts(texts, ids=IDS)


def nodes(texts: list[str]) -> list[TextNode]:
    return [
        TextNode(text=text, id_=name, embedding=[0.1] * 4)
        for text, name in zip(texts, IDS, strict=True)
    ]


def to_llama_index(engine: KVRagEngine, texts: list[str]) -> None:
    LlamaStore(llm=engine).add(nodes(texts))


def to_transform(engine: KVRagEngine, texts: list[str]) -> None:
    PrecomputeKV(llm=engine)(nodes(texts))


def to_client(engine: KVRagEngine, texts: list[str]) -> Any:
    with served(engine, ServerConfig(model_name="tiny")) as (_, url):
        return KVRagClient(url).precompute(texts, ids=IDS).failed


def to_server(engine: KVRagEngine, texts: list[str]) -> Any:
    documents = [{"id": name, "text": text} for name, text in zip(IDS, texts, strict=True)]
    with served(engine, ServerConfig(model_name="tiny")) as (_, url):
        answer = httpx.post(
            f"{url}/v1/kv/precompute",
            content=json.dumps({"documents": documents}),
            headers={"content-type": "application/json"},
        )
    assert answer.status_code == 200
    return answer.json()["failed"]


WAYS = [
    *(to_engine, to_hook, to_sync, to_langchain, to_wrapped),
    *(to_llama_index, to_transform, to_client, to_server),
]


@every_fault
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_one_bad_text_costs_no_other_document_its_kv(engine, way, fault):
    engine.precompute([TEXTS[2]], ids=["d2"])  # the document's former text, whose KV goes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        failed = way(engine, texts_with(fault))
    assert sorted(engine.document_ids()) == GOOD
    if failed is not None:
        [(name, reason)] = failed
        assert name == "d2"
        assert BAD[fault][1] in reason


def test_an_id_that_utf8_cannot_encode_is_reported_like_a_text(engine):
    report = engine.precompute(TEXTS, ids=[*IDS[:4], "d\ud835"])
    assert report.stored == 4
    [(name, reason)] = report.failed
    assert name == "d\\ud835"
    assert "UTF-8" in reason


def test_a_bad_text_without_an_id_is_named_by_its_place(engine):
    report = engine.precompute(texts_with("half a pair of surrogates"))
    assert (report.stored, report.failed[0][0]) == (4, "text 2")


@every_fault
def test_a_question_with_such_text_is_refused_in_a_sentence(engine, fault):
    sign, word = BAD[fault]
    message = [{"role": "user", "content": f"a {sign} b"}]
    for ask in (
        lambda: engine.generate(f"{sign} hello"),
        lambda: engine.generate(message, max_new_tokens=1),
        lambda: engine.prefill(f"{TEXTS[0]} {sign}", mode="stitch"),
        lambda: engine.score("Who?", f" {sign}"),
        lambda: engine.precompute(TEXTS, prefix=f"{sign} of yours"),
    ):
        with pytest.raises(InputError, match=word):
            ask()


def test_a_server_answers_such_a_question_with_400(engine):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a <late> b"}]}
    with served(engine, ServerConfig(model_name="tiny")) as (_, url):
        answer = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "embeddings" in answer.json()["error"]["message"]
