"""The part of the store's contract that is about layers in order; :class:`kvrag.testing.store.StoreContract` has it."""

from __future__ import annotations

# ruff: noqa: D102  (the name of a test is its sentence)
from dataclasses import replace

from kvrag.store.base import KVStore
from kvrag.testing.chunks import NAMESPACE, make_identity, same_bits
from kvrag.testing.store_base import StoreUnderTest
from kvrag.types import ChunkKV


class LayerTests(StoreUnderTest):
    """What every store promises that gives a chunk layer by layer."""

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
