"""From LangChain's messages and templates to the prompt that the model is shown."""

import pytest
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    ChatMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate

from kvrag import InputError, TemplatePrefix
from langchain_kvrag import ChatKVRag
from langchain_kvrag._convert import chat_messages

PROMPT = ChatPromptTemplate.from_messages(
    [("system", "Answer from the notes."), ("human", "{context}\n\nQuestion: {question}")]
)


# -- messages ------------------------------------------------------------------------------------------------------------


def test_roles():
    call = {"name": "find", "args": {"q": "x"}, "id": "1"}
    history = [
        SystemMessage("s"),
        HumanMessage("h", name="Ann"),
        AIMessage("", tool_calls=[call]),
        ToolMessage("found", tool_call_id="1"),
        AIMessageChunk(content="a"),
        ChatMessage("c", role="critic"),
    ]
    out = chat_messages(history)
    assert [m["role"] for m in out] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "critic",
    ]
    assert out[1]["name"] == "Ann"
    assert out[2]["tool_calls"][0]["function"] == {"name": "find", "arguments": {"q": "x"}}
    assert out[3]["tool_call_id"] == "1"
    with pytest.raises(InputError, match="RemoveMessage"):
        chat_messages([RemoveMessage(id="1")])


def test_text_blocks_are_joined_and_others_refused(chat):
    blocks = [
        {"type": "text", "text": "Who "},
        {"type": "text", "text": "comes?", "cache_control": {"type": "ephemeral"}},
    ]
    assert chat.invoke([HumanMessage(blocks)]).content == chat.invoke("Who comes?").content
    with pytest.raises(InputError, match="'image_url'"):
        chat.invoke([HumanMessage([{"type": "image_url", "image_url": {"url": "data:,"}}])])


def test_the_models_own_tokenizer_counts(chat, tokenizer):
    text = "The keeper brings the box."
    assert chat.get_token_ids(text) == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert chat.get_num_tokens(text) == len(chat.get_token_ids(text))
    custom = ChatKVRag(model=chat.model, custom_get_token_ids=lambda text: [7] * len(text))
    assert custom.get_num_tokens("abc") == 3


# -- prefixes: the first chunk is exact ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prefix",
    [
        PROMPT,
        TemplatePrefix(PROMPT, "context"),
        PROMPT.partial(question="anything"),
        [SystemMessage("Answer from the notes.")],
        [("system", "Answer from the notes."), ("human", "{context}")],
        [{"role": "system", "content": "Answer from the notes."}],
        "<|im_start|>system\nAnswer from the notes.<|im_end|>\n<|im_start|>user\n",
    ],
    ids=["template", "named", "partial", "messages", "tuples", "dicts", "text"],
)
def test_the_first_chunk_behind_the_prefix_is_exact(options, chunks, prefix):
    llm = ChatKVRag(**options, prefix=prefix, context=None)
    llm.precompute_kv(chunks[:2])
    value = PROMPT.invoke({"context": f"{chunks[0]}\n\n{chunks[1]}", "question": "Who?"})
    spans = [span for span in llm.explain(value).spans if span.kind == "chunk"]
    assert [(span.hit, span.exact) for span in spans] == [(True, True), (True, False)]
    message = (PROMPT | llm).invoke({"context": chunks[0], "question": "Who?"})
    assert message.response_metadata["kvrag"]["exactness"] == "exact"
    assert (
        message.content
        == (PROMPT | llm).invoke({"context": chunks[0], "question": "Who?"}, mode="full").content
    )
    llm.engine.close()


SHOTS = [
    HumanMessage("Where?"),
    AIMessage("", tool_calls=[{"name": "find", "args": {"q": "x"}, "id": "1"}]),
    ToolMessage("found", tool_call_id="1"),
    AIMessage("There."),
]


@pytest.mark.parametrize(
    "prompt",
    [
        PromptTemplate.from_template("Read this.\n{context}\n{question}"),
        ChatPromptTemplate([*SHOTS, ("human", "{context}\n{question}")]),
    ],
    ids=["text", "few shots with calls"],
)
def test_the_first_chunk_behind_a_template_of_another_form_is_exact(options, chunks, prompt):
    for prefix in (prompt, TemplatePrefix(prompt, "context")):
        llm = ChatKVRag(**options, prefix=prefix, context=None)
        llm.precompute_kv(chunks[:1])
        message = (prompt | llm).invoke({"context": chunks[0], "question": "Who?"})
        assert message.response_metadata["kvrag"]["exactness"] == "exact"
