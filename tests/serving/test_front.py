"""The front and the replica without a cluster: a stand-in passes calls on, and loses replicas when it is told to."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from texts import make_chunks

pytest.importorskip("ray.serve", reason="Ray Serve is not installed")

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from starlette.requests import Request

from kvrag import KVRagEngine
from kvrag.identity.fingerprint import text_digest
from kvrag_ray import front
from kvrag_ray.front import Front, saying, texts
from kvrag_ray.replica import Replica

CHUNKS = make_chunks(4, words=42)
QUESTION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": f"{CHUNKS[0]}\n\n{CHUNKS[1]}\n\nWho?"},
]


class Handle:
    """Stands for a deployment's handle: asks one replica after the other, each of which fails after so many messages."""

    def __init__(self, *replicas, error=None):
        self.replicas, self.keys, self.error = list(replicas), [], error or RayActorError()
        self.answer = SimpleNamespace(options=lambda stream: SimpleNamespace(remote=self.remote))

    async def remote(self, scope, body, *, keys):
        self.keys.append(keys)
        replica, most = self.replicas.pop(0)
        messages = replica if isinstance(replica, list) else replica.answer(scope, body)
        count = 0
        async for message in messages if not isinstance(messages, list) else each(messages):
            if count == most:
                break
            count += 1
            yield message
        if most is not None:
            raise self.error.pop(0) if isinstance(self.error, list) else self.error


async def each(values):
    for value in values:
        yield value


async def replica_of(options):
    made = Replica.__new__(Replica)
    await made.__init__(options)
    return made


def ask(handle, options, body, *, prefix="", headers=()):
    """Ask a front as a client does; return status, headers and body."""
    scope = {
        "type": "http",
        "method": "POST",
        "root_path": prefix,  # Ray leaves it in the path
        "path": f"{prefix}/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), *headers],
    }

    async def run():
        for number, (replica, most) in enumerate(handle.replicas):
            if replica == "real":
                handle.replicas[number] = (await replica_of(options), most)
        made = [replica for replica, _ in handle.replicas if isinstance(replica, Replica)]

        async def receive():
            return {
                "type": "http.request",
                "body": body if isinstance(body, bytes) else json.dumps(body).encode(),
            }

        sent = []

        async def send(message):
            sent.append(message)

        response = await Front(handle, options)(Request(scope, receive))
        await response(scope, asyncio.Event().wait, send)
        for replica in made:
            replica.__del__()
        return (
            response.status_code,
            dict(response.headers),
            b"".join(m.get("body", b"") for m in sent),
        )

    return asyncio.run(run())


@pytest.fixture(scope="module")
def options(tiny_dir, tmp_path_factory):
    """Options of an application whose store has the chunks."""
    kv_dir = str(tmp_path_factory.mktemp("kv"))
    engine = KVRagEngine.from_pretrained(tiny_dir, kv_dir=kv_dir)
    engine.precompute(CHUNKS, ids=list("abcd"))
    engine.close()
    return {"model": tiny_dir, "kv_dir": kv_dir, "server": {"model_name": "tiny"}, "warm_s": 0.0}


def body(*, stream=False, **more):
    return {
        "model": "tiny",
        "messages": QUESTION,
        "max_tokens": 6,
        "temperature": 0,
        "stream": stream,
        **more,
    }


def told(data):
    """The text of a stream's events."""
    events = [
        json.loads(line[5:]) for line in data.decode().split("\n") if line.startswith("data: {")
    ]
    return "".join(c["delta"].get("content") or "" for e in events for c in e["choices"])


@pytest.mark.parametrize("prefix", ["", "/kv"])
def test_a_request_goes_to_a_replica_with_the_keys_of_its_chunks(options, prefix):
    handle = Handle(("real", None))
    asked = body(kvrag={"trace": True, "mode": "stitch"})
    status, headers, data = ask(handle, options, asked, prefix=prefix)
    answer = json.loads(data)
    assert status == 200
    assert headers["content-type"] == "application/json"
    assert "x-request-id" not in headers
    assert int(headers["content-length"]) == len(data)
    assert answer["kvrag"][0]["cached_tokens"] > 0
    assert handle.keys == [[text_digest(chunk) for chunk in CHUNKS[:2]]]


def test_an_error_of_the_api_is_passed_on(options):
    status, _, data = ask(Handle(("real", None)), options, body(model="other"))
    assert (status, json.loads(data)["error"]["code"]) == (404, "model_not_found")
    status, _, data = ask(Handle(("real", None)), options, b"{")
    assert status == 400


def test_a_body_that_is_too_large_goes_nowhere(options):
    small = options | {"server": {"max_body_bytes": 100}}
    status, _, data = ask(Handle(), small, body())
    assert (status, json.loads(data)["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("lost_after", [0, 1])
def test_another_replica_answers_for_one_that_is_lost(options, lost_after):
    status, _, expected = ask(Handle(("real", None)), options, body())
    status, _, data = ask(Handle(("real", lost_after), ("real", None)), options, body())
    assert status == 200
    assert json.loads(data)["choices"] == json.loads(expected)["choices"]


@pytest.mark.parametrize("lost_after", range(8))
def test_another_replica_goes_on_with_a_stream(options, lost_after):
    _, _, expected = ask(Handle(("real", None)), options, body(stream=True))
    handle = Handle(("real", lost_after), ("real", lost_after), ("real", None))
    _, _, data = ask(handle, options, body(stream=True))
    assert len(handle.replicas) == 0  # three were asked
    assert told(data) == told(expected)
    assert data.count(b"[DONE]") == 1
    assert b"replica_lost" not in data


START = {"type": "http.response.start", "status": 200, "headers": []}


def event(text):
    return {
        "type": "http.response.body",
        "body": f'data: {{"id": "{id(text)}", "choices": ["{text}"]}}\r\n\r\n'.encode(),
    }


PING = {"type": "http.response.body", "body": b": ping\r\n\r\n"}


def test_a_stream_that_is_repeated_with_other_words_ends_with_an_error(options):
    handle = Handle(([START, event("a"), event("b")], 2), ([START, event("x")], None))
    _, _, data = ask(handle, options, body(stream=True))
    assert data.count(b"data:") == 2
    assert json.loads(data.rpartition(b"data: ")[2])["error"]["code"] == "replica_lost"


def test_signs_of_life_are_neither_compared_nor_repeated(options):
    handle = Handle(
        ([START, PING, event("a"), event("b")], 3),
        ([START, PING, PING, event("a"), PING, event("b")], None),
    )
    _, _, data = ask(handle, options, body(stream=True))
    assert data.count(b"ping") == 2
    assert [
        saying({"type": "", "body": part}) for part in data.split(b"\r\n\r\n") if b"data" in part
    ] == [["a"], ["b"]]


def test_where_no_replica_lives_the_client_is_told_to_come_again(options, monkeypatch):
    monkeypatch.setattr(front, "ATTEMPTS", 2)
    handle = Handle(([START], 0), ([START], 0))
    status, headers, data = ask(handle, options, body())
    assert (status, headers["retry-after"], json.loads(data)["error"]["code"]) == (
        503,
        "1",
        "no_replica",
    )
    handle = Handle(([START, event("a")], 1), ([START, event("a")], 2))
    assert b"replica_lost" in ask(handle, options, body(stream=True))[2]
    full = BackPressureError(num_queued_requests=9, max_queued_requests=9)
    assert ask(Handle(([START], 0), error=full), options, body())[0] == 503
    handle = Handle(([START, event("a")], 2), ([START], 0), error=[RayActorError(), full])
    assert b"replica_lost" in ask(handle, options, body(stream=True))[2]


def test_the_first_text_with_chunks_says_where_a_chat_goes(options):
    found = Front(Handle(), options)

    def keys(*contents, **more):
        return found.keys({}, json.dumps({"messages": contents, **more}).encode())

    first, second = [text_digest(CHUNKS[0])], [text_digest(CHUNKS[1])]
    asked = {"role": "user", "content": [{"type": "text", "text": f"{CHUNKS[0]} Who?"}]}
    assert keys(asked) == first
    assert (
        keys({"role": "system", "content": "x"}, asked, {"role": "user", "content": CHUNKS[1]})
        == first
    )
    assert (
        keys({"role": "user", "content": "Who?"}, kvrag={"documents": [{"text": CHUNKS[1]}]})
        == second
    )
    assert keys({"role": "system", "content": "x"}, {"role": "user", "content": "Who?"}) == [
        text_digest("Who?")
    ]
    assert keys({"role": "user", "content": 3}, "nothing") == []
    assert found.keys({}, json.dumps({"prompt": ["a", CHUNKS[1]]}).encode()) == second


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"3", b"[" * 100_000, b'{"messages": 3, "prompt": 4, "kvrag": 5}', b"\xff"]
)
def test_what_is_no_request_has_no_keys(options, data):
    assert Front(Handle(), options).keys({}, data) == []


def test_each_tenant_has_chunks_of_its_own(options, monkeypatch):
    monkeypatch.setenv("KVRAG_API_KEYS", "a=secret,b=other")
    found = Front(Handle(), options)
    engine = KVRagEngine.from_pretrained(
        options["model"], kv_dir=options["kv_dir"], namespace="default/a"
    )
    engine.precompute([CHUNKS[3]])
    engine.close()
    data = json.dumps({"prompt": CHUNKS[3]}).encode()
    assert found.keys({"authorization": "Bearer secret"}, data) == [text_digest(CHUNKS[3])]
    asked = json.dumps({"prompt": f"x {CHUNKS[3]}"}).encode()
    assert found.keys({"x-api-key": "secret"}, asked) == [text_digest(CHUNKS[3])]
    assert found.keys({"x-api-key": "other"}, asked) == [text_digest(f"x {CHUNKS[3]}")]


def test_texts_of_a_request():
    messages = [
        {"role": "system"},
        {"role": "user", "content": [{"text": "a"}, {"text": "b"}, {"image": 1}, 3]},
        {"content": "c"},
    ]
    assert texts({"messages": messages, "prompt": "d"}) == [(True, "ab"), (False, "c"), (True, "d")]
    assert texts(None) == []


def test_a_replica_stops_when_nobody_listens(options):
    async def run():
        replica = await replica_of(options)
        data = json.dumps(body(stream=True, max_tokens=400)).encode()
        headers = [(b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "query_string": b"",
            "headers": headers,
        }
        answer = replica.answer(scope, data)
        for _ in range(3):
            await anext(answer)
        await answer.aclose()
        for _ in range(200):
            if not sum(replica.record_autoscaling_stats().values()):
                break
            await asyncio.sleep(0.05)
        stats = replica.record_autoscaling_stats()
        replica.__del__()
        Replica.__new__(Replica).__del__()  # one that has not begun
        return stats

    assert asyncio.run(run()) == {"running": 0.0, "waiting": 0.0}


def test_what_prometheus_reads_is_handed_to_ray(options, monkeypatch):
    published = {}

    class Gauge:
        def __init__(self, name, description, tag_keys):
            self.name, self.tags = name, tag_keys

        def set(self, value, tags):
            assert set(tags) == set(self.tags)
            published[self.name, *tags.values()] = value

    monkeypatch.setattr("kvrag_ray.replica.Gauge", Gauge)

    async def run():
        replica = await replica_of(options)
        for _ in range(100):
            if published:
                break
            await asyncio.sleep(0.05)
        replica.__del__()

    asyncio.run(run())
    assert published["kvrag_store_chunks", "disk"] >= 5
    assert published["kvrag_requests_running",] == 0
