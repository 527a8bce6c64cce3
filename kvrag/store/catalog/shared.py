"""Rows that machines share: each has a copy of them, and all follow one journal.

An entry of the journal is a change: rows by name. It is written under the next number, and a blob is written once, so one writer has it;
who comes second undoes its change, follows, and makes it again. Each entry names the digest of the one before it, and the first one is
random, so who follows a journal that was lost and begun anew sees that, and begins anew as well.

From time to time all rows are written down as a snapshot, for who begins, and entries before it are erased: the first never, the others in
their order. So if the entry that a copy is at is there, none behind it was erased. The more rows, the more entries come before the next
snapshot: all together cost a few times what writing the rows once does.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from kvrag.errors import StoreError
from kvrag.store.catalog.journal import Behind, Changed, Journal, Place
from kvrag.store.catalog.rows import Rows
from kvrag.store.crypto import Seal
from kvrag.threads import POOL, fork_lock

log = logging.getLogger(__name__)
T = TypeVar("T")

FRESH_S = 1.0
"""Seconds for which a copy is looked at without following the journal: what another machine erases is not answered for longer."""
AGAIN_S = 5.0  # after a fault, seconds until the journal is asked again
PAUSE_S = 0.25  # at most, before a change is made again
ROUNDS = 10  # times that a copy begins anew before it gives up
ATTEMPTS = 100  # times that a change is made that others come before
PER_SNAPSHOT = 512  # entries between snapshots, at least; of many rows,
ROWS_PER_ENTRY = 64  # rows for each of these entries
AT_ONCE = 2**14  # rows up to which an erasure is followed by a snapshot, about a second's work
PER_PART, PER_LOOK = 2**14, 256  # rows of a part; rows read while nobody else can look
PLACE = "j"  # the row that says where a copy is


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

    pause_s = 300.0  # each change is one of all machines

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
        # A database, and the generator of its names, which holds a connection.
        self._reading: tuple[Any, Any] | None = None
        super().__init__(folder, seal, durable=durable, begin=begin)
        self.read_only = read_only

    def change(self, action: Callable[[], T]) -> T:
        """Make a change here and in the journal, or nowhere; see :meth:`Rows.change`. ``action`` may run several times."""
        if getattr(self._mine, "cache", None) is not None:
            return action()
        for attempt in range(ATTEMPTS):
            try:
                self._follow()
                with suppress(Behind):
                    return super().change(partial(self._noted, action))
                time.sleep(
                    random.uniform(0, min(PAUSE_S, 0.002 * 2**attempt))
                )  # or who was first is first again
            except StoreError:
                raise
            except OSError as error:
                raise StoreError(
                    f"the shared KV store can't be changed: {error}; try again later"
                ) from error
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
        """Leave nothing of erased rows: here, and in the journal, which keeps them until the next snapshot where the catalog is large."""
        super().scrub()
        is_small = self._look(len, AT_ONCE + 1) <= AT_ONCE
        with suppress(OSError):
            for _ in range(ROUNDS if is_small else 0):
                self.change(
                    partial(self._note, {"": None})
                )  # the last entry stays: let it be one that names nothing
                with suppress(Behind):
                    self._snapshot()
                    break
                time.sleep(
                    random.uniform(0, PAUSE_S)
                )  # what others write down may have begun before the erasure

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
            if place.number % _interval(len(self._mine.cache)) == 0:
                with suppress(RuntimeError):  # no thread can be had
                    POOL.submit(self._try_snapshot)
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
                    log.warning(
                        "the shared KV store can't be reached (%s); it counts as empty", error
                    )
                self._is_cut_off = True
                return False
            self._again_s, self._is_cut_off = 0.0, False
            return True

    def _follow(self) -> None:
        """Take over what others have changed; raises ``OSError``."""
        with self._following:
            start = time.monotonic()
            for _ in range(ROUNDS):
                if self._is_at_the_end():
                    self._fresh_s = start
                    return
        raise OSError("its journal changes faster than it can be followed")

    def _is_at_the_end(self) -> bool:
        """Take over what is behind this copy's place; whether nothing came between."""
        here = super()._look(_place_of, Place(0, ""))
        try:
            if not here.number:
                raise Behind
            for place, entry in self._journal.after(here):
                self._take(here, place, [entry.rows], is_whole=entry.is_whole)
                here = place
        except Behind:
            with suppress(Behind):
                self._take(
                    super()._look(_place_of, Place(0, "")), *self._journal.begin(), is_whole=True
                )
            return False
        return True

    def _take(self, here: Place, place: Place, parts: Iterable[Changed], *, is_whole: bool) -> None:
        """Change rows here; raises ``Behind`` if this copy is elsewhere by now: other threads and processes follow, too."""

        def take() -> set[str]:
            cache, gone = self._mine.cache, set[str]()
            if _place_of(cache) != here:
                raise Behind
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
        with suppress(OSError, Behind):
            self._snapshot()

    def _snapshot(self) -> None:
        """Write all rows down; raises ``OSError`` if they can't be read or written, and ``Behind`` if others do so at the same time."""
        place = super()._look(_place_of, Place(0, ""))
        self._journal.snapshot(place, self._parts(place))

    def _pages(self, size: int) -> Iterator[dict[str, str]]:
        """Yield all rows as they are stored, some at a time: others may change them meanwhile. Raises ``OSError``."""

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
        """Yield all rows; raises ``OSError`` unless they are those of a copy that is at a place or behind it."""
        part, place = Changed(), Place(0, "")
        for page in self._pages(PER_LOOK):
            place = _place_of(page) if PLACE in page else place
            part |= {name: text for name, text in page.items() if name != PLACE}
            if len(part) >= PER_PART:
                yield part
                part = {}
        if place.number < since.number:
            raise OSError("the catalog was replaced")
        yield part


def _interval(rows: int) -> int:
    """Return the number of entries between snapshots: a power of two, so that nearly all who count rows agree on it."""
    return max(PER_SNAPSHOT, 1 << (rows // ROWS_PER_ENTRY).bit_length())


def _place_of(cache: Any) -> Place:
    with suppress(ValueError, TypeError):
        return Place(*json.loads(cache.get(PLACE) or ""))
    return Place(0, "")
