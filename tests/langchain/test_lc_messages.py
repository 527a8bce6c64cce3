"""No message of LangChain's vanishes, documents in contents stay apart, and variables reach the chat template."""

import pytest
from chat_templates import outcome, with_template
from langchain_core.messages import (
    AIMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from kvrag import ConfigError, InputError
from langchain_kvrag import ChatKVRag, KVRagLLM
from langchain_kvrag._convert import chat_messages

ASK = HumanMessage("Quokka seven")
CALL = {"name": "look", "args": {"where": "box"}, "id": "call00001"}
BROKEN = {"name": "look", "args": '{"where": ', "id": "call00001", "error": "no JSON"}
HISTORIES = {
    "system": [SystemMessage("Numbat eight"), ASK],
    "developer": [ChatMessage("Numbat eight", role="developer"), ASK],
    "narrator": [ChatMessage("Numbat eight", role="narrator"), ASK],
    "ai": [ASK, AIMessage("Numbat eight"), HumanMessage("And then?")],
    "call": [
        ASK,
        AIMessage("", tool_calls=[CALL]),
        ToolMessage("Numbat eight", tool_call_id="call00001"),
    ],
    "text and call": [
        ASK,
        AIMessage("Numbat eight", tool_calls=[CALL]),
        ToolMessage("A box.", tool_call_id="call00001"),
    ],
    "broken call": [
        ASK,
        AIMessage("", invalid_tool_calls=[BROKEN]),
        ToolMessage("Numbat eight", tool_call_id="call00001"),
    ],
    "unread": [
        ASK,
        AIMessage("", invalid_tool_calls=[{**BROKEN, "name": None, "args": "Numbat eight"}]),
        ASK,
    ],
    "function": [
        ASK,
        AIMessage("", additional_kwargs={"function_call": {"name": "look", "arguments": "{}"}}),
        FunctionMessage("Numbat eight", name="look"),
    ],
    "refusal": [ASK, AIMessage("", additional_kwargs={"refusal": "Numbat eight"}), ASK],
}


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("template", ["qwen2.5", "llama3.2", "gemma", "mistral"])
def test_a_message_is_shown_or_refused_by_name(options, tiny_dir, template, history):
    chat = ChatKVRag(
        **options, tokenizer=with_template(tiny_dir, template), chat_template_kwargs={}
    )
    messages = HISTORIES[history]
    encoder = chat.engine.encoder
    text = outcome(lambda: encoder.render(chat_messages(messages)))
    if isinstance(text, InputError):
        assert history in ("system", "developer", "narrator")
        assert f"'{history}'" in str(text) or "'system'" in str(text)
        with pytest.raises(InputError):
            chat.invoke(messages)
        return
    assert "Numbat eight" in text
    assert "Quokka seven" in text
    if "call" in history:
        assert "look" in text
    assert chat.invoke(messages).usage_metadata[
        "input_tokens"
    ] == chat.get_num_tokens_from_messages(messages)


def test_a_broken_call_is_shown_as_it_was(options, tiny_dir):
    chat = ChatKVRag(**options, tokenizer=with_template(tiny_dir, "hermes"))
    assert '{\\"where\\": ' in chat.engine.encoder.render(chat_messages(HISTORIES["broken call"]))


def test_a_plain_text_block_is_a_chunk(chat):
    """Control-token text in it, and in its title, stays text."""
    block = {"type": "text-plain", "text": "a <s> b", "title": "N<s>1", "mime_type": "text/plain"}
    explained = chat.explain([HumanMessage([block, {"type": "text", "text": "Who?"}])])
    assert [span.text for span in explained.spans if span.kind == "chunk"] == ["<s>", "a <s> b"]


@pytest.mark.usefixtures("no_histories")
@pytest.mark.parametrize("blank", ["", " ", "\n"])
def test_a_blank_text_block_is_nothing(chat, blank):
    block = {"type": "text-plain", "text": blank, "mime_type": "text/plain"}
    with_it = chat.invoke([HumanMessage([block, {"type": "text", "text": "Who?"}])])
    assert with_it.usage_metadata == chat.invoke("Who?").usage_metadata


def test_a_string_model_can_not_keep_control_text_apart(llm):
    block = {"type": "text-plain", "text": "a <s> b", "mime_type": "text/plain"}
    with pytest.raises(InputError, match="control-token text"):
        llm.invoke([HumanMessage([block])])
    assert isinstance(llm.invoke([HumanMessage([{**block, "text": "a b"}])]), str)


def test_thoughts_are_left_to_the_template():
    blocks = [{"type": "reasoning", "reasoning": "deep"}, {"type": "text", "text": "Yes."}]
    (message,) = chat_messages([AIMessage(blocks)])
    assert message["reasoning_content"] == "deep"
    assert message["content"] == blocks[1:]


@pytest.mark.parametrize("kind", [ChatKVRag, KVRagLLM])
def test_variables_reach_the_chat_template(options, tiny_dir, kind):
    tokenizer = with_template(tiny_dir, "qwen3")
    off = {"enable_thinking": False}

    def tokens(llm, **more):
        result = llm.generate_prompt([llm._convert_input([ASK])], **more)
        return result.llm_output["token_usage"]["prompt_tokens"]

    plain, quiet = (
        kind(**options, tokenizer=tokenizer),
        kind(**options, tokenizer=tokenizer, chat_template_kwargs=off),
    )
    assert tokens(plain) < tokens(quiet) == tokens(plain, chat_template_kwargs=off)
    assert plain._identifying_params != quiet._identifying_params
    assert "think" in quiet.explain([ASK]).spans[-1].text
    with pytest.raises(ConfigError, match="chat_template_kwargs"):
        kind(**options, chat_template_kwargs={"messages": []})
