"""Chunks in memory up to a budget: what leaves when another one comes."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from kvrag.fingerprint import chunk_key, content_key
from kvrag.store.base import Record
from kvrag.store.usage import Usage
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, TextEntry


@dataclass(frozen=True, slots=True)
class Entry:
    """A chunk with what decides when it leaves."""

    identity: ChunkIdentity
    kv: ChunkKV
    usage: Usage


def record_for(identity: ChunkIdentity, num_bytes: int, text: TextEntry | None) -> Record:
    """Return the row of a chunk in memory."""
    return Record(
        key=chunk_key(identity),
        content=content_key(identity),
        model=identity.model,
        namespace=identity.namespace,
        prefix=identity.prefix,
        num_tokens=len(identity.token_ids),
        num_bytes=num_bytes,
        text=text,
    )


@dataclass(slots=True)
class Shelf:
    """Chunks in the order of their use, those that must stay, and their bytes; calls must be serialised."""

    max_bytes: int
    chunks: OrderedDict[ChunkKey, Entry] = field(default_factory=OrderedDict)
    pins: Counter[ChunkKey] = field(default_factory=Counter)
    num_bytes: int = 0

    def find(self, key: ChunkKey, identity: ChunkIdentity) -> ChunkKV | None:
        """Return the KV of a chunk, if that is what the key is here."""
        entry = self.chunks.get(key)
        return entry.kv if entry is not None and entry.identity == identity else None

    def use(self, key: ChunkKey) -> None:
        """Count a chunk as the last one used."""
        self.chunks.move_to_end(key)

    def take(self, key: ChunkKey, entry: Entry) -> dict[ChunkKey, Entry] | None:
        """Take a chunk, and return what had to leave for it; ``None`` if it finds no room, and then nothing has left."""
        victims = self._victims(key, entry.kv.num_bytes, entry.usage.priority_now())
        if victims is not None:
            for old in (key, *victims):
                self.drop(old)
            self.chunks[key] = entry
            self.num_bytes += entry.kv.num_bytes
        return victims

    def drop(self, key: ChunkKey) -> bool:
        """Let a chunk go; whether it was there."""
        entry = self.chunks.pop(key, None)
        if entry is None:
            return False
        self.num_bytes -= entry.kv.num_bytes
        return True

    def clear(self) -> list[ChunkKey]:
        """Let everything go, and return what was there."""
        gone, self.num_bytes = list(self.chunks), 0
        self.chunks.clear()
        return gone

    def _victims(self, key: ChunkKey, size: int, priority: int) -> dict[ChunkKey, Entry] | None:
        """Choose what leaves for ``size`` more bytes under ``key``; ``None`` if that is not enough."""
        chosen: dict[ChunkKey, Entry] = {}
        old = self.chunks.get(key)
        excess = self.num_bytes + size - self.max_bytes - (0 if old is None else old.kv.num_bytes)
        if excess > 0 and size <= self.max_bytes:
            # Sorting is stable: what was used last stays last among its equals.
            ranked = sorted(((e.usage.priority_now(), k, e) for k, e in self.chunks.items()), key=lambda item: item[0])
            for rank, other, entry in ranked:
                if excess <= 0 or rank > priority:
                    break
                if other != key and not self.pins[other]:
                    chosen[other] = entry
                    excess -= entry.kv.num_bytes
        return chosen if excess <= 0 else None
