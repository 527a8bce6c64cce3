"""The part of the store's contract that is about documents and erasing; :class:`kvrag.testing.store.StoreContract` has it."""

from __future__ import annotations

# ruff: noqa: D102  (the name of a test is its sentence)
import pytest

from kvrag.identity.fingerprint import chunk_key, namespace_digest
from kvrag.store.base import KVStore
from kvrag.testing.chunks import NAMESPACE, make_identity, make_text, same_bits
from kvrag.testing.store_base import PATIENT_S, StoreUnderTest


class DocumentTests(StoreUnderTest):
    """What every store promises of the documents that refer to its chunks."""

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
