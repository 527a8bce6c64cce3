"""Rows that machines share: each has a copy of them, and all follow one journal.

An entry of the journal is a change: rows by name. It is written under the next number, and a blob is written once, so one writer has it;
who comes second undoes its change, follows, and makes it again. Each entry names the digest of the one before it, and the first one is
random, so who follows a journal that was lost and begun anew sees that, and begins anew as well.

From time to time all rows are written down as a snapshot, for who begins, and entries before it are erased: the first never, the others in
their order. So if the entry that a copy is at is there, none behind it was erased.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import secrets
import time
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kvrag.errors import StoreError
from kvrag.store.base import Blobs
from kvrag.store.blobs import KEY
from kvrag.store.catalog.rows import Rows
from kvrag.store.crypto import Seal
from kvrag.threads import POOL, fork_lock
from kvrag.types import ChunkKey

log = logging.getLogger(__name__)
T = TypeVar("T")

FRESH_S = 1.0
"""Seconds for which a copy is looked at without following the journal: what another machine erases is not answered for longer."""
AGAIN_S = 5.0  # after a fault, seconds until the journal is asked again
DAMAGED = "its journal is damaged; erase it, and precompute again"
PAUSE_S = 0.25  # at most, before a change is made again
ATTEMPTS = 100  # times that a change is made that others come before
AHEAD, PER_SNAPSHOT = 16, 512  # entries read at once, and written between snapshots
PLACE, MAX_ENTRY = "j", 2**30  # the row that says where a copy is; bytes of an entry


class Place(NamedTuple):
    """Where a copy is in the journal: the number of the last entry that it has, and its digest."""

    number: int
    digest: str


class Entry(NamedTuple):
    """A change: what ``after`` it follows, whether it begins with no rows, and rows; ``None`` for those that are removed."""

    after: str
    is_whole: bool
    rows: dict[str, str | None]


class _Behind(Exception):
    """Another writer was first."""


class Journal:
    """Entries and snapshots, as blobs whose keys are numbers. Raises ``OSError`` where they can't be read or written."""

    def __init__(self, entries: Blobs, snapshots: Blobs) -> None:
        self._entries, self._snapshots = entries, snapshots

    def begin(self) -> tuple[Place, Entry]:
        """Return the place to begin at, with all rows there; the first entry is written if there is none."""
        for number in sorted(filter(KEY.fullmatch, self._snapshots.keys()), reverse=True):
            if (data := self._snapshots.read(number)) is not None:
                digest, rows = _load(data)
                return Place(int(number, 16), digest), _checked(Entry(digest, True, rows))
        self._entries.write(_key(1), [_dump([secrets.token_hex(16), False, {}])])
        if (data := self._entries.read(_key(1))) is None:
            raise OSError("the journal's first entry is gone")
        return Place(1, _digest(data)), Entry("", True, {})

    def after(self, place: Place) -> Iterator[tuple[Place, Entry]]:
        """Yield the entries behind a place; raises :class:`_Behind` if that is not, or no longer, a place of this journal."""
        count = 1  # mostly there is none
        while True:
            numbers, count = range(place.number + 1, place.number + 1 + count), AHEAD
            *found, last = POOL.ahead(self._entries.read, map(_key, (*numbers, place.number)))
            if not self._is_at(place, last):  # what seems to follow may stand where others have erased
                raise _Behind
            for number, data in zip(numbers, found, strict=True):
                if data is None:
                    return
                entry = _entry(data)
                if entry.after != place.digest:
                    raise _Behind
                place = Place(number, _digest(data))
                yield place, entry

    def append(self, place: Place, rows: dict[str, str | None], *, is_whole: bool) -> Place:
        """Write the entry behind a place, and return where that is; raises :class:`_Behind` if another was first."""
        data, key = _dump(Entry(place.digest, is_whole, rows)), _key(place.number + 1)
        if not self._entries.write(key, [data]):
            raise _Behind
        try:
            is_next = self._is_at(place, self._entries.read(_key(place.number)))
        except OSError:
            with suppress(OSError):
                self._entries.delete([key])
            raise
        if not is_next:  # the number was free because what had it was erased
            self._entries.delete([key])
            raise _Behind
        return Place(place.number + 1, _digest(data))

    def _is_at(self, place: Place, data: Any) -> bool:
        """Whether what stands at a place is the entry that was there, and none behind it was erased."""
        is_there = data is not None and _digest(data) == place.digest
        return is_there and (place.number > 1 or not self._snapshots.keys())

    def snapshot(self, place: Place, rows: dict[str, str]) -> None:
        """Write all rows down, and erase what nobody needs any more."""
        self._snapshots.write(_key(place.number), [_dump([place.digest, rows])])
        snapshots, entries, end = self._snapshots.keys(), self._entries.keys(), _key(place.number)
        self._snapshots.delete([key for key in snapshots if key < end])
        for key in sorted(key for key in entries if _key(1) < key < end):
            self._entries.delete([key])

    def close(self) -> None:
        """Release resources; idempotent."""
        self._entries.close()
        self._snapshots.close()


class SharedRows(Rows):
    """A copy of shared rows, at most :data:`FRESH_S` behind. While nobody can know what was erased elsewhere, it counts as empty.

    Parameters
    ----------
    folder, seal, read_only, durable, begin
        As for :class:`~kvrag.store.catalog.rows.Rows`, of the copy.
    journal
        What the copies follow.
    changed
        Told the names of rows that are no more.
    """

    def __init__(
        self,
        folder: Path | None,
        seal: Seal | None,
        *,
        journal: Journal,
        changed: Callable[[Collection[str]], None] = lambda _: None,
        read_only: bool = False,
        durable: bool = True,
        begin: Callable[[Rows, bool], None],
    ) -> None:
        self._journal, self._changed, self._following = journal, changed, fork_lock()
        self._fresh_s, self._again_s, self._is_cut_off = -FRESH_S, 0.0, False
        super().__init__(folder, seal, durable=durable, begin=begin)
        self.read_only = read_only

    def change(self, action: Callable[[], T]) -> T:
        """Make a change here and in the journal, or nowhere; see :meth:`Rows.change`. ``action`` may run several times."""
        if getattr(self._mine, "cache", None) is not None:
            return action()
        for attempt in range(ATTEMPTS):
            try:
                self._follow()
                with suppress(_Behind):
                    return super().change(partial(self._noted, action))
                time.sleep(random.uniform(0, min(PAUSE_S, 0.002 * 2**attempt)))  # or who was first is first again
            except StoreError:
                raise
            except OSError as error:
                raise StoreError(f"the shared KV store can't be changed: {error}; try again later") from error
        raise StoreError("the shared KV store is changed by too many at once; try again later")

    def delete(self, name: str) -> None:
        """Remove a row, inside :meth:`change`; absent ones are fine."""
        super().delete(name)
        self._note({name: None})

    def clear(self) -> None:
        """Remove all rows, inside :meth:`change`."""
        super().clear()
        if getattr(self._mine, "noted", None) is not None:
            self._mine.noted, self._mine.is_whole = {}, True

    def scrub(self) -> None:
        """Leave nothing of erased rows: neither here nor, as far as it can be reached, in the journal."""
        super().scrub()
        with suppress(OSError):
            self._snapshot()

    def close(self) -> None:
        """Close the copy; idempotent."""
        super().close()
        self._journal.close()

    def _put(self, name: str, text: str) -> None:
        super()._put(name, text)
        self._note({name: text})

    def _note(self, rows: dict[str, str | None]) -> None:
        if getattr(self._mine, "noted", None) is not None:
            self._mine.noted |= rows

    def _noted(self, action: Callable[[], T]) -> T:
        """Do what changes rows, and write what it has changed to the journal; what it raises undoes the change here."""
        self._mine.noted, self._mine.is_whole, place = {}, False, _place_of(self._mine.cache)
        try:
            result = action()
            rows, is_whole = self._mine.noted, self._mine.is_whole
        finally:
            self._mine.noted = None
        if rows or is_whole:
            place = self._journal.append(place, rows, is_whole=is_whole)
            self._mine.cache.set(PLACE, json.dumps(place))
            if place.number % PER_SNAPSHOT == 0:
                with suppress(RuntimeError):  # no thread can be had
                    POOL.submit(self.scrub)
        return result

    def _look(self, action: Callable[[Any], T], default: T) -> T:
        if getattr(self._mine, "cache", None) is None and not self._is_fresh():
            return default
        return super()._look(action, default)

    def _is_fresh(self) -> bool:
        """Follow the journal if that is due; whether this copy is as fresh as it must be."""
        asked = time.monotonic()
        if asked - self._fresh_s <= FRESH_S:
            return True
        with self._following:  # while another thread followed, or has found that it can't
            if self._fresh_s >= asked:
                return True
            if time.monotonic() < self._again_s:
                return False
            try:
                self._follow()
            except OSError as error:
                self._again_s = time.monotonic() + AGAIN_S
                if not self._is_cut_off:
                    log.warning("the shared KV store can't be reached (%s); it counts as empty", error)
                self._is_cut_off = True
                return False
            self._again_s, self._is_cut_off = 0.0, False
            return True

    def _follow(self) -> None:
        """Take over what others have changed; raises ``OSError``."""
        with self._following:
            start = time.monotonic()
            try:
                place = super()._look(_place_of, Place(0, ""))
                if not place.number:
                    raise _Behind
                for found in self._journal.after(place):
                    self._take(*found)
            except _Behind:
                place, entry = self._journal.begin()
                self._take(place, entry)
                with suppress(_Behind):
                    for found in self._journal.after(place):
                        self._take(*found)
            self._fresh_s = start

    def _take(self, place: Place, entry: Entry) -> None:
        """Make an entry's change here."""

        def take() -> set[str]:
            cache, rows = self._mine.cache, {name: text for name, text in entry.rows.items() if text is not None}
            gone = set(cache.iterkeys()) if entry.is_whole else set(entry.rows)
            for name in gone - set(rows):
                cache.delete(name)
            for name, text in (rows | {PLACE: json.dumps(place)}).items():
                cache.set(name, text)
            return gone - set(rows)

        self._changed(super().change(take))

    def _snapshot(self) -> None:
        def rows() -> tuple[Place, dict[str, str]]:
            cache = self._mine.cache
            return _place_of(cache), {name: cache.get(name) for name in cache.iterkeys() if name != PLACE}

        place, found = super().change(rows)
        if place.number > 1:
            self._journal.snapshot(place, found)


def _place_of(cache: Any) -> Place:
    with suppress(ValueError, TypeError):
        return Place(*json.loads(cache.get(PLACE) or ""))
    return Place(0, "")


def _key(number: int) -> ChunkKey:
    return ChunkKey(f"{number:064x}")


def _digest(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()


def _dump(value: Any) -> bytes:
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode())


def _entry(data: Any) -> Entry:
    """Return what an entry says; raises ``OSError``."""
    try:
        return _checked(Entry(*_load(data)))
    except TypeError as error:
        raise OSError(DAMAGED) from error


def _checked(entry: Entry) -> Entry:
    """Return an entry that has the form of one; raises ``OSError`` for any other."""
    after, is_whole, rows = entry
    is_right = isinstance(after, str) and isinstance(is_whole, bool) and isinstance(rows, dict)
    if not is_right or not all(text is None or isinstance(text, str) for text in rows.values()):
        raise OSError(DAMAGED)
    return entry


def _load(data: Any) -> Any:
    """Return what an entry or a snapshot says; raises ``OSError`` for what is none."""
    try:
        return json.loads(zlib.decompressobj().decompress(data, MAX_ENTRY))
    except (zlib.error, ValueError, RecursionError) as error:
        raise OSError(DAMAGED) from error
