"""The journal that copies of shared rows follow: numbered entries, each written once, and snapshots.

An entry names the digest of the one before it. The first one is random, so a journal that was lost and begun anew is another one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from kvrag.store.base import Blobs
from kvrag.store.blobs import KEY
from kvrag.threads import POOL
from kvrag.types import ChunkKey

log = logging.getLogger(__name__)

DAMAGED = "its journal is damaged; erase it, and precompute again"
AHEAD, MAX_ENTRY = 16, 2**30  # entries read at once; bytes of one


class Place(NamedTuple):
    """Where a copy is in the journal: the number of the last entry that it has, and its digest."""

    number: int
    digest: str


class Entry(NamedTuple):
    """A change: what ``after`` it follows, whether it begins with no rows, and rows; ``None`` for those that are removed."""

    after: str
    is_whole: bool
    rows: dict[str, str | None]


class Behind(Exception):
    """Another writer was first."""


class Journal:
    """Entries and snapshots, as blobs whose keys are numbers. Raises ``OSError`` where they can't be read or written."""

    def __init__(self, entries: Blobs, snapshots: Blobs) -> None:
        self._entries, self._snapshots = entries, snapshots

    def begin(self) -> tuple[Place, Entry]:
        """Return the place to begin at, with all rows there; the first entry is written if there is none."""
        for number in sorted(filter(KEY.fullmatch, self._snapshots.keys()), reverse=True):
            if (data := self._snapshots.read(number)) is not None:
                entry = _entry(data, is_snapshot=True)
                return Place(int(number, 16), entry.after), entry
        self._entries.write(_key(1), [_dump([secrets.token_hex(16), False, {}])])
        if (data := self._entries.read(_key(1))) is None:
            raise OSError("the journal's first entry is gone")
        return Place(1, _digest(data)), Entry("", True, {})

    def after(self, place: Place) -> Iterator[tuple[Place, Entry]]:
        """Yield the entries behind a place; raises :class:`Behind` if that is not, or no longer, a place of this journal."""
        count = 1  # mostly there is none
        while True:
            numbers, count = range(place.number + 1, place.number + 1 + count), AHEAD
            *found, last = POOL.ahead(self._entries.read, map(_key, (*numbers, place.number)))
            if not self._is_at(place, last):  # what seems to follow may stand where others have erased
                raise Behind
            for number, data in zip(numbers, found, strict=True):
                if data is None:
                    return
                entry = _entry(data)
                if entry.after != place.digest:
                    raise Behind
                place = Place(number, _digest(data))
                yield place, entry

    def append(self, place: Place, rows: dict[str, str | None], *, is_whole: bool) -> Place:
        """Write the entry behind a place, and return where that is; raises :class:`Behind` if another was first."""
        data, key = _dump(Entry(place.digest, is_whole, rows)), _key(place.number + 1)
        if not self._entries.write(key, [data]):
            raise Behind
        try:
            is_next = self._is_at(place, self._entries.read(_key(place.number)))
        except OSError:
            with suppress(OSError):
                self._entries.delete([key])
            raise
        if not is_next:  # the number was free because what had it was erased
            self._entries.delete([key])
            raise Behind
        return Place(place.number + 1, _digest(data))

    def _is_at(self, place: Place, data: Any) -> bool:
        """Whether what stands at a place is the entry that was there, and none behind it was erased."""
        is_there = data is not None and _digest(data) == place.digest
        return is_there and (place.number > 1 or not self._snapshots.keys())

    def snapshot(self, place: Place, rows: dict[str, str]) -> None:
        """Write all rows down, and erase what nobody needs any more; nothing where they are more than can be read again."""
        if sum(map(len, rows)) + sum(map(len, rows.values())) > MAX_ENTRY // 2:
            log.warning("the catalog of the shared KV store is too large for a snapshot; use several stores")
            return
        self._snapshots.write(_key(place.number), [_dump([place.digest, rows])])
        snapshots, entries, end = self._snapshots.keys(), self._entries.keys(), _key(place.number)
        self._snapshots.delete([key for key in snapshots if key < end])
        for key in sorted(key for key in entries if _key(1) < key < end):
            self._entries.delete([key])

    def close(self) -> None:
        """Release resources; idempotent."""
        self._entries.close()
        self._snapshots.close()


def _key(number: int) -> ChunkKey:
    return ChunkKey(f"{number:064x}")


def _digest(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()


def _dump(value: Any) -> bytes:
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode())


def _entry(data: Any, *, is_snapshot: bool = False) -> Entry:
    """Return what an entry or a snapshot says; raises ``OSError`` for what is none."""
    try:
        found = json.loads(zlib.decompressobj().decompress(data, MAX_ENTRY))
        after, is_whole, rows = (found[0], True, found[1]) if is_snapshot else found
    except (zlib.error, ValueError, TypeError, LookupError, RecursionError) as error:
        raise OSError(DAMAGED) from error
    is_right = isinstance(after, str) and isinstance(is_whole, bool) and isinstance(rows, dict)
    if not is_right or not all(text is None or isinstance(text, str) for text in rows.values()):
        raise OSError(DAMAGED)
    return Entry(after, is_whole, rows)
