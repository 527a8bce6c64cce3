"""Rows that machines share: every machine has a copy, and all copies follow a journal.

An entry of the journal is a change: rows by name. It is written under the next number. A blob can
be written only once, so a single writer gets the number. The loser rolls back its change, applies
the winner's entry and retries. An entry names the digest of the entry before it, and the first
entry is random. So a copy notices a journal that was lost and begun anew, and begins anew as well.

From time to time all rows are written as a snapshot, for new copies, and earlier entries are erased
in their order, except for the first. So if the entry that a copy is at exists, no later entry was
erased. The interval between snapshots grows with the number of rows: all snapshots together cost a
few times a single write of the rows.
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from kvrag.errors import StoreError
from kvrag.store.catalog.journal import Changed, Conflict, Journal, Place
from kvrag.store.catalog.rows import RowTable
from kvrag.store.crypto import RowCipher
from kvrag.threads import POOL

log = logging.getLogger(__name__)
T = TypeVar("T")

FRESH_S = 1.0
"""Seconds that a copy is used without following the journal: the delay of erasures elsewhere."""
AGAIN_S = 5.0  # seconds after a fault until the journal is read again
PAUSE_S = 0.25  # longest pause before a change is retried
ROUNDS = 10  # times that a copy begins anew before it gives up
ATTEMPTS = 100  # times that a change is made if other writers come first
PER_SNAPSHOT = 512  # least number of entries between snapshots
ROWS_PER_ENTRY = 64  # rows per entry between snapshots, if there are many rows
AT_ONCE = 2**14  # rows up to which an erasure is followed by a snapshot, about a second's work
PER_PART = 2**14  # rows of a part
PER_LOOK = 256  # rows read under a lock
PLACE = "j"  # the row with the place of a copy


class SharedRows(RowTable):
    """Copy of shared rows, at most :data:`FRESH_S` behind.

    The copy counts as empty as long as erasures elsewhere can't be known.

    Parameters
    ----------
    folder, seal, read_only, durable, begin
        As for :class:`~kvrag.store.catalog.rows.RowTable`, for the copy.
    journal
        The journal that all copies follow.
    changed
        Called with the names of removed rows.
    """

    pause_s = 300.0  # a change concerns all machines

    def __init__(
        self,
        folder: Path | None,
        seal: RowCipher | None,
        *,
        journal: Journal,
        changed: Callable[[Collection[str]], None] = lambda _: None,
        read_only: bool = False,
        durable: bool = True,
        begin: Callable[[RowTable, bool], None],
    ) -> None:
        self._journal = journal
        self._changed = changed
        self._following = threading.RLock()
        self._fresh_s = -FRESH_S
        self._again_s = 0.0
        self._is_cut_off = False
        # A database, and the generator of its names, which holds a connection.
        self._reading: tuple[Any, Any] | None = None
        super().__init__(folder, seal, durable=durable, begin=begin)
        self.read_only = read_only

    def change(self, action: Callable[[], T]) -> T:
        """Make a change both here and in the journal, or not at all; see :meth:`RowTable.change`.

        ``action`` may run several times.
        """
        if getattr(self._mine, "cache", None) is not None:
            return action()
        for attempt in range(ATTEMPTS):
            try:
                self._follow()
                with suppress(Conflict):
                    return super().change(partial(self._noted, action))
                # Random, or the same writer is first again.
                time.sleep(random.uniform(0, min(PAUSE_S, 0.002 * 2**attempt)))
            except StoreError:
                raise
            except OSError as error:
                raise StoreError(
                    f"the shared KV store can't be changed: {error}; try again later"
                ) from error
        raise StoreError("too many writers change the shared KV store at once; try again later")

    def delete(self, name: str) -> None:
        """Remove a row if it exists, inside :meth:`change`."""
        super().delete(name)
        self._note({name: None})

    def clear(self) -> None:
        """Remove all rows, inside :meth:`change`."""
        super().clear()
        if getattr(self._mine, "noted", None) is not None:
            self._mine.noted = {}
            self._mine.is_whole = True

    def scrub(self) -> None:
        """Purge erased rows here and in the journal.

        In a large catalog, the journal keeps them until the next snapshot.
        """
        super().scrub()
        is_small = self._look(len, AT_ONCE + 1) <= AT_ONCE
        with suppress(OSError):
            for _ in range(ROUNDS if is_small else 0):
                # The last entry stays, so it must not name an erased row.
                self.change(partial(self._note, {"": None}))
                with suppress(Conflict):
                    self._snapshot()
                    break
                # Another writer's snapshot may have begun before the erasure.
                time.sleep(random.uniform(0, PAUSE_S))

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
        """Run ``action`` and append its changes to the journal; an exception undoes them here."""
        self._mine.noted, self._mine.is_whole, place = {}, False, _place_of(self._mine.cache)
        try:
            result = action()
            rows = self._mine.noted
            is_whole = self._mine.is_whole
        finally:
            self._mine.noted = None
        if rows or is_whole:
            place = self._journal.append(place, rows, is_whole=is_whole)
            self._mine.cache.set(PLACE, json.dumps(place))
            if place.number % _interval(len(self._mine.cache)) == 0:
                with suppress(RuntimeError):  # no thread can be started
                    POOL.submit(self._try_snapshot)
        return result

    def _look(self, action: Callable[[Any], T], default: T) -> T:
        if getattr(self._mine, "cache", None) is None and not self._is_fresh():
            return default
        return super()._look(action, default)

    def _is_fresh(self) -> bool:
        """Follow the journal if that is due; return whether this copy is fresh enough."""
        asked = time.monotonic()
        if asked - self._fresh_s <= FRESH_S:
            return True
        with self._following:  # meanwhile another thread may have followed, or failed to
            if self._fresh_s >= asked:
                return True
            if time.monotonic() < self._again_s:
                return False
            try:
                self._follow()
            except OSError as error:
                self._again_s = time.monotonic() + AGAIN_S
                if not self._is_cut_off:
                    log.warning(
                        "the shared KV store can't be reached (%s); it counts as empty", error
                    )
                self._is_cut_off = True
                return False
            self._again_s = 0.0
            self._is_cut_off = False
            return True

    def _follow(self) -> None:
        """Apply the changes of other writers; raises ``OSError``."""
        with self._following:
            start = time.monotonic()
            for _ in range(ROUNDS):
                if self._is_at_the_end():
                    self._fresh_s = start
                    return
        raise OSError("its journal changes faster than it can be followed")

    def _is_at_the_end(self) -> bool:
        """Apply the entries after this copy's place; return ``False`` if it had to begin anew."""
        here = super()._look(_place_of, Place(0, ""))
        try:
            if not here.number:
                raise Conflict
            for place, entry in self._journal.after(here):
                self._take(here, place, [entry.rows], is_whole=entry.is_whole)
                here = place
        except Conflict:
            with suppress(Conflict):
                self._take(
                    super()._look(_place_of, Place(0, "")), *self._journal.begin(), is_whole=True
                )
            return False
        return True

    def _take(self, here: Place, place: Place, parts: Iterable[Changed], *, is_whole: bool) -> None:
        """Apply changes at ``here`` and move this copy to ``place``.

        Raises ``Conflict`` if the copy has moved: other threads and processes follow, too.
        """

        def take() -> set[str]:
            cache = self._mine.cache
            gone = set[str]()
            if _place_of(cache) != here:
                raise Conflict
            if is_whole:
                gone.update(cache)
                cache.clear()
            for rows in parts:
                for name, text in rows.items():
                    if text is None:
                        cache.delete(name)
                        gone.add(name)
                    else:
                        cache.set(name, text)
                        gone.discard(name)
            cache.set(PLACE, json.dumps(place))
            return gone

        self._changed(super().change(take))

    def _try_snapshot(self) -> None:
        with suppress(OSError, Conflict):
            self._snapshot()

    def _snapshot(self) -> None:
        """Write a snapshot of all rows.

        Raises ``OSError`` if they can't be read or written, and ``Conflict`` if another writer
        makes a snapshot at the same time.
        """
        place = super()._look(_place_of, Place(0, ""))
        self._journal.snapshot(place, self._parts(place))

    def _pages(self, size: int) -> Iterator[dict[str, str]]:
        """Yield all rows as they are stored, ``size`` at a time; raises ``OSError``.

        Rows may change meanwhile.
        """

        def begin(cache: Any) -> Any:
            self._reading = cache, iter(cache)
            return self._reading

        def some(cache: Any) -> list[tuple[str, str | None]]:
            if self._reading is None or self._reading is not reading or cache is not reading[0]:
                raise OSError("it was closed or replaced while it was read")
            return [(name, cache.get(name)) for name in islice(reading[1], size)]

        look = super()._look
        reading: tuple[Any, Any] = look(begin, None)
        while found := look(some, None):
            yield {name: text for name, text in found if text is not None}
        if found is None:
            raise OSError("the catalog can't be read")

    def _let_go(self) -> None:
        if self._reading is not None:
            self._reading[1].close()
            self._reading = None
        super()._let_go()

    def _parts(self, since: Place) -> Iterator[Changed]:
        """Yield all rows in parts; raises ``OSError`` if the copy is at a place before that."""
        part = Changed()
        place = Place(0, "")
        for page in self._pages(PER_LOOK):
            if PLACE in page:
                place = _place_of(page)
            part |= {name: text for name, text in page.items() if name != PLACE}
            if len(part) >= PER_PART:
                yield part
                part = {}
        if place.number < since.number:
            raise OSError("the catalog was replaced")
        yield part


def _interval(rows: int) -> int:
    """Return the number of entries between snapshots.

    It is a power of two, so that nearly all copies agree on it.
    """
    return max(PER_SNAPSHOT, 1 << (rows // ROWS_PER_ENTRY).bit_length())


def _place_of(cache: Any) -> Place:
    with suppress(ValueError, TypeError):
        return Place(*json.loads(cache.get(PLACE) or ""))
    return Place(0, "")
