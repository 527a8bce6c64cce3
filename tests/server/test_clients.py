"""What clients send, and fields that ask for nothing, or for what can't be done."""

import http.client
import json
import math
import re
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import get_origin
from urllib.parse import urlsplit

import httpx
import pytest
from clients import CHAT, CLIENTS, ID, SCHEMA, TEXT, TOOL, USER
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from server_kit import served
from texts import make_chunks

from kvrag import ConfigError, KVRagEngine
from kvrag.testing.models import save_tiny_model, tiny_model
from kvrag_server import ServerConfig, schema
from kvrag_server.fields import ALIASES, HINTS, NEUTRAL, OF_PENALTY, REMEDIES, asks_for_nothing

ASK = {"model": ID, "messages": [USER], "max_tokens": 2, "temperature": 0}
PROMPT = {"model": ID, "prompt": "Who keeps the lamp?", "max_tokens": 2, "temperature": 0}
ROUTES = {CHAT: (schema.ChatRequest, ASK), TEXT: (schema.TextRequest, PROMPT)}
DOC = Path(__file__).parents[2] / "docs" / "how-to" / "serve.md"


def answer_of(http, path, body):
    """A body's answer, whole or put together from its events: its texts and its calls, by choice."""
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return [choice.get("text", choice.get("message")) for choice in response.json()["choices"]]
    events = [
        json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")
    ]
    assert not [event for event in events if "error" in event], response.text
    ends = [
        choice["finish_reason"]
        for event in events
        for choice in event["choices"]
        if choice["finish_reason"]
    ]
    assert len(ends) == body.get("n", 1)
    return events


@pytest.mark.parametrize("sent", CLIENTS, ids=lambda sent: sent.client)
def test_what_a_client_sends_is_answered(http, sent):
    assert answer_of(http, sent.path, sent.body)


def test_the_documentation_lists_the_clients():
    text = DOC.read_text()
    assert [sent.client for sent in CLIENTS if sent.client.partition(",")[0] not in text] == []


def test_the_documentation_lists_the_fields():
    text = DOC.read_text()
    names = {*HINTS, *NEUTRAL, *ALIASES, *OF_PENALTY, *REMEDIES}
    assert sorted(name for name in names if f"`{name}`" not in text) == []


def fields_of(model, path=()):
    """All fields of a schema and of those inside it, as paths."""
    for name, field in model.model_fields.items():
        yield (*path, name)
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        for kind in kinds if get_origin(field.annotation) is not list else ():
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from fields_of(kind, (*path, name))


def with_value(body, path, value):
    """A copy of a body with a value at a path; objects on the way are made."""
    if len(path) == 1:
        return body | {path[0]: value}
    inner = body.get(path[0])
    return body | {path[0]: with_value(inner if isinstance(inner, dict) else {}, path[1:], value)}


def read(model, body):
    """What a schema makes of a body, or the place and kind of its first fault."""
    try:
        return model.model_validate(body).model_dump()
    except ValidationError as error:
        fault = error.errors()[0]
        return fault["type"], fault["loc"]


@pytest.mark.parametrize("route", ROUTES)
def test_a_field_that_is_null_is_not_given(route):
    model, body = ROUTES[route]
    for path in fields_of(model):
        without = {name: value for name, value in body.items() if (name,) != path}
        assert read(model, with_value(without, path, None)) == read(
            model, without if len(path) == 1 else with_value(without, path[:1], {})
        ), path


MANY = ([{}] * 3000, [[None]] * 3000, [*[5] * 3000, "x"], {f"{n}a": "x" for n in range(3000)})


@pytest.mark.parametrize(
    "model", [each for each in vars(schema).values() if getattr(each, "model_fields", None)]
)
def test_many_faults_are_read_up_to_the_first(model):
    counts = {}
    for path, many in product(fields_of(model), MANY):
        for body in (many, with_value({}, path, many)):
            try:
                model.model_validate(body)
            except ValidationError as error:
                counts[path] = max(counts.get(path, 0), error.error_count())
    assert max(counts.values(), default=0) < 2_100, counts


NULLS = {
    "a message": {
        "messages": [
            USER | dict.fromkeys(("name", "refusal", "audio", "tool_calls", "function_call"))
        ]
    },
    "a call": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "a",
                        "type": "function",
                        "index": None,
                        "function": {"name": "f", "arguments": "{}"},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "a", "content": "Ann", "name": None},
        ]
    },
    "a part": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Who?", "cache_control": None}]}
        ]
    },
    "a tool": {
        "tools": [{**TOOL, "function": {**TOOL["function"], "strict": None, "description": None}}]
    },
    "a tool without parameters": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": None}}]
    },
    "a form": {"response_format": {"type": "text", "json_schema": None}},
    "a schema's form": {
        "max_tokens": 40,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": None, "description": None, "strict": None, "schema": SCHEMA},
        },
    },
    "the repair": {"kvrag": {"repair": None, "documents": None, "mode": None}},
}


@pytest.mark.parametrize("where", NULLS)
def test_nulls_inside_are_not_given(http, where):
    def without(value):
        if isinstance(value, list):
            return [without(each) for each in value]
        if isinstance(value, dict):
            return {k: without(v) for k, v in value.items() if v is not None or k == "content"}
        return value

    body = ASK | NULLS[where]
    assert answer_of(http, CHAT, body) == answer_of(http, CHAT, without(body))


def test_nulls_of_a_schema_are_its_own():
    """A null in a JSON schema is a value."""
    form = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {"enum": [None], "default": None}},
    }
    read = schema.ChatRequest.model_validate(ASK | {"response_format": form})
    assert read.response_format == form


KNOWN = {name for model, _ in ROUTES.values() for name in model.model_fields} | {
    *HINTS,
    *NEUTRAL,
    *ALIASES,
    *OF_PENALTY,
    *REMEDIES,
    "best_of",
}
names = st.text(min_size=1, max_size=12).filter(lambda name: name not in KNOWN)
nothings = st.sampled_from([None, False, 0, 0.0, "", [], {}])
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@pytest.mark.parametrize("route", ROUTES)
@given(name=names, value=nothings)
def test_an_unknown_field_that_asks_for_nothing_is_accepted(route, name, value):
    model, body = ROUTES[route]
    assert read(model, body | {name: value}) == read(model, body)


@pytest.mark.parametrize("route", ROUTES)
@given(name=names, value=json_values.filter(lambda value: not asks_for_nothing(value)))
def test_an_unknown_field_that_asks_for_something_is_refused_by_name(route, name, value):
    model, body = ROUTES[route]
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body | {name: value})
    fault = caught.value.errors()[0]
    assert (fault["type"], fault["ctx"]["field"]) == ("unknown_parameter", name)
    assert repr(name) in fault["msg"]


@pytest.mark.parametrize("route", ROUTES)
@given(name=st.sampled_from(HINTS), value=json_values)
def test_a_hint_changes_nothing_whatever_it_holds(route, name, value):
    model, body = ROUTES[route]
    assert read(model, body | {name: value}) == read(model, body)


@pytest.mark.parametrize(
    ("route", "name"),
    [(r, n) for r in ROUTES for n in NEUTRAL if n not in ROUTES[r][0].model_fields],
)
def test_a_neutral_value_is_accepted_and_another_refused_with_a_remedy(route, name):
    model, body = ROUTES[route]
    for value in NEUTRAL[name]:
        assert read(model, body | {name: value}) == read(model, body), value
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body | {name: 0.123})
    fault = caught.value.errors()[0]
    assert (fault["type"], fault["ctx"]["field"]) == ("unsupported_parameter", name)
    assert ";" in fault["msg"]


FOREIGN = {
    "best_of": ({"best_of": 2, "n": 2}, {"best_of": 3, "n": 2}),
    "do_sample": ({"do_sample": False}, {"do_sample": False, "temperature": 1}),
    "functions": ({"functions": []}, {"functions": [TOOL["function"]]}),
    "repeat_last_n": ({"repeat_last_n": 64}, {"repeat_last_n": 64, "repetition_penalty": 1.1}),
    "rep_pen_range": ({"rep_pen_range": 9, "rep_pen": 1}, {"rep_pen_range": 9, "rep_pen": 1.1}),
    "repeat_penalty": (
        {"repeat_penalty": 1.5, "repetition_penalty": 1.5},
        {"repeat_penalty": 2, "repetition_penalty": 1.5},
    ),
    "function_call": ({"function_call": "auto"}, {"function_call": {"name": "look_up"}}),
    "guided_json": ({"guided_json": {}}, {"guided_json": SCHEMA}),
    "response_format": ({"response_format": {"type": "text"}}, {"response_format": {"type": "x"}}),
    "tools": ({"tools": []}, {"tools": [TOOL]}),
    "tool_choice": ({"tool_choice": "auto"}, {"tool_choice": "required"}),
    "suffix": ({"suffix": ""}, {"suffix": "x"}),
    "ignore_eos": ({"ignore_eos": False}, {"ignore_eos": True}),
    "mirostat": ({"mirostat": 0, "mirostat_tau": 5}, {"mirostat": 2, "mirostat_tau": 5}),
    "modalities": ({"modalities": ["text"]}, {"modalities": ["text", "audio"]}),
    "web_search_options": ({"web_search_options": None}, {"web_search_options": {}}),
}
OF_CHATS = ["function_call", "functions", "guided_json", "response_format", "tools", "tool_choice"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", FOREIGN)
def test_what_changes_an_answer_is_refused_by_name(http, name, stream):
    neutral, other = FOREIGN[name]
    assert answer_of(http, TEXT, PROMPT | neutral | {"stream": stream})
    refused = http.post(TEXT, json=PROMPT | other | {"stream": stream})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, name)
    assert re.search(r"unsupported_parameter|unknown_parameter", error["code"])
    assert ("chat messages" in error["message"]) == (name in OF_CHATS)


def test_other_servers_names_of_fields_mean_the_same(http):
    (text,) = answer_of(http, TEXT, PROMPT | {"max_tokens": 9})
    mine = PROMPT | {"repetition_penalty": 5.0, "stop": [text[2:4]], "max_tokens": 9}
    theirs = {
        "repeat_penalty": 5.0,
        "stopping_strings": [text[2:4]],
        "n_predict": 9,
        "max_tokens": None,
    }
    assert answer_of(http, TEXT, PROMPT | theirs) == answer_of(http, TEXT, mine) != [text]


SEEDS = {-1: 200, 0: 200, -7: 200, 2**63: 200, 2**64 - 1: 200, 2**64: 400, -(2**63) - 1: 400}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_of_any_size_is_taken_or_refused(http, seed):
    response = http.post(TEXT, json=PROMPT | {"seed": seed, "temperature": 1, "n": 2})
    assert response.status_code == SEEDS[seed]
    if SEEDS[seed] == 400:
        assert response.json()["error"]["param"] == "seed"


def test_minus_one_is_no_seed_and_no_limit(http):
    assert (
        schema.TextRequest.model_validate(
            PROMPT | {"seed": -1, "max_tokens": -1, "top_k": -1}
        ).limit
        is None
    )
    sampled = {
        tuple(answer_of(http, TEXT, PROMPT | {"seed": -1, "temperature": 2, "max_tokens": 8}))
        for _ in range(4)
    }
    assert len(sampled) > 1


def test_any_type_of_content_is_json_but_for_other_sites_pages(http, url):
    raw = json.dumps(ASK).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "", None):
        headers = {} if kind is None else {"Content-Type": kind}
        connection = http_connection(url)
        connection.request("POST", CHAT, body=raw, headers=headers)
        assert connection.getresponse().status == 200, kind
        connection.close()
    page = {"Content-Type": "text/plain", "Origin": "https://elsewhere.example"}
    refused = http.post(CHAT, content=raw, headers=page)
    assert refused.status_code == 400
    assert "Content-Type: application/json" in refused.json()["error"]["message"]
    own = {"Content-Type": "text/plain", "Origin": url}
    assert http.post(CHAT, content=raw, headers=own).status_code == 200


def http_connection(url):
    return http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)


def test_paths_may_end_with_a_slash_and_head_is_get_without_a_body(http):
    assert http.post(CHAT + "/", json=ASK).status_code == 200
    assert http.get("/v1/models/").json() == http.get("/v1/models").json()
    for path in ("/", "/health", "/ready", "/v1/models", f"/v1/models/{ID}"):
        response = http.head(path)
        assert (response.status_code, response.content) == (200, b"")
    (card,) = http.get("/v1/models").json()["data"]
    assert card["max_model_len"] > 100
    assert card["created"] > 1_600_000_000
    missing = http.post("/chat/completions", json=ASK)
    assert (missing.status_code, "/v1" in missing.json()["error"]["message"]) == (404, True)


def test_a_request_may_leave_the_model_out(http):
    for path, body in ((CHAT, ASK), (TEXT, PROMPT)):
        nameless = {name: value for name, value in body.items() if name != "model"}
        assert http.post(path, json=nameless).json()["model"] == ID


class TestPages:
    ORIGIN = "https://chat.example.com"

    @pytest.fixture(scope="class")
    @staticmethod
    def url(shared):
        config = ServerConfig(model_name=ID, api_keys={"ka": "a"}, cors_origins=[TestPages.ORIGIN])
        with served(shared[0], config) as (_, url):
            yield url

    def asked(self, origin):
        return {
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
        }

    def test_a_browser_asks_for_leave_without_the_key(self, url):
        allowed = httpx.options(url + CHAT, headers=self.asked(self.ORIGIN))
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == self.ORIGIN
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        other = httpx.options(url + CHAT, headers=self.asked("https://other.example"))
        assert other.status_code == 400
        assert "access-control-allow-origin" not in other.headers

    def test_answers_and_refusals_can_be_read_by_the_page(self, url):
        for key, status in (("ka", 200), ("kb", 401)):
            headers = {
                "Origin": self.ORIGIN,
                "Authorization": f"Bearer {key}",
                "Content-Type": "text/plain",
            }
            response = httpx.post(url + CHAT, content=json.dumps(ASK), headers=headers, timeout=60)
            assert response.status_code == status
            assert response.headers["access-control-allow-origin"] == self.ORIGIN

    def test_no_page_may_by_default(self, shared):
        response = httpx.options(shared[2] + CHAT, headers=self.asked(self.ORIGIN))
        assert "access-control-allow-origin" not in response.headers

    @pytest.mark.parametrize(
        "origins", ["https://a.example", ["a.example"], ["https://a.example/chat"]]
    )
    def test_an_origin_that_is_none_is_refused(self, origins):
        with pytest.raises(ConfigError, match="cors_origins"):
            ServerConfig(cors_origins=origins)


WRONG = {
    "no JSON": (b'{"model": "tiny",', "JSON", None),
    "no body": (b"", "send one JSON object", None),
    "a list": ([1], "send one JSON object", None),
    "a union, its type": (
        ASK | {"stop": 3},
        "stop is 3; it should be a valid string or a valid list",
        "stop",
    ),
    "a union, inside": (ASK | {"stop": ["a", 3]}, "stop.1 is 3", "stop.1"),
    "a union, its length": (ASK | {"stop": ["a"] * 17}, "at most 16 items", "stop"),
    "a part": (
        ASK | {"messages": [USER | {"content": [3]}]},
        "messages.0.content.0 is 3",
        "messages.0.content.0",
    ),
    "a message": (
        ASK | {"messages": [{"content": "x"}]},
        "messages.0.role is missing",
        "messages.0.role",
    ),
    "a typo": (ASK | {"max_tokenz": 3}, "did you mean 'max_tokens'?", "max_tokenz"),
    "deep inside": (
        ASK | {"kvrag": {"documents": [{"txt": "x"}]}},
        "did you mean 'text'?",
        "kvrag.documents.0.txt",
    ),
    "an object's option": (
        ASK | {"stream_options": {"include_obfuscation": True}},
        "include_obfuscation",
        "stream_options.include_obfuscation",
    ),
    "too many tokens": (ASK | {"max_tokens": 10**6}, "--max-tokens", "max_tokens"),
    "no tokens": (ASK | {"max_tokens": 0}, "max_tokens is 0", "max_tokens"),
    "a mode": (ASK | {"kvrag": {"mode": "fast"}}, "'stitch'", "kvrag.mode"),
    "a strategy": (ASK | {"kvrag": {"repair": {"strategy": "fast"}}}, "strategy is 'fast'", None),
    "a long prompt": (ASK | {"messages": [USER | {"content": "word " * 5000}]}, "exceeds", None),
    "another model": (ASK | {"model": "other"}, "is not served here", "model"),
    "no messages": (ASK | {"messages": []}, "at least 1 item", "messages"),
    "a temperature": (ASK | {"temperature": 3}, "less than or equal to 2", "temperature"),
    "many answers": (ASK | {"n": 99}, "less than or equal to 8", "n"),
    "a long stop": (ASK | {"stop": "x" * 1001}, "at most 1000", "stop"),
    "an empty stop": (ASK | {"stop": [""]}, "non-empty string", None),
    "many biases": (ASK | {"logit_bias": {str(n): 1 for n in range(2000)}}, "at mos", "logit_bias"),
    "a bias": (ASK | {"logit_bias": {"x": 1}}, "a valid integer", "logit_bias.x"),
    "a tool's name": (
        ASK | {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools holds",
        None,
    ),
    "a tree": (ASK | {"tools": json.loads("[" * 65 + "]" * 65)}, "nests deeper", None),
    "a schema": (
        ASK
        | {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"const": math.nan}},
            }
        },
        "JSON schema",
        None,
    ),
    "half a character": (ASK | {"messages": [USER | {"content": "\ud800"}]}, "UTF-8", None),
    "an image": (
        ASK | {"messages": [USER | {"content": [{"type": "image_url"}]}]},
        "image_url",
        None,
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_fault_is_said_in_a_sentence_of_openais_form(http, wrong):
    body, sentence, param = WRONG[wrong]
    content = body if isinstance(body, bytes) else json.dumps(body)
    response = http.post(CHAT, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == (404 if wrong == "another model" else 400)
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["code"], str)
    assert sentence in error["message"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_messages_name_fields_as_the_api_does(http):
    faults = [
        PROMPT | {"prompt": "word " * 9000},
        PROMPT | {"temperature": 1e-9, "stop_token_ids": [10**6]},
        PROMPT | {"logit_bias": {"5": 1000}},
        PROMPT | {"repetition_penalty": 1e-9},
        PROMPT | {"kvrag": {"repair": {"recompute_ratio": 7}}},
    ]
    for body in faults:
        response = http.post(TEXT, json=body)
        assert not re.search(r"SamplingConfig|RepairConfig|new_tokens", response.text), (
            response.text
        )
        assert response.status_code in (200, 400)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(name=names | st.sampled_from(sorted(KNOWN)), value=json_values)
def test_no_field_of_any_value_is_a_fault_of_the_server(http, name, value):
    response = http.post(TEXT, json=PROMPT | {"max_tokens": 1} | {name: value})
    assert response.status_code < 500, response.text


def test_text_under_other_names_is_shown(http):
    parts = [
        {"type": "input_text", "text": "Who"},
        {"type": "output_text", "text": " keeps"},
        {"type": "refusal", "refusal": " it?"},
    ]
    whole = ASK | {"messages": [{"role": "user", "content": "Who keeps it?"}]}
    assert answer_of(
        http, CHAT, ASK | {"messages": [{"role": "user", "content": parts}]}
    ) == answer_of(http, CHAT, whole)


def test_one_call_at_most_where_a_client_takes_no_more(http, app, monkeypatch):
    from dataclasses import replace

    from kvrag.types import ToolCall
    from kvrag_server import completions

    real = completions._as_asked
    calls = tuple(ToolCall(f"call_{n}", "look_up", {"name": str(n)}) for n in range(2))
    monkeypatch.setattr(
        completions,
        "_as_asked",
        lambda body, result, echo: real(body, replace(result, tool_calls=calls), echo),
    )
    for is_parallel, count in ((True, 2), (None, 2), (False, 1)):
        body = ASK | {"tools": [TOOL], "parallel_tool_calls": is_parallel}
        (message,) = answer_of(http, CHAT, body)
        assert len(message["tool_calls"]) == count


def test_token_ids_reuse_stored_chunks(http, engine):
    (chunk,) = make_chunks(1, words=30, seed=77)
    engine.precompute([chunk], ids=["of ids"])
    ids = engine.loaded.encoder.live_ids(f"{chunk}\n\nWho?", at_start=True)
    body = PROMPT | {"prompt": ids, "kvrag": {"mode": "stitch"}}
    usage = http.post(TEXT, json=body).json()["usage"]
    assert usage["prompt_tokens"] == len(ids)
    assert usage["prompt_tokens_details"]["cached_tokens"] > 40
    engine.delete(["of ids"])
    usage = http.post(TEXT, json=body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] < 40


def test_token_ids_are_prompts_as_they_are(http, engine):
    ids = engine.generate(PROMPT["prompt"], max_new_tokens=1).prompt_ids
    (want,) = answer_of(http, TEXT, PROMPT)
    assert answer_of(http, TEXT, PROMPT | {"prompt": list(ids)}) == [want]
    assert answer_of(http, TEXT, PROMPT | {"prompt": [list(ids), list(ids)]}) == [want, want]
    for wrong in ([], [[]], [1, "a"], [10**9], [[10**9]], [1.5], [*[5] * 9999, -1]):
        refused = http.post(TEXT, json=PROMPT | {"prompt": wrong})
        assert refused.status_code == 400, wrong
        assert re.search("prompt|token", refused.json()["error"]["message"])
    assert refused.json()["error"]["param"] == "prompt.9999"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("limit", [0, 3])
@pytest.mark.parametrize("prompt", ["Who keeps the lamp?", [5, 6, 7, 9]], ids=["text", "ids"])
def test_echo_has_the_prompts_tokens_before_the_answers(
    http, client, engine, prompt, limit, stream
):
    body = PROMPT | {
        "prompt": prompt,
        "max_tokens": limit,
        "echo": True,
        "logprobs": 2,
        "n": 2,
        "stream": stream,
    }
    response = http.post(TEXT, json=body)
    assert response.status_code == 200, response.text
    want = engine.generate(prompt, max_new_tokens=max(1, limit), logprobs=2, prompt_logprobs=2)
    shown = prompt if isinstance(prompt, str) else engine.tokenizer.decode(prompt)
    if stream:
        events = [
            json.loads(line[6:])
            for line in response.text.splitlines()
            if line.startswith("data: {")
        ]
        choices = [choice for event in events for choice in event["choices"] if choice["text"]]
    else:
        choices = response.json()["choices"]
        assert response.json()["usage"]["completion_tokens"] == 2 * limit
    assert len(choices) == 2
    for choice in choices:
        assert choice["text"] == shown + (want.text if limit else "")
        told = choice["logprobs"]
        values = [each.logprob for each in (*want.prompt_logprobs[1:], *want.logprobs[:limit])]
        assert told["token_logprobs"][0] is None
        assert told["top_logprobs"][0] is None
        assert told["token_logprobs"][1:] == pytest.approx(values, abs=1e-4)
        assert len(told["tokens"]) == len(want.prompt_ids) + limit == len(told["text_offset"])
        for token, at in zip(told["tokens"], told["text_offset"], strict=True):
            assert (
                token.startswith(("bytes:", "<s>")) or choice["text"][at : at + len(token)] == token
            )


def test_echo_without_logprobs_is_the_prompts_text_and_the_answer(http):
    (plain,) = answer_of(http, TEXT, PROMPT)
    assert answer_of(http, TEXT, PROMPT | {"echo": True}) == [PROMPT["prompt"] + plain]
    documents = {"documents": [{"text": "One."}]}
    (behind,) = answer_of(http, TEXT, PROMPT | {"echo": True, "kvrag": documents})
    assert behind.startswith("One.\n\n" + PROMPT["prompt"])
    refused = http.post(TEXT, json=PROMPT | {"prompt": [1, 5], "kvrag": documents}).json()["error"]
    assert refused["param"] == "kvrag.documents"


def test_an_answer_goes_on_with_the_last_message(http):
    begun = ASK | {"messages": [USER, {"role": "assistant", "content": "The keeper"}]}
    onward = begun | {"continue_final_message": True, "add_generation_prompt": False}
    counts = [
        http.post(CHAT, json=body).json()["usage"]["prompt_tokens"] for body in (begun, onward)
    ]
    assert counts[1] < counts[0]
    refused = http.post(CHAT, json=begun | {"add_generation_prompt": False}).json()["error"]
    assert refused["param"] == "add_generation_prompt"


OTHER = {"type": "function", "function": {"name": "count", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "count"}}
CHOICES = {
    "one, as OpenAI's chats name it": (NAMED, {"count"}),
    "one, as OpenAI's responses name it": ({"type": "function", "name": "count"}, {"count"}),
    "allowed": (
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}},
        {"count"},
    ),
    "allowed, flat": (
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "count"}],
        },
        {"count"},
    ),
    "any": ({"type": "required"}, {"count", "look_up"}),
    "none": ({"type": "none"}, set()),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_of_tools_is_kept_in_each_of_its_forms(http, choice):
    given, names = CHOICES[choice]
    body = ASK | {"tools": [TOOL, OTHER], "tool_choice": given, "max_tokens": 60}
    (message,) = answer_of(http, CHAT, body)
    called = {call["function"]["name"] for call in message.get("tool_calls", ())}
    assert called <= names
    assert bool(called) == bool(names)


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "other"}]},
        {"type": "allowed_tools", "mode": "auto", "tools": []},
        {"type": "allowed_tools", "allowed_tools": 3},
        {"type": "allowed_tools", "mode": "sometimes", "tools": [NAMED]},
        {"type": "function", "function": {"name": "other"}},
        {"type": "custom"},
        "often",
    ],
)
def test_a_choice_that_is_none_is_refused_by_name(http, choice):
    refused = http.post(CHAT, json=ASK | {"tools": [TOOL, OTHER], "tool_choice": choice})
    assert (refused.status_code, "tool_choice" in refused.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize("stream", [False, True])
def test_without_a_limit_an_answer_has_what_the_window_leaves_up_to_the_servers(tokenizer, stream):
    model = tiny_model("llama")
    model.config.max_position_embeddings = 128
    endless = {"model": ID, "temperature": 0, "logit_bias": {"9": 100}, "stream": stream}
    counts = {}
    with closing(KVRagEngine.from_pretrained(model, tokenizer=tokenizer, context=None)) as engine:
        for most in (20, 4096):
            config = ServerConfig(model_name=ID, max_tokens=most)
            with served(engine, config) as (_, url), httpx.Client(base_url=url, timeout=60) as http:
                for num in (10, 120, 128):
                    body = endless | {"prompt": [5] * num, "logprobs": 0}
                    response = http.post(TEXT, json=body)
                    found = re.findall(r'"tokens": ?\[([^\]]*)\]', response.text)
                    counts[most, num] = (
                        sum(each.count('"') // 2 for each in found) or response.status_code
                    )
    assert counts == {
        (20, 10): 20,
        (20, 120): 8,
        (20, 128): 400,
        (4096, 10): 118,
        (4096, 120): 8,
        (4096, 128): 400,
    }


@pytest.mark.parametrize(("most", "length"), [(4096, 64), (20, 20)])
def test_answers_without_a_limit_leave_room_in_a_short_window_of_reuse(tmp_path, most, length):
    directory = save_tiny_model(tmp_path, "phi3-longrope")
    text = "The keeper of the ledger has the key. " * 8
    with closing(KVRagEngine.from_pretrained(directory, prove="off", context=None)) as engine:
        engine.precompute([text])
        assert engine.loaded.lm.reuse_window == 3000
        with served(engine, ServerConfig(max_tokens=most)) as (_, url):
            body = {"prompt": text, "logit_bias": {"9": 100}, "kvrag": {"mode": "stitch"}}
            made = httpx.post(url + TEXT, json=body, timeout=60).json()
    assert made["usage"]["completion_tokens"] == length
    assert made["kvrag"][0]["fallback_reason"] is None
