"""Chunks in memory up to a budget: what is worth least leaves when another one comes, by the same measure as on the disk."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from kvrag.identity.fingerprint import chunk_key, content_key
from kvrag.store.base import Record
from kvrag.store.retention import Retention
from kvrag.store.usage import Usage, order, token_ms
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, TextEntry

DUE_SHARE = 16
"""One chunk of so many may leave by the ranking that found it, before all are ranked again."""


@dataclass(slots=True, eq=False)
class Entry:
    """A chunk with what decides when it leaves."""

    identity: ChunkIdentity
    kv: ChunkKV
    usage: Usage
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_bytes = self.kv.num_bytes  # counted once: it is asked for at each choice

    @property
    def num_tokens(self) -> int:
        """Tokens of the chunk."""
        return len(self.identity.token_ids)


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
    """Chunks, those that must stay, and their bytes; calls must be serialised.

    Time is logical, as on the disk: ``now`` counts what came and what was used. Where there are many chunks, they are not ranked anew for
    each one that comes: those found to be worth least leave one after the other, unless they are used meanwhile.
    """

    max_bytes: int
    chunks: dict[ChunkKey, Entry] = field(default_factory=dict)
    pins: Counter[ChunkKey] = field(default_factory=Counter)
    num_bytes: int = 0
    now: int = 0
    _lasting: Counter[int] = field(default_factory=Counter)
    """Bytes of chunks whose priority never ends, by that priority."""
    _ending: set[ChunkKey] = field(default_factory=set)
    """Chunks whose priority has an end."""
    _due: list[tuple[ChunkKey, Usage]] = field(default_factory=list)
    _due_priority: int = 0

    def find(self, key: ChunkKey, identity: ChunkIdentity) -> ChunkKV | None:
        """Return the KV of a chunk, if that is what the key is here."""
        entry = self.chunks.get(key)
        return entry.kv if entry is not None and entry.identity == identity else None

    def use(self, key: ChunkKey) -> None:
        """Count a hit on a chunk."""
        self.now += 1
        entry = self.chunks[key]
        entry.usage = entry.usage.touched(1, self.now)

    def retention(self, key: ChunkKey) -> Retention | None:
        """Return what was said of a chunk's worth, as it is at present; ``None`` if nothing was."""
        entry = self.chunks.get(key)
        retention = None if entry is None else entry.usage.retention()
        return None if retention == Retention() else retention

    def retain(self, key: ChunkKey, retention: Retention) -> bool:
        """Say anew what a chunk is worth; whether it is here."""
        entry = self.chunks.get(key)
        if entry is not None:
            self._tally(key, entry, -1)
            entry.usage, self._due = entry.usage.retained(retention), []
            self._tally(key, entry, 1)
        return entry is not None

    def take(self, key: ChunkKey, entry: Entry) -> dict[ChunkKey, Entry] | None:
        """Take a chunk, and return what had to leave for it; ``None`` if it finds no room, and then nothing has left."""
        self.now += 1
        known = self.chunks.get(key)
        hits = 0.0 if known is None else known.usage.recent_hits(self.now)
        entry.usage = replace(entry.usage, hits=max(hits, entry.usage.hits), last=self.now)
        victims = self._victims(key, entry)
        if victims is not None:
            for old in (key, *victims):
                self.drop(old)
            self.chunks[key] = entry
            if entry.usage.priority_now() < self._due_priority:
                self._due = []  # this one must leave before them
            self._tally(key, entry, 1)
        return victims

    def drop(self, key: ChunkKey) -> bool:
        """Let a chunk go; whether it was there."""
        entry = self.chunks.pop(key, None)
        if entry is None:
            return False
        self._tally(key, entry, -1)
        return True

    def clear(self, namespace: str | None = None) -> list[ChunkKey]:
        """Let everything go, or all of a namespace, and return what was there."""
        gone = [key for key, entry in self.chunks.items() if namespace in (None, entry.identity.namespace)]
        for key in gone:
            self.drop(key)
        return gone

    def _victims(self, key: ChunkKey, new: Entry) -> dict[ChunkKey, Entry] | None:
        """Choose what leaves for a chunk under ``key``; ``None`` if that is not enough."""
        old, priority = self.chunks.get(key), new.usage.priority_now()
        excess = self.num_bytes + new.num_bytes - self.max_bytes - (0 if old is None else old.num_bytes)
        if excess <= 0 or new.num_bytes > self.max_bytes:
            return {} if excess <= 0 else None
        if self._may_leave(key, priority) < excess:
            return None
        for ranking in (self._ranked_before, self._ranked):
            chosen, left = {}, excess
            for other, entry in ranking(new):
                if left <= 0:
                    break
                if other != key and not self.pins[other] and entry.usage.priority_now() <= priority:
                    chosen[other] = entry
                    left -= entry.num_bytes
            if left <= 0:
                return chosen
        return None

    def _tally(self, key: ChunkKey, entry: Entry, sign: int) -> None:
        """Count a chunk that is here from now on, or not any more."""
        self.num_bytes += sign * entry.num_bytes
        if entry.usage.deadline < 0:
            self._lasting[entry.usage.priority] += sign * entry.num_bytes
        elif sign > 0:
            self._ending.add(key)
        else:
            self._ending.discard(key)

    def _may_leave(self, key: ChunkKey, priority: int) -> int:
        """Return the bytes that may leave for a chunk under ``key`` with a priority; looks at no chunk whose own never ends."""
        lasting = sum(num_bytes for other, num_bytes in self._lasting.items() if other <= priority)
        staying = {key, *(pinned for pinned, count in self.pins.items() if count > 0)}
        ending = [self.chunks[other] for other in self._ending - staying]
        there = [entry for entry in map(self.chunks.get, staying) if entry is not None and entry.usage.deadline < 0]
        return (
            lasting
            + sum(entry.num_bytes for entry in ending if entry.usage.priority_now() <= priority)
            - sum(entry.num_bytes for entry in there if entry.usage.priority <= priority)
        )

    def _ranked_before(self, _: Entry) -> list[tuple[ChunkKey, Entry]]:
        """Return what was worth least when all was ranked, but for what has gone or been used since."""
        entries = ((key, self.chunks.get(key), usage) for key, usage in self._due)
        due = [(key, entry) for key, entry, usage in entries if entry is not None and entry.usage is usage]
        self._due = [(key, entry.usage) for key, entry in due]
        return due

    def _ranked(self, new: Entry) -> list[tuple[ChunkKey, Entry]]:
        """Rank all chunks, worth least first, and note the first of them for the next times."""
        rank = order(self.now, token_ms((entry, entry.usage) for entry in (new, *self.chunks.values())))
        ranked = sorted(self.chunks.items(), key=lambda item: rank((item[1], item[1].usage)))
        self._due = [(key, entry.usage) for key, entry in ranked[: len(ranked) // DUE_SHARE]]
        self._due_priority = max((usage.priority_now() for _, usage in self._due), default=0)
        return ranked
