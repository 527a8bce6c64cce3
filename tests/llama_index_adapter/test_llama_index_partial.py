"""LlamaIndex cuts documents to the context window: their first parts are reused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.schema import TextNode
from llama_index_kit import chunks, make_llm, record_prompts, settings

from kvrag import precompute_kv
from llama_index.llms.kvrag import KVRagLLM

pytestmark = pytest.mark.filterwarnings("ignore:chunks were encoded behind another prefix")


@pytest.fixture
def llm(tiny_dir: str, tmp_path: Path) -> Iterator[KVRagLLM]:
    llm = make_llm(tiny_dir, tmp_path / "kv", max_new_tokens=3, context_window=1100)
    with settings(llm):
        yield llm
    llm.engine.close()


@pytest.mark.parametrize("mode", ["compact", "tree_summarize"])
def test_documents_that_are_split_to_fit_are_reused_in_part(
    llm: KVRagLLM, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    texts = chunks(6, words=90)
    index = VectorStoreIndex([TextNode(text=text) for text in texts])
    assert precompute_kv(index, llm=llm).stored == 6
    seen = record_prompts(monkeypatch)
    index.as_query_engine(similarity_top_k=6, response_mode=mode).query("Who keeps the ledger?")
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
