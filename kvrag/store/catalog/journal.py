"""Journal that copies of shared rows follow: numbered, write-once entries, and snapshots.

An entry names the digest of the entry before it. The first entry is random, so a journal that was
lost and begun anew differs.

A snapshot is a head and parts. The key of a head is the number of the last entry in the snapshot;
the head names the parts with their digests. Rows may change while parts are written. The keys of
parts begin with the number at which the snapshot was begun; the last part holds the rows changed
since. A head without all of its parts is ignored. After writing a head, a writer lists the other
heads from its start on. If it finds any, it deletes its own head; otherwise it deletes older
snapshots and entries. So no writer deletes parts of a head that stays.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

from kvrag.store.base import Blobs
from kvrag.store.blobs import KEY
from kvrag.threads import POOL
from kvrag.types import ChunkKey

DAMAGED = "its journal is damaged; erase it, and precompute again"
AHEAD = 16  # entries read at once
MAX_BYTES = 2**30  # of an entry or a part


class Place(NamedTuple):
    """Place of a copy in the journal: number and digest of the last entry that it has."""

    number: int
    digest: str


Changed = dict[str, str | None]
"""Rows by name; ``None`` for removed rows."""


class JournalEntry(NamedTuple):
    """Change: digest of the entry that it follows, whether it begins without rows, and rows."""

    after: str
    is_whole: bool
    rows: Changed


class Conflict(Exception):
    """Another writer was first."""


class Journal:
    """Entries and snapshots, as blobs with numbers as keys.

    Raises ``OSError`` if they can't be read or written.
    """

    def __init__(self, entries: Blobs, snapshots: Blobs) -> None:
        self._entries = entries
        self._snapshots = snapshots

    def begin(self) -> tuple[Place, Iterator[Changed]]:
        """Return the place to begin at, and all rows there in parts.

        The first entry is written if it is missing. Raises :class:`Conflict` if another snapshot
        has replaced this snapshot meanwhile.
        """
        there = self._snapshots.keys()
        for number in sorted(_heads(there), reverse=True):
            data = self._snapshots.read(number)
            if data is not None:
                digest, parts = _head(data)
                if parts.keys() <= there:
                    # Read all parts before the copy changes.
                    found = [self._part(*part) for part in parts.items()]
                    return Place(int(number, 16), digest), map(_rows, found)
        self._entries.write(_key(1), [_dump([secrets.token_hex(16), False, {}])])
        data = self._entries.read(_key(1))
        if data is None:
            raise OSError("the journal's first entry is gone")
        return Place(1, _digest(data)), iter(())

    def after(self, place: Place) -> Iterator[tuple[Place, JournalEntry]]:
        """Yield the entries after a place; raises :class:`Conflict` if the place is gone."""
        count = 1  # usually there are no entries
        while True:
            numbers = range(place.number + 1, place.number + 1 + count)
            count = AHEAD
            *found, last = POOL.ahead(self._entries.read, map(_key, (*numbers, place.number)))
            # Later entries may have been written where entries were erased.
            if not self._is_at(place, last):
                raise Conflict
            for number, data in zip(numbers, found, strict=True):
                if data is None:
                    return
                entry = _entry(data)
                if entry.after != place.digest:
                    raise Conflict
                place = Place(number, _digest(data))
                yield place, entry

    def append(self, place: Place, rows: Changed, *, is_whole: bool) -> Place:
        """Write the entry after a place and return its place.

        Raises :class:`Conflict` if another writer was first. If it can't be known whether the entry
        follows the place, the entry stays: other entries may have followed it. An entry written
        where entries were erased follows nothing, so no copy applies it.
        """
        data = _dump(JournalEntry(place.digest, is_whole, rows))
        key = _key(place.number + 1)
        if not self._entries.write(key, [data]) or not self._is_at(
            place, self._entries.read(_key(place.number))
        ):
            raise Conflict
        return Place(place.number + 1, _digest(data))

    def _is_at(self, place: Place, data: Any) -> bool:
        """Whether ``data`` is the entry of a place, and no later entry was erased."""
        is_there = data is not None and _digest(data) == place.digest
        return is_there and (place.number > 1 or not _heads(self._snapshots.keys()))

    def snapshot(self, place: Place, rows: Iterable[Changed]) -> None:
        """Write a snapshot of all rows, and erase the entries and snapshots that it replaces.

        Raises :class:`Conflict` if another writer does so at the same time. ``rows`` are read in
        parts, from ``place`` on; they may change meanwhile.
        """
        first = _key(place.number)
        parts = dict[ChunkKey, str]()
        if place.number < 2:
            raise Conflict
        try:
            end = self._write_parts(parts, place, rows)
            if any(head >= first for head in _heads(self._snapshots.keys())):
                raise Conflict
        except BaseException:
            with suppress(OSError):
                self._snapshots.delete(list(parts))
            raise
        number = _key(end.number)
        if not self._snapshots.write(number, [_dump([end.digest, parts])]):
            raise Conflict
        there = self._snapshots.keys()
        heads = [each for each in _heads(there) if each != number]
        if any(each >= first for each in heads):
            self._snapshots.delete([number])
            self._snapshots.delete(list(parts))
            raise Conflict
        # Upper bound of parts begun up to the last of these heads, also by killed writers.
        late = f"{max(heads, default=_key(0))[-16:]}g"
        self._snapshots.delete(heads)
        self._snapshots.delete([key for key in there if _BEFORE <= key < late])
        entries = self._entries.keys()
        for key in sorted(key for key in entries if _key(1) < key < number):
            self._entries.delete([key])

    def _write_parts(
        self, parts: dict[ChunkKey, str], place: Place, rows: Iterable[Changed]
    ) -> Place:
        """Write the parts of a snapshot, add their digests to ``parts``, and return its place."""
        name = f"{place.number:016x}{secrets.token_hex(16)}"
        end = place
        changed = Changed()

        def later() -> Iterator[Changed]:
            nonlocal end
            for here, entry in self.after(place):
                if entry.is_whole:
                    raise Conflict
                changed.update(entry.rows)
                end = here
            yield changed

        for number, some in enumerate(chain(rows, later())):
            key = ChunkKey(f"{name}{number:016x}")
            data = _dump(some)
            self._snapshots.write(key, [data])
            parts[key] = _digest(data)
        return end

    def _part(self, key: ChunkKey, digest: str) -> Any:
        data = self._snapshots.read(key)
        if data is None:
            raise Conflict
        if _digest(data) != digest:
            raise OSError(DAMAGED)
        return data

    def close(self) -> None:
        """Release resources; idempotent."""
        self._entries.close()
        self._snapshots.close()


def _key(number: int) -> ChunkKey:
    return ChunkKey(f"{number:064x}")


_BEFORE = _key(2**192)  # parts begin with a number that is not 0


def _digest(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()


def _dump(value: Any) -> bytes:
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1)


def _heads(keys: Iterable[ChunkKey]) -> list[ChunkKey]:
    """Return the keys of heads, which are numbers; keys of parts are larger than any number."""
    return [key for key in keys if KEY.fullmatch(key) and key < _BEFORE]


def _entry(data: Any) -> JournalEntry:
    """Parse an entry; raises ``OSError`` if it is malformed."""
    match _load(data):
        case [str() as after, bool() as is_whole, dict() as rows] if _are_rows(rows):
            return JournalEntry(after, is_whole, rows)
    raise OSError(DAMAGED)


def _head(data: Any) -> tuple[str, dict[ChunkKey, str]]:
    """Parse a head: the digest of the snapshot's entry, and the parts with their digests.

    Raises ``OSError`` if the head is malformed.
    """
    match _load(data):
        case [str() as digest, dict() as parts] if all(
            isinstance(each, str) for each in parts.values()
        ):
            return digest, parts
    raise OSError(DAMAGED)


def _rows(data: Any) -> Changed:
    """Parse a part; raises ``OSError`` if it is malformed."""
    rows: Changed = _load(data)
    if not _are_rows(rows):
        raise OSError(DAMAGED)
    return rows


def _load(data: Any) -> Any:
    try:
        return json.loads(zlib.decompressobj().decompress(data, MAX_BYTES))
    except (zlib.error, ValueError, TypeError, RecursionError) as error:
        raise OSError(DAMAGED) from error


def _are_rows(rows: Any) -> bool:
    return isinstance(rows, dict) and all(
        text is None or isinstance(text, str) for text in rows.values()
    )
