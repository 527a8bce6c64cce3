"""The official client, and others that speak to OpenAI, against a real socket."""

import asyncio
import json

import openai
import pytest

ASK = "Who reads?"


def prompt_of(chunks):
    return [{"role": "user", "content": "\n\n".join([*chunks, ASK])}]


@pytest.fixture
def asked(chunks):
    return {"model": "tiny", "messages": prompt_of(chunks), "max_tokens": 6, "temperature": 0}


def test_an_answer_is_the_engines(client, engine, asked):
    got = client.chat.completions.create(**asked)
    want = engine.generate(asked["messages"], max_new_tokens=6)
    assert got.choices[0].message.content == want.text
    assert got.choices[0].finish_reason == want.finish_reason == "length"
    assert got.usage.prompt_tokens == want.prompt_tokens
    assert got.usage.completion_tokens == 6
    assert got.usage.prompt_tokens_details.cached_tokens == want.cached_tokens > 0
    assert got.kvrag[0]["exactness"] == want.exactness == "repaired"


@pytest.mark.parametrize("trace", [False, True])
def test_a_stream_adds_up_to_the_answer_and_ends_with_the_usage(client, asked, trace):
    whole = client.chat.completions.create(**asked)
    traced, counted = {"kvrag": {"trace": True}}, {"stream_options": {"include_usage": True}}
    own = {"stream": True, "extra_body": traced if trace else counted}
    chunks = list(client.chat.completions.create(**asked, **own))
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (
        "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
        == whole.choices[0].message.content
    )
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == [
        "length"
    ]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert ("tokens" in chunks[-1].kvrag[0]) == trace
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_text_completions_take_several_prompts_and_several_choices(client, engine):
    got = client.completions.create(
        model="tiny", prompt=["One", "Two"], max_tokens=4, temperature=1, seed=3, n=2
    )
    want = [
        engine.generate(prompt, max_new_tokens=4, temperature=1.0, seed=3 + i).text
        for prompt in ("One", "Two")
        for i in range(2)
    ]
    assert [choice.text for choice in got.choices] == want
    assert len(set(want)) > 2
    pieces = client.completions.create(
        model="tiny", prompt="One", max_tokens=4, seed=3, n=2, stream=True, temperature=1
    )
    texts = ["", ""]
    for piece in pieces:
        for choice in piece.choices:
            texts[choice.index] += choice.text
    assert texts == want[:2]


def test_documents_in_the_body_are_reused(client, chunks):
    ask = [{"role": "user", "content": ASK}]
    own = {"documents": [{"text": text} for text in chunks], "mode": "stitch"}
    body = {"kvrag": own | {"repair": {"strategy": "none"}}}
    got = client.chat.completions.create(
        model="tiny", messages=ask, max_tokens=2, temperature=0, extra_body=body
    )
    assert got.kvrag[0]["cached_tokens"] > 100
    assert got.kvrag[0]["repaired_tokens"] == 0
    plain = client.chat.completions.create(model="tiny", messages=ask, max_tokens=2)
    assert plain.kvrag[0]["cached_tokens"] < 50


def test_stop_strings_end_an_answer(client, asked):
    whole = client.chat.completions.create(**asked).choices[0].message.content
    got = client.chat.completions.create(**asked, stop=[whole[3:5]]).choices[0]
    assert (got.message.content, got.finish_reason) == (whole[:3].partition(whole[3:5])[0], "stop")


async def test_many_at_once_each_get_their_own_answer(url, engine, chunks):
    orders = [chunks[i:] + chunks[:i] for i in range(4)] * 3
    want = [engine.generate(prompt_of(order), max_new_tokens=4).text for order in orders]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:

        async def ask(i):
            options = {"model": "tiny", "messages": prompt_of(orders[i]), "max_tokens": 4}
            options["temperature"] = 0
            if i % 2:
                return (await client.chat.completions.create(**options)).choices[0].message.content
            stream = await client.chat.completions.create(**options, stream=True)
            return "".join([piece.choices[0].delta.content or "" async for piece in stream])

        assert await asyncio.gather(*map(ask, range(len(orders)))) == want


def test_langchain_openai_and_llama_index_speak_to_it(url, engine, asked):
    from langchain_openai import ChatOpenAI
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    want, text = (
        engine.generate(asked["messages"], max_new_tokens=6),
        asked["messages"][0]["content"],
    )
    options = {"temperature": 0, "max_tokens": 6, "api_key": "none"}
    chat = ChatOpenAI(model="tiny", base_url=f"{url}/v1", **options)
    message = chat.invoke(text)
    assert message.content == want.text
    assert message.usage_metadata["input_token_details"]["cache_read"] == want.cached_tokens
    assert "".join(piece.content for piece in chat.stream(text)) == want.text
    llm = OpenAILike(model="tiny", api_base=f"{url}/v1", is_chat_model=True, **options)
    assert llm.chat([ChatMessage(role="user", content=text)]).message.content == want.text
    assert [
        piece.message.content for piece in llm.stream_chat([ChatMessage(role="user", content=text)])
    ][-1] == want.text


TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Finds a keeper.",
        "parameters": {
            "type": "object",
            "properties": {"box": {"enum": ["red", "blue"]}},
            "required": ["box"],
        },
    },
}


def test_tools_are_called_whole_and_in_a_stream(client, asked):
    options = {**asked, "max_tokens": 60, "tools": [TOOL], "tool_choice": "required"}
    whole = client.chat.completions.create(**options).choices[0]
    (call,) = whole.message.tool_calls
    assert (call.function.name, whole.finish_reason, whole.message.content) == (
        "look_up",
        "tool_calls",
        None,
    )
    assert json.loads(call.function.arguments)["box"] in ("red", "blue")
    choices = [piece.choices[0] for piece in client.chat.completions.create(**options, stream=True)]
    (streamed,) = [choice.delta.tool_calls[0] for choice in choices if choice.delta.tool_calls]
    assert (streamed.index, streamed.function) == (
        0,
        type(streamed.function)(**call.function.model_dump()),
    )
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]
    history = [
        whole.message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "The keeper is Ann."},
    ]
    again = client.chat.completions.create(
        **{**asked, "messages": [*asked["messages"], *history]}, tools=[TOOL]
    )
    assert again.usage.prompt_tokens > 10


def test_an_answer_has_the_form_that_was_asked_for(client, asked):
    schema = {
        "type": "object",
        "properties": {"box": {"enum": ["red", "blue"]}},
        "required": ["box"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "box", "schema": schema}}
    got = client.chat.completions.create(
        **{**asked, "max_tokens": 40}, response_format=form
    ).choices[0]
    assert json.loads(got.message.content)["box"] in ("red", "blue")
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.chat.completions.create(**asked, response_format={"type": "grammar"})


def test_logprobs_are_openais_whole_and_streamed(client, engine, asked):
    ask = {**asked, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**ask).choices[0].logprobs.content
    want = engine.generate(asked["messages"], max_new_tokens=6, logprobs=2).logprobs
    assert [each.logprob for each in whole] == pytest.approx(
        [each.logprob for each in want], abs=1e-4
    )
    assert [len(each.top_logprobs) for each in whole] == [2] * 6
    assert [each.bytes for each in whole if each.token.encode() == bytes(each.bytes)]
    pieces = [
        piece.choices[0].logprobs for piece in client.chat.completions.create(**ask, stream=True)
    ]
    streamed = [each for piece in pieces if piece for each in piece.content]
    assert [each.bytes for each in streamed] == [each.bytes for each in whole]
    assert [each.logprob for each in streamed] == pytest.approx(
        [each.logprob for each in whole], abs=1e-4
    )
    assert client.chat.completions.create(**asked).choices[0].logprobs is None
    text = client.chat.completions.create(**asked).choices[0].message.content
    pieces = list(
        client.chat.completions.create(
            **ask, stop=[text[:3]], stream=True, stream_options={"include_usage": True}
        )
    )
    told = [piece.choices[0].logprobs for piece in pieces[:-1]]
    # The stop string's too.
    assert sum(len(piece.content) for piece in told if piece) == pieces[-1].usage.completion_tokens
    with pytest.raises(openai.BadRequestError, match="top_logprobs"):
        client.chat.completions.create(**asked, top_logprobs=2)


def test_logprobs_of_text_completions_are_openais_whole_and_streamed(client):
    ask = {
        "model": "tiny",
        "prompt": "One",
        "max_tokens": 6,
        "temperature": 1,
        "seed": 3,
        "logprobs": 2,
        "n": 2,
    }
    whole = client.completions.create(**ask).choices
    for choice in whole:
        told = choice.logprobs
        for token, at in zip(told.tokens, told.text_offset, strict=True):
            assert token.startswith("bytes:") or choice.text[at : at + len(token)] == token
        assert [
            top[token] for top, token in zip(told.top_logprobs, told.tokens, strict=True)
        ] == told.token_logprobs
        assert all(2 <= len(top) <= 3 for top in told.top_logprobs)
    streamed = [{}, {}]
    for piece in client.completions.create(**ask, stream=True):
        for choice in piece.choices:
            for name, values in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
                streamed[choice.index].setdefault(name, []).extend(values)
    for got, choice in zip(streamed, whole, strict=True):
        assert (got["tokens"], got["text_offset"]) == (
            choice.logprobs.tokens,
            choice.logprobs.text_offset,
        )
        assert got["token_logprobs"] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)


def test_penalties_and_biases_reach_the_sampler(client, engine, asked):
    options = {"frequency_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": {9: 4.0}}
    want = engine.generate(asked["messages"], max_new_tokens=6, **options).text
    assert client.chat.completions.create(**asked, **options).choices[0].message.content == want
    for name, value in (
        ("frequency_penalty", 3),
        ("logit_bias", {"9": 200}),
        ("logit_bias", {"nine": 1}),
    ):
        with pytest.raises(openai.BadRequestError, match=name):
            client.chat.completions.create(**asked, **{name: value})
