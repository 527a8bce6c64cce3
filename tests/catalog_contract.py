"""What is the same in every store, whatever its tiers: its catalog of chunks, texts and documents, what it refuses and counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvrag.config import Retention
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key, content_key, namespace_digest
from kvrag.store import TieredStore
from kvrag.testing.chunks import NAMESPACE, make_identity, make_text, same_bits
from kvrag.testing.store import HOUR_S, KEYS, PATIENT_S, StoreContract
from kvrag.types import ChunkKey, ChunkKV, Hole, LayerKV


class CatalogContract(StoreContract):
    """Contract of a store of kvrag's own: :class:`StoreContract`, and what is the same whatever the tiers."""

    @pytest.mark.parametrize("field", ["model", "namespace", "prefix", "context", "token_ids"])
    def test_each_field_of_the_identity_participates(self, store: TieredStore, field: str) -> None:
        self.put(store, make_identity())
        changed: Any = (9, 9, 9) if field == "token_ids" else "other"
        assert store.get(replace(make_identity(), **{field: changed})) is None

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
        assert store.catalog.documents(NAMESPACE) == ["doc"]

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

    def test_a_closed_store_is_empty(self, store: TieredStore) -> None:
        self.put(store, make_identity())
        store.close()
        store.close()
        assert store.get(make_identity()) is None
        with pytest.raises(StoreError, match="closed"):
            self.put(store, make_identity(2))

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
        assert store.delete([pinned]) == 1
        assert other.retain([pinned], Retention(1)) == 0
        assert other.retention(pinned) is None
