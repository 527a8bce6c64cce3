"""What a request leaves behind: a line in the log, spans, and no word of what was asked, answered or stored."""

import functools
import io
import json
import logging
import re
import sys
import time
import warnings
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from server_kit import served

from kvrag import KVRagEngine, StoreConfig, StoreError
from kvrag_server import ServerConfig
from kvrag_server.record import JsonLines, RequestRecord, Tracer

SECRET = "Swordfish"
KEY = "key-of-swordfish"


@pytest.fixture
def lines():
    """All records at any level, as the JSON lines of a server; those of clients in this process are theirs."""
    out = io.StringIO()
    handler, root = logging.StreamHandler(out), logging.getLogger()
    handler.setFormatter(JsonLines())
    handler.addFilter(lambda record: not record.name.startswith(("openai", "httpx", "httpcore")))
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield lambda: [json.loads(line) for line in out.getvalue().splitlines()]
    root.removeHandler(handler)
    root.setLevel(level)


def post(url, body, *, key=None, path="/v1/chat/completions", headers=()):
    """Status, headers and text of an answer, by a client that logs nothing."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    own = {
        "Content-Type": "application/json",
        **({"Authorization": f"Bearer {key}"} if key else {}),
        **dict(headers),
    }
    try:
        with urlopen(Request(url + path, data=data, headers=own), timeout=60) as response:
            return response.status, response.headers, response.read().decode()
    except HTTPError as error:
        return error.code, error.headers, error.read().decode()


def ask(text, **options):
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 4,
        **options,
    }


def until_logged(lines, request_id, seconds=10):
    """The request's line: a stream's is written just after its client has read the end."""
    end = time.monotonic() + seconds
    while not (found := [line for line in lines() if line.get("request_id") == request_id]):
        assert time.monotonic() < end
        time.sleep(0.01)
    (line,) = found
    return line


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_line_with_how_it_was_answered(lines, url, chunks, stream):
    text = "\n\n".join([*chunks, "Who?"])
    body = ask(text, temperature=0, stream=stream)
    assert post(url, body, headers={"x-request-id": f"mine-{stream}"}.items())[0] == 200
    line = until_logged(lines, f"mine-{stream}")
    assert (line["level"], line["logger"], line["endpoint"]) == (
        "info",
        "kvrag_server",
        "/v1/chat/completions",
    )
    assert (line["status"], line["ended"], line["model"], line["method"]) == (
        200,
        "answered",
        "tiny",
        "POST",
    )
    assert (line["exactness"], line["finish_reason"], line["completion_tokens"]) == (
        "repaired",
        "length",
        4,
    )
    assert (
        line["cached_tokens"] + line["repaired_tokens"] + line["computed_tokens"]
        == line["prompt_tokens"]
    )
    assert line["cached_tokens"] > 50
    assert {"plan", "load", "stitch", "select", "repair", "decode"} <= line["stages_ms"].keys()
    assert 0 <= line["queue_ms"] <= line["ttft_ms"] <= line["total_ms"]
    assert line.get("stream", False) is stream


def test_faults_are_lines_with_their_codes(lines, url):
    post(url, ask("x", model="other"), headers={"x-request-id": "f1"}.items())
    post(url, ask("x", temperature=9), headers={"x-request-id": "f2"}.items())
    post(url, {}, path="/nothing", headers={"x-request-id": "f3"}.items())
    found = [until_logged(lines, name) for name in ("f1", "f2", "f3")]
    assert [(line["status"], line["code"], line["level"]) for line in found] == [
        (404, "model_not_found", "info"),
        (400, "invalid_value", "info"),
        (404, "not_found", "debug"),
    ]


def test_no_text_or_key_is_ever_logged(lines, tiny_dir, tmp_path, monkeypatch, capfd):
    """A whole session of a tenant whose every word is a secret, at every level, with failures of all kinds."""
    engine = KVRagEngine.from_pretrained(tiny_dir, kv_dir=tmp_path / "kv", context=None)
    document = f"{SECRET} " + " ".join(f"{SECRET}{n}" for n in range(60))
    config = ServerConfig(model_name="tiny", api_keys={KEY: "a"})
    with served(engine, config) as (app, url):
        send = functools.partial(post, url, key=KEY)
        answers = [
            send({"documents": [{"id": "1", "text": document}]}, path="/v1/kv/precompute"),
            send(ask(f"{document}\n\n{SECRET}?")),
            send(ask(f"{document}\n\n{SECRET}?", stream=True, stop=[SECRET], logprobs=True)),
            send(ask("x", kvrag={"documents": [{"text": document}]})),
            send({"messages": ask(document)["messages"]}, path="/v1/kv/explain"),
            send(
                {"model": "tiny", "prompt": [SECRET, document], "max_tokens": 2},
                path="/v1/completions",
            ),
            send(ask(SECRET), key=f"{KEY}-wrong"),
            send(ask(SECRET, model=SECRET)),
            send(ask(SECRET, **{SECRET: 1})),
            send(ask(SECRET, temperature=SECRET)),
            send(ask({"text": SECRET})),
            send(ask([{"type": SECRET}])),
            send(ask(SECRET, response_format={"type": SECRET})),
            send(
                ask(
                    SECRET,
                    tools=[
                        {"type": "function", "function": {"name": SECRET, "parameters": SECRET}}
                    ],
                )
            ),
            send(ask(SECRET + " word" * 5000)),
            send(f'{{"model": "{SECRET}'.encode()),
            send(ask("x", kvrag={"mode": SECRET, "repair": {SECRET: SECRET}})),
            send({}, path=f"/{SECRET}"),
        ]

        def fail(*_, **__):
            raise RuntimeError(f"it said {SECRET}")

        with monkeypatch.context() as patch:
            patch.setattr(app.state.service.engine, "astream", fail)
            answers.append(send(ask(SECRET)))
        with monkeypatch.context() as patch:
            patch.setattr(app.state.service.engine._answering.loaded.encoder, "chat_pieces", fail)
            answers += [send(ask(SECRET, stream=stream)) for stream in (False, True)]
        with monkeypatch.context() as patch:
            patch.setattr(app.state.service.engine, "explain", fail)
            answers.append(post(url, {"prompt": SECRET}, key=KEY, path="/v1/kv/explain"))
    engine.close()
    statuses = [status for status, *_ in answers]
    assert statuses.count(500) == 4
    assert {200, 400, 401, 404} <= set(statuses)
    said = lines()
    assert len([line for line in said if line["logger"] == "kvrag_server"]) >= len(answers)
    # The way to a failure is there, its message is not.
    assert any("fail" in json.dumps(line) for line in said)
    made = json.loads(answers[1][2])["choices"][0]["message"]["content"]
    everything = json.dumps(said) + capfd.readouterr().err
    assert SECRET.lower() not in everything.lower()
    assert json.dumps(made)[1:-1] not in json.dumps(said)
    # An event of a stream.
    assert not [line for line in said if "choices" in line.get("message", "")]


@pytest.fixture(scope="module")
def exporter():
    """The spans that this process writes; a process has one provider for good."""
    trace = pytest.importorskip("opentelemetry.trace")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        trace.set_tracer_provider(TracerProvider())
    memory = InMemorySpanExporter()
    trace.get_tracer_provider().add_span_processor(SimpleSpanProcessor(memory))
    return memory


@pytest.fixture
def spans(exporter, lines, url):
    """Send a request, and give its spans by name and its line."""

    def send(body, request_id, path="/v1/chat/completions", **headers):
        exporter.clear()
        status = post(
            url, body, path=path, headers={"x-request-id": request_id, **headers}.items()
        )[0]
        line = until_logged(lines, request_id)
        ours = [
            span
            for span in exporter.get_finished_spans()
            if span.instrumentation_scope.name == "kvrag"
        ]
        return {span.name: span for span in ours}, status, line

    return send


def test_spans_have_the_stages_at_their_times_and_continue_the_clients_trace(spans, chunks):
    trace_id, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    body = ask("\n\n".join([*chunks, "Who?"]), temperature=0)
    found, _, line = spans(body, "s1", traceparent=f"00-{trace_id}-{parent}-01")
    root = found.pop("chat tiny")
    assert line["trace_id"] == trace_id == format(root.context.trace_id, "032x")
    assert format(root.parent.span_id, "016x") == parent
    names = ["queue", "plan", "load", "stitch", "select", "repair", "decode"]
    for name in ("kvrag.prepare", "kvrag.wait"):  # of a slow machine
        found.pop(name, None)
    assert sorted(found) == sorted(f"kvrag.{name}" for name in names)
    assert {span.parent.span_id for span in found.values()} == {root.context.span_id}
    slack = 1_000_000  # of the wall clock, which is read once more at the end
    for name, span in found.items():
        assert root.start_time - slack <= span.start_time <= span.end_time <= root.end_time + slack
        if name != "kvrag.queue":
            took = (span.end_time - span.start_time) / 1e6
            waited = took - line["stages_ms"][name.removeprefix("kvrag.")]
            assert -0.1 <= waited <= line["stages_ms"].get("wait", 0) + 0.1
    assert found["kvrag.plan"].end_time <= found["kvrag.load"].start_time
    assert found["kvrag.load"].end_time <= found["kvrag.stitch"].start_time
    assert found["kvrag.repair"].end_time <= found["kvrag.decode"].start_time
    told = root.attributes
    assert (told["gen_ai.operation.name"], told["gen_ai.request.model"]) == ("chat", "tiny")
    assert told["gen_ai.usage.input_tokens"] == line["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == 4
    assert told["gen_ai.response.finish_reasons"] == ("length",)
    for name in ("cached_tokens", "repaired_tokens", "computed_tokens", "exactness"):
        assert told[f"kvrag.{name}"] == line[name]
    assert told["http.response.status_code"] == 200


def test_spans_of_faults_and_of_other_endpoints(spans):
    found, status, _ = spans(ask("x", temperature=9), "s2")
    (root,) = found.values()
    assert (root.attributes["http.response.status_code"], root.attributes["error.type"]) == (
        400,
        "invalid_value",
    )
    assert status == 400
    found, _, _ = spans({"prompt": "One"}, "s3", path="/v1/kv/explain")
    assert [*found] == ["POST /v1/kv/explain"]


def test_without_the_api_nothing_is_traced(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert Tracer().write(RequestRecord("x", endpoint="/v1/completions"), {}) is None


def test_fastapis_own_telemetry_is_off(exporter, spans):
    """It would write bodies that it can't read, and messages of exceptions."""
    spans(ask("x", temperature=9), "s4")
    assert {span.instrumentation_scope.name for span in exporter.get_finished_spans()} == {"kvrag"}


def test_lines_are_readable_without_json(url, caplog):
    with caplog.at_level(logging.INFO, "kvrag_server"):
        post(url, ask("Who?"), headers={"x-request-id": "r1"}.items())
    assert re.search(r'request request_id="r1" .*status=200', caplog.text)


def test_the_password_of_a_shared_store_is_never_written(lines, tiny_dir, tmp_path, capfd):
    """Nobody listens at its address, so every request meets the store's failure."""
    address = f"redis://reader:{SECRET}@127.0.0.1:1/0"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            engine = KVRagEngine.from_pretrained(
                tiny_dir,
                kv_dir=tmp_path / "kv",
                store_config=StoreConfig(shared=address, load_timeout_s=0.5),
            )
            said = repr(engine) + repr(engine.store_config)
            with served(engine, ServerConfig(model_name="tiny")) as (_, url):
                answers = [
                    post(url, {"documents": [{"text": "One. " * 60}]}, path="/v1/kv/precompute"),
                    post(url, ask("Who?")),
                    post(url, ask("Who?", stream=True)),
                ]
                with urlopen(f"{url}/metrics") as read, urlopen(f"{url}/v1/kv/stats") as counted:
                    said += read.read().decode() + counted.read().decode()
            engine.close()
            said += json.dumps([text for *_, text in answers])
        except StoreError as error:
            said = repr(error)
    written = [
        said,
        json.dumps(lines()),
        capfd.readouterr().err,
        *[str(each.message) for each in warned],
    ]
    assert not [text for text in written if SECRET.lower() in text.lower()]
