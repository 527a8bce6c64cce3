"""The store's contract as tests: subclass :class:`StoreContract` to prove a store of your own.

::

    class TestMyStore(StoreContract):
        def make_store(self, directory):
            return MyStore(directory)
"""

from __future__ import annotations

# ruff: noqa: D102  (the name of a test is its sentence)
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvrag.errors import StoreError
from kvrag.fingerprint import chunk_key, content_key, namespace_digest
from kvrag.store.base import KVStore
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text, same_bits
from kvrag.testing.store_worth import RetentionTests
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, LayerKV

PATIENT_S = 30.0


class StoreContract(RetentionTests):
    """What every store promises. A subclass gives :meth:`make_store`; pytest collects the rest."""

    dtype: torch.dtype = torch.float32

    def make_store(self, directory: Path) -> KVStore:
        """Open an empty store with room for a few megabytes; ``directory`` is its own and may be ignored."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[KVStore]:
        """Give the store under test, and close it afterwards."""
        store = self.make_store(tmp_path / "store")
        yield store
        store.close()

    def kv(self, identity: ChunkIdentity) -> ChunkKV:
        """KV of an identity in the dtype under test."""
        return make_kv(identity, dtype=self.dtype)

    def put(
        self, store: KVStore, identity: ChunkIdentity, text: str | None = None, doc_id: str | None = None
    ) -> ChunkKey:
        """Store the KV of an identity and return its key."""
        store.put(identity, self.kv(identity), text=make_text(text) if text else None, doc_id=doc_id)
        return chunk_key(identity)

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

    def test_layers_come_in_order_with_the_bits_of_the_whole(self, store: KVStore) -> None:
        identity = make_identity()
        self.put(store, identity, "a", "doc")
        for _ in range(2):  # the first one may promote it
            stream = store.stream(identity)
            assert stream is not None
            with stream as layers:
                assert (layers.num_layers, layers.num_bytes) == (2, self.kv(identity).num_bytes)
                assert same_bits(ChunkKV((next(layers), *layers), layers.kv_dtype), self.kv(identity))
            assert list(stream) == []
            assert same_bits(store.get(identity), self.kv(identity))

    def test_layers_that_nobody_takes_do_no_harm(self, store: KVStore) -> None:
        identity = make_identity()
        self.put(store, identity)
        for taken in range(2):
            stream = store.stream(identity)
            assert stream is not None
            for _ in range(taken):
                next(stream)
            stream.close()
            stream.close()
            assert list(stream) == []
        assert same_bits(store.get(identity), self.kv(identity))

    def test_what_is_absent_or_erased_has_no_layers(self, store: KVStore) -> None:
        identity = make_identity()
        assert store.stream(identity) is None
        key = self.put(store, identity, "a", "doc")
        assert store.stream(replace(identity, model="other")) is None
        assert store.forget(NAMESPACE, "doc") == 1
        assert store.stream(identity) is None
        self.put(store, identity)
        store.delete([key])
        assert store.stream(identity) is None

    def test_what_is_erased_while_its_layers_come_is_not_kept(self, store: KVStore) -> None:
        identity = make_identity()
        key = self.put(store, identity)
        stream = store.stream(identity)
        assert stream is not None
        next(stream)
        store.delete([key])
        list(stream)
        assert store.get(identity) is None
        assert store.stream(identity) is None

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

    def test_kv_lives_as_long_as_one_document_references_its_text(self, store: KVStore) -> None:
        first = self.put(store, make_identity(1), "a", "one")
        self.put(store, make_identity(1), "a", "two")
        variant = self.put(store, make_identity(1, prefix="other"), "a")
        only = self.put(store, make_identity(2), "b", "one")
        digests = [make_text("a").digest, make_text("b").digest]
        assert sorted(store.index.documents(NAMESPACE)) == ["one", "two"]
        assert sorted(store.index.document_texts(NAMESPACE, "one")) == sorted(digests)
        assert store.index.unlink(NAMESPACE, "one") == [only]
        assert store.index.documents(NAMESPACE) == ["two"]
        assert store.index.document_texts(NAMESPACE, "one") == []
        assert sorted(store.index.unlink(NAMESPACE, "two")) == sorted([first, variant])
        assert store.index.unlink(NAMESPACE, "two") == []
        assert store.index.keys() == []

    def test_texts_that_share_a_key_both_keep_it(self, store: KVStore) -> None:
        key = self.put(store, make_identity(), "a", "one")
        self.put(store, make_identity(), "b", "two")
        assert store.index.unlink(NAMESPACE, "two") == []
        assert store.index.texts(NAMESPACE, 0)[0] == [make_text("a")]
        assert store.index.unlink(NAMESPACE, "one") == [key]

    def test_unlinking_a_text_drops_all_its_references(self, store: KVStore) -> None:
        keys = [self.put(store, make_identity(prefix=prefix), "a", "one") for prefix in ("x", "y")]
        self.put(store, make_identity(5), "b", "two")
        assert sorted(store.index.unlink_text(NAMESPACE, make_text("a").digest)) == sorted(keys)
        assert store.index.documents(NAMESPACE) == ["two"]
        assert store.index.texts(NAMESPACE, 0)[0] == [make_text("b")]

    def test_forgetting_a_document_erases_what_only_it_held(self, store: KVStore) -> None:
        self.put(store, make_identity(1), "a", "one")
        self.put(store, make_identity(1), "a", "two")
        only = self.put(store, make_identity(2), "b", "one")
        assert store.index.document_keys(NAMESPACE, "two") == [chunk_key(make_identity(1))]
        assert store.forget(NAMESPACE, "one") == 1
        assert not store.contains(only)
        assert store.get(make_identity(2)) is None
        assert same_bits(store.get(make_identity(1)), self.kv(make_identity(1)))
        assert store.index.documents(NAMESPACE) == ["two"]
        assert store.forget(NAMESPACE, "one") == 0
        assert store.put(make_identity(2), self.kv(make_identity(2)), text=make_text("b"), doc_id="one") > 0
        assert same_bits(store.get(make_identity(2)), self.kv(make_identity(2)))

    def test_a_link_adds_a_reference_without_kv(self, store: KVStore) -> None:
        key = self.put(store, make_identity(), "a", "one")
        assert store.link(make_identity(), text=make_text("a"), doc_id="two")
        assert store.index.unlink(NAMESPACE, "one") == []
        assert store.index.unlink(NAMESPACE, "two") == [key]

    def test_a_prefix_is_never_searched_for(self, store: KVStore) -> None:
        key = self.put(store, make_identity())
        assert store.index.texts(NAMESPACE, 0)[0] == []
        assert store.index.keys() == [key]

    @pytest.mark.parametrize("doc_id", ["", 'a"b', "a b", "\0", "\ud800", "ü/../x", "\U0010ffff"])
    def test_any_string_is_a_document_id(self, store: KVStore, doc_id: str) -> None:
        key = self.put(store, make_identity(), "a", doc_id)
        assert store.index.documents(NAMESPACE) == [doc_id]
        assert same_bits(store.get(make_identity()), self.kv(make_identity()))
        assert store.index.unlink(NAMESPACE, doc_id) == [key]

    def test_nothing_is_left_of_a_store_that_was_cleared(self, store: KVStore) -> None:
        other = make_identity(2, namespace=namespace_digest("other"))
        self.put(store, make_identity(1), "a", "one")
        store.put(other, self.kv(other), text=make_text("b"), doc_id="two")
        self.put(store, make_identity(3))
        store.get(make_identity(1))
        assert store.clear() == 3
        for identity in (make_identity(1), other, make_identity(3)):
            assert store.get(identity) is None
            assert not store.contains(chunk_key(identity))
        for space in (NAMESPACE, other.namespace):
            assert store.index.documents(space) == []
            assert store.index.texts(space, 0)[0] == []
        assert store.index.keys() == []
        assert store.clear() == 0
        key = self.put(store, make_identity(1), "a", "one")
        assert same_bits(store.get(make_identity(1)), self.kv(make_identity(1)))
        assert store.index.unlink(NAMESPACE, "one") == [key]

    def test_nothing_is_left_of_a_namespace_that_was_cleared(self, store: KVStore) -> None:
        space = namespace_digest("other")
        mine = make_identity(1)
        theirs = [make_identity(number, namespace=space) for number in (1, 2, 3)]
        key = self.put(store, mine, "a", "one")
        store.put(theirs[0], self.kv(theirs[0]), text=make_text("a"), doc_id="one")
        store.put(theirs[1], self.kv(theirs[1]), text=make_text("b"))
        store.put(theirs[2], self.kv(theirs[2]), text=None)
        store.get_many([mine, *theirs], timeout_s=PATIENT_S)
        assert store.clear(namespace_digest("unknown")) == 0
        assert store.clear(space) == 3, "with and without ids and texts"
        assert store.get_many(theirs, timeout_s=PATIENT_S) == [None] * 3
        assert store.index.documents(space) == []
        assert store.index.texts(space, 0)[0] == []
        assert store.index.keys() == [key]
        assert same_bits(store.get(mine), self.kv(mine))
        assert store.index.documents(NAMESPACE) == ["one"]
        assert store.clear(space) == 0
        store.put(theirs[0], self.kv(theirs[0]), text=make_text("a"), doc_id="one")
        assert same_bits(store.get(theirs[0]), self.kv(theirs[0]))
        assert store.index.unlink(NAMESPACE, "one") == [key]

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
