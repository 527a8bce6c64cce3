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
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrag.config import Retention
from kvrag.errors import ConfigError, StoreError
from kvrag.identity.fingerprint import chunk_key, content_key, namespace_digest
from kvrag.store import Blobs, TieredStore
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text, same_bits
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, Hole, LayerKV

PATIENT_S = 30.0
HOUR_S = 3600.0
KEYS = [chunk_key(make_identity(number)) for number in range(4)]


class BlobsContract:
    """Contract of :class:`~kvrag.store.Blobs`."""

    has_other: bool = True
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

    dtype: torch.dtype = torch.float32
    has_other: bool = True
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

    def test_special_values_slices_and_strides_are_stored_as_they_look(
        self, store: TieredStore
    ) -> None:
        tiny = torch.finfo(self.dtype).smallest_normal / 2
        wide = torch.arange(60, dtype=self.dtype).reshape(5, 3, 4)
        row = torch.tensor(
            [0.0, -0.0, tiny, torch.finfo(self.dtype).max], dtype=self.dtype
        ).reshape(1, 1, 4)
        for layer in (LayerKV(row, -row), LayerKV(wide[1:3], wide.transpose(0, 1)[:, :3])):
            identity = make_identity(tokens=layer.keys.shape[1])
            kv = ChunkKV((layer,))
            store.put(identity, kv, text=None)
            assert same_bits(store.get(identity), kv)

    def test_putting_twice_writes_once(self, store: TieredStore, other: TieredStore) -> None:
        identity = make_identity()
        kv = self.kv(identity)
        assert store.put(identity, kv, text=make_text("a"), doc_id="doc") == kv.num_bytes
        for each in (store, other):
            assert each.put(identity, kv, text=make_text("a"), doc_id="doc") == 0
            assert each.catalog.keys() == [chunk_key(identity)]
            assert each.catalog.texts(NAMESPACE, 0)[0] == [make_text("a")]

    @pytest.mark.parametrize("field", ["model", "namespace", "prefix", "context", "token_ids"])
    def test_each_field_of_the_identity_participates(self, store: TieredStore, field: str) -> None:
        self.put(store, make_identity())
        changed: Any = (9, 9, 9) if field == "token_ids" else "other"
        assert store.get(replace(make_identity(), **{field: changed})) is None

    def test_get_many_answers_in_order_and_loads_repeats_once(
        self, store: TieredStore, other: TieredStore
    ) -> None:
        here = make_identity(1)
        gone = make_identity(2)
        also = make_identity(3)
        for identity in (here, also):
            self.put(store, identity)
        first, hole, last, again = other.get_many([here, gone, also, here], timeout_s=PATIENT_S)
        assert isinstance(first, ChunkKV)
        assert isinstance(last, ChunkKV)
        assert same_bits(first, self.kv(here))
        assert same_bits(last, self.kv(also))
        assert hole == Hole(chunk_key(gone), "absent", None)
        assert again is first
        assert other.get_many([], timeout_s=PATIENT_S) == []

    def test_a_prefetch_reads_ahead(self, store: TieredStore, other: TieredStore) -> None:
        keys = [self.put(store, make_identity(number)) for number in range(3)]
        found = other.prefetch([make_identity(0), keys[1], make_identity(9), make_identity(0)])
        assert found.found == 2
        assert found.wait(PATIENT_S)
        assert all(self.has(other, make_identity(number)) for number in range(3))

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
    def test_what_is_not_finite_or_of_another_length_is_refused(
        self, store: TieredStore, bad: float
    ) -> None:
        kv = self.kv(make_identity())
        kv.layers[-1].values[1, 2, 0] = bad
        longer = self.kv(make_identity(tokens=4))
        for refused, why in (
            (kv, "not finite"),
            (longer, "one row per token"),
            (ChunkKV(()), "no layers"),
        ):
            with pytest.raises(StoreError, match=why):
                store.put(make_identity(), refused, text=make_text("a"), doc_id="doc")
        assert not self.has(store, make_identity())
        assert store.catalog.documents(NAMESPACE) == []

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
        assert sorted(store.catalog.keys()) == sorted(
            chunk_key(identity) for identity in identities
        )
        assert len(store.catalog.texts(NAMESPACE, 0)[0]) == len(identities)

    def test_statistics_count(self, store: TieredStore) -> None:
        for number in (1, 2):
            self.put(store, make_identity(number))
        for number in (1, 3):
            store.get(make_identity(number))
        stats = list(store.stats().values())
        num_bytes = self.kv(make_identity(1)).num_bytes
        assert sum(tier.hits for tier in stats) >= 1
        assert all(tier.misses >= 1 and tier.rejected == 0 for tier in stats)
        assert (stats[-1].chunks, stats[-1].num_bytes) == (2, 2 * num_bytes)
        assert all(tier.num_bytes == tier.chunks * num_bytes <= 2 * num_bytes for tier in stats)

    # -- the catalog -------------------------------------------------------------------------------

    def test_the_catalog_describes_what_was_put(
        self, store: TieredStore, other: TieredStore
    ) -> None:
        identity = make_identity()
        record = other.catalog.get(self.put(store, identity, "a", "doc"))
        assert record is not None
        assert (record.key, record.content) == (chunk_key(identity), content_key(identity))
        assert (record.model, record.namespace, record.prefix) == (
            identity.model,
            identity.namespace,
            identity.prefix,
        )
        assert (record.context, record.num_tokens, record.num_bytes) == (
            "",
            3,
            self.kv(identity).num_bytes,
        )
        assert other.catalog.key_texts(record.key) == [make_text("a")]

    def test_variants_are_listed_oldest_first(self, store: TieredStore, other: TieredStore) -> None:
        identities = [make_identity(prefix=prefix) for prefix in ("z", "a", "m")]
        keys = [self.put(store, identity, "a") for identity in identities]
        self.put(store, make_identity(7), "b")
        content = content_key(identities[0])
        assert [record.key for record in other.catalog.variants(content)] == keys
        store.delete(keys[:1])
        assert [record.key for record in other.catalog.variants(content)] == keys[1:]
        assert store.catalog.variants("unknown") == []

    def test_texts_come_once_with_a_cursor(self, store: TieredStore, other: TieredStore) -> None:
        self.put(store, make_identity(0), "a", "doc")
        self.put(store, make_identity(1), "b")
        self.put(store, make_identity(3))
        texts, cursor = other.catalog.texts(NAMESPACE, 0)
        assert texts == [make_text("a"), make_text("b")]
        self.put(store, make_identity(1, prefix="other"), "a")
        assert other.catalog.texts(NAMESPACE, cursor) == ([], cursor)
        for number in range(100):
            self.put(store, make_identity(10 + number), f"text {number}")
        texts, newer = other.catalog.texts(NAMESPACE, cursor)
        assert texts == [make_text(f"text {number}") for number in range(100)]
        assert newer > cursor
        assert len(store.catalog.texts(NAMESPACE, 0)[0]) == 102
        assert store.forget(NAMESPACE, "doc") == 2
        assert not other.catalog.knows_text(NAMESPACE, make_text("a").digest)
        self.put(store, make_identity(), "a", "doc")
        assert other.catalog.texts(NAMESPACE, newer)[0] == [make_text("a")], (
            "what comes back is announced again"
        )

    # -- documents and erasing ---------------------------------------------------------------------

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

    def test_kv_lives_as_long_as_one_document_refers_to_its_text(
        self, store: TieredStore, other: TieredStore
    ) -> None:
        self.put(store, make_identity(1), "a", "one")
        self.put(other, make_identity(1), "a", "two")
        self.put(store, make_identity(1, prefix="other"), "a")
        self.put(store, make_identity(2), "b", "one")
        digests = sorted([make_text("a").digest, make_text("b").digest])
        assert sorted(other.catalog.documents(NAMESPACE)) == ["one", "two"]
        assert sorted(other.catalog.document_texts(NAMESPACE, "one")) == digests
        assert store.forget(NAMESPACE, "one") == 1
        assert not self.has(other, make_identity(2))
        assert self.has(other, make_identity(1))
        assert other.catalog.documents(NAMESPACE) == ["two"]
        assert other.forget(NAMESPACE, "two") == 2
        assert store.catalog.keys() == []
        assert store.forget(NAMESPACE, "two") == 0

    def test_texts_that_share_a_chunk_and_documents_that_share_a_text_keep_it(
        self, store: TieredStore, other: TieredStore
    ) -> None:
        key = self.put(store, make_identity(), "a", "one")
        self.put(store, make_identity(), "b", "two")
        assert store.forget(NAMESPACE, "two") == 0
        assert store.catalog.texts(NAMESPACE, 0)[0] == [make_text("a")]
        assert other.link(make_identity(), text=make_text("a"), doc_id="three"), (
            "a document without KV"
        )
        assert store.catalog.document_keys(NAMESPACE, "three") == [key]
        assert store.forget(NAMESPACE, "one") == 0
        assert self.has(store, make_identity())
        assert store.forget(NAMESPACE, "three") == 1
        assert not self.has(other, make_identity())

    @pytest.mark.parametrize("doc_id", ["", 'a"b', "a b", "\0", "\ud800", "ü/../x", "\U0010ffff"])
    def test_any_string_is_a_document_id(self, store: TieredStore, doc_id: str) -> None:
        self.put(store, make_identity(), "a", doc_id)
        assert store.catalog.documents(NAMESPACE) == [doc_id]
        assert store.forget(NAMESPACE, doc_id) == 1
        assert store.catalog.documents(NAMESPACE) == []

    def test_nothing_is_left_of_what_was_cleared(
        self, store: TieredStore, other: TieredStore
    ) -> None:
        space = namespace_digest("other")
        mine = make_identity(1)
        theirs = [make_identity(number, namespace=space) for number in (1, 2, 3)]
        key = self.put(store, mine, "a", "one")
        self.put(store, theirs[0], "a", "one")
        self.put(store, theirs[1], "b")
        self.put(store, theirs[2])
        store.get_many([mine, *theirs], timeout_s=PATIENT_S)
        assert other.clear(namespace_digest("unknown")) == 0
        assert other.clear(space) == 3, "with and without ids and texts"
        assert not any(self.has(store, identity) for identity in theirs)
        assert (store.catalog.documents(space), store.catalog.texts(space, 0)[0]) == ([], [])
        assert store.catalog.keys() == [key]
        assert self.has(store, mine)
        assert [other.clear(), other.clear()] == [1, 0]
        assert not self.has(store, mine)
        assert (store.catalog.keys(), store.catalog.documents(NAMESPACE)) == ([], [])
        assert store.catalog.texts(NAMESPACE, 0)[0] == []
        self.put(store, mine, "a", "one")
        assert self.has(other, mine)

    def test_a_blob_without_a_row_is_adopted_or_erased(self, store: TieredStore) -> None:
        keys = [self.put(store, make_identity(number), "a", "one") for number in range(2)]
        store.catalog.clear()
        assert not self.has(store, make_identity(0)), "dormant"
        assert store.link(make_identity(0), text=make_text("a"), doc_id="one")
        assert self.has(store, make_identity(0))
        assert store.listed() - store.catalog.present() == {keys[1]}
        assert store.clear() == 1
        assert store.blobs.keys() == set()

    # -- retention ---------------------------------------------------------------------------------

    def test_retention_is_kept_with_what_is_left_and_updated(
        self, store: TieredStore, other: TieredStore
    ) -> None:
        given = [None, Retention(80, HOUR_S, cost_ms=12.5), Retention(20)]
        for number, retention in enumerate(given):
            identity = make_identity(number)
            store.put(identity, self.kv(identity), text=None, retention=retention)
        plain, pinned, lasting, unknown = KEYS
        assert [other.retention(key) for key in (plain, lasting, unknown)] == [
            None,
            Retention(20),
            None,
        ]
        found = other.retention(pinned)
        assert found is not None
        assert (found.priority, found.cost_ms) == (80, 12.5)
        assert 0 < (found.duration_s or 0) < HOUR_S
        assert other.retain([pinned, pinned, unknown, ChunkKey("no key")], Retention(10)) == 1
        assert store.retention(pinned) == Retention(10, cost_ms=12.5), "its cost stays"
        assert store.retain([pinned], Retention(20, cost_ms=1.0)) == 1
        assert other.retention(pinned) == Retention(20, cost_ms=1.0)
        assert store.retain([], Retention(1)) == 0
        with pytest.raises(ConfigError, match="retention is 90"):
            store.retain([pinned], 90)  # type: ignore[arg-type]
        assert store.delete([pinned]) == 1
        assert other.retain([pinned], Retention(1)) == 0
        assert other.retention(pinned) is None

    def test_a_closed_store_is_empty(self, store: TieredStore) -> None:
        self.put(store, make_identity())
        store.close()
        store.close()
        assert store.get(make_identity()) is None
        with pytest.raises(StoreError, match="closed"):
            self.put(store, make_identity(2))
