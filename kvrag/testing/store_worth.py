"""The part of the store's contract that is about what chunks are worth keeping; :class:`kvrag.testing.store.StoreContract` has it."""

from __future__ import annotations

# ruff: noqa: D102  (the name of a test is its sentence)
import pytest

from kvrag.errors import ConfigError
from kvrag.identity.fingerprint import chunk_key
from kvrag.store.base import KVStore
from kvrag.store.retention import Retention
from kvrag.testing.chunks import make_identity, make_text
from kvrag.testing.store_base import StoreUnderTest
from kvrag.types import ChunkKey

HOUR_S = 3600.0


class RetentionTests(StoreUnderTest):
    """What every store promises that goes by what it was told of a chunk's worth."""

    keeps_retention: bool = True
    """Whether the store goes by priorities; one that does not says ``None`` of every chunk."""

    def told(self, retention: Retention | None) -> Retention | None:
        """Return what the store under test says of a chunk that it was told this of."""
        return retention if self.keeps_retention else None

    def test_a_store_tells_what_a_chunk_is_worth(self, store: KVStore) -> None:
        plain, pinned, lasting = (make_identity(number) for number in range(3))
        store.put(plain, self.kv(plain), text=make_text("a"))
        store.put(pinned, self.kv(pinned), text=None, retention=Retention(80, HOUR_S, cost_ms=12.5))
        store.put(lasting, self.kv(lasting), text=None, retention=Retention(20))
        store.get_many([plain, pinned, lasting], timeout_s=30)
        assert store.retention(chunk_key(plain)) is None
        assert store.retention(chunk_key(make_identity(9))) is None
        assert store.retention(chunk_key(lasting)) == self.told(Retention(20))
        found = store.retention(chunk_key(pinned))
        if not self.keeps_retention:
            assert found is None
            return
        assert found is not None
        assert found.duration_s is not None
        assert 0 < found.duration_s < HOUR_S, "what is left of it"
        assert (found.priority, found.cost_ms) == (80, 12.5)

    def test_worth_is_said_anew_wherever_a_chunk_is(self, store: KVStore) -> None:
        first, second = make_identity(1), make_identity(2)
        keys = [chunk_key(first), chunk_key(second)]
        store.put(first, self.kv(first), text=make_text("a"), retention=Retention(90, cost_ms=12.5))
        store.put(second, self.kv(second), text=None)
        store.get(first)
        assert store.retain([*keys, keys[0], chunk_key(make_identity(9)), ChunkKey("no key")], Retention(10)) == 2
        assert store.retention(keys[0]) == self.told(Retention(10, cost_ms=12.5)), "its cost stays"
        assert store.retention(keys[1]) == self.told(Retention(10))
        assert store.retain(keys[:1], Retention(20, cost_ms=1.0)) == 1
        store.get_many([first, second], timeout_s=30)
        assert store.retention(keys[0]) == self.told(Retention(20, cost_ms=1.0))
        assert store.retain(keys[1:], Retention()) == 1
        assert store.retention(keys[1]) is None
        assert store.retain([], Retention(1)) == 0
        with pytest.raises(ConfigError, match="retention is 90"):
            store.retain(keys, 90)  # type: ignore[arg-type]
        assert store.delete(keys) == 2
        assert store.retain(keys, Retention(1)) == 0
        assert store.retention(keys[0]) is None
