"""What the front does not know passes unchanged, both ways, part by part."""

import asyncio
from contextlib import closing
from http.client import HTTPConnection

import httpx
import openai
import pytest
from front_kit import RECORD, WORDS, FakeVLLM, fronted, until

from kvrag_server import ServerConfig

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}]}


def test_openais_client_gets_an_answer_and_how_it_was_made(client):
    answer = client.chat.completions.create(**ASK)
    assert answer.choices[0].message.content == "".join(WORDS)
    assert answer.usage.prompt_tokens == 50
    assert answer.usage.prompt_tokens_details.cached_tokens == RECORD["cached_tokens"]
    assert answer.kvrag == [RECORD]
    assert answer.kv_transfer_params == {"kvrag": RECORD}
    assert client.completions.create(model="tiny", prompt="Who?").kvrag == [RECORD]


def test_an_answer_that_a_stop_string_ends_says_how_it_was_made(client, fake, monkeypatch):
    assert client.chat.completions.create(**ASK, stop="key").kvrag == [RECORD]
    asked = fake.last["body"]["kv_transfer_params"]["kvrag"]["report"]
    assert asked == fake.requests[-2]["body"]["kv_transfer_params"]["kvrag"]["stream"]
    monkeypatch.setattr(fake, "answers_worker", False)
    answer = client.chat.completions.create(**ASK, stop="key")
    assert answer.choices
    assert not hasattr(answer, "kvrag")


@pytest.mark.parametrize(
    "asked",
    [{"stream_options": {"include_usage": True}}, {"extra_body": {"kvrag": {"trace": True}}}],
)
def test_openais_client_gets_a_stream_whose_last_event_says_how_it_was_made(client, fake, asked):
    events = list(client.chat.completions.create(**ASK, stream=True, **asked))
    assert [e.choices[0].delta.content for e in events if e.choices] == [*WORDS, None]
    assert events[-1].kvrag == [RECORD]
    assert events[-1].usage.prompt_tokens_details.cached_tokens == RECORD["cached_tokens"]
    asked = fake.last["body"]["kv_transfer_params"]["kvrag"]["report"]
    assert asked == fake.requests[-2]["body"]["kv_transfer_params"]["kvrag"]["stream"]


def test_a_stream_without_usage_asks_for_no_record(client, fake):
    list(client.chat.completions.create(**ASK, stream=True))
    assert [request["path"] for request in fake.requests] == ["/v1/chat/completions"]


@pytest.mark.parametrize(("name", "value"), [("answers_worker", False), ("is_busy", True)])
def test_a_stream_ends_even_without_its_record(client, fake, monkeypatch, name, value):
    monkeypatch.setattr(fake, name, value)
    options = {"include_usage": True}
    asking = client.with_options(timeout=10).chat.completions
    events = list(asking.create(**ASK, stream=True, stream_options=options))
    assert events[-1].usage.total_tokens == 53
    assert not hasattr(events[-1], "kvrag")
    assert not fake.is_busy or fake.cancelled.wait(10)


def test_events_come_one_by_one(http, fake, monkeypatch):
    monkeypatch.setattr(fake, "goes_on", False)
    body = {**ASK, "stream": True, "stream_options": {"include_usage": True}}
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = answer.iter_lines()
        assert WORDS[0] in next(lines)  # the stand-in waits behind it
        fake.goes_on = True
        assert list(lines)[-2] == "data: [DONE]"


def test_errors_of_vllm_are_its_own(client):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**ASK, max_tokens=999)
    assert error.value.body["message"] == "too long"


def test_models_and_unknown_paths_pass(client, http, fake):
    assert [model.id for model in client.models.list()] == ["tiny"]
    answer = http.post("/tokenize?status=418&a=%2F", json={"prompt": "x"}, headers={"x-a": "b"})
    assert (answer.status_code, answer.text, answer.headers["x-own"]) == (418, "passed", "1")
    sent = fake.last
    assert (sent["path"], sent["query"]) == ("/tokenize", "status=418&a=%2F")
    assert sent["body"] == {"prompt": "x"}
    assert sent["headers"]["x-a"] == "b"
    assert http.delete("/v1/things/7?status=503").status_code == 503


def test_files_pass_with_their_type(http, fake):
    http.post("/v1/audio/transcriptions", files={"file": ("a.wav", b"\0\1\2")})
    assert fake.last["headers"]["content-type"].startswith("multipart/form-data; boundary=")
    assert b"\0\1\2" in fake.last["content"]


def test_a_body_that_is_no_json_is_vllms_to_refuse(http, fake):
    http.post("/tokenize", content=b"{not json", headers={"content-type": "text/plain"})
    assert fake.last["content"] == b"{not json"


def test_request_ids_are_one_for_both(http, fake):
    answer = http.post("/tokenize", headers={"x-request-id": "mine"})
    assert answer.headers.get_list("x-request-id") == ["mine"]
    assert fake.last["headers"]["x-request-id"] == "mine"


def test_a_client_that_leaves_ends_vllms_work_and_is_recorded(http, fake, caplog):
    caplog.set_level("INFO", "kvrag_server")
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/chat/completions", json={**ASK, "max_tokens": 998}, timeout=0.5)
    assert fake.cancelled.wait(10)
    until(lambda: "client_left" in caplog.text)


def test_what_the_servers_end_cuts_off_is_not_refused(http, front, caplog, monkeypatch):
    def cancelled(*_, **__):
        raise asyncio.CancelledError

    caplog.set_level("INFO", "kvrag_server")
    with monkeypatch.context() as patched:
        patched.setattr(front.state.upstream.client, "send", cancelled)
        assert http.post("/v1/chat/completions", json=ASK).status_code == 503
    until(lambda: 'status=503 code="draining" ended="broken_off"' in caplog.text)
    counted = http.get("/metrics").text
    assert 'kvrag_requests_cancelled_total{reason="broken_off"}' in counted
    assert 'kvrag_request_rejected_total{reason="draining"}' not in counted


def test_a_stream_is_never_held_and_ends_with_its_client(http, fake, caplog):
    caplog.set_level("DEBUG", "kvrag_server")
    with http.stream("GET", "/endless") as answer:
        size = 0
        for part in answer.iter_raw():
            size += len(part)
            if size > 2**24:
                break
    assert fake.cancelled.wait(10)
    until(lambda: "client_left" in caplog.text)


def test_health_readiness_and_metrics(http, front, monkeypatch):
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").json() == {"status": "ready"}
    text = http.get("/metrics").text
    assert "vllm:num_requests_running 1.0" in text
    assert "kvrag_requests_total" in text
    assert "kvrag_time_to_first_token" not in text  # vLLM measures it
    monkeypatch.setattr(front.state.service.admission, "is_draining", True)
    assert http.get("/ready").status_code == 503


def test_without_vllm_requests_get_a_sentence(tiny_dir, tmp_path, engine):
    why = "vLLM has ended (exit code 3); its log says why, start the server again"
    fake = FakeVLLM(engine)
    with fronted(tiny_dir, tmp_path / "kv", fake, fault=lambda: why) as (url, front, _):
        front.state.upstream.client.base_url = "http://127.0.0.1:9"
        answer = httpx.post(f"{url}/v1/chat/completions", json=ASK)
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == why
        assert httpx.get(f"{url}/ready").status_code == 503
        assert httpx.get(f"{url}/metrics").status_code == 200


@pytest.mark.parametrize(
    ("kind", "status", "ended"),
    [("text/event-stream", 200, "broken_off"), ("text/json", 503, "answered")],
)
def test_an_answer_that_vllm_breaks_off_ends_with_an_error(guarded, caplog, kind, status, ended):
    caplog.set_level("INFO", "kvrag_server")
    fake, http = guarded

    async def broken(body, head):
        yield fake.event({**head, "choices": [{"index": 0, "delta": {"content": "A"}}]})
        raise ConnectionError

    fake.events = broken
    body = {**ASK, "stream": True, "media_type": kind}
    headers = {"authorization": "Bearer sk-a"}
    answer = http.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == status
    has_begun = status == 200
    assert ('"content":"A"' in answer.text) == has_begun
    assert answer.text.endswith("}\n\ndata: [DONE]\n\n") == has_begun
    assert "engine_gone" in answer.text
    until(lambda: f'status=503 code="engine_gone" ended="{ended}"' in caplog.text)


KEYS = {"sk-a": "acme", "sk-b": "beta"}


@pytest.fixture
def guarded(tiny_dir, tmp_path, engine):
    fake = FakeVLLM(engine)
    config = ServerConfig(model_name="tiny", api_keys=KEYS, max_body_bytes=2**18)
    with fronted(tiny_dir, tmp_path / "kv", fake, config) as (url, _, _):
        fake.requests.clear()
        with httpx.Client(base_url=url) as http:
            yield fake, http


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/inference/v1/generate",
        "/invocations",
        "/tokenize",
        "/v1/kv/stats",
        "//v1/models",
        "/health/../v1/models",
        "/metrics/x",
    ],
)
def test_every_path_but_the_open_ones_needs_a_key(guarded, path):
    fake, http = guarded
    assert http.post(path, json=ASK).status_code == 401
    assert http.post(path, json=ASK, headers={"authorization": "Bearer no"}).status_code == 401
    assert not fake.requests


def test_open_paths_need_no_key(guarded):
    _, http = guarded
    for path in ("/health", "/ready", "/metrics"):
        assert http.get(path).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/inference/v1/generate", "/new"],
)
def test_a_key_reaches_its_own_namespace_alone(guarded, path):
    fake, http = guarded
    theft = {"namespace": "default/beta"}
    body = {**ASK, "prompt": "Who?", "kv_transfer_params": {"kvrag": theft}}
    http.post(path, json=body, headers={"authorization": "Bearer sk-a"})
    own = fake.last["body"]["kv_transfer_params"]["kvrag"]
    own.pop("stream", None)
    assert own == {"mode": "auto", "namespace": "default/acme", "repair": None, "trace": False}
    assert "authorization" not in fake.last["headers"]
    theft["precompute"] = {"texts": ["x"]}
    answer = http.post(path, json=body, headers={"authorization": "Bearer sk-a"})
    assert answer.json()["error"]["param"] == "kv_transfer_params.kvrag"
    assert b"texts" not in fake.last["content"]


def test_the_key_of_anthropics_clients_counts_and_stays_here(guarded):
    fake, http = guarded
    answer = http.post("/v1/messages", json=ASK, headers={"x-api-key": "sk-a"})
    assert answer.status_code == 200
    own = fake.last["body"]["kv_transfer_params"]["kvrag"]
    assert own["namespace"] == "default/acme"
    assert "x-api-key" not in fake.last["headers"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/invocations"])
def test_no_depth_of_a_body_hides_a_namespace(guarded, path):
    fake, http = guarded
    theft = '"kv_transfer_params": {"kvrag": {"namespace": "default/beta"}}'
    hopeless = 100_000  # deeper than any interpreter reads
    for depth in (*range(900, 1001, 5), hopeless):
        body = f'{{"prompt": "Who?", {theft}, "deep": {"[" * depth}{"]" * depth}}}'
        answer = http.post(path, content=body, headers={"authorization": "Bearer sk-a"})
        assert answer.status_code in (200, 400)
        if depth == hopeless:
            assert "make it flatter" in answer.json()["error"]["message"]
    assert fake.requests
    assert b"default/beta" not in b"".join([request["content"] for request in fake.requests])


@pytest.mark.parametrize("path", ["/x/../invocations", "/./invocations", "/x/%2e%2E/invocations"])
def test_paths_that_mean_others_are_refused(guarded, path):
    fake, http = guarded
    connection = HTTPConnection(http.base_url.host, http.base_url.port)
    with closing(connection):
        connection.request("POST", path, "{}", {"authorization": "Bearer sk-a"})
        answer = connection.getresponse()
        assert answer.status == 400
        assert b"without it" in answer.read()
    assert not fake.requests


def test_bodies_are_limited(guarded):
    fake, http = guarded
    answer = http.post(
        "/tokenize", content=b"x" * 300_000, headers={"authorization": "Bearer sk-a"}
    )
    assert answer.status_code == 413
    assert not fake.requests


def test_origins_are_the_fronts_to_allow(http, fake):
    answer = http.post("/tokenize", json={}, headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in answer.headers
    assert "origin" not in fake.last["headers"]
