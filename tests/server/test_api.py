"""Errors, limits, keys, and the index side, over a real socket."""

import json
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_kit import served, until
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from kvrag import ConfigError, KVRagEngine, StoreConfig
from kvrag.testing.models import tiny_model
from kvrag_server import ServerConfig
from kvrag_server.config import keys_of_environment

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 2}


def test_context_length_has_openais_code(http):
    got = http.post("/v1/completions", json={"model": "tiny", "prompt": "word " * 5000})
    assert got.json()["error"]["code"] == "context_length_exceeded"


def test_unknown_paths_and_methods_have_the_shape_too(http):
    assert http.get("/v1/nothing").json()["error"]["code"] == "not_found"
    assert http.get("/v1/chat/completions").json()["error"]["code"] == "method_not_allowed"


def test_a_fault_inside_tells_the_client_nothing(http, app, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("the password is swordfish")

    monkeypatch.setattr(app.state.service.engine, "astream", fail)
    response = http.post("/v1/chat/completions", json=ASK)
    assert response.status_code == 500
    assert "swordfish" not in response.text
    assert response.headers["x-should-retry"] == "false"


def test_an_error_after_the_first_byte_is_an_event_and_counts_as_one(http, app, monkeypatch):
    class Failing:
        async def _texts(self):
            yield "some"
            raise RuntimeError("broken")

        def __aiter__(self):
            return self._texts()

        def cancel(self):
            pass

    before = sample(http, "kvrag_requests_total", code="500")
    monkeypatch.setattr(app.state.service.engine, "astream", lambda *_, **__: Failing())
    with http.stream("POST", "/v1/chat/completions", json={**ASK, "stream": True}) as response:
        events = [
            json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")
        ]
    assert response.status_code == 200
    assert events[1]["choices"][0]["delta"]["content"] == "some"
    assert events[-1]["error"]["code"] == "server_error"
    until(lambda: sample(http, "kvrag_requests_total", code="500") == before + 1)


def test_requests_have_ids(http):
    assert http.get("/health", headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"
    assert len(http.get("/health").headers["x-request-id"]) == 32


def test_health_and_readiness_and_models(http, client, app, monkeypatch):
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").status_code == 200
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    monkeypatch.setattr(app.state.service.admission, "is_draining", True)
    assert http.get("/ready").status_code == 503
    refused = http.post("/v1/chat/completions", json=ASK)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")


def test_large_bodies_are_refused_whatever_they_say_of_their_length(engine):
    with served(engine, ServerConfig(model_name="tiny", max_body_bytes=1000)) as (_, url):
        assert httpx.post(f"{url}/v1/chat/completions", content=b"x" * 2000).status_code == 413
        pieces = httpx.post(f"{url}/v1/chat/completions", content=(b"x" * 100 for _ in range(30)))
        assert pieces.status_code == 413
        assert pieces.json()["error"]["code"] == "request_too_large"


class TestKeys:
    @pytest.fixture(scope="class")
    @staticmethod
    def shared(tiny_dir):
        config = ServerConfig(model_name="tiny", api_keys={"ka": "a", "kb": "b"})
        with (
            closing(KVRagEngine.from_pretrained(tiny_dir, context=None)) as engine,
            served(engine, config) as (app, url),
        ):
            yield engine, app, url

    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {"Authorization": "Bearer kc"},
            {"Authorization": "Basic ka"},
            {"api-key": "ka"},
            {"x-api-key": "kc"},
            {"x-api-key": "ka", "Authorization": "Bearer kc"},
        ],
    )
    @pytest.mark.parametrize("prefix", ["none", "mount", "root"])
    def test_without_a_known_one_nothing_is_answered(self, app, http, headers, prefix):
        mounted = TestClient(Starlette(routes=[Mount("/v", app)]), "http://localhost/v")
        behind = TestClient(app, "http://localhost/v", root_path="/v")
        client = {"none": http, "mount": mounted, "root": behind}[prefix]
        for path in ("/v1/models", "/v1/kv/stats", "/v1/kv/documents"):
            response = client.get(path, headers=headers)
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (401, "invalid_api_key")
        assert client.get("/v1/models", headers={"x-api-key": "ka"}).status_code == 200
        assert client.get("/health").status_code == 200

    def test_each_has_its_own_documents(self, url, chunks):
        a, b = {"Authorization": "Bearer ka"}, {"x-api-key": "kb"}
        body = {"documents": [{"id": "one", "text": chunks[0]}]}
        made = httpx.post(f"{url}/v1/kv/precompute", json=body, headers=a, timeout=60).json()
        assert made["stored"] == 1
        listed = [httpx.get(f"{url}/v1/kv/documents", headers=who).json()["data"] for who in (a, b)]
        assert listed == [["one"], []]
        ask = {
            **ASK,
            "messages": [{"role": "user", "content": f"{chunks[0]}\n\nWho?"}],
            "kvrag": {"mode": "stitch"},
        }
        replies = [
            httpx.post(f"{url}/v1/chat/completions", json=ask, headers=who, timeout=60).json()
            for who in (a, b)
        ]
        cached = [reply["kvrag"][0]["cached_tokens"] for reply in replies]
        assert cached[0] > 50
        assert cached[1] < 30
        for who, count in ((b, 0), (a, 1)):
            reply = httpx.post(f"{url}/v1/kv/delete", json={"ids": ["one"]}, headers=who).json()
            assert reply["erased_chunks"] == count


def test_explain_says_what_is_found(http, chunks):
    got = http.post(
        "/v1/kv/explain", json={"messages": [{"role": "user", "content": f"{chunks[0]}\n\nWho?"}]}
    ).json()
    assert [span["hit"] for span in got["spans"] if span["kind"] == "chunk"] == [True]
    assert http.post("/v1/kv/explain", json={"prompt": chunks[0]}).json()["prompt_tokens"] > 50
    assert http.post("/v1/kv/explain", json={}).status_code == 400


def test_stats_count(http):
    before = http.get("/v1/kv/stats").json()
    http.post("/v1/chat/completions", json=ASK)
    after = http.get("/v1/kv/stats").json()
    assert after["requests"] == before.get("requests", 0) + 1
    assert after["running"] == after["waiting"] == 0


def sample(http, name, **labels):
    """The value of a metric, and 0 where there is none yet."""
    families = text_string_to_metric_families(http.get("/metrics").text)
    samples = [s for family in families for s in family.samples if s.name == name]
    return sum(s.value for s in samples if labels.items() <= s.labels.items())


def test_metrics_count_what_was_answered(http, client, chunks):
    def read():
        tokens = {
            source: sample(http, "kvrag_prompt_tokens_by_source_total", source=source)
            for source in ("cached", "computed")
        }
        names = (
            "time_to_first_token",
            "request_queue_time",
            "e2e_request_latency",
            "inter_token_latency",
        )
        times = {name: sample(http, f"kvrag_{name}_seconds_count") for name in names}
        codes = {
            code: sample(http, "kvrag_requests_total", endpoint="/v1/chat/completions", code=code)
            for code in ("200", "404")
        }
        return tokens | times | codes | {"generated": sample(http, "kvrag_generation_tokens_total")}

    before = read()
    ask = {
        **ASK,
        "messages": [{"role": "user", "content": "\n\n".join([*chunks, "Who?"])}],
        "max_tokens": 5,
        "temperature": 0,
    }
    usage = client.chat.completions.create(**ask).usage
    http.post("/v1/chat/completions", json={**ASK, "model": "other"})
    grown = {name: value - before[name] for name, value in read().items()}
    assert grown.pop("cached") == usage.prompt_tokens_details.cached_tokens
    assert grown.pop("computed") > 0
    assert 1 <= grown.pop("inter_token_latency") <= 5
    assert grown == {
        "time_to_first_token": 1,
        "request_queue_time": 1,
        "e2e_request_latency": 1,
        "200": 1,
        "404": 1,
        "generated": 5,
    }
    assert sample(http, "kvrag_store_chunks", tier="disk") >= 4
    assert sample(http, "kvrag_chunk_lookups_total", result="hit") >= 4
    assert sample(http, "kvrag_requests_running") == 0


@pytest.mark.parametrize("text", ["key", "=key", "a=", "a=same,b=same"])
def test_keys_without_a_tenant_of_their_own_are_refused(text, monkeypatch):
    monkeypatch.setenv("KVRAG_API_KEYS", text)
    with pytest.raises(ConfigError, match="tenant=key") as raised:
        keys_of_environment()
    assert "same" not in str(raised.value)
    monkeypatch.setenv("KVRAG_API_KEYS", "a=x, b=y=z")
    assert keys_of_environment() == {"x": "a", "y=z": "b"}


@pytest.mark.parametrize(
    "options", [{"max_running": 0}, {"max_waiting": -1}, {"timeout_s": 0}, {"api_keys": {"": "a"}}]
)
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigError, match="ServerConfig"):
        ServerConfig(**options)


@pytest.mark.parametrize(("name", "is_said"), [("llama", False), ("bloom", True)])
def test_a_model_whose_requests_take_turns_says_so(engine_of, name, is_said, caplog):
    with served(engine_of(name), ServerConfig(model_name="tiny")):
        pass
    assert ("decoded one after the other" in caplog.text) == is_said


def test_the_next_turn_of_a_chat_goes_on_with_the_last(engine_of):
    engine = engine_of("llama", store_config=StoreConfig(history_bytes=2**24))
    with (
        served(engine, ServerConfig(model_name="tiny")) as (_, url),
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        messages, counts = [{"role": "user", "content": "Who keeps the lamp?"}], []
        for _ in range(3):
            body = {"model": "tiny", "messages": messages, "max_tokens": 5}
            answer = http.post("/v1/chat/completions", json=body).json()
            counts.append((answer["kvrag"][0]["history_tokens"], answer["usage"]["prompt_tokens"]))
            messages = [
                *messages,
                answer["choices"][0]["message"],
                {"role": "user", "content": "And then?"},
            ]
    assert counts[0][0] == 0
    assert all(now[0] >= before[1] - 8 for before, now in pairwise(counts)), counts
    assert engine.stats()["histories"]["tokens"] > 0


def test_a_model_on_this_machine_is_called_by_its_own_name(tiny_dir):
    with (
        served(KVRagEngine.from_pretrained(tiny_dir), ServerConfig()) as (_, url),
        httpx.Client(base_url=url) as http,
    ):
        (card,) = http.get("/v1/models").json()["data"]
        assert card["id"] == Path(tiny_dir).name


def test_a_prompt_longer_than_the_window_is_refused_or_slides(tokenizer):
    model = tiny_model("llama")
    model.config.max_position_embeddings = 128
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "The keeper counts the ships. " * 30}],
    }
    with (
        closing(KVRagEngine.from_pretrained(model, tokenizer=tokenizer)) as engine,
        served(engine, ServerConfig(model_name="tiny")) as (_, url),
    ):
        refused = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        slides = {**body, "max_tokens": 8, "kvrag": {"max_context": "slide"}}
        answered = httpx.post(f"{url}/v1/chat/completions", json=slides, timeout=60)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "context_length_exceeded")
    assert answered.json()["kvrag"][0]["evicted_tokens"] > 0


def test_requests_that_precompute_hold_up_no_others(shared, http, monkeypatch):
    engine, app, _ = shared
    precomputes, gate, real = app.state.service.precomputes, threading.Event(), engine.precompute
    monkeypatch.setattr(precomputes, "_max_waiting", 70)
    monkeypatch.setattr(
        engine, "precompute", lambda *args, **options: gate.wait(60) and real(*args, **options)
    )
    register = engine.store.register
    monkeypatch.setattr(engine.store, "register", lambda *a: time.sleep(0.3) or register(*a))
    text = "The keeper counts the ships that came by night. " * 8

    def send(number):
        body = {"documents": [{"id": str(number), "text": text}], "collection": "ships"}
        return http.post("/v1/kv/precompute", json=body)

    with ThreadPoolExecutor(80) as pool:
        sent = [pool.submit(send, number) for number in range(80)]
        until(lambda: precomputes.running == 4 and precomputes.waiting == 70)
        assert http.get("/v1/kv/stats", timeout=5).status_code == 200
        assert http.get("/v1/kv/documents", timeout=5).status_code == 200
        assert http.post("/v1/chat/completions", json=ASK, timeout=20).status_code == 200
        gate.set()
        assert Counter(each.result(60).status_code for each in sent) == {200: 74, 503: 6}
    found = http.get("/v1/kv/documents", params={"collection": "ships"}).json()["data"]
    assert len(found) == 74, "what is refused leaves nothing"
