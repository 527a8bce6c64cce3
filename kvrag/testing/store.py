"""The store's contract as tests: subclass :class:`StoreContract` to prove a store of your own.

::

    class TestMyStore(StoreContract):
        def make_store(self, directory):
            return MyStore(directory)
"""

from __future__ import annotations

# ruff: noqa: D102  (the name of a test is its sentence)
import threading
from dataclasses import replace

import pytest
import torch

from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key, content_key, namespace_digest
from kvrag.store.base import KVStore
from kvrag.testing.chunks import NAMESPACE, make_identity, make_text, same_bits
from kvrag.testing.store_base import PATIENT_S
from kvrag.testing.store_documents import DocumentTests
from kvrag.testing.store_layers import LayerTests
from kvrag.testing.store_worth import RetentionTests
from kvrag.types import ChunkKV, LayerKV


class StoreContract(RetentionTests, LayerTests, DocumentTests):
    """What every store promises. A subclass gives :meth:`make_store`; pytest collects the rest."""

    def test_an_empty_store_has_nothing(self, store: KVStore) -> None:
        identity = make_identity()
        assert store.get(identity) is None
        assert store.get_many([identity], timeout_s=PATIENT_S) == [None]
        assert not store.contains(chunk_key(identity))
        assert not store.link(identity, text=make_text("a"), doc_id="doc")
        assert store.delete([chunk_key(identity)]) == 0
        assert store.index.keys() == []
        assert store.index.texts(NAMESPACE, 0) == ([], 0)

    def test_what_was_put_comes_back_bit_for_bit(self, store: KVStore) -> None:
        identity = make_identity()
        kv = self.kv(identity)
        assert store.put(identity, kv, text=make_text("a"), doc_id="doc") == kv.num_bytes
        assert store.contains(chunk_key(identity))
        for _ in range(2):
            assert same_bits(store.get(identity), kv)

    def test_special_values_keep_their_bits(self, store: KVStore) -> None:
        identity = make_identity(tokens=1)
        tiny = torch.finfo(self.dtype).smallest_normal / 2
        row = torch.tensor([0.0, -0.0, tiny, torch.finfo(self.dtype).max], dtype=self.dtype).reshape(1, 1, 4)
        kv = ChunkKV((LayerKV(row, -row),))
        store.put(identity, kv, text=None)
        assert same_bits(store.get(identity), kv)

    def test_slices_and_strides_are_stored_as_they_look(self, store: KVStore) -> None:
        identity = make_identity()
        wide = torch.arange(60, dtype=self.dtype).reshape(5, 3, 4)
        kv = ChunkKV((LayerKV(wide[1:3], wide.transpose(0, 1)[:, :3]),))
        store.put(identity, kv, text=None)
        assert same_bits(store.get(identity), kv)

    def test_a_change_of_the_callers_tensors_does_not_reach_the_store(self, store: KVStore) -> None:
        identity = make_identity()
        kv = self.kv(identity)
        store.put(identity, kv, text=None)
        kv.layers[0].keys.zero_()
        assert same_bits(store.get(identity), self.kv(identity))

    def test_putting_twice_writes_once(self, store: KVStore) -> None:
        identity = make_identity()
        kv = self.kv(identity)
        assert store.put(identity, kv, text=make_text("a"), doc_id="doc") == kv.num_bytes
        assert store.put(identity, kv, text=make_text("a"), doc_id="doc") == 0
        assert store.index.keys() == [chunk_key(identity)]
        assert len(store.index.texts(NAMESPACE, 0)[0]) == 1

    @pytest.mark.parametrize("field", ["model", "namespace", "prefix", "token_ids"])
    def test_each_field_of_the_identity_participates(self, store: KVStore, field: str) -> None:
        identity = make_identity()
        changed = (9, 9, 9) if field == "token_ids" else "other"
        self.put(store, identity)
        assert store.get(replace(identity, **{field: changed})) is None  # type: ignore[arg-type]

    def test_namespaces_never_share(self, store: KVStore) -> None:
        mine = make_identity(namespace=namespace_digest("mine"))
        self.put(store, mine, "a", "doc")
        other = namespace_digest("other")
        assert store.get(replace(mine, namespace=other)) is None
        assert store.index.texts(other, 0)[0] == []
        assert store.index.documents(other) == []
        assert store.index.unlink(other, "doc") == []
        assert store.index.unlink_text(other, make_text("a").digest) == []
        assert same_bits(store.get(mine), self.kv(mine))

    def test_get_many_answers_in_order_and_loads_repeats_once(self, store: KVStore) -> None:
        here, gone, also = make_identity(1), make_identity(2), make_identity(3)
        self.put(store, here)
        self.put(store, also)
        got = store.get_many([here, gone, also, here], timeout_s=PATIENT_S)
        assert same_bits(got[0], self.kv(here))
        assert got[1] is None
        assert same_bits(got[2], self.kv(also))
        assert got[3] is got[0]
        assert store.get_many([], timeout_s=PATIENT_S) == []

    def test_values_that_are_not_finite_are_refused(self, store: KVStore) -> None:
        identity = make_identity()
        for bad in (float("nan"), float("inf"), float("-inf")):
            kv = self.kv(identity)
            kv.layers[-1].values[1, 2, 0] = bad
            with pytest.raises(StoreError, match="not finite"):
                store.put(identity, kv, text=None)
        assert not store.contains(chunk_key(identity))
        assert store.get(identity) is None

    def test_kv_of_another_length_is_refused(self, store: KVStore) -> None:
        with pytest.raises(StoreError, match="one row per token"):
            store.put(make_identity(tokens=4), self.kv(make_identity(tokens=3)), text=None)
        with pytest.raises(StoreError, match="no layers"):
            store.put(make_identity(), ChunkKV(()), text=None)

    def test_the_index_describes_what_was_put(self, store: KVStore) -> None:
        identity = make_identity()
        self.put(store, identity, "a", "doc")
        record = store.index.get(chunk_key(identity))
        assert record is not None
        assert record.key == chunk_key(identity)
        assert record.content == content_key(identity)
        assert (record.model, record.namespace, record.prefix) == (identity.model, identity.namespace, identity.prefix)
        assert (record.num_tokens, record.num_bytes) == (3, self.kv(identity).num_bytes)
        assert record.text == make_text("a")

    def test_variants_behind_other_prefixes_are_listed_oldest_first(self, store: KVStore) -> None:
        identities = [make_identity(prefix=prefix) for prefix in ("z", "a", "m")]
        keys = [self.put(store, identity, "a") for identity in identities]
        self.put(store, make_identity(7), "b")
        content = content_key(identities[0])
        assert [record.key for record in store.index.variants(content)] == keys
        store.delete(keys[:1])
        assert [record.key for record in store.index.variants(content)] == keys[1:]
        assert store.index.variants("unknown") == []

    def test_texts_come_once_with_a_cursor(self, store: KVStore) -> None:
        self.put(store, make_identity(1), "a")
        self.put(store, make_identity(2), "b")
        self.put(store, make_identity(3))
        texts, cursor = store.index.texts(NAMESPACE, 0)
        assert texts == [make_text("a"), make_text("b")]
        assert store.index.texts(NAMESPACE, cursor) == ([], cursor)
        self.put(store, make_identity(1, prefix="other"), "a")
        assert store.index.texts(NAMESPACE, cursor) == ([], cursor)
        self.put(store, make_identity(4), "c")
        texts, newer = store.index.texts(NAMESPACE, cursor)
        assert texts == [make_text("c")]
        assert newer > cursor

    def test_a_text_that_comes_back_is_announced_again(self, store: KVStore) -> None:
        key = self.put(store, make_identity(), "a", "doc")
        _, cursor = store.index.texts(NAMESPACE, 0)
        store.delete(store.index.unlink(NAMESPACE, "doc"))
        assert not store.contains(key)
        self.put(store, make_identity(), "a", "doc")
        assert store.index.texts(NAMESPACE, cursor)[0] == [make_text("a")]

    def test_deleted_chunks_are_gone(self, store: KVStore) -> None:
        keys = [self.put(store, make_identity(number), f"text {number}") for number in range(3)]
        store.get_many([make_identity(number) for number in range(3)], timeout_s=PATIENT_S)
        assert store.delete([keys[0], keys[1], keys[0]]) == 2
        assert store.get(make_identity(0)) is None
        assert not store.contains(keys[1])
        assert store.index.keys() == keys[2:]
        assert store.delete(keys[:2]) == 0
        assert store.put(make_identity(0), self.kv(make_identity(0)), text=None) > 0

    def test_statistics_count(self, store: KVStore) -> None:
        self.put(store, make_identity(1))
        self.put(store, make_identity(2))
        store.get(make_identity(1))
        store.get(make_identity(3))
        stats = store.stats()
        assert sum(tier.hits for tier in stats.values()) >= 1
        assert all(tier.misses >= 1 for tier in stats.values())
        assert all(tier.rejected == 0 for tier in stats.values())
        num_bytes = 2 * self.kv(make_identity(1)).num_bytes
        lasting = list(stats.values())[-1]
        assert (lasting.chunks, lasting.num_bytes) == (2, num_bytes)
        # A tier above it may hold what was read alone.
        assert all(tier.num_bytes == tier.chunks * num_bytes // 2 <= num_bytes for tier in stats.values())

    def test_threads_may_share_a_store(self, store: KVStore) -> None:
        identities = [make_identity(number) for number in range(6)]
        wrong: list[object] = []

        def work(offset: int) -> None:
            try:
                for step in range(12):
                    identity = identities[(step + offset) % len(identities)]
                    text = make_text(str(identity.token_ids))
                    store.put(identity, self.kv(identity), text=text, doc_id=f"doc {offset}")
                    if not same_bits(store.get(identity), self.kv(identity)):
                        wrong.append(identity)
                    store.index.texts(NAMESPACE, 0)
            except Exception as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(offset,)) for offset in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert sorted(store.index.keys()) == sorted(chunk_key(identity) for identity in identities)
        assert len(store.index.texts(NAMESPACE, 0)[0]) == len(identities)

    def test_closing_twice_is_fine(self, store: KVStore) -> None:
        store.close()
        store.close()
