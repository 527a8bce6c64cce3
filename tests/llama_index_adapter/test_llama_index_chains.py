"""Every normal way of LlamaIndex to ask must find the chunks again."""

import pytest
from llama_index.core import PromptTemplate, StorageContext, VectorStoreIndex
from llama_index.core.postprocessor import LongContextReorder
from llama_index.core.schema import MetadataMode, TextNode
from llama_index_kit import chunks, documents, hit_texts, record_prompts

from kvrag import precompute_kv
from llama_index.vector_stores.kvrag import KVRagVectorStore

pytestmark = pytest.mark.filterwarnings("ignore:chunks were encoded behind another prefix")
QUESTION = "Who keeps the ledger?"
TOP_K = 4
AWKWARD = (
    'She said: "keep {this} box", then \\n was written',
    "first line\r\nsecond line\twith a tab and a\u00a0wide space",
    "  spaces   before,  inside   and after   ",
    "<|im_end|> is a token of the model, and here it is text; {{ braces }} and {query_str} stay",
)


@pytest.fixture(params=[False, True], ids=["plain", "with metadata"])
def index(llm, request):
    index = VectorStoreIndex.from_documents(documents(6, has_metadata=request.param))
    report = precompute_kv(index, llm=llm)
    assert (report.stored, report.failed) == (6, [])
    return index


@pytest.mark.parametrize("mode", ["compact", "refine", "tree_summarize", "accumulate", "compact_accumulate"])
def test_response_modes(llm, index, monkeypatch, mode):
    seen = record_prompts(monkeypatch)
    response = index.as_query_engine(similarity_top_k=TOP_K, response_mode=mode).query(QUESTION)
    wanted = {scored.node.get_content() for scored in response.source_nodes}
    assert len(wanted) == TOP_K
    assert hit_texts(llm.engine, seen) == wanted
    assert llm.engine.stats()["cached_tokens"] > 0


def test_the_readmes_recipe_has_nodes_with_metadata_exact_right_behind_the_prefix(llm, monkeypatch):
    context = StorageContext.from_defaults(vector_store=KVRagVectorStore(content="llm"))
    index = VectorStoreIndex.from_documents(documents(6, has_metadata=True), storage_context=context)
    seen = record_prompts(monkeypatch)
    nodes = index.as_query_engine(similarity_top_k=TOP_K).query(QUESTION).source_nodes
    assert hit_texts(llm.engine, seen) == {scored.node.get_content(metadata_mode=MetadataMode.LLM) for scored in nodes}
    assert [span.exact for span in llm.engine.explain(seen[0]).spans if span.kind == "chunk"] == [
        True,
        *[False] * (TOP_K - 1),
    ]


@pytest.mark.parametrize("mode", ["context", "condense_question", "condense_plus_context"])
def test_chat_engines(llm, index, monkeypatch, mode):
    chat = index.as_chat_engine(chat_mode=mode, similarity_top_k=TOP_K)
    for turn in (QUESTION, "And in winter?"):
        seen = record_prompts(monkeypatch)
        response = chat.chat(turn)
        wanted = {scored.node.get_content() for scored in response.source_nodes}
        assert len(wanted) == TOP_K
        assert hit_texts(llm.engine, seen) == wanted
    assert llm.engine.stats()["cached_tokens"] > 0


async def test_asynchronous_and_streaming_engines(llm, index, monkeypatch):
    plain = index.as_query_engine(similarity_top_k=TOP_K)
    streaming = index.as_query_engine(similarity_top_k=TOP_K, streaming=True)
    seen = record_prompts(monkeypatch)
    answers = [
        str(plain.query(QUESTION)),
        str(await plain.aquery(QUESTION)),
        "".join(streaming.query(QUESTION).response_gen),
        "".join([delta async for delta in (await streaming.aquery(QUESTION)).response_gen]),
    ]
    assert len(set(seen)) == 1
    assert len(set(answers)) == 1
    assert len(hit_texts(llm.engine, seen)) == TOP_K


def test_chunks_with_awkward_text(llm, monkeypatch):
    bodies = [f"{text} {body}" for text, body in zip(AWKWARD, chunks(4), strict=True)]
    nodes = [TextNode(text=f"\n{body}\n" if i % 2 else body) for i, body in enumerate(bodies)]
    index = VectorStoreIndex(nodes)
    precompute_kv(index, llm=llm)
    seen = record_prompts(monkeypatch)
    engine = index.as_query_engine(similarity_top_k=4, node_postprocessors=[LongContextReorder()])
    engine.query(QUESTION)
    assert hit_texts(llm.engine, seen) == {body.strip() for body in bodies}


def test_a_full_context_is_packed_and_still_fits(llm, monkeypatch):
    nodes = [TextNode(text=text) for text in chunks(60)]
    index = VectorStoreIndex(nodes)
    llm.precompute_kv(nodes)
    seen = record_prompts(monkeypatch)
    index.as_query_engine(similarity_top_k=60).query(QUESTION)
    assert len(seen) > 1
    assert len(hit_texts(llm.engine, seen)) > 45


def test_predict_with_a_template_of_ones_own(llm, monkeypatch):
    texts = chunks(3)
    llm.precompute_kv(texts)
    seen = record_prompts(monkeypatch)
    llm.predict(PromptTemplate("Notes:\n{notes}\n\n{question}"), notes="\n* ".join(texts), question=QUESTION)
    assert hit_texts(llm.engine, seen) == set(texts)


@pytest.mark.parametrize("mode", ["compact", "tree_summarize"])
def test_documents_that_are_split_to_fit_are_reused_in_part(make, monkeypatch, mode):
    llm = make(max_new_tokens=3, context_window=1100)
    llm.apply_settings()
    texts = chunks(6, words=90)
    index = VectorStoreIndex([TextNode(text=text) for text in texts])
    assert precompute_kv(index, llm=llm).stored == 6
    seen = record_prompts(monkeypatch)
    index.as_query_engine(similarity_top_k=6, response_mode=mode).query(QUESTION)
    spans = [span for prompt in seen for span in llm.engine.explain(prompt, mode="stitch").spans]
    cut = [span for span in spans if span.kind == "chunk" and span.hit and span.text not in texts]
    assert cut
    for span in cut:
        assert any(text.startswith(span.text) for text in texts)
        assert str(span.reason).startswith("first ")
    for prompt in seen:
        reused, full = (llm.engine.prefill(prompt, mode=mode) for mode in ("prefix", "full"))
        assert reused.prompt_ids == full.prompt_ids
        assert float((reused.logits - full.logits).abs().max()) < 1e-3
