"""KVRagClient: a server's documents as an engine's, faults in sentences, and keys that nobody reads."""

import copy
import logging
import os
import pickle
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest
from kv_client_kit import Answer, Tenant, answering
from server_kit import served
from texts import make_chunks

from kvrag import (
    Chunk,
    ConfigError,
    InputError,
    KVRagClient,
    KVRagEngine,
    PrecomputeReport,
    RepairConfig,
    Retention,
    StoreError,
)
from kvrag_server import ServerConfig
from kvrag_server import client as client_module

REPORT = {"stored": 1, "skipped": 0, "failed": [], "stored_bytes": 9, "seconds": 0.1, "short": []}
TENANTS = [f"tenant{n}" for n in range(40)]


@pytest.fixture(scope="module")
def chunks():
    return make_chunks(70, words=42)


@pytest.fixture(scope="module")
def server(tiny_dir):
    engine = KVRagEngine.from_pretrained(tiny_dir, context=None)
    keys = {f"secret-{name}": name for name in TENANTS}
    with served(engine, ServerConfig(model_name="tiny", api_keys=keys)) as (_, url):
        yield engine, url
    engine.close()


@pytest.fixture
def tenant(server, request):
    """A tenant for this test alone."""
    free = request.config.stash.setdefault(_FREE, iter(TENANTS))
    return Tenant(*server, next(free))


_FREE = pytest.StashKey()


@pytest.fixture
def waits(monkeypatch):
    """The waits before requests are sent again, which take no time here."""
    found = []
    monkeypatch.setattr(client_module.time, "sleep", found.append)
    return found


def plain(report):
    return replace(report, seconds=0.0)


# -- documents ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collection", [None, "manuals"])
def test_documents_of_a_server_are_those_of_an_engine(tenant, tiny_dir, chunks, collection):
    engine = KVRagEngine.from_pretrained(tiny_dir, context=None)
    texts = [*chunks[:5], "short", chunks[0]]
    ids = ["a", "b", "c", "d", "e", "f", "g"]
    for host in (engine, tenant.client):
        first = host.precompute(texts, ids=ids, collection=collection)
        assert (first.stored, len(first.short), first.failed) == (5, 1, [])
        assert first.seconds > 0
    calls = [
        lambda host: plain(host.precompute(texts, ids=ids, collection=collection)),
        lambda host: plain(host.precompute([chunks[6], "x"], ids=["b", "y"])),
        lambda host: host.document_ids(),
        lambda host: host.document_ids(collection="manuals"),
        lambda host: host.delete(["a", "b", "unknown"], collection=collection),
        lambda host: host.delete("g", collection=collection),
        lambda host: host.delete([]),
        lambda host: host.delete(),
        lambda host: host.document_ids(),
        lambda host: host.delete(collection="manuals"),
        lambda host: host.document_ids(),
    ]
    for number, call in enumerate(calls):
        assert call(engine) == call(tenant.client), number
    assert sorted(tenant.ids()) == sorted(engine.document_ids())
    engine.close()


@pytest.mark.parametrize(
    "given",
    [
        {"texts": ["fine", ""], "ids": None},
        {"texts": [5], "ids": None},
        {"texts": ["one", "two"], "ids": ["x", "x"]},
        {"texts": ["one"], "ids": ["x", "y"]},
        {"texts": ["one"], "ids": None, "collection": "c"},
        {"texts": ["one"], "ids": ["x"], "collection": "/"},
        {"texts": ["one"], "ids": ["x"], "collection": "a\ud800"},
    ],
)
def test_a_wrong_document_is_refused_before_anything_is_sent(given):
    with answering(Answer(500)) as (url, seen), pytest.raises(InputError):
        KVRagClient(url).precompute(**given)
    assert seen == []


def test_many_documents_go_in_parts(tenant, chunks, monkeypatch, capsys):
    sent = noted_sizes(monkeypatch)
    report = tenant.client.precompute(
        chunks, ids=[f"{n}" for n in range(len(chunks))], show_progress=True
    )
    assert (report.stored, sent) == (70, [32, 32, 6])
    assert len(tenant.ids()) == 70
    assert f"computing KV at {tenant.url}: 100%" in capsys.readouterr().err
    sent.clear()
    monkeypatch.setattr(client_module, "PART_CHARS", 5 * len(chunks[0]))
    assert tenant.client.precompute(chunks[:8]).skipped == 8
    assert sum(sent) == 8
    assert max(sent) < 5
    monkeypatch.setattr(client_module, "PART_IDS", 30)
    assert tenant.client.delete([f"{n}" for n in range(70)]) >= 62


def noted_sizes(monkeypatch):
    """The number of documents in each request to precompute."""
    sizes = []
    send = KVRagClient._request

    def noting(self, method, route, read, body=None, **options):
        if route == "precompute":
            sizes.append(len(body["documents"]))
        return send(self, method, route, read, body, **options)

    monkeypatch.setattr(KVRagClient, "_request", noting)
    return sizes


def test_a_document_that_is_too_large_is_reported_and_loses_its_old_kv(tiny_dir, chunks):
    engine = KVRagEngine.from_pretrained(tiny_dir, context=None)
    engine.precompute(chunks[:2], ids=["a", "b"])
    with served(engine, ServerConfig(max_body_bytes=4000)) as (_, url):
        report = KVRagClient(url).precompute(
            ["word " * 300_000, *chunks[1:20]], ids=["a", *(f"n{n}" for n in range(19))]
        )
        assert (report.stored, report.skipped) == (18, 1)
        assert [name for name, _ in report.failed] == ["a"]
        assert "4000 bytes" in report.failed[0][1]
        assert engine.explain(f"{chunks[0]}\n\n?").hits == 0
    engine.close()


def test_short_documents_are_told_once_as_a_warning(tenant, caplog):
    caplog.set_level(logging.INFO, "kvrag")
    client = tenant.client
    for _ in range(2):
        client.precompute(["tiny"], ids=["a"])
    told = [r.levelname for r in caplog.records if "too short" in r.message and r.args[0] == 1]
    assert {"WARNING", "INFO"} <= set(told)


def test_explanations_and_statistics_are_the_servers(tenant, chunks):
    tenant.client.precompute(chunks[:1])
    prompt = [{"role": "user", "content": f"{chunks[0]}\n\n?"}]
    for given in (prompt, f"{chunks[0]}\n\n?"):
        for options in ({}, {"repair": RepairConfig(recompute_ratio=0.5)}, {"mode": "full"}):
            told = tenant.client.explain(given, **options)
            own = tenant.engine.explain(given, namespace=tenant.space, **options)
            assert str(told) == str(own)
            assert told.hits == own.hits
    assert tenant.client.explain([1, 2, 3]).prompt_tokens == 3
    assert tenant.client.stats()["store"].keys() == tenant.engine.stats()["store"].keys()
    with pytest.raises(InputError, match="as one text"):
        tenant.client.explain([Chunk(chunks[0]), "?"])


def test_tenants_see_their_own_documents_only(tenant, server, chunks):
    other = Tenant(*server, TENANTS[-1])
    for each in (tenant, other):
        each.client.precompute(chunks[:2], ids=["a", "b"])
    assert tenant.client.delete(["a"]) == 1
    assert (tenant.ids(), tenant.kept(chunks[:2])) == (["b"], [1])
    assert (other.ids(), other.kept(chunks[:2])) == (["a", "b"], [0, 1])


def test_a_client_is_shared_by_threads_and_copied(tenant, chunks):
    client = tenant.client
    assert client == copy.deepcopy(client) == pickle.loads(pickle.dumps(client))
    with ThreadPoolExecutor(8) as pool:
        reports = list(pool.map(lambda n: client.precompute([chunks[n]], ids=[f"{n}"]), range(24)))
    assert sum(report.stored for report in reports) == 24
    assert len(tenant.ids()) == 24


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/", "/kv", "/kv/v1/"])
def test_an_address_may_end_with_the_apis_path(end):
    kept = "/kv" if end.startswith("/kv") else ""
    assert KVRagClient(f" http://host:8000{end}").base_url == f"http://host:8000{kept}"


@pytest.mark.parametrize(
    "address",
    ["", "host:8000", "127.0.0.1:8000", "ftp://host", "http://", "http://[::1", "http://h?a=b", 5],
)
def test_a_wrong_address_is_refused(address):
    with pytest.raises(ConfigError, match=r"base_url is .*; pass the address of a server"):
        KVRagClient(address)


@pytest.mark.parametrize(
    "options",
    [
        {"base_url": "http://me:secret@host"},
        {"base_url": "me:secret@host:1"},
        {"api_key": "secret\n"},
        {"api_key": "sécret"},
        {"api_key": 5},
        {"timeout_s": 0},
        {"timeout_s": float("nan")},
        {"max_retries": -1},
        {"max_retries": 1.5},
    ],
    ids=str,
)
def test_a_wrong_option_is_refused_and_no_secret_is_repeated(options):
    with pytest.raises(ConfigError) as refused:
        KVRagClient(**{"base_url": "http://host"} | options)
    assert "cret" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"namespace": "a"}, "pass that key"),
        ({"prefix": "You"}, "kvrag serve --prefix"),
        ({"retention": Retention(90)}, "default retention"),
        ({"batch_size": 2}, "leave batch_size out"),
    ],
)
def test_an_option_of_engines_is_refused_unless_it_asks_for_nothing(options, remedy):
    client = KVRagClient("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=remedy):
        client.precompute(["text"], **options)
    if "namespace" in options:
        for call in (client.delete, client.document_ids):
            with pytest.raises(ConfigError, match=remedy):
                call(**options)


# -- faults ------------------------------------------------------------------------------------------------------------


def test_a_busy_server_is_asked_again_after_the_time_that_it_names(waits, caplog):
    busy = [
        Answer(503, {"error": {"message": "2 wait"}}, {"retry-after": "7"}),
        Answer(429, "", {"retry-after": "9999"}),
        Answer(502, "<html>", {"retry-after": "Fri, 31 Dec 1999 23:59:59 GMT"}),
    ]
    with answering(*busy, Answer(200, REPORT)) as (url, seen):
        report = KVRagClient(url).precompute(["text of mine"], ids=["a"])
    assert (report.stored, len(seen)) == (1, 4)
    assert waits == [7, 60, 2]
    told = [record.message for record in caplog.records if record.name == "kvrag_server.client"]
    assert "503: 2 wait" in told[0]
    assert "trying again in 7.0 s" in told[0]
    assert "of mine" not in caplog.text


@pytest.mark.parametrize(
    ("answer", "requests"),
    [
        (Answer(503), 4),
        (Answer(503, "", {"x-should-retry": "false"}), 1),
        (Answer(500), 1),
        (Answer(500, "", {"x-should-retry": "true"}), 4),
        (Answer(501), 1),
        (Answer(None), 4),
    ],
    ids=str,
)
def test_tries_are_bounded(waits, answer, requests):
    with answering(answer) as (url, seen), pytest.raises(StoreError, match=url):
        KVRagClient(url).delete(["a"])
    assert len(seen) == requests
    assert waits == [0.5, 1, 2][: requests - 1]


def test_no_retries_are_none(waits):
    with answering(Answer(503)) as (url, seen), pytest.raises(StoreError):
        KVRagClient(url, max_retries=0).stats()
    assert (len(seen), waits) == (1, [])


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (Answer(400, {"error": {"message": "too odd"}}), InputError, "too odd"),
        (Answer(422, {"detail": []}), InputError, "Unprocessable"),
        (Answer(401, {"error": {"message": "no"}}), ConfigError, "refuses the API key: no; pass"),
        (Answer(403), ConfigError, "refuses the API key"),
        (
            Answer(404, {"detail": "Not Found"}),
            ConfigError,
            "has no /v1/kv/documents .* address of",
        ),
        (Answer(405), ConfigError, "has no /v1/kv/documents"),
        (Answer(200, "<html>welcome"), ConfigError, "does not answer as kvrag does"),
        (Answer(200, ["a"]), ConfigError, "does not answer as kvrag does"),
        (Answer(200, {"object": "list"}), ConfigError, "does not answer as kvrag does"),
        (Answer(500, {"error": {"message": "odd"}}), StoreError, "500: odd"),
    ],
    ids=str,
)
def test_a_fault_is_a_sentence_of_kvrag(answer, kind, words):
    with answering(answer) as (url, _), pytest.raises(kind, match=words) as fault:
        KVRagClient(url, api_key="secret").document_ids()
    assert url in str(fault.value)
    assert "secret" not in str(fault.value)


def test_a_redirect_is_told_and_not_followed():
    with answering(Answer(200, {"data": []})) as (other, seen):
        moved = Answer(308, "", {"location": f"{other}/v1/kv/documents"})
        with (
            answering(moved) as (url, _),
            pytest.raises(ConfigError, match=f"redirects to {other}"),
        ):
            KVRagClient(url, api_key="secret").document_ids()
    assert seen == []


def test_a_wrong_key_is_told_and_not_repeated(server, caplog):
    client = KVRagClient(server[1], api_key="unknown-secret")
    with pytest.raises(ConfigError, match=r"refuses the API key: .*; pass KVRagClient") as fault:
        client.document_ids()
    told = f"{fault.value} {client!r} {client} {caplog.text}"
    assert "unknown-secret" not in told
    with pytest.raises(ConfigError, match="is missing or unknown"):
        KVRagClient(server[1]).document_ids()


def test_a_server_that_is_not_there_is_named(waits):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(
            StoreError, match=f"{url} can't be reached .*refused.*; start the server"
        ):
            KVRagClient(url).document_ids()
    assert waits == [0.5, 1, 2]
    with pytest.raises(StoreError, match="can't be reached"):
        KVRagClient("https://kvrag.invalid", max_retries=0).document_ids()


def test_a_server_that_takes_no_connection_is_asked_again(waits, monkeypatch):
    def request(*_, **__):
        raise httpx.ConnectTimeout("timed out")

    monkeypatch.setattr(httpx, "request", request)
    with pytest.raises(StoreError, match="can't be reached"):
        KVRagClient("http://127.0.0.1:9").document_ids()
    assert waits == [0.5, 1, 2]


@pytest.fixture
def silent():
    """The address of a server that takes connections and says nothing."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_a_silent_server_is_left_after_the_timeout_and_not_asked_again(silent, waits):
    start = time.monotonic()
    with pytest.raises(StoreError, match=r"not answered within 0.3 s; raise timeout_s"):
        KVRagClient(silent, timeout_s=0.3).precompute(["text"])
    assert time.monotonic() - start < 5
    assert waits == []


def test_ctrl_c_ends_the_wait(silent):
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        KVRagClient(silent).precompute(["text"])
    timer.join()


def test_a_server_that_starts_again_gets_the_rest(tiny_dir, chunks):
    """The first part reaches one process of the server, the others the next."""
    engine = KVRagEngine.from_pretrained(tiny_dir, context=None)
    ids = [f"{n}" for n in range(70)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    client = KVRagClient(f"http://127.0.0.1:{port}", max_retries=8)
    reports = []
    indexing = threading.Thread(
        target=lambda: reports.append(client.precompute(chunks, ids=ids, show_progress=False))
    )
    with served(engine, port=port):
        indexing.start()
        while not engine.document_ids():
            time.sleep(0.005)
    with served(engine, port=port):
        indexing.join()
    [report] = reports
    assert isinstance(report, PrecomputeReport)
    assert (report.failed, report.stored + report.skipped) == ([], 70)
    assert sorted(engine.document_ids()) == sorted(ids)
    engine.close()
