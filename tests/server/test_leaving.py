"""Clients that leave, read nothing, come too often, or come again."""

import asyncio
import concurrent.futures
import json
import socket
import threading
import time
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_kit import served, until

from kvrag.generate import pipeline
from kvrag_server import ServerConfig, completions

ASK = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Who?"}],
    "max_tokens": 2,
    "temperature": 0,
}
LONG = ASK | {"max_tokens": 400, "logit_bias": {"9": 100}}  # it never ends early


def samples(url, name, **labels):
    found = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    all_samples = [sample for family in found for sample in family.samples]
    return sum(
        s.value for s in all_samples if s.name == name and labels.items() <= s.labels.items()
    )


def opened(url, body, *, small=False):
    """A socket that has sent a request and reads nothing yet."""
    address, raw = urlsplit(url), json.dumps(body).encode()
    peer = socket.socket()
    if small:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    peer.connect((address.hostname, address.port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    peer.sendall(head.encode() + raw)
    return peer


@pytest.fixture
def steps(monkeypatch):
    """Forwards of answers, each of which waits for ``gate``; it is open at first."""
    real, made, gate = pipeline.decode, [], threading.Event()
    gate.set()

    def decode(extend, *args, **options):
        def waiting(ids):
            made.append(time.monotonic())
            time.sleep(0.01)
            gate.wait(20)
            return extend(ids)

        return real(waiting, *args, **options)

    monkeypatch.setattr(pipeline, "decode", decode)
    made_steps = type("Steps", (), {"made": made, "gate": gate})()
    yield made_steps
    gate.set()


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_while_decoding_ends_it_within_two_tokens(url, app, steps, stream):
    before = samples(url, "kvrag_requests_cancelled_total", reason="client_left")
    peer = opened(url, LONG | {"stream": stream})
    until(lambda: len(steps.made) > 3)
    steps.gate.clear()
    peer.close()
    until(lambda: not app.state.service.admission.running)
    count = len(steps.made)
    steps.gate.set()
    until(lambda: app.state.service.engine.load.kv_bytes == 0)
    assert len(steps.made) - count <= 2
    assert samples(url, "kvrag_requests_cancelled_total", reason="client_left") == before + 1


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_while_queueing_gives_the_place_up(engine, steps, stream):
    with served(engine, ServerConfig(model_name="tiny", max_running=1)) as (app, url):
        admission = app.state.service.admission
        steps.gate.clear()
        first = opened(url, LONG)
        until(lambda: len(steps.made) == 1)
        peer = opened(url, ASK | {"stream": stream})
        until(lambda: admission.waiting == 1)
        peer.close()
        until(lambda: admission.waiting == 0)
        assert admission.running == 1
        first.close()
        until(lambda: not admission.running)
        steps.gate.set()
        until(lambda: engine.load.kv_bytes == 0)
        assert len(steps.made) <= 3  # of the first alone
        assert samples(url, "kvrag_requests_cancelled_total", reason="client_left") == 2


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_while_prefilling_leaves_nothing_to_decode(
    url, app, engine, steps, stream, monkeypatch
):
    begun, gate, real = threading.Event(), threading.Event(), pipeline.prefill

    def prefill(*args, **options):
        begun.set()
        gate.wait(20)
        return real(*args, **options)

    monkeypatch.setattr(pipeline, "prefill", prefill)
    peer = opened(url, LONG | {"stream": stream})
    assert begun.wait(20)
    peer.close()
    until(lambda: not app.state.service.admission.running)
    gate.set()
    until(lambda: engine.load.kv_bytes == 0)
    assert len(steps.made) <= 2


def test_a_client_that_reads_nothing_holds_nobody_up_and_is_left(engine, monkeypatch):
    monkeypatch.setattr(completions, "SEND_TIMEOUT_S", 1.0)
    # Most of a megabyte: more than the sockets take.
    ask = LONG | {"stream": True, "logprobs": True, "top_logprobs": 20}
    with served(engine, ServerConfig(model_name="tiny", max_running=1), send_buffer=2**15) as (
        app,
        url,
    ):
        peer = opened(url, ask, small=True)
        until(lambda: app.state.service.admission.running)
        # The work is done, the client has read nothing.
        until(lambda: not app.state.service.admission.running, 120)
        assert httpx.post(f"{url}/v1/chat/completions", json=ASK, timeout=30).is_success
        until(lambda: samples(url, "kvrag_requests_cancelled_total", reason="client_too_slow") == 1)
        peer.close()
        assert httpx.get(f"{url}/health").is_success


def test_the_official_client_comes_again_when_it_is_told_to(engine, steps):
    with served(engine, ServerConfig(model_name="tiny", max_running=1, max_waiting=0)) as (_, url):
        steps.gate.clear()
        busy = opened(url, LONG)
        until(lambda: len(steps.made) == 1)
        refused = httpx.post(f"{url}/v1/chat/completions", json=ASK, timeout=30)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        rejected = samples(url, "kvrag_request_rejected_total", reason="overloaded")

        def free():
            until(
                lambda: samples(url, "kvrag_request_rejected_total", reason="overloaded") > rejected
            )
            busy.close()
            steps.gate.set()

        freeing = threading.Thread(target=free)
        freeing.start()
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=5) as client:
            start = time.monotonic()
            assert client.chat.completions.create(**ASK).usage.completion_tokens == 2
        freeing.join()
        assert time.monotonic() - start >= 1  # it waited for what Retry-After said
        assert samples(url, "kvrag_requests_total", code="503") >= 1


def test_the_official_client_does_not_repeat_what_would_fail_again(client, app, monkeypatch):
    calls = []

    def fail(*_, **__):
        calls.append(1)
        raise RuntimeError("broken")

    monkeypatch.setattr(app.state.service.engine, "astream", fail)
    with pytest.raises(openai.InternalServerError):
        client.with_options(max_retries=3).chat.completions.create(**ASK)
    assert len(calls) == 1


def test_one_key_has_no_more_than_its_share(engine, steps):
    config = ServerConfig(model_name="tiny", api_keys={"ka": "a", "kb": "b"}, max_per_key=1)
    with served(engine, config) as (_, url), concurrent.futures.ThreadPoolExecutor(1) as pool:
        steps.gate.clear()

        def ask(key):
            headers = {"Authorization": f"Bearer {key}"}
            return httpx.post(f"{url}/v1/chat/completions", json=ASK, headers=headers, timeout=30)

        first = pool.submit(ask, "ka")
        until(lambda: len(steps.made) == 1)
        refused = ask("ka")
        code = refused.json()["error"]["code"]
        assert (refused.status_code, code) == (429, "rate_limit_exceeded")
        assert int(refused.headers["retry-after"]) >= 1
        steps.gate.set()
        assert [each.status_code for each in (ask("kb"), first.result(), ask("ka"))] == [200] * 3


def test_timeouts_wait_in_the_queue_too_and_are_counted(engine, steps):
    with served(engine, ServerConfig(model_name="tiny", max_running=1, timeout_s=1.0)) as (_, url):
        steps.gate.clear()
        first = opened(url, LONG)
        until(lambda: len(steps.made) == 1)
        late = httpx.post(f"{url}/v1/chat/completions", json=ASK, timeout=30)
        assert (late.status_code, late.headers["x-should-retry"]) == (504, "false")
        assert late.json()["error"]["code"] == "timeout"
        steps.gate.set()
        until(lambda: samples(url, "kvrag_request_timeouts_total") == 2)
        first.close()


async def test_a_request_that_the_end_of_the_server_cuts_off_may_be_sent_again(app, monkeypatch):
    begun, gate = threading.Event(), threading.Event()
    monkeypatch.setattr(app.state.service.engine, "stats", lambda: begun.set() or gate.wait(20))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        asked = asyncio.create_task(http.get("/v1/kv/stats"))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        asked.cancel("in the words of another library")
        cut_off = await asked
    gate.set()
    assert (cut_off.status_code, cut_off.json()["error"]["code"]) == (503, "draining")
    assert "another replica" in cut_off.json()["error"]["message"]


def test_what_leaves_the_store_is_counted_by_tier_and_reason(url, http, engine):
    before = samples(url, "kvrag_store_evictions_total", tier="disk", reason="deleted")
    document = {"id": "gone", "text": " ".join(f"gone{n}" for n in range(60))}
    assert http.post("/v1/kv/precompute", json={"documents": [document]}).json()["stored"] == 1
    assert http.post("/v1/kv/delete", json={"ids": ["gone"]}).json()["erased_chunks"] == 1
    assert samples(url, "kvrag_store_evictions_total", tier="disk", reason="deleted") == before + 1


def test_the_kv_of_running_requests_is_seen(url, engine, steps):
    steps.gate.clear()
    peer = opened(url, LONG)
    until(lambda: len(steps.made) == 1)
    assert samples(url, "kvrag_running_kv_bytes") > 0
    peer.close()
    steps.gate.set()
    until(lambda: samples(url, "kvrag_running_kv_bytes") == 0)
