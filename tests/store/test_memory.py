import threading

import pytest
import torch

from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.store import DiskStore, MemoryStore, TieredStore, blob, reader
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text, same_bits
from kvrag.types import ChunkKV, LayerKV

IDENTITIES = [make_identity(number) for number in range(6)]
SIZE = make_kv(IDENTITIES[0]).num_bytes


def test_the_budget_holds_and_the_least_recently_used_leaves():
    store = MemoryStore(3 * SIZE)
    for number, identity in enumerate(IDENTITIES[:3]):
        store.put(identity, make_kv(identity), text=make_text(str(number)))
    store.get(IDENTITIES[0])
    store.put(IDENTITIES[3], make_kv(IDENTITIES[3]), text=None)
    assert [store.contains(chunk_key(identity)) for identity in IDENTITIES[:4]] == [True, False, True, True]
    assert (store.stats()["host"].chunks, store.stats()["host"].num_bytes) == (3, 3 * SIZE)
    assert store.index.get(chunk_key(IDENTITIES[1])) is None
    assert make_text("1") not in store.index.texts(NAMESPACE, 0)[0]


def test_a_chunk_larger_than_the_budget_is_an_error_where_memory_is_all_there_is():
    store = MemoryStore(SIZE - 1)
    with pytest.raises(StoreError, match="budget"):
        store.put(IDENTITIES[0], make_kv(IDENTITIES[0]), text=make_text("a"), doc_id="doc")
    assert store.index.keys() == []
    assert store.stats()["host"].num_bytes == 0


def test_a_chunk_larger_than_the_budget_stays_on_disk_where_there_is_one(root):
    store = TieredStore(MemoryStore(SIZE - 1), DiskStore(root))
    assert store.put(IDENTITIES[0], make_kv(IDENTITIES[0]), text=None) == SIZE
    assert same_bits(store.get(IDENTITIES[0]), make_kv(IDENTITIES[0]))
    assert store.stats()["host"].chunks == 0
    store.close()


def test_a_slice_does_not_keep_the_batch_alive():
    identity = IDENTITIES[0]
    batch = torch.zeros(64, 2, 3, 4)
    store = MemoryStore(2**20)
    store.put(identity, ChunkKV((LayerKV(batch[0], batch[1]),)), text=None)
    layer = store.get(identity).layers[0]
    assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes


def test_a_promoted_chunk_is_served_from_memory_with_the_same_bits(root, monkeypatch):
    DiskStore(root).put(IDENTITIES[0], make_kv(IDENTITIES[0]), text=None)
    store = TieredStore(MemoryStore(2**20), DiskStore(root))
    first = store.get_many([IDENTITIES[0]], timeout_s=30)[0]
    monkeypatch.setattr(blob, "open_blob", lambda *args, **kwargs: pytest.fail("read from disk"))
    assert store.get(IDENTITIES[0]) is first
    assert same_bits(first, make_kv(IDENTITIES[0]))
    stats = store.stats()
    assert (stats["host"].hits, stats["host"].misses, stats["disk"].hits) == (1, 1, 1)
    store.close()


def test_other_bits_under_a_stored_key_are_not_kept(root):
    """Two runs may differ in the last bit; what is on disk is the truth for every tier and process."""
    store = TieredStore(MemoryStore(2**20), DiskStore(root))
    identity = IDENTITIES[0]
    DiskStore(root).put(identity, make_kv(identity), text=None)
    other = make_kv(identity)
    other.layers[0].keys[0, 0, 0] += 1
    assert store.put(identity, other, text=None) == 0
    assert same_bits(store.get(identity), make_kv(identity))
    store.close()


def test_what_is_erased_during_a_load_is_not_promoted(root, monkeypatch):
    store = TieredStore(MemoryStore(2**20), DiskStore(root))
    identity = IDENTITIES[0]
    store.put(identity, make_kv(identity), text=None)
    store._memory.delete([chunk_key(identity)])
    real, began, go_on = reader.read_all, threading.Event(), threading.Event()

    def slow(*args, **kwargs):
        found = real(*args, **kwargs)
        began.set()
        go_on.wait(30)
        return found

    monkeypatch.setattr(reader, "read_all", slow)
    thread = threading.Thread(target=store.get, args=(identity,))
    thread.start()
    began.wait(30)
    store.delete([chunk_key(identity)])
    go_on.set()
    thread.join()
    assert store.get(identity) is None
    assert store.stats()["host"].chunks == 0
    store.close()
