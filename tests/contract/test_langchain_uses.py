"""What LangChain's documentation does with any model: trims messages by its tokens, listens to it, and asks many things at once."""

import asyncio
from itertools import product

import pytest
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, trim_messages
from texts import make_chunks

from langchain_kvrag import ChatKVRag, KVRagLLM

CHUNKS = make_chunks(8, words=32)
MESSAGES = [
    SystemMessage("Be short."),
    HumanMessage("Who?"),
    AIMessage("The keeper."),
    HumanMessage("Where?"),
]


@pytest.fixture(scope="module")
def options(tiny_dir, tmp_path_factory):
    options = {
        "model": tiny_dir,
        "kv_dir": str(tmp_path_factory.mktemp("kv")),
        "max_tokens": 6,
        "mode": "stitch",
    }
    ChatKVRag(**options).precompute_kv(CHUNKS)
    return options


@pytest.mark.parametrize("kind", [ChatKVRag, KVRagLLM])
def test_messages_are_counted_as_the_model_is_shown_them(options, kind):
    model, tools = (
        kind(**options),
        [{"name": "find", "description": "Find a ledger.", "parameters": {}}],
    )
    [[answer]] = ChatKVRag(**options).generate([MESSAGES]).generations
    assert (
        model.get_num_tokens_from_messages(MESSAGES)
        == answer.message.usage_metadata["input_tokens"]
    )
    assert (
        model.get_num_tokens_from_messages(MESSAGES, tools)
        > model.get_num_tokens_from_messages(MESSAGES) + 20
    )
    limit = model.get_num_tokens_from_messages(MESSAGES) - 1
    trimmed = trim_messages(MESSAGES, max_tokens=limit, token_counter=model, include_system=True)
    assert (trimmed[0], trimmed[-1]) == (MESSAGES[0], MESSAGES[-1])
    assert model.get_num_tokens_from_messages(trimmed) <= limit
    custom = kind(**options, custom_get_token_ids=lambda text: [7] * len(text))
    assert custom.get_num_tokens_from_messages([HumanMessage("abc")]) == len("Human: abc")


def test_messages_that_a_template_refuses_are_counted_as_text(options, monkeypatch):
    model = ChatKVRag(**options)
    tokenizer = model.engine.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    assert model.get_num_tokens_from_messages([AIMessage("hm")]) == model.get_num_tokens("AI: hm")


@pytest.mark.parametrize("kind", [ChatKVRag, KVRagLLM])
async def test_an_asked_model_that_streams_tells_callbacks(options, kind):
    class Heard(BaseCallbackHandler):
        def on_llm_new_token(self, token, **_):
            pieces.append(token)

    class HeardLater(AsyncCallbackHandler):
        async def on_llm_new_token(self, token, **_):
            pieces.append(token)

    streaming, quiet, pieces = kind(**options, streaming=True), kind(**options), list[str]()
    for model, asynchronous in product((streaming, quiet), (False, True)):
        if asynchronous:
            answer = await model.ainvoke("Who?", config={"callbacks": [HeardLater()]})
        else:
            answer = await asyncio.to_thread(model.invoke, "Who?", config={"callbacks": [Heard()]})
        assert "".join(pieces) == (getattr(answer, "content", answer) if model is streaming else "")
        pieces.clear()


async def test_requests_at_once_are_counted_apart(options):
    """Sixteen requests in one event loop, each of other chunks: every answer's text and accounting is that of a request alone."""
    model = ChatKVRag(**options)
    prompts = [f"{CHUNKS[i % 8]}\n\n{CHUNKS[(i + 1 + i // 8) % 8]}\n\nWho, {i}?" for i in range(16)]

    def made(message):
        info = message.response_metadata["kvrag"]
        return (
            message.content,
            message.usage_metadata,
            [info[k] for k in ("repaired_tokens", "computed_tokens")],
        )

    alone = [made(model.invoke(prompt)) for prompt in prompts]
    together = await asyncio.gather(*map(model.ainvoke, prompts))
    assert list(map(made, together)) == alone
    assert len({str(each) for each in alone}) > 8
    assert all(usage["input_token_details"]["cache_read"] for _, usage, _ in alone)
