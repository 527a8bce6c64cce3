"""Prompts reach vLLM as the token ids that the engine itself would compute."""

import pytest
from texts import asking

from kvrag import Chunk

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def ids_of(sent):
    return sent["body"]["kv_transfer_params"]["prompt_token_ids"]


def test_a_chat_reaches_vllm_with_the_engines_own_ids(client, engine, fake, chunks):
    messages = asking(chunks, 2, 0)
    client.chat.completions.create(model="tiny", messages=messages)
    made = engine.prefill(messages)
    assert ids_of(fake.last) == made.prompt_ids
    assert made.cached_tokens
    assert fake.last["body"]["messages"] == messages


def test_seams_are_kept_where_the_whole_text_has_other_ids(client, engine, fake, chunks):
    messages = [{"role": "user", "content": f"Who?{chunks[1]}Who?{chunks[3]}"}]
    client.chat.completions.create(model="tiny", messages=messages)
    ids = ids_of(fake.last)
    for chunk in (chunks[1], chunks[3]):
        own = list(engine.encoder.chunk_ids(chunk))
        assert any([ids[at : at + len(own)] == own for at in range(len(ids))])


def test_text_is_sent_as_ids(client, engine, fake, chunks):
    client.completions.create(model="tiny", prompt=f"{chunks[0]}\n\nWho?")
    assert fake.last["body"]["prompt"] == engine.prefill(f"{chunks[0]}\n\nWho?").prompt_ids
    client.completions.create(model="tiny", prompt=["Who?", chunks[1]])
    assert fake.last["body"]["prompt"] == [
        engine.prefill(each).prompt_ids for each in ("Who?", chunks[1])
    ]
    client.completions.create(model="tiny", prompt=[5, 6, 7])
    assert fake.last["body"]["prompt"] == [5, 6, 7]


def test_documents_of_the_field_kvrag_stand_before_the_question(client, engine, fake, chunks):
    documents = [{"text": chunks[3]}, {"text": "A text that nobody has stored."}]
    client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Who?", "image_url": None}]}
        ],
        extra_body={"kvrag": {"documents": documents}},
    )
    parts = [Chunk(chunks[3]), "\n\n", Chunk(documents[1]["text"]), "\n\n", "Who?"]
    own = engine.prefill([{"role": "user", "content": parts}])
    assert ids_of(fake.last) == own.prompt_ids
    assert "kvrag" not in fake.last["body"]
    assert b"image_url" not in fake.last["content"]  # vLLM would render the messages itself


def test_tools_and_variables_are_rendered(client, engine, fake):
    messages = [{"role": "user", "content": [{"type": "text", "text": "Who?", "image_url": None}]}]
    client.chat.completions.create(
        model="tiny",
        messages=messages,
        tools=[TOOL],
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    assert fake.last["body"]["tools"] == [TOOL]
    assert b"image_url" not in fake.last["content"]
    with engine.stream(messages, tools=[TOOL], max_new_tokens=1) as stream:
        list(stream)
    assert ids_of(fake.last) == stream.result.prompt_ids


@pytest.mark.parametrize(
    "asked",
    [
        {"echo": True},
        {"prompt_logprobs": 1},
        {"truncate_prompt_tokens": 5},
        {"chat_template": "{{ messages }}"},
        {"add_generation_prompt": False},
        {"add_special_tokens": True},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        {"messages": [{"content": "no role"}]},
        {"messages": []},
        {"model": "an-adapter"},
    ],
)
def test_what_ids_cannot_give_is_left_to_vllm(http, fake, asked):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], **asked}
    http.post("/v1/chat/completions", json=body)
    sent = fake.last["body"]
    assert "prompt_token_ids" not in sent.pop("kv_transfer_params")
    assert sent == body


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {"echo": True}),
        ("/v1/chat/completions", {"model": "an-adapter"}),
        ("/tokenize", {}),
    ],
)
def test_documents_are_refused_where_nobody_would_place_them(http, fake, path, more):
    asked = {"messages": [{"role": "user", "content": "Who?"}], **more}
    answer = http.post(path, json={**asked, "kvrag": {"documents": [{"text": "a"}]}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "kvrag.documents"
    assert not fake.requests


@pytest.mark.parametrize(
    ("asked", "own"),
    [
        ({"n": 2}, {"mode": "prefix"}),  # a prompt is not blended for each of its answers
        ({"n": "two"}, {"mode": "prefix"}),  # vLLM refuses it
        ({"n": 1}, {"mode": "auto"}),
        ({"n": None}, {"mode": "auto"}),
        ({"n": 2, "kvrag": {"mode": "stitch"}}, {"mode": "stitch"}),
        ({"kvrag": (own := {"mode": "stitch", "repair": "fast", "trace": True})}, own),
    ],
)
def test_options_of_reuse_become_parameters(http, fake, asked, own):
    params = {"kvrag": {"namespace": "another's"}, "mine": 1}
    http.post("/v1/chat/completions", json={"messages": [], "kv_transfer_params": params, **asked})
    sent = fake.last["body"]["kv_transfer_params"]
    assert sent["kvrag"].pop("stream")
    assert sent["kvrag"] == {"repair": None, "trace": False, "namespace": "default", **own}
    assert sent["mine"] == 1


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"n_predict": 5, "rep_pen": 1.2}, {"max_tokens": 5, "repetition_penalty": 1.2}),
        ({"stopping_strings": ["x"], "tfs": 1}, {"stop": ["x"]}),
        ({"think": False}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"max_tokens": None, "n": 2, "best_of": 2}, {"max_tokens": None, "n": 2}),
        ({"do_sample": False, "temperature": None}, {"temperature": 0}),
        ({"do_sample": True, "dry_multiplier": 0, "dry_base": 2}, {"dry_base": 2}),
        ({"think": True, "chat_template_kwargs": 3}, {"chat_template_kwargs": 3}),
    ],
)
def test_fields_of_other_servers_get_vllms_names(http, fake, given, sent):
    http.post("/v1/chat/completions", json={"messages": [], **given})
    assert fake.requests[0]["body"].pop("kv_transfer_params")
    assert fake.requests[0]["body"] == {"messages": [], **sent}


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"kvrag": {"mode": "fastest"}}, "kvrag.mode"),
        ({"kvrag": {"max_context": "slide"}}, "kvrag.max_context"),
        ({"kvrag": {"repair": "quick"}}, None),
        ({"kvrag": {"speed": 1}}, "kvrag.speed"),
        ({"kvrag": []}, "kvrag"),
        ({"kv_transfer_params": {"kvrag": {"mode": "full"}}}, "kv_transfer_params.kvrag"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"mirostat": 2}, "mirostat"),
        *[({name: 2}, name) for name in ("best_of", "dry_multiplier", "xtc_probability")],
        ({"rep_pen_range": 9, "rep_pen": 1.2}, "rep_pen_range"),
        ({"think": "false"}, "enable_thinking"),
        ({"max_tokens": 3, "n_predict": 4}, "n_predict"),
        ({"prompt": "Who?", "think": True}, "think"),
    ],
)
def test_options_without_an_effect_are_refused(http, fake, given, param):
    path = "/v1/completions" if "prompt" in given else "/v1/chat/completions"
    answer = http.post(path, json={"messages": [{"role": "user", "content": "Who?"}], **given})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert not fake.requests
