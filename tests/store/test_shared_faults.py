"""Faults below stores that machines share: of the network, of a server, of a copy, of the journal, and of addresses."""

import os
import signal
import time
import urllib.request
from itertools import count

import pytest
from kit import raising
from proxy import FAULTS, proxy_of
from stores import ended, in_child
from texts import make_chunks

import kvrag.store.object_store as object_blobs
import kvrag.store.redis as redis_blobs
from kvrag import Chunk
from kvrag.config import StoreConfig
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.store import open_store
from kvrag.store.catalog import journal, shared
from kvrag.store.opening import open_url
from kvrag.testing.chunks import make_identity, make_kv, same_bits

redis = pytest.importorskip("redis")
pytest.importorskip("obstore")

pytestmark = pytest.mark.usefixtures("always_fresh")

BUCKETS = count()


CHUNKS = make_chunks(4, words=42)
PROMPT = [*(Chunk(text) for text in CHUNKS), "\n\nWhat is it?"]


def ask(engine, mode="stitch"):
    return engine.generate(PROMPT, max_new_tokens=6, mode=mode)


def put(store, number):
    store.put(make_identity(number), make_kv(make_identity(number)), text=None)


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
        monkeypatch.setattr(shared, "AGAIN_S", 0.0)
        engine.store.catalog._rows._again_s = 0.0
        assert ask(engine).cached_tokens == stitched.cached_tokens
    if fault in ("wrong bytes", "lost"):
        assert engine.precompute(CHUNKS, ids=list("abcd")).stored == 4
        assert ask(engine).cached_tokens == stitched.cached_tokens


@pytest.fixture(params=["redis", "s3"])
def far(request, own_redis, monkeypatch):
    """Address of a shared store, and the network before it."""
    if request.param == "redis":
        url = own_redis[1]
        with proxy_of(int(url.rpartition(":")[2].partition("/")[0])) as network:
            yield url.replace(url.rpartition(":")[2], f"{network.port}/0"), network
        return
    request.getfixturevalue("s3")
    server, name = os.environ["AWS_ENDPOINT_URL"], f"faults-{next(BUCKETS)}"
    urllib.request.urlopen(urllib.request.Request(f"{server}/{name}", method="PUT")).close()
    with proxy_of(int(server.rpartition(":")[2])) as network:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{network.port}")
        yield f"s3://{name}/kv", network


@pytest.mark.parametrize("has_copies", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_network_costs_no_more_than_the_deadline(
    engine_of, far, tmp_path, fault, has_copies, monkeypatch
):
    monkeypatch.setattr(redis_blobs, "ANSWER_S", 2.0)
    monkeypatch.setattr(object_blobs, "ANSWER_S", 2.0)
    monkeypatch.setattr(shared, "AGAIN_S", 0.2)
    url, network = far
    at = {"kv_dir": tmp_path / "copies"} if has_copies else {"kv_dir": url}
    config = StoreConfig(
        ram_bytes=0, load_timeout_s=3.0, shared=url if has_copies else None, min_free_bytes=0
    )
    engine = engine_of(**at, store_config=config)
    engine.precompute(CHUNKS, ids=list("abcd"))
    full, stitched = ask(engine, "full"), ask(engine)
    assert stitched.cached_tokens > 100
    network.become(fault)
    start = time.monotonic()
    answer = ask(engine)
    took_s = time.monotonic() - start
    is_known = has_copies and fault not in (
        "cut",
        "half-open",
        "slow",
    )  # who can ask the journal may use copies
    assert (answer.token_ids, answer.cached_tokens) in (
        (full.token_ids, 0),
        (stitched.token_ids, stitched.cached_tokens),
    )
    assert is_known or fault == "slow" or answer.cached_tokens == 0
    assert took_s < 3.0 + 5.0  # the deadline, and what it takes to compute all
    network.become(None)
    deadline = time.monotonic() + 120
    while ask(engine).cached_tokens != stitched.cached_tokens:
        assert time.monotonic() < deadline, "it has not recovered"
        engine.precompute(CHUNKS, ids=list("abcd"))
        time.sleep(0.3)


@pytest.mark.parametrize("size", [0, 1, 500, 504, 505, 506, 507, 508, 600, 70_000])
def test_a_value_from_redis_is_whole_wherever_its_first_piece_ends(own_redis, size):
    blobs, data = redis_blobs.RedisBlobs(own_redis[1], "objects"), os.urandom(size)
    blobs.write("a" * 64, [data])
    assert [bytes(blobs.read("a" * 64)) for _ in range(2)] == [data, data]
    assert blobs.read("b" * 64) is None


def test_an_error_instead_of_a_value_is_named_and_ends_no_later_read(own_redis):
    blobs = redis_blobs.RedisBlobs(own_redis[1], "objects")
    redis.Redis.from_url(own_redis[1]).lpush(f"kvrag:objects:{'a' * 64}", "x")
    with pytest.raises(OSError, match="WRONGTYPE"):
        blobs.read("a" * 64)
    blobs.write("b" * 64, [b"value"])
    assert bytes(blobs.read("b" * 64)) == b"value"


def test_a_value_from_redis_that_comes_slowly_has_one_deadline_for_all_of_it(
    own_redis, monkeypatch
):
    monkeypatch.setattr(redis_blobs, "ANSWER_S", 0.5)
    port = own_redis[1].rpartition(":")[2].partition("/")[0]
    with proxy_of(int(port)) as network:
        blobs, data = (
            redis_blobs.RedisBlobs(f"redis://127.0.0.1:{network.port}/0", "objects"),
            os.urandom(100_000),
        )
        blobs.write("a" * 64, [data])
        network.become("slow")  # a piece every 0.05 s: no single wait is too long
        with pytest.raises(OSError, match="too long"):
            blobs.read("a" * 64)
        network.become(None)
        assert (
            bytes(blobs.read("a" * 64)) == data
        )  # on a new connection: the rest of the other answer is not taken for it


# -- faults that a review has found --------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [b"", b"\0" * 60_000])
def test_a_damaged_copy_harms_no_shared_blob(tmp_path, damage):
    url, key = f"file://{tmp_path}/bucket", chunk_key(make_identity(0))
    store = open_store(tmp_path / "copies", StoreConfig(shared=url, min_free_bytes=0, ram_bytes=0))
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


def test_a_thread_that_can_follow_again_ends_the_pause_of_one_that_could_not(tmp_path, monkeypatch):
    stores = [
        open_store(f"file://{tmp_path}/bucket", StoreConfig(min_free_bytes=0)) for _ in range(2)
    ]
    put(stores[0], 0)
    assert stores[1].known([chunk_key(make_identity(0))])
    rows = stores[1].catalog._rows
    with monkeypatch.context() as patch:
        patch.setattr(shared.Journal, "after", raising(OSError, "time-out"))
        assert not stores[1].known([chunk_key(make_identity(0))])
    assert rows._again_s > time.monotonic()
    assert not stores[1].known([chunk_key(make_identity(0))]), "in the pause nobody knows"
    rows._again_s = 0.0
    assert stores[1].known([chunk_key(make_identity(0))])
    stores[0].delete([chunk_key(make_identity(0))])
    assert not stores[1].known([chunk_key(make_identity(0))])


def test_an_entry_that_its_writer_could_not_check_is_followed_by_all(tmp_path, monkeypatch):
    """Others may have followed it, and built on it, when its writer gives up."""
    store, other = (
        open_store(f"file://{tmp_path}/bucket", StoreConfig(min_free_bytes=n)) for n in (0, 1)
    )
    put(store, 0)
    rows, is_at = store.catalog._rows, journal.Journal._is_at

    def after_writing(self, place, data):
        if len(self._entries.keys()) == before:
            return is_at(self, place, data)
        raise OSError("time-out")

    before = len(rows._journal._entries.keys())
    with monkeypatch.context() as patch:
        patch.setattr(journal.Journal, "_is_at", after_writing)
        with pytest.raises(StoreError, match="time-out"):
            rows.change(lambda: rows.set("x", 1))
    put(other, 1)
    put(store, 2)
    for each in (
        store,
        other,
        open_store(tmp_path / "new", StoreConfig(shared=f"file://{tmp_path}/bucket")),
    ):
        assert len(each.catalog.keys()) == 3
        assert each.catalog._rows.get("x") == "1"


@pytest.mark.parametrize(
    "wrong", [3, [1], ["", False, 3], ["", False, {"c x": 3}], [None, False, {}], ["", 1, {}], {}]
)
def test_what_is_no_entry_counts_as_a_fault_of_the_journal(tmp_path, wrong, monkeypatch):
    monkeypatch.setattr(shared, "AGAIN_S", 0.0)
    store = open_store(f"file://{tmp_path}/bucket", StoreConfig(min_free_bytes=0))
    put(store, 0)
    entries = store.catalog._rows._journal._entries
    last = max(entries.keys())
    entries.write(journal._key(int(last, 16) + 1), [journal._dump(wrong)])
    assert store.get(make_identity(0)) is None
    with pytest.raises(StoreError, match="damaged"):
        put(store, 1)
    entries.delete([journal._key(int(last, 16) + 1)])
    assert store.get(make_identity(0)) is not None


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
        open_url(url, "objects")
    assert "hunt" not in str(caught.value)


def test_valkeys_own_addresses_are_taken(redis_url):
    assert open_url(redis_url.replace("redis://", "Valkey://"), "objects").keys() == set()


def test_an_empty_object_is_read_as_nothing(tmp_path):
    blobs, key = open_url(f"file://{tmp_path}/bucket", "objects"), chunk_key(make_identity(0))
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


def test_a_follower_that_is_late_sets_nothing_back(tmp_path):
    """Two processes on one directory of copies: what one has followed further, the other leaves."""
    url = f"file://{tmp_path}/bucket"
    far, near = (
        open_store(tmp_path / name, StoreConfig(shared=url, min_free_bytes=0))
        for name in ("far", "near")
    )
    put(far, 0)
    key = chunk_key(make_identity(0))
    assert near.known([key])
    rows = near.catalog._rows
    here = rows._look(shared._place_of, None)
    late = list(rows._journal.after(here))
    far.delete([key])
    late = list(rows._journal.after(here))
    assert late
    assert not near.known([key])  # it is further by now
    with pytest.raises(journal.Conflict):
        rows._take(here, late[0][0], [late[0][1].rows], is_whole=False)
    assert not near.known([key])


def test_a_forked_process_is_told_where_obstore_would_wait_for_ever(tmp_path):
    store = open_store(f"file://{tmp_path}/bucket", StoreConfig(min_free_bytes=0, ram_bytes=0))
    put(store, 0)

    def child():
        with pytest.raises(StoreError, match="start processes by 'spawn'"):
            open_store(f"file://{tmp_path}/bucket", StoreConfig(min_free_bytes=0))
        return True

    assert ended(in_child(child)) == 0
    assert store.get(make_identity(0)) is not None
