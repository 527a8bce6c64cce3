"""Requests that are wrong in a thousand ways, over a real socket: none is a fault of the server, none hangs it."""

import http.client
import json
import math
import random
import socket
from urllib.parse import urlsplit

import pytest

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Who?"}],
    "max_tokens": 2,
    "temperature": 0,
    "top_p": 0.9,
    "top_k": 3,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "logit_bias": {"5": 1},
    "logprobs": True,
    "top_logprobs": 1,
    "stop": ["x"],
    "seed": 1,
    "n": 1,
    "stream": False,
    "stream_options": {"include_usage": True},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
    "tool_choice": "auto",
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    "kvrag": {"mode": "auto", "repair": {"strategy": "query"}, "documents": [{"text": "One."}]},
    "user": "me",
}
TEXT = {
    name: CHAT[name] for name in ("model", "max_tokens", "temperature", "stop", "n", "kvrag")
} | {"prompt": "One", "logprobs": 1}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/kv/precompute": {"documents": [{"id": "a", "text": "One."}], "collection": "c"},
    "/v1/kv/explain": {"messages": CHAT["messages"], "kvrag": CHAT["kvrag"]},
    "/v1/kv/delete": {"ids": ["a"], "collection": "c"},
}
PATTERNS = ("(" * 50, "(?<=a", "[z-a]", "\\", "(a+)+$")
VALUES = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 2**64, 10**400),
    *(1e308, -1e308, 0.5, math.nan, math.inf),
    *("", "x", "\x00", "\ud800", "\udfff", "🙂", "a" * 100_000, "<|im_end|>"),
    *("-1", "NaN", "null", "{{ 1 / 0 }}"),
    *([], {}, [[]], [{}], {"": ""}, [None], ["x"] * 10_000),
    *({"type": "x"}, {"type": None}, {"\ud800": 1}),
    [{"role": "user"}],
    [{"role": "tool", "tool_call_id": 3, "content": "x"}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": None, "arguments": "{"}}]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"type": "function"}],
    [{"type": "function", "function": None}],
    {"type": "function", "function": {"name": "g"}},
    {"type": "json_schema"},
    {"type": "json_schema", "json_schema": {"schema": 1}},
    {"type": "json_object"},
]
SCHEMAS = [
    {"type": "wrong"},
    {"type": ["object", 1]},
    *({"$ref": target} for target in ("#/nowhere", "#", 3, "http://127.0.0.1:1/x")),
    *({"properties": properties} for properties in (3, {"a": 3})),
    {"required": "a", "type": "object"},
    *({"enum": values} for values in ([], "abc")),
    *({"anyOf": schemas} for schemas in ([], {})),
    {"not": {}},
    {"minimum": "x"},
    {"type": "number", "minimum": 5, "maximum": 1},
    {"type": "string", "minLength": 10**9},
    {"type": "array", "items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
    {"type": "integer", "multipleOf": 0},
    {"const": math.nan},
    *[{"type": "string", "pattern": pattern} for pattern in PATTERNS],
    *(True, False, []),
]


def nested(depth, kind):
    return (
        b'{"a":' * depth + b"1" + b"}" * depth if kind == "object" else b"[" * depth + b"]" * depth
    )


def places(value, path=()):
    """All paths inside a value, its own too."""
    yield path
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, each in inner:
        yield from places(each, (*path, key))


def changed(body, path, value):
    """A copy of a body with another value at a path."""
    if not path:
        return value
    copy = dict(body) if isinstance(body, dict) else list(body)
    copy[path[0]] = changed(copy[path[0]], path[1:], value)
    return copy


def malformed(rng):
    """A request that is probably wrong: method, path, headers, body."""
    path = rng.choice([*BODIES, *["/v1/chat/completions"] * 4])
    body, headers = BODIES[path], {"Content-Type": "application/json"}
    kind = rng.randrange(12)
    if kind < 5:  # another value at some place
        for _ in range(rng.choice((1, 1, 2))):
            body = changed(body, rng.choice([*places(body)]), rng.choice(VALUES))
            if not isinstance(body, dict):
                break
    elif kind == 5:  # a place that there isn't
        body = body | {
            rng.choice(["max_tokenz", "", "\ud800", "__proto__", "echo", "best_of"]): rng.choice(
                VALUES
            )
        }
    elif kind in (6, 7):  # a schema that can't be, for a tool or for the answer
        path, schema = "/v1/chat/completions", rng.choice(SCHEMAS)
        tool = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        own = rng.choice(
            [{"tools": tool, "tool_choice": "required"}, {"tools": tool}, {"response_format": form}]
        )
        body = {
            name: CHAT[name] for name in ("model", "messages", "max_tokens", "temperature")
        } | own
    if kind == 8:
        deep = nested(rng.choice((100, 900, 5_000, 200_000)), rng.choice(("object", "list")))
        name = rng.choice(
            ["messages", "tools", "response_format", "kvrag", "prompt", "logit_bias", "documents"]
        )
        raw = (
            b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"'
            + name.encode()
            + b'":'
            + deep
            + b"}"
        )
        return "POST", path, headers, raw if rng.random() < 0.7 else deep
    raw = json.dumps(body).encode()
    if kind == 9:  # bytes that are no JSON, or of another encoding
        cut = rng.randrange(len(raw))
        flipped = bytes(
            byte ^ (1 << rng.randrange(8)) if rng.random() < 0.02 else byte for byte in raw
        )
        others = [
            b"",
            b"\xff\xfe",
            raw[:cut],
            flipped,
            raw.decode().encode("utf-16"),
            b"\x00" * 100,
            b"null",
            b'"x"',
            raw * 2,
        ]
        raw = rng.choice([*others, raw.replace(b"Who?", b"\xc3\x28"), raw.replace(b'"', b"'")])
    elif kind == 10:
        wrong = (
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data",
            "application/json; charset=x",
            "",
        )
        headers = {"Content-Type": rng.choice(wrong)}
        if rng.random() < 0.3:
            headers |= rng.choice(
                [
                    {"Content-Encoding": "gzip"},
                    {"Authorization": "\xff" * 9},
                    {"x-request-id": "\xe9" * 300},
                ]
            )
    elif kind == 11:
        return (
            rng.choice(["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE"]),
            path,
            headers,
            raw,
        )
    return "POST", path, headers, raw


def send(connection, method, path, headers, raw):
    connection.request(method, path, body=raw, headers=headers)
    response = connection.getresponse()
    return response.status, response.getheader("content-type") or "", response.read()


@pytest.fixture
def connection(url):
    made = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    yield made
    made.close()


NUM = 1_000


def test_a_thousand_malformed_requests_are_the_clients_faults_and_change_nothing(
    connection, app, client
):
    ask = {name: CHAT[name] for name in ("model", "messages", "temperature")}
    before = client.chat.completions.create(**ask, max_tokens=4).choices[0].message.content
    rng, statuses = random.Random(7), []
    for _ in range(NUM):
        method, path, headers, raw = malformed(rng)
        status, kind, text = send(connection, method, path, headers, raw)
        told = method, path, headers, raw[:500], status, text[:300]
        statuses.append(status)
        assert status < 500 or status == 503, told
        if status >= 400 and method != "HEAD":
            assert kind == "application/json", told
            error = json.loads(text)["error"]
            assert error.keys() == {"message", "type", "param", "code"}, told
            assert error["message"], told
    assert statuses.count(400) > NUM / 2
    assert client.chat.completions.create(**ask, max_tokens=4).choices[0].message.content == before
    assert app.state.service.admission.running == app.state.service.admission.waiting == 0


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00",
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/9.9\r\n\r\n",
        b"\x00" * 70_000,
    ],
)
def test_what_is_no_http_is_hung_up_on(url, http, raw):
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=20) as peer:
        peer.sendall(raw)
        answer = peer.recv(4096)
    assert not answer or answer.startswith(b"HTTP/1.1 4")
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize(("num", "n"), [(10_000, 1), (17, 2), (0, 1)])
def test_a_request_asks_for_a_few_answers_at_most(http, num, n):
    response = http.post(
        "/v1/completions", json={"model": "tiny", "prompt": ["x"] * num, "max_tokens": 1, "n": n}
    )
    assert response.status_code == 400
