"""The journal under every order of steps: machines append, take snapshots, are killed or lose answers, one call of the store at a time.

Whatever they do, a machine that begins afterwards has the rows that all entries together say.
"""

import json
import os
import random
import threading
import zlib

import pytest

from kvrag.store.base import MemoryBlobs
from kvrag.store.catalog import journal
from kvrag.store.catalog.journal import Conflict, Journal, Place

MACHINES, CHANGES, ROUNDS = 4, 8, 20
SEEDS = int(os.environ.get("KVRAG_SCHEDULES", "100"))
NAMES = [f"row {number}" for number in range(6)]


class Killed(BaseException):
    """Stands for the death of a machine."""


class Turns:
    """Lets one thread at a time make one step, chosen at random; the one that is killed makes no more."""

    def __init__(self, seed, risk):
        self.rng, self._risk = random.Random(seed), risk
        self._changed, self._waiting, self._next, self._running = (
            threading.Condition(),
            set(),
            None,
            0,
        )
        self._dead, self._last, self._restless = set(), None, self.rng.choice((0.05, 0.2, 1.0))

    def step(self):
        with self._changed:
            me = threading.get_ident()
            if me in self._dead:
                raise Killed
            self._waiting.add(me)
            self._running -= 1
            self._choose()
            self._changed.wait_for(lambda: self._next == me)
            self._next = None
            self._waiting.discard(me)
            self._running += 1
            if self.rng.random() < self._risk / 4:
                self._dead.add(me)
                raise Killed
            if self.is_unlucky():
                raise OSError("time-out")

    def is_unlucky(self):
        return self.rng.random() < self._risk

    def _choose(self):
        if not self._running and self._waiting:
            if self._last not in self._waiting or self.rng.random() < self._restless:
                self._last = self.rng.choice(sorted(self._waiting))
            self._next = self._last
            self._changed.notify_all()

    def run(self, works):
        def begun(work):
            try:
                work()
            except Killed:
                pass
            finally:
                with self._changed:
                    self._running -= 1
                    self._choose()

        self._running = len(works)
        threads = [threading.Thread(target=begun, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "it hangs"


class Stepped:
    """Blobs each of whose calls waits for its turn; an answer may be lost when all was done."""

    def __init__(self, blobs, turns):
        self._blobs, self._turns = blobs, turns

    def __getattr__(self, name):
        call = getattr(self._blobs, name)

        def stepped(*args):
            if threading.current_thread() is threading.main_thread():
                return call(*args)
            self._turns.step()
            found = call(*args)
            if name == "write" and self._turns.is_unlucky():
                found = call(*args)  # a client that got no answer asks again, and meets itself
            self._turns.step()
            return found

        return stepped


class Entries(MemoryBlobs):
    """Remembers every entry that was ever written and not taken back by its writer at once."""

    def __init__(self):
        super().__init__()
        self.history = {}

    def write(self, key, parts):
        if written := super().write(key, parts):
            self.history.setdefault(key, []).append(bytes(self._blobs[key]))
        return written


class Machine:
    """A copy of the rows, as :class:`SharedRows` keeps it."""

    def __init__(self, entries, snapshots):
        self.journal, self.place, self.rows = Journal(entries, snapshots), Place(0, ""), {}

    def follow(self):
        for _ in range(ROUNDS):
            try:
                if not self.place.number:
                    raise Conflict
                for place, entry in self.journal.after(self.place):
                    self._take(place, entry.rows, is_whole=entry.is_whole)
                return True
            except Conflict:
                try:
                    place, parts = self.journal.begin()
                    self.rows = {}
                    for rows in parts:
                        self._take(place, rows)
                    self.place = place
                except Conflict:
                    pass
        return False

    def _take(self, place, rows, *, is_whole=False):
        self.rows = {} if is_whole else self.rows
        self.rows |= rows
        self.rows = {name: text for name, text in self.rows.items() if text is not None}
        self.place = place

    def append(self, rows, *, is_whole):
        while self.follow():
            try:
                place = self.journal.append(self.place, rows, is_whole=is_whole)
            except Conflict:
                continue
            return self._take(place, rows, is_whole=is_whole)
        return None

    def snapshot(self, rng):
        def parts():
            names = sorted(self.rows)
            for start in range(0, len(names), 2):
                yield {
                    name: self.rows[name] for name in names[start : start + 2] if name in self.rows
                }
                if rng.random() < 0.5:
                    self.follow()

        self.follow()
        self.journal.snapshot(self.place, parts())

    def live(self, rng):
        for number in range(CHANGES):
            try:
                if rng.random() < 0.5:
                    self.snapshot(rng)
                else:
                    some = rng.sample(NAMES, 2)
                    rows = {
                        name: None if rng.random() < 0.3 else f"{id(self)} {number}"
                        for name in some
                    }
                    self.append(rows, is_whole=rng.random() < 0.1)
            except (Conflict, OSError):
                pass


def said(entries):
    """The rows that the chain of all entries says."""
    digest, number, rows = "", 1, {}
    while True:
        chain = [
            data
            for data in entries.history.get(journal._key(number), [])
            if number == 1 or after(data) == digest
        ]
        if not chain:
            return rows
        digest, number = journal._digest(chain[0]), number + 1
        _, is_whole, changed = json.loads(zlib.decompress(chain[0]))
        rows = changed if is_whole else rows | changed
        rows = {name: text for name, text in rows.items() if text is not None}


def after(data):
    return json.loads(zlib.decompress(data))[0]


@pytest.mark.parametrize("risk", [0.0, 0.02])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_who_begins_has_what_all_entries_say(seed, risk, monkeypatch):
    monkeypatch.setattr(journal.POOL, "ahead", map)  # a step after the other
    turns = Turns(seed, risk)
    entries, snapshots = Entries(), MemoryBlobs()
    stepped = Stepped(entries, turns), Stepped(snapshots, turns)
    machines = [Machine(*stepped) for _ in range(MACHINES)]
    lives = [random.Random(f"{seed} {number}") for number in range(MACHINES)]
    turns.run(
        [lambda own=own, rng=rng: own.live(rng) for own, rng in zip(machines, lives, strict=True)]
    )
    new = Machine(entries, snapshots)
    assert new.follow(), "it can't begin"
    assert new.rows == said(entries)
    for machine in machines:  # those that were killed begin again
        again = Machine(entries, snapshots)
        again.place, again.rows = machine.place, dict(machine.rows)
        assert again.follow()
        assert again.rows == new.rows
