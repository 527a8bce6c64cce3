"""Names that a server without keys answers to: a page whose own name is pointed at this machine gets nothing."""

import asyncio

import httpx
import pytest
from server_kit import served

from kvrag import ConfigError
from kvrag_server import ServerConfig
from kvrag_server.gate import Gate

FOREIGN = [
    "evil.test",
    "evil.test:8000",
    "EVIL.test.",
    "localhost.evil.test",
    "127.0.0.1.evil.test",
    "10.0.0.7",  # not of a server on loopback
    "[::1",
    "localhost@evil.test",
    "kvrag.example.com",
]
OWN = ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1", "127.8.0.1:80", "[::1]:8000"]
PATHS = [
    ("GET", "/"),
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("GET", "/v1/kv/documents"),
    ("POST", "/v1/kv/delete"),
    ("POST", "/v1/chat/completions"),
]


def status_of(config, host, address="127.0.0.1", headers=()):
    """Return the status that the gate answers a request with, 200 if it lets it pass."""

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    sent = []

    async def keep(message):
        sent.append(message)

    async def nothing():
        return {"type": "http.request", "body": b""}

    scope = {"type": "http", "method": "GET", "path": "/v1/models", "server": (address, 8000)}
    named = [] if host is None else [(b"host", host.encode())]
    asyncio.run(
        Gate(app, config, lambda _: None)({**scope, "headers": [*named, *headers]}, nothing, keep)
    )
    return sent[0]["status"]


@pytest.mark.parametrize("host", FOREIGN)
@pytest.mark.parametrize(("method", "path"), PATHS)
def test_another_name_gets_nothing(url, engine, host, method, path):
    before = engine.document_ids()
    headers = {"host": host, "origin": f"http://{host}"}
    answer = httpx.request(method, url + path, headers=headers, json={"ids": before})
    assert answer.status_code == 421
    assert answer.json()["error"]["code"] == "host_not_allowed"
    assert "--allowed-host" in answer.json()["error"]["message"]
    assert engine.document_ids() == before


@pytest.mark.parametrize("host", OWN)
def test_loopback_names_are_answered(url, host):
    assert httpx.get(f"{url}/v1/models", headers={"host": host}).status_code == 200


def test_a_request_without_a_host_is_no_browsers():
    assert status_of(ServerConfig(), None) == 200


@pytest.mark.parametrize(
    ("allowed", "host", "status"),
    [
        (["kvrag.example.com"], "kvrag.example.com:8000", 200),
        (["KVRAG.example.com"], "kvrag.EXAMPLE.com", 200),
        (["kvrag.example.com"], "evil.kvrag.example.com", 421),
        (["*.example.com"], "a.example.com", 200),
        (["*.example.com"], "example.com", 421),
        (["*.example.com"], "evilexample.com", 421),
        (["*"], "evil.test", 200),
    ],
)
def test_more_names_may_be_allowed(allowed, host, status):
    assert status_of(ServerConfig(allowed_hosts=allowed), host) == status


@pytest.mark.parametrize(
    ("host", "status"),
    [("10.0.0.5:8000", 200), ("192.168.1.20", 200), ("[fd00::1]", 200), ("evil.test", 421)],
)
def test_addresses_reach_a_server_that_listens_beyond_this_machine(host, status):
    """Probes of Kubernetes and forwarded ports come by address, and no page's name is one."""
    assert status_of(ServerConfig(), host, address="10.0.0.5") == status


def test_with_keys_any_name_is_answered():
    config = ServerConfig(api_keys={"k": "tenant"})
    key = [(b"authorization", b"Bearer k")]
    assert status_of(config, "evil.test", headers=key) == 200
    assert status_of(config, "evil.test") == 401


@pytest.mark.parametrize("allowed", ["a.example", ["https://a.example"], ["a*.example"], [""]])
def test_names_that_are_none_are_refused(allowed):
    with pytest.raises(ConfigError, match="allowed_hosts"):
        ServerConfig(allowed_hosts=allowed)


@pytest.mark.parametrize("name", ["allowed_hosts", "cors_origins"])
def test_text_in_place_of_a_list_is_told(name):
    with pytest.raises(ConfigError, match=rf"ServerConfig\.{name} is 'x.test'; pass a list"):
        ServerConfig(**{name: "x.test"})


def test_the_name_that_the_server_is_bound_to_is_its_own(engine):
    """As ``kvrag serve --host NAME`` does."""
    with served(engine, ServerConfig(allowed_hosts=["my-machine"])) as (_, url):
        answer = httpx.get(f"{url}/v1/models", headers={"host": "my-machine:8000"})
        assert answer.status_code == 200
