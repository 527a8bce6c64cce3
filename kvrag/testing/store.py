"""Contracts of blobs and stores as tests: subclass them to test a tier of your own.

::

    class TestMyBlobs(BlobsContract):
        def make_blobs(self, directory):
            return MyBlobs(directory)

    class TestStoreOnMyBlobs(StoreContract):
        def make_store(self, directory):
            tiers, catalog = [MemoryTier(2**22)], Catalog(directory / "catalog")
            return TieredStore(tiers, MyBlobs(directory), catalog)

The tests open two handles on the same directory: both must see every change.
"""

from __future__ import annotations

# ruff: noqa: D102  (the name of a test is its sentence)
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kvrag.identity.fingerprint import chunk_key
from kvrag.store import Blobs, TieredStore
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text, same_bits
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, Hole

PATIENT_S = 30.0
HOUR_S = 3600.0
KEYS = [chunk_key(make_identity(number)) for number in range(4)]


class BlobsContract:
    """Contract of :class:`~kvrag.store.Blobs`."""

    has_other = True
    """Whether a second handle on the directory sees the first handle's blobs."""

    def make_blobs(self, directory: Path) -> Blobs:
        """Open the blobs of ``directory``, as a path or merely as a name."""
        raise NotImplementedError

    @pytest.fixture
    def blobs(self, tmp_path: Path) -> Iterator[Blobs]:
        """Yield the blobs under test."""
        blobs = self.make_blobs(tmp_path / "store")
        yield blobs
        blobs.close()

    @pytest.fixture
    def other(self, tmp_path: Path, blobs: Blobs) -> Iterator[Blobs]:
        """Yield a second handle on the blobs."""
        other = self.make_blobs(tmp_path / "store") if self.has_other else blobs
        yield other
        other.close()

    def test_what_was_written_is_read_in_any_part(self, blobs: Blobs, other: Blobs) -> None:
        assert blobs.write(KEYS[0], [b"abc", memoryview(b"defg"), bytearray(b"h")]) == 8
        for each in (blobs, other):
            assert each.read(KEYS[0]) == b"abcdefgh"
            assert each.read(KEYS[0], 2) == b"cdefgh"
            assert [each.read(KEYS[0], start, 3) for start in (2, 6, 100)] == [b"cde", b"gh", b""]
            assert each.read(KEYS[0], 0, 0) == b""
        parts = [bytes([number]) * 2**17 for number in range(20)]
        assert blobs.write(KEYS[1], parts) == 20 * 2**17
        assert blobs.read(KEYS[1]) == b"".join(parts)

    def test_writing_twice_is_writing_once(self, blobs: Blobs, other: Blobs) -> None:
        assert blobs.write(KEYS[0], [b"one"]) == 3
        assert other.write(KEYS[0], [b"two!"]) == 0
        assert other.read(KEYS[0]) == b"one"
        assert blobs.keys() == {KEYS[0]}

    def test_what_was_erased_is_absent(self, blobs: Blobs, other: Blobs) -> None:
        assert (blobs.read(KEYS[0]), blobs.keys(), blobs.delete(KEYS)) == (None, set(), set())
        for key in KEYS[:3]:
            blobs.write(key, [b"x"])
        assert other.delete([*KEYS[:2], KEYS[3]]) == set(KEYS[:2])
        assert (blobs.read(KEYS[0]), blobs.keys(), blobs.delete(KEYS[:1])) == (
            None,
            {KEYS[2]},
            set(),
        )
        assert blobs.write(KEYS[0], [b"again"]) == 5
        assert other.read(KEYS[0]) == b"again"
        blobs.close()  # the fixture closes once more

    def test_optional_abilities_keep_the_blob(self, blobs: Blobs) -> None:
        blobs.write(KEYS[0], [b"kept"])
        blobs.expire(KEYS[0], HOUR_S)
        assert blobs.sweep() == 0 < blobs.free_bytes()
        assert blobs.read(KEYS[0]) == b"kept"

    def test_writers_of_one_key_agree(self, blobs: Blobs, other: Blobs) -> None:
        with ThreadPoolExecutor(6) as pool:
            written = pool.map(
                lambda handle: handle.write(KEYS[0], [b"same" * 10_000]), (blobs, other) * 3
            )
        assert sorted(written) == [0, 0, 0, 0, 0, 40_000]
        assert blobs.read(KEYS[0]) == b"same" * 10_000


class StoreContract:
    """Contract of :class:`~kvrag.store.TieredStore`."""

    dtype = torch.float32
    has_other = True
    """Whether a second handle on the directory sees the first handle's chunks."""

    def make_store(self, directory: Path) -> TieredStore:
        """Open the store of ``directory``, with room for a few megabytes."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[TieredStore]:
        """Yield the store under test."""
        store = self.make_store(tmp_path / "store")
        yield store
        store.close()

    @pytest.fixture
    def other(self, tmp_path: Path, store: TieredStore) -> Iterator[TieredStore]:
        """Yield a second handle on the store."""
        other = self.make_store(tmp_path / "store") if self.has_other else store
        yield other
        other.close()

    def kv(self, identity: ChunkIdentity) -> ChunkKV:
        """Return the KV of an identity in the dtype under test."""
        return make_kv(identity, dtype=self.dtype)

    def put(
        self,
        store: TieredStore,
        identity: ChunkIdentity,
        text: str | None = None,
        doc_id: str | None = None,
    ) -> ChunkKey:
        """Store the KV of an identity and return its key."""
        store.put(
            identity, self.kv(identity), text=make_text(text) if text else None, doc_id=doc_id
        )
        return chunk_key(identity)

    def has(self, store: TieredStore, identity: ChunkIdentity) -> bool:
        """Whether a store returns KV for an identity; fail if the KV is wrong."""
        kv = store.get(identity)
        assert (kv is not None) == bool(store.known([chunk_key(identity)]))
        assert kv is None or same_bits(kv, self.kv(identity))
        return kv is not None

    # -- chunks ------------------------------------------------------------------------------------

    def test_an_empty_store_has_nothing(self, store: TieredStore) -> None:
        identity = make_identity()
        assert not self.has(store, identity)
        assert store.get_many([identity], timeout_s=PATIENT_S) == [
            Hole(chunk_key(identity), "absent", None)
        ]
        assert not store.link(identity, text=make_text("a"), doc_id="doc")
        assert store.delete([chunk_key(identity)]) == store.forget(NAMESPACE, "doc") == 0
        assert store.catalog.keys() == []
        assert store.catalog.texts(NAMESPACE, 0) == ([], 0)

    def test_what_was_put_comes_back_bit_for_bit_from_every_tier(
        self, store: TieredStore, other: TieredStore
    ) -> None:
        identity = make_identity()
        kv = self.kv(identity)
        assert store.put(identity, kv, text=make_text("a"), doc_id="doc") == kv.num_bytes
        kv.layers[0].keys.zero_()  # changing the caller's tensors must not change the store
        for each in (store, store, other, other):
            assert self.has(each, identity)
        for tier in other.tiers:
            tier.release()
            assert self.has(other, identity)
        assert other.identities(NAMESPACE, make_text("a").digest) == [identity]

    def test_putting_twice_writes_once(self, store: TieredStore, other: TieredStore) -> None:
        identity = make_identity()
        kv = self.kv(identity)
        assert store.put(identity, kv, text=make_text("a"), doc_id="doc") == kv.num_bytes
        for each in (store, other):
            assert each.put(identity, kv, text=make_text("a"), doc_id="doc") == 0
            assert each.catalog.keys() == [chunk_key(identity)]
            assert each.catalog.texts(NAMESPACE, 0)[0] == [make_text("a")]

    def test_threads_may_share_a_store(self, store: TieredStore, other: TieredStore) -> None:
        identities = [make_identity(number) for number in range(6)]

        def work(offset: int) -> bool:
            handle = (store, other)[offset % 2]
            is_right = True
            for step in range(8):
                identity = identities[(step + offset) % len(identities)]
                self.put(handle, identity, str(identity.token_ids), f"doc {offset}")
                is_right &= same_bits(handle.get(identity), self.kv(identity))
                handle.catalog.texts(NAMESPACE, 0)
            return is_right

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(work, range(4)))
        assert sorted(store.catalog.keys()) == sorted(map(chunk_key, identities))
        assert len(store.catalog.texts(NAMESPACE, 0)[0]) == len(identities)

    # -- erasing -----------------------------------------------------------------------------------

    def test_what_one_erases_the_other_does_not_answer_with(
        self, store: TieredStore, other: TieredStore
    ) -> None:
        identities = [make_identity(number) for number in range(4)]
        keys = [
            self.put(store, identity, f"text {n}", f"doc {n}")
            for n, identity in enumerate(identities)
        ]
        assert all(
            self.has(handle, identity) for identity in identities for handle in (store, other)
        )
        assert other.delete([keys[0], keys[0]]) == 1
        assert not self.has(store, identities[0])
        assert store.delete(keys[:1]) == 0
        assert other.forget(NAMESPACE, "doc 1") == 1
        assert not self.has(store, identities[1])
        got = store.get_many(identities, timeout_s=PATIENT_S)
        assert [isinstance(each, ChunkKV) for each in got] == [False, False, True, True]
        assert sorted(store.catalog.keys()) == sorted(keys[2:])
        assert other.clear() == 2
        assert not any(self.has(store, identity) for identity in identities)
        self.put(store, identities[0])
        assert self.has(other, identities[0]), "it may come back"

    def test_a_blob_without_a_row_is_adopted_or_erased(self, store: TieredStore) -> None:
        keys = [self.put(store, make_identity(number), "a", "one") for number in range(2)]
        store.catalog.clear()
        assert not self.has(store, make_identity(0)), "dormant"
        assert store.link(make_identity(0), text=make_text("a"), doc_id="one")
        assert self.has(store, make_identity(0))
        assert store.listed() - store.catalog.present() == {keys[1]}
        assert store.clear() == 1
        assert store.blobs.keys() == set()
