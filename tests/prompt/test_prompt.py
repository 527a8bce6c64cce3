"""Rendering, cutting and tokenising; prefixes from whatever the user has."""

import pytest

from kvrag import Chunk, ConfigError, InputError, TemplatePrefix
from kvrag.prompt.prefix import prefix_text
from kvrag.prompt.template import PromptEncoder, cut, merge_live
from kvrag.prompt.tokenizer import Piece
from kvrag.testing.tokenizers import tiny_tokenizer
from kvrag.types import Span


@pytest.fixture
def encoder(tokenizer):
    return PromptEncoder(tokenizer)


def test_cutting_keeps_every_character():
    pieces = [Piece("before CHUNK between CHUNK after"), Piece("given", "chunk", is_given=True)]
    out = cut(pieces, lambda text: [Span(7, 12, "x"), Span(21, 26, "x")])
    assert "".join(p.text for p in out) == "".join(p.text for p in pieces)
    assert [p.kind for p in out] == ["live", "chunk", "live", "chunk", "live", "chunk"]
    assert merge_live([Piece("a"), Piece(""), Piece("b")]) == [Piece("ab")]


def test_white_space_of_a_given_chunk_belongs_to_the_live_text(encoder):
    pieces = merge_live(encoder.pieces(["head", Chunk("\n body \n"), "tail"]))
    assert [(p.text, p.kind) for p in pieces] == [
        ("head\n ", "live"),
        ("body", "chunk"),
        (" \ntail", "live"),
    ]


@pytest.mark.parametrize("chunk", [Chunk(""), Chunk("  "), Chunk(None)])
def test_an_impossible_chunk_is_refused(chunk, encoder):
    with pytest.raises(InputError, match="chunk"):
        encoder.pieces(["a", chunk])


def test_messages_need_a_chat_template():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="no chat template"):
        PromptEncoder(tokenizer).pieces([{"role": "user", "content": "hi"}])
    assert prefix_text(None, PromptEncoder(tokenizer)) == ""
    assert PromptEncoder(tokenizer).pieces("some text") == [Piece("some text")]
    assert PromptEncoder(tokenizer).live_ids("", at_start=True) == [1]


@pytest.mark.parametrize("content", [0, 3, [3], [{"type": "audio"}]])
def test_content_that_would_be_dropped_is_refused(content, encoder):
    with pytest.raises(InputError):
        encoder.render([{"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "of type NoneType"),
        (b"text", "of type bytes"),
        ({"role": "user", "content": "x"}, "of type dict"),
        ([{"role": "user", "content": "x"}, "y"], "a list of dict and str"),
        (["a", 3], "a list of int and str"),
        ([], "is empty"),
        (" \n", "is empty"),
        ([{"content": "x", 3: 4}], r"the keys \['content', 3\]"),
        ([{"role": 3, "content": "x"}], "role of a chat message is 3"),
        ([{"role": "user", "content": b"x"}], "user message is of type bytes"),
        ([{"role": "user", "content": [Chunk(3)]}], "a chunk's text is of type int"),
        ([{"role": "user", "content": "\ud800"}], "UTF-8"),
        ([{"role": "user", "content": [Chunk("a \ud800")]}], "UTF-8"),
        ([Chunk("a \ud800")], "UTF-8"),
    ],
)
def test_what_is_no_prompt_is_named(prompt, message, encoder):
    with pytest.raises(InputError, match=message):
        encoder.pieces(prompt)


def test_empty_content_is_an_empty_message(encoder):
    assert encoder.render([{"role": "assistant", "content": None}]).startswith(
        "<|im_start|>assistant\n<|im_end|>"
    )


# -- prefixes ------------------------------------------------------------------------------------------------------------

HEAD = "<|im_start|>user\n"


def test_the_default_prefix_is_the_head_of_the_chat_template(encoder):
    assert prefix_text(None, encoder) == HEAD


def test_a_prefix_may_be_text_or_messages(encoder):
    assert prefix_text("Read:\n", encoder) == "Read:\n"
    system = [{"role": "system", "content": "Be brief."}]
    assert prefix_text(system, encoder) == f"<|im_start|>system\nBe brief.<|im_end|>\n{HEAD}"
    placed = [*system, {"role": "user", "content": "Read this:\n{context}\n\n{question}"}]
    assert prefix_text(placed, encoder).endswith(f"{HEAD}Read this:\n")
    parts = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}]
    assert prefix_text(parts, encoder) == prefix_text(system, encoder)


def test_a_prefix_may_be_a_langchain_template(encoder):
    prompts = pytest.importorskip("langchain_core.prompts")
    chat = prompts.ChatPromptTemplate.from_messages(
        [
            ("system", "Be brief."),
            ("placeholder", "{history}"),
            ("human", "Read:\n{context}\n\nQ: {question}"),
        ]
    )
    assert prefix_text(chat, encoder) == f"<|im_start|>system\nBe brief.<|im_end|>\n{HEAD}Read:\n"
    plain = prompts.PromptTemplate.from_template("Notes: {docs}\n{question}")
    assert prefix_text(TemplatePrefix(plain, "docs"), encoder) == "Notes: "
    with pytest.raises(ConfigError, match="TemplatePrefix"):
        prefix_text(plain, encoder)
    with pytest.raises(ConfigError, match="no variable 'context'"):
        prefix_text(TemplatePrefix(plain), encoder)
    late = prompts.PromptTemplate.from_template("Q: {question}\n{context}")
    with pytest.raises(ConfigError, match="'question' stands before 'context'"):
        prefix_text(late, encoder)


def test_a_prefix_may_be_a_llama_index_template(encoder):
    prompts = pytest.importorskip("llama_index.core.prompts")
    plain = prompts.PromptTemplate("Context:\n{context_str}\nQ: {query_str}")
    # LlamaIndex sends it as one user message.
    assert prefix_text(plain, encoder) == f"{HEAD}Context:\n"
    core = pytest.importorskip("llama_index.core.llms")
    chat = prompts.ChatPromptTemplate(
        [
            core.ChatMessage(role="system", content="Be brief."),
            core.ChatMessage(role="user", content="C: {context_str} {query_str}"),
        ]
    )
    assert prefix_text(chat, encoder) == f"<|im_start|>system\nBe brief.<|im_end|>\n{HEAD}C: "


def test_a_prefix_of_another_kind_is_refused(encoder):
    with pytest.raises(ConfigError, match="of type int"):
        prefix_text(7, encoder)
