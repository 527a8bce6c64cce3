"""A text that can't be encoded, or that the model can't read: it is named, and costs no other document its KV."""

import json
import warnings
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.messages import HumanMessage
from langchain_core.vectorstores import InMemoryVectorStore
from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode
from server_kit import served
from texts import make_chunks
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

from kvrag import InputError, KVRagClient, KVRagEngine, StoreError, precompute_kv, sync_kv
from kvrag.cli.app import app
from kvrag.testing.models import save_tiny_model, tiny_model
from kvrag.testing.tokenizers import tiny_tokenizer
from kvrag_server import ServerConfig
from langchain_kvrag import ChatKVRag, KVRagVectorStore
from llama_index.llms.kvrag import KVRagLLM as LlamaLLM
from llama_index.llms.kvrag import PrecomputeKV
from llama_index.vector_stores.kvrag import KVRagVectorStore as LlamaStore

TEXTS = make_chunks(5, words=40)
IDS = [f"d{number}" for number in range(5)]
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


def reused(engine: KVRagEngine) -> list[int]:
    """Return the numbers of the texts whose KV is kept."""
    return [
        number
        for number, text in enumerate(TEXTS)
        if engine.prefill(f"{text}\n\nWho?", mode="stitch").cached_tokens > 8
    ]


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
    assert reused(engine) == [0, 1, 3, 4]
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


def test_a_text_that_the_tokenizer_refuses_costs_no_other_its_kv(model, tmp_path):
    """Of words, without a token for unknown words: the backend raises a bare Exception."""
    words = dict.fromkeys([*" ".join(TEXTS).split(), "a", "."])
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    engine = KVRagEngine.from_pretrained(model, tokenizer=tokenizer, kv_dir=tmp_path, context=None)
    report = engine.precompute([*TEXTS[:2], f"{TEXTS[2]} xyzzy", *TEXTS[3:]], ids=IDS)
    assert report.stored == 4
    [(name, reason)] = report.failed
    assert name == "d2"
    assert "the tokenizer can't encode" in reason
    with pytest.raises(InputError, match="can't encode"):
        engine.generate("xyzzy", max_new_tokens=1)


def test_a_begin_token_without_an_embedding_is_refused_in_a_sentence(model, tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<begin>"})
    begin = [("<begin>", len(tokenizer) - 1)]
    template = TemplateProcessing(single="<begin> $A", special_tokens=begin)
    tokenizer.backend_tokenizer.post_processor = template
    engine = KVRagEngine.from_pretrained(model, tokenizer=tokenizer, kv_dir=tmp_path, context=None)
    with pytest.raises(InputError, match=r"<begin>.*embeddings"):
        engine.generate("Who?", max_new_tokens=1)


@every_fault
def test_such_texts_are_counted(model, tokenizer, tmp_path, fault):
    """Splitters and trimmers count all texts, so that a refusal would cost the others theirs."""
    text = f"a {BAD[fault][0]} b"
    chat = ChatKVRag.from_pretrained_model(model, tokenizer, kv_dir=tmp_path, context=None)
    index = LlamaLLM(model=model, tokenizer=tokenizer, kv_dir=tmp_path, context=None)
    assert chat.get_num_tokens(text) > 1
    assert chat.get_num_tokens_from_messages([HumanMessage(text)]) > 1
    assert len(index._token_ids(text)) > 1


STRANGE = "d2\ud835"


@pytest.mark.parametrize("is_remote", [False, True], ids=["engine", "client"])
@pytest.mark.parametrize("kind", ["langchain", "llama_index"])
def test_an_id_that_utf8_cannot_encode_costs_no_other_its_kv(engine, kind, is_remote):
    ids = [*IDS[:2], STRANGE, *IDS[3:]]
    with ExitStack() as stack:
        llm = engine
        if is_remote:
            _, url = stack.enter_context(served(engine, ServerConfig(model_name="tiny")))
            llm = KVRagClient(url)
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        if kind == "langchain":
            store = KVRagVectorStore(InMemoryVectorStore(LengthEmbedding()), llm=llm)
            store.add_texts(TEXTS, ids=ids)
            erase = store.delete
        else:
            index = LlamaStore(llm=llm)
            index.add(
                [
                    node.model_copy(update={"id_": i})
                    for node, i in zip(nodes(TEXTS), ids, strict=True)
                ]
            )
            erase = index.delete_nodes
        assert sorted(engine.document_ids()) == ["d0", "d1", "d3", "d4"]
        erase([STRANGE, "d0", "d1"])
        assert sorted(engine.document_ids()) == ["d3", "d4"]


def test_nodes_of_a_document_whose_id_utf8_cannot_encode_are_erased(engine):
    source = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=STRANGE)}
    index = LlamaStore(llm=engine)
    first, *rest = nodes(TEXTS)
    index.add([first.model_copy(update={"relationships": source}), *rest])
    index.delete(STRANGE)
    assert sorted(engine.document_ids()) == IDS[1:]


def test_an_index_of_such_texts_and_metadata_is_saved_and_loaded(engine, tmp_path):
    store = KVRagVectorStore(embedding=LengthEmbedding(), llm=engine)
    bad = Document(texts_with("half a pair of surrogates")[2], id=STRANGE, metadata={"a": STRANGE})
    with warnings.catch_warnings(action="ignore"):
        store.add_documents([bad, Document(TEXTS[0], id="d0")])
    store.save_local(tmp_path / "index")
    again = KVRagVectorStore.load_local(tmp_path / "index", LengthEmbedding(), llm=engine)
    [found] = again.get_by_ids([STRANGE])
    assert (found.page_content, found.metadata) == (bad.page_content, bad.metadata)


def test_a_file_that_is_no_utf8_costs_no_other_file_its_kv(tiny_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in zip(IDS, TEXTS, strict=True):
        ending = b" caf\xe9" if name == "d2" else b""
        (tmp_path / f"{name}.txt").write_bytes(text.encode() + ending)
    files = [f"{name}.txt" for name in IDS]
    options = ["--model", tiny_dir, "--kv-dir", str(tmp_path / "kv"), "--json"]
    result = CliRunner().invoke(app, ["precompute", *files, *options])
    assert result.exit_code == 1
    done = json.loads(result.stdout)
    assert done["stored"] == 4
    assert [name for name, _ in done["failed"]] == ["d2.txt#0"]


def test_a_file_with_a_token_without_an_embedding_costs_no_other_file_its_kv(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = save_tiny_model(tmp_path / "model")
    late = AutoTokenizer.from_pretrained(folder)
    late.add_tokens(["<late>"])
    late.save_pretrained(folder)
    for name, text in zip(IDS, texts_with("a token without an embedding"), strict=True):
        (tmp_path / f"{name}.txt").write_text(text, "utf-8")
    files = [f"{name}.txt" for name in IDS]
    options = ["--model", folder, "--kv-dir", str(tmp_path / "kv"), "--json"]
    done = json.loads(CliRunner().invoke(app, ["precompute", *files, *options]).stdout)
    assert done["stored"] == 4
    assert [name for name, _ in done["failed"]] == ["d2.txt#0"]
