"""Faults below stores that machines share: of the network, of a server, of a database, of a copy, and of addresses."""

import os
import signal
import time
import urllib.request
from itertools import count

import pytest
from proxy import FAULTS, proxy_of
from stores import ended, in_child, put
from texts import make_chunks

import kvrag_shared.object_store as object_blobs
import kvrag_shared.redis as redis_blobs
from kvrag import Chunk
from kvrag.cli import check
from kvrag.config import StoreConfig
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.store import open_store
from kvrag.store.opening import open_url
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, same_bits

redis = pytest.importorskip("redis")
pytest.importorskip("obstore")

BUCKETS = count()


CHUNKS = make_chunks(4, words=42)
PROMPT = [*(Chunk(text) for text in CHUNKS), "\n\nWhat is it?"]


def ask(engine, mode="stitch"):
    return engine.generate(PROMPT, max_new_tokens=6, mode=mode)


@pytest.mark.parametrize("fault", ["cut", "half-open", "wrong bytes", "lost"])
def test_a_fault_of_the_network_costs_time_and_nothing_else(
    engine_of, own_redis, tmp_path, fault, monkeypatch
):
    monkeypatch.setattr(redis_blobs, "ANSWER_S", 0.5)
    server, url = own_redis
    engine = engine_of(kv_dir=url, store_config=StoreConfig(ram_bytes=0, load_timeout_s=3.0))
    engine.precompute(CHUNKS, ids=list("abcd"))
    full, stitched = ask(engine, "full"), ask(engine)
    assert stitched.cached_tokens > 100
    client = redis.Redis.from_url(url)
    if fault == "cut":
        server.kill()
    elif fault == "half-open":
        server.send_signal(signal.SIGSTOP)
    elif fault == "wrong bytes":
        for name in client.keys("kvrag:objects:*"):
            client.setrange(name, 20_000, b"x" * 64)
    else:
        client.flushall()
    start = time.monotonic()
    answer = ask(engine)
    took_s = time.monotonic() - start
    assert (answer.token_ids, answer.cached_tokens) == (full.token_ids, 0)
    assert took_s < 8
    if fault == "half-open":
        server.send_signal(signal.SIGCONT)
        engine.store.catalog._rows._again_s = 0.0
        assert ask(engine).cached_tokens == stitched.cached_tokens
    if fault in ("wrong bytes", "lost"):
        assert engine.precompute(CHUNKS, ids=list("abcd")).stored == 4
        assert ask(engine).cached_tokens == stitched.cached_tokens


@pytest.fixture(params=["redis", "catalog", "s3"])
def far(request, own_redis, monkeypatch, tmp_path):
    """Addresses of a shared store and of its catalog, and the network before one of them."""
    if request.param == "redis":
        url = own_redis[1]
        with proxy_of(port_of(url)) as network:
            yield behind(url, network), None, network
    elif request.param == "catalog":
        url = own_redis[1]
        with proxy_of(port_of(url)) as network:
            yield f"file://{tmp_path}/bucket", behind(url, network), network
    else:
        request.getfixturevalue("s3")
        server, name = os.environ["AWS_ENDPOINT_URL"], f"faults-{next(BUCKETS)}"
        urllib.request.urlopen(urllib.request.Request(f"{server}/{name}", method="PUT")).close()
        with proxy_of(port_of(server)) as network:
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{network.port}")
            yield f"s3://{name}/kv", own_redis[1], network


def port_of(url):
    return int(url.rpartition(":")[2].partition("/")[0])


def behind(url, network):
    return url.replace(f":{port_of(url)}", f":{network.port}")


@pytest.mark.parametrize("has_copies", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_network_costs_no_more_than_the_deadline(
    engine_of, far, tmp_path, fault, has_copies, monkeypatch
):
    monkeypatch.setattr(redis_blobs, "ANSWER_S", 2.0)
    monkeypatch.setattr(object_blobs, "ANSWER_S", 2.0)
    monkeypatch.setattr(redis_blobs, "AGAIN_S", 0.2)
    url, catalog, network = far
    at = {"kv_dir": tmp_path / "copies"} if has_copies else {"kv_dir": url}
    config = StoreConfig(
        ram_bytes=0,
        load_timeout_s=3.0,
        shared=url if has_copies else None,
        catalog=catalog,
        min_free_bytes=0,
    )
    engine = engine_of(**at, store_config=config)
    engine.precompute(CHUNKS, ids=list("abcd"))
    full, stitched = ask(engine, "full"), ask(engine)
    assert stitched.cached_tokens > 100
    network.become(fault)
    start = time.monotonic()
    answer = ask(engine)
    took_s = time.monotonic() - start
    assert (answer.token_ids, answer.cached_tokens) in (
        (full.token_ids, 0),
        (stitched.token_ids, stitched.cached_tokens),
    )
    # Whoever can ask the catalog may use copies on a disk, and blobs that are elsewhere.
    is_asked = has_copies or catalog is not None
    assert is_asked or fault == "slow" or answer.cached_tokens == 0
    assert took_s < 3.0 + 5.0  # the deadline, and what it takes to compute all
    network.become(None)
    deadline = time.monotonic() + 120
    while ask(engine).cached_tokens != stitched.cached_tokens:
        assert time.monotonic() < deadline, "it has not recovered"
        engine.precompute(CHUNKS, ids=list("abcd"))
        time.sleep(0.3)


@pytest.fixture
def behind_a_network(redis_url, tmp_path, monkeypatch):
    """Store whose catalog is behind a network, and the network."""
    monkeypatch.setattr(redis_blobs, "ANSWER_S", 1.0)
    with proxy_of(port_of(redis_url)) as network:
        catalog = behind(redis_url, network)
        config = StoreConfig(catalog=catalog, min_free_bytes=0, ram_bytes=2**22)
        store = open_store(f"file://{tmp_path}/bucket", config)
        put(store, 0)
        assert store.get(make_identity(0)) is not None
        yield store, network
        network.become(None)
        store.close()


@pytest.mark.parametrize("fault", ["cut", "half-open"])
def test_who_can_not_know_what_was_erased_answers_with_nothing(
    behind_a_network, fault, monkeypatch, caplog
):
    """Not even from memory; one warning says so, and no later look waits."""
    store, network = behind_a_network
    network.become(fault)
    start = time.monotonic()
    for _ in range(3):
        assert store.get(make_identity(0)) is None
    took_s = time.monotonic() - start
    assert took_s < 2 * redis_blobs.ANSWER_S
    assert len([record for record in caplog.records if "counts as empty" in record.message]) == 1
    for call in (put, lambda *_: store.catalog.documents(NAMESPACE), check.copy):
        with pytest.raises(StoreError, match=r"can't be changed: .*; try again later"):
            call(store, 1)
    assert store.listed() == {chunk_key(make_identity(0))}
    network.become(None)
    store.catalog._rows._again_s = 0.0
    assert store.get(make_identity(0)) is not None
    assert put(store, 1) > 0
    assert "counts as empty" in caplog.text


def test_a_connection_that_the_server_has_ended_is_opened_again_at_once(behind_a_network, caplog):
    store, network = behind_a_network
    network.become("cut")
    network.become(None)
    assert store.get(make_identity(0)) is not None
    network.become("cut")
    network.become(None)
    assert put(store, 1) > 0
    assert "counts as empty" not in caplog.text


def test_a_forked_process_has_connections_of_its_own(behind_a_network):
    store, _ = behind_a_network
    rows = store.catalog._rows

    def child():
        rows.change(lambda: rows.set("x", 1))
        return rows.get("x") == "1"

    assert ended(in_child(child)) == 0
    assert rows.get("x") == "1"


def test_an_error_instead_of_a_value_is_named_and_ends_no_later_read(own_redis):
    blobs = redis_blobs.RedisBlobs(own_redis[1], "objects")
    redis.Redis.from_url(own_redis[1]).lpush(f"kvrag:objects:{'a' * 64}", "x")
    with pytest.raises(OSError, match="WRONGTYPE"):
        blobs.read("a" * 64)
    blobs.write("b" * 64, [b"value"])
    assert bytes(blobs.read("b" * 64)) == b"value"


# -- faults that a review has found --------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [b"", b"\0" * 60_000])
def test_a_damaged_copy_harms_no_shared_blob(tmp_path, damage, redis_url):
    url, key = f"file://{tmp_path}/bucket", chunk_key(make_identity(0))
    config = StoreConfig(shared=url, catalog=redis_url, min_free_bytes=0, ram_bytes=0)
    store = open_store(tmp_path / "copies", config)
    put(store, 0)
    [copy] = [path for path in (tmp_path / "copies").rglob(f"*{key}*") if path.is_file()]
    copy.write_bytes(damage)
    assert same_bits(store.get(make_identity(0)), make_kv(make_identity(0)))
    assert store.blobs.shared.keys() == {key}
    assert copy.stat().st_size > 1000  # made anew
    [blob] = [path for path in (tmp_path / "bucket").rglob(f"*{key}*") if path.is_file()]
    for path in (copy, blob):
        path.write_bytes(b"x" * 60_000)
    assert store.get(make_identity(0)) is None
    assert store.blobs.shared.keys() == set()


@pytest.mark.parametrize(
    "url",
    [
        "redis+cluster://:hunter2@host:1/0",
        "https://me:hunter2@host/kv",
        "redis://:hunt/er2@host:port",
        "nowhere://hunter2",
    ],
)
def test_no_password_of_an_address_is_in_a_message(url):
    with pytest.raises(StoreError) as caught:
        open_url(url)
    assert "hunt" not in str(caught.value)


def test_valkeys_own_addresses_are_taken(redis_url):
    assert open_url(redis_url.replace("redis://", "Valkey://")).keys() == set()


def test_an_empty_object_is_read_as_nothing(tmp_path):
    blobs, key = open_url(f"file://{tmp_path}/bucket"), chunk_key(make_identity(0))
    blobs.write(key, [b""])
    assert bytes(blobs.read(key, 0, 10) or b"") == b""
    assert blobs.read(key, 0, 10) is not None


@pytest.mark.parametrize("has_copies", [False, True])
def test_what_the_server_let_go_is_precomputed_again(engine_of, redis_url, tmp_path, has_copies):
    config = StoreConfig(shared=redis_url if has_copies else None, min_free_bytes=0, ram_bytes=0)
    engine = engine_of(kv_dir=tmp_path / "copies" if has_copies else redis_url, store_config=config)
    engine.precompute(CHUNKS, ids=list("abcd"))
    client = redis.Redis.from_url(redis_url)
    client.delete(*client.keys("kvrag:objects:*"))
    assert engine.precompute(CHUNKS, ids=list("abcd")).stored == 4
    assert len(client.keys("kvrag:objects:*")) >= 4
    assert sorted(engine.document_ids()) == list("abcd")
    assert engine.precompute(CHUNKS, ids=list("abcd")).skipped == 4


def test_a_forked_process_is_told_where_obstore_would_wait_for_ever(tmp_path, redis_url):
    config = StoreConfig(catalog=redis_url, min_free_bytes=0, ram_bytes=0)
    store = open_store(f"file://{tmp_path}/bucket", config)
    put(store, 0)

    def child():
        with pytest.raises(StoreError, match="start processes by 'spawn'"):
            open_store(f"file://{tmp_path}/bucket", config)
        return True

    assert ended(in_child(child)) == 0
    assert store.get(make_identity(0)) is not None
