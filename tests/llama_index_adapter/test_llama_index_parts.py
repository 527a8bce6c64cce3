"""What a table of chains can't say (tests/contract): exactness, packing, templates of one's own, and parts of chunks."""

import pytest
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.schema import MetadataMode, TextNode
from llama_index_kit import chunks, documents, hit_texts, record_prompts

from kvrag import precompute_kv
from llama_index.vector_stores.kvrag import KVRagVectorStore

pytestmark = pytest.mark.filterwarnings("ignore:chunks were encoded behind another prefix")
QUESTION = "Who keeps the ledger?"
TOP_K = 4


def test_the_readmes_recipe_has_nodes_with_metadata_exact_right_behind_the_prefix(llm, monkeypatch):
    context = StorageContext.from_defaults(vector_store=KVRagVectorStore(content="llm"))
    index = VectorStoreIndex.from_documents(
        documents(6, has_metadata=True), storage_context=context
    )
    seen = record_prompts(monkeypatch)
    nodes = index.as_query_engine(similarity_top_k=TOP_K).query(QUESTION).source_nodes
    assert hit_texts(llm.engine, seen) == {
        scored.node.get_content(metadata_mode=MetadataMode.LLM) for scored in nodes
    }
    assert [span.exact for span in llm.engine.explain(seen[0]).spans if span.kind == "chunk"] == [
        True,
        *[False] * (TOP_K - 1),
    ]


def test_a_full_context_is_packed_and_still_fits(llm, monkeypatch):
    nodes = [TextNode(text=text) for text in chunks(60)]
    index = VectorStoreIndex(nodes)
    llm.precompute_kv(nodes)
    seen = record_prompts(monkeypatch)
    index.as_query_engine(similarity_top_k=60).query(QUESTION)
    assert len(seen) > 1
    assert len(hit_texts(llm.engine, seen)) > 45


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
