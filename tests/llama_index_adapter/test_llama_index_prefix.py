"""What stands before the first chunk: out of the box, and with templates of the user."""

from typing import Any

import pytest
from llama_index.core import ChatPromptTemplate, PromptTemplate, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import RichPromptTemplate, SelectorPromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TREE_SUMMARIZE_PROMPT_SEL
from llama_index_kit import chunks, documents, hit_texts, record_prompts
from transformers import AutoTokenizer

from kvrag import ConfigError, TemplatePrefix, precompute_kv
from llama_index.llms.kvrag import KVRagLLM

QUESTION = "Who keeps the ledger?"
RULES = "Answer from these notes only.\n"


def first_chunk_is_exact(
    llm: KVRagLLM, monkeypatch: pytest.MonkeyPatch, **engine_options: Any
) -> bool:
    """Index three documents, ask, and look at the first chunk in the prompt."""
    index = VectorStoreIndex.from_documents(
        documents(3, has_metadata=engine_options.pop("has_metadata", False))
    )
    content = engine_options.pop("content", "text")
    llm.precompute_kv(index, content=content)
    seen = record_prompts(monkeypatch)
    index.as_query_engine(llm=llm, similarity_top_k=3, **engine_options).query(QUESTION)
    assert len(seen) == 1
    assert len(hit_texts(llm.engine, seen)) == 3
    spans = [
        span for span in llm.engine.explain(seen[0], mode="stitch").spans if span.kind == "chunk"
    ]
    return spans[0].exact


def without_chat_template(tiny_dir: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    tokenizer.chat_template = None
    return tokenizer


def test_the_first_chunk_of_the_default_query_engine_is_exact(make, monkeypatch):
    llm = make()
    assert first_chunk_is_exact(llm, monkeypatch)
    assert llm.engine.prefix_text.endswith("Context information is below.\n---------------------\n")
    assert llm.engine.prefix_text.startswith("<|im_start|>system\nYou are an expert Q&A system")


def test_one_chunk_alone_is_answered_exactly(make):
    llm = make(mode="auto")
    index = VectorStoreIndex.from_documents(documents(1))
    llm.precompute_kv(index)
    index.as_query_engine(llm=llm).query(QUESTION)
    assert llm.engine.stats()["requests_exact"] == 1


def test_a_system_prompt_is_part_of_the_prefix(make, monkeypatch):
    llm = make(system_prompt="You are a keeper.")
    assert first_chunk_is_exact(llm, monkeypatch)
    assert llm.engine.prefix_text.startswith(
        "<|im_start|>system\nYou are a keeper.\n\nYou are an expert"
    )


def test_a_model_without_chat_template_gets_the_text_prompt(tiny_dir, make, monkeypatch):
    llm = make(
        tokenizer=without_chat_template(tiny_dir),
        completion_to_prompt=lambda completion: f"### {completion}",
    )
    assert first_chunk_is_exact(llm, monkeypatch)
    assert llm.engine.prefix_text == "### Context information is below.\n---------------------\n"


@pytest.mark.parametrize(("content", "is_exact"), [("text", False), ("llm", True)])
def test_metadata_before_the_text_is_glue_unless_it_is_precomputed_too(
    make, monkeypatch, content, is_exact
):
    assert first_chunk_is_exact(make(), monkeypatch, has_metadata=True, content=content) == is_exact


TEXT = PromptTemplate(RULES + "{context_str}\nQuestion: {query_str}")
CHAT = ChatPromptTemplate.from_messages(
    [("system", "You are brief."), ("user", RULES + "{context_str}\n\n{query_str}")]
)
TEMPLATES = {
    "text": TEXT,
    "chat": CHAT,
    "rich": RichPromptTemplate(
        '{% chat role="system" %}Be brief.{% endchat %}{% chat role="user" %}Notes:\n{{ context_str }}\nQ: {{ query_str }}{% endchat %}'
    ),
    "partial": PromptTemplate("{tone}\n{context_str}\n{query_str}").partial_format(tone="Be kind."),
    "renamed": PromptTemplate(
        RULES + "{notes}\n{question}",
        template_var_mappings={"context_str": "notes", "query_str": "question"},
    ),
    "selector": SelectorPromptTemplate(
        TEXT, conditionals=[(lambda llm: llm.metadata.is_chat_model, CHAT)]
    ),
}


@pytest.mark.parametrize(
    ("name", "is_named"),
    [*((name, False) for name in TEMPLATES), ("text", True), ("selector", True)],
)
def test_templates_of_the_user_give_the_prefix(make, monkeypatch, name, is_named):
    template = TEMPLATES[name]
    prefix = TemplatePrefix(template, "context_str") if is_named else template
    assert first_chunk_is_exact(make(prefix=prefix), monkeypatch, text_qa_template=template)


def test_a_template_may_be_given_when_precomputing(make):
    llm = make()
    text = chunks(1)[0]
    rendered = f"<|im_start|>user\n{RULES}{text}"
    for precompute in (llm.precompute_kv, lambda items, **kw: precompute_kv(items, llm=llm, **kw)):
        precompute([text], prefix=TEXT)
        assert [s.exact for s in llm.engine.explain(rendered, mode="stitch").spans] == [True, True]
        llm.engine.delete(llm.engine.document_ids())


def test_other_modes_have_other_prefixes(make, monkeypatch):
    llm = make(prefix=DEFAULT_TREE_SUMMARIZE_PROMPT_SEL)
    assert first_chunk_is_exact(llm, monkeypatch, response_mode="tree_summarize")


def test_messages_and_text_are_prefixes(make):
    messages = [ChatMessage(role="system", content="Be brief.")]
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    assert make(prefix=messages).engine.prefix_text == expected
    assert make(prefix=[{"role": "system", "content": "Be brief."}]).engine.prefix_text == expected
    assert make(prefix=expected).engine.prefix_text == expected


def test_a_question_before_the_context_is_refused(make):
    llm = make(prefix=PromptTemplate("{query_str}\n{context_str}"))
    with pytest.raises(ConfigError, match="'query_str' stands before 'context_str'"):
        llm.precompute_kv(chunks(1))
