"""No message of LlamaIndex's vanishes, citable blocks stay apart, and variables reach the chat template."""

import pytest
from chat_templates import outcome, with_template
from llama_index.core.base.llms.types import (
    ChatMessage,
    CitableBlock,
    DocumentBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from kvrag import ConfigError, InputError
from llama_index.llms.kvrag.prompts import chat_prompt

ASK = ChatMessage("Quokka seven")
FUNCTION = {"name": "look", "arguments": "{}"}


def shown(llm, messages):
    prompt = chat_prompt(llm, messages, llm.engine.encoder, ())
    return (
        prompt
        if isinstance(prompt, str)
        else "".join(p.text for p in llm.engine.encoder.pieces(prompt))
    )


@pytest.mark.parametrize("role", list(MessageRole))
@pytest.mark.parametrize("template", ["qwen2.5", "llama3.2", "gemma", "mistral"])
def test_a_message_is_shown_or_refused_by_name(make, tiny_dir, template, role):
    llm = make(tokenizer=with_template(tiny_dir, template))
    messages = [ChatMessage("Numbat eight", role=role), ASK]
    text = outcome(lambda: shown(llm, messages))
    if isinstance(text, InputError):
        assert f"'{role.value}'" in str(text)
        return
    assert "Numbat eight" in text
    assert "Quokka seven" in text


@pytest.mark.parametrize("template", ["qwen2.5", "llama3.2", "gemma"])
def test_what_openai_keeps_beside_the_text_is_shown(make, tiny_dir, template):
    llm = make(tokenizer=with_template(tiny_dir, template))
    called = ChatMessage(role="assistant", additional_kwargs={"function_call": FUNCTION})
    text = shown(
        llm,
        [
            ASK,
            called,
            ChatMessage("Numbat eight", role="function", additional_kwargs={"name": "look"}),
        ],
    )
    assert "look" in text
    assert "Numbat eight" in text
    both = [
        TextBlock(text="Let me see."),
        ToolCallBlock(tool_call_id="a", tool_name="look", tool_kwargs={}),
    ]
    text = shown(llm, [ASK, ChatMessage(role="assistant", blocks=both), ASK])
    assert "Let me see." in text
    assert "look" in text
    refused = ChatMessage(role="assistant", additional_kwargs={"refusal": "Never."})
    assert "Never." in shown(llm, [ASK, refused, ASK])


def test_a_citable_block_is_a_chunk(llm):
    """Control-token text in it, and in titles, stays text."""
    inner = DocumentBlock(title="M<s>2", data=b"c", document_mimetype="text/plain")
    block = CitableBlock(title="N<s>1", source="a", content=[TextBlock(text="a <s> b"), inner])
    explained = llm.explain([ChatMessage(blocks=[block, TextBlock(text="Who?")])])
    chunks = [span.text for span in explained.spans if span.kind == "chunk"]
    assert chunks == ["<s>", "a <s> b", "<s>", "c"]
    assert (
        llm.chat([ChatMessage(blocks=[block, TextBlock(text="Who?")])]).raw["usage"][
            "prompt_tokens"
        ]
        == explained.prompt_tokens
    )


@pytest.mark.parametrize("blank", ["", " ", "\n"])
def test_blank_text_of_a_citable_block_is_nothing(llm, blank):
    block = CitableBlock(title="Notes", source="a.txt", content=[TextBlock(text=blank)])
    asked = llm.chat([ChatMessage(blocks=[block, TextBlock(text="Who?")])]).raw["usage"]
    assert asked["prompt_tokens"] == llm.chat([ChatMessage("Who?")]).raw["usage"]["prompt_tokens"]


def test_thoughts_are_left_to_the_template(make, tiny_dir):
    llm = make(tokenizer=with_template(tiny_dir, "qwen3"))
    thinking = ChatMessage(
        role="assistant", blocks=[ThinkingBlock(content="deep"), TextBlock(text="Yes.")]
    )
    assert "deep" in shown(llm, [ASK, thinking])
    assert "deep" not in shown(llm, [ASK, thinking, ASK])


def test_variables_reach_the_chat_template(make, tiny_dir):
    tokenizer, off = with_template(tiny_dir, "qwen3"), {"enable_thinking": False}
    plain, quiet = make(tokenizer=tokenizer), make(tokenizer=tokenizer, chat_template_kwargs=off)

    def tokens(llm, **more):
        asked = llm.complete("Who?", **more), llm.chat([ASK], **more)
        return [response.raw["usage"]["prompt_tokens"] for response in asked]

    assert tokens(plain) != tokens(quiet) == tokens(plain, chat_template_kwargs=off)
    assert "think" in plain.explain([ASK], chat_template_kwargs=off).spans[-1].text
    with pytest.raises(ConfigError, match="chat_template_kwargs"):
        make(chat_template_kwargs={"messages": []})


def test_the_last_message_is_continued(llm):
    last = ChatMessage("The keeper", role="assistant")
    assert (
        llm.explain([ASK, last], continue_final_message=True).spans[-1].text.endswith("The keeper")
    )
