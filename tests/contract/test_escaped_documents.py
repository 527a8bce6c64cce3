"""Documents that go into a prompt unjoined: one warning with the remedy, and the cause in every answer."""

import json
import warnings
from typing import Any

import httpx
import pytest
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnablePassthrough
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.schema import NodeWithScore, TextNode
from server_kit import served
from texts import make_chunks

from kvrag import KVRagEngine, StoreConfig
from kvrag_server import ServerConfig
from kvrag_server.app import prepare_process
from langchain_kvrag import ChatKVRag
from langchain_kvrag import KVRagLLM as LangChainLLM
from llama_index.llms.kvrag import KVRagLLM as LlamaIndexLLM

pytestmark = pytest.mark.filterwarnings("ignore:chunks were encoded behind another prefix")

WHOLE, *HALVES = make_chunks(9)
TEXTS = [f"{a}\n\n{b}" for a, b in zip(HALVES[::2], HALVES[1::2], strict=True)]
SHORT = [
    f"Note {n}: \u201cthe\u00a0harbour\u201d \U0001f6a2\n{text}" for n, text in enumerate(TEXTS)
]
ESCAPED = "this prompt has known chunks escaped"
REMEDY = '"\\n\\n".join(d.page_content for d in docs)'
QUESTION = "Who keeps the ledger?"
FORMS = {
    "documents of LangChain": lambda texts: str([Document(t, metadata={"a": 1}) for t in texts]),
    "a document of LangChain": lambda texts: "\n".join(repr(Document(t)) for t in texts),
    "nodes of LlamaIndex": lambda texts: str(
        [NodeWithScore(node=TextNode(text=t), score=0.5) for t in texts]
    ),
    "a list of texts": str,
    "JSON": lambda texts: json.dumps([{"page_content": text} for text in texts]),
    "JSON in Unicode": lambda texts: json.dumps(texts, ensure_ascii=False),
}


def told(caught: Any) -> list[str]:
    return [str(each.message) for each in caught if ESCAPED in str(each.message)]


@pytest.fixture
def engine(tiny_dir, tmp_path):
    engine = KVRagEngine.from_pretrained(tiny_dir, kv_dir=tmp_path / "kv", context=None)
    engine.precompute([WHOLE, *TEXTS, *SHORT])
    yield engine
    engine.close()


@pytest.mark.parametrize("is_beside", [False, True], ids=["alone", "beside a hit"])
@pytest.mark.parametrize("texts", [TEXTS, SHORT], ids=["first parts hit", "no first part"])
@pytest.mark.parametrize("form", FORMS)
def test_escaped_documents_are_named_in_the_answer_and_warned_of_once(
    engine, form, texts, is_beside
):
    mode = "stitch" if is_beside else "auto"
    prompt = "\n\n".join([*[WHOLE] * is_beside, FORMS[form](texts), QUESTION])
    prompts = (
        prompt,
        [{"role": "user", "content": prompt}],
        engine.loaded.encoder.tokenizer.encode(prompt),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [engine.generate(each, max_new_tokens=1, mode=mode) for each in prompts]
    for each, result in zip(prompts, results, strict=True):
        assert result.fallback_reason.count(ESCAPED) == 1
        assert REMEDY in result.fallback_reason
        notes = engine.explain(each, mode=mode).notes
        assert [ESCAPED in note for note in notes].count(True) == 1
    (said,) = told(caught)
    assert REMEDY in said
    assert not any(text[:20] in said for text in (*texts, WHOLE)), "no text of documents"


@pytest.mark.parametrize("mode", ["full", "stitch"])
def test_backslashes_and_joined_texts_are_no_cause(engine, mode):
    code = "Print it as\\nhere: \\nabla \\u00e9 \\x41 'page_content=' Document( and C:\\new. " * 4
    engine.precompute([code])
    prompt = "\n\n".join([code, *TEXTS, f"{code}?", QUESTION])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert engine.generate(prompt, max_new_tokens=1, mode=mode).fallback_reason is None
    assert not told(caught)


def test_they_are_named_where_misses_are_stored(tiny_dir, tmp_path):
    config = StoreConfig(on_miss="store")
    engine = KVRagEngine.from_pretrained(tiny_dir, kv_dir=tmp_path / "kv", store_config=config)
    engine.precompute(TEXTS)
    with pytest.warns(UserWarning, match=ESCAPED):
        engine.generate(f"{TEXTS}\n{QUESTION}", max_new_tokens=1)
    engine.close()


@pytest.mark.parametrize("kind", [ChatKVRag, LangChainLLM, LlamaIndexLLM])
def test_both_frameworks_say_it(kind, tiny_dir, tmp_path):
    llm = kind(model=tiny_dir, kv_dir=str(tmp_path / "kv"), max_tokens=2, mode="stitch")
    llm.engine.precompute(TEXTS)
    if kind is LlamaIndexLLM:
        nodes = [NodeWithScore(node=TextNode(text=text), score=0.5) for text in TEXTS]

        def ask() -> Any:
            return llm.chat([ChatMessage(f"{nodes}\n\n{QUESTION}")]).raw
    else:
        text = "Use the notes.\n{context}\n\n{input}"
        prompt = PromptTemplate.from_template(text)
        if kind is ChatKVRag:
            prompt = ChatPromptTemplate([("human", text)])
        documents = [Document(each) for each in TEXTS]
        given = {"context": lambda _: documents, "input": RunnablePassthrough()}

        def ask() -> Any:
            return (given | prompt | llm).invoke(QUESTION)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            answer = ask()
    assert REMEDY in told(caught)[0]
    assert len(told(caught)) == 1
    if kind is not LangChainLLM:  # whose answers are text alone
        assert ESCAPED in str(getattr(answer, "response_metadata", answer))
    llm.engine.close()


def test_the_server_says_it_in_the_answer_and_on_stderr(engine):
    messages = [{"role": "user", "content": f"{json.dumps(TEXTS)}\n\n{QUESTION}"}]
    with (
        warnings.catch_warnings(record=True) as caught,
        served(engine, ServerConfig(model_name="tiny")) as (_, url),
    ):
        prepare_process()
        for _ in range(2):
            answer = httpx.post(
                f"{url}/v1/chat/completions",
                json={"model": "tiny", "messages": messages, "max_tokens": 2},
                timeout=60,
            )
    assert ESCAPED in json.dumps(answer.json()["kvrag"])
    assert len(told(caught)) == 1
