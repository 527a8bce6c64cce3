"""SQL that is planted in the index: triggers, views, indices on expressions, settings. None of it runs, and the store heals."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from kvrag.store.index import FILES
from world import CONFIG, Outcome, agree, key, put, state

from kvrag.errors import StoreError
from kvrag.store import DiskStore

TRIES = 5
RAN = "CREATE TABLE IF NOT EXISTS ran (x)"
RUN = "BEGIN INSERT INTO ran VALUES (1); END"
WIPE = "BEGIN INSERT INTO ran VALUES (1); DELETE FROM {table}; END"
ANY = {
    f"trigger {when} {what}": (RAN, f"CREATE TRIGGER planted {when} {what} ON {{table}} {WIPE}")
    for when in ("BEFORE", "AFTER")
    for what in ("INSERT", "UPDATE", "DELETE")
}
ANY |= {
    "trigger that loads code": (
        RAN,
        "CREATE TRIGGER planted AFTER INSERT ON {table} BEGIN SELECT load_extension('/nowhere/planted.so'); END",
    ),
    "view of the rows": (
        "ALTER TABLE {table} RENAME TO hidden",
        "CREATE VIEW {table} AS SELECT * FROM hidden",
        RAN,
        f"CREATE TRIGGER planted INSTEAD OF INSERT ON {{table}} {RUN}",
    ),
    "virtual table": ("DROP TABLE {table}", "CREATE VIRTUAL TABLE {table} USING fts4(key, value)"),
    "index on an expression": ("CREATE INDEX planted ON {table} (abs(length(value)))",),
    "generated column": ("ALTER TABLE {table} ADD COLUMN planted AS (abs(length(value)))",),
}
DISKCACHE = {
    "trigger of a known name": (
        RAN,
        "DROP TRIGGER Settings_count_insert",
        f"CREATE TRIGGER Settings_count_insert AFTER INSERT ON Cache FOR EACH ROW {RUN}",
    ),
    "trigger on the settings": (RAN, f"CREATE TRIGGER planted AFTER UPDATE ON Settings {RUN}"),
    "word in a setting": ("UPDATE Settings SET value = '0; ATTACH \"x\" AS y' WHERE key = 'sqlite_mmap_size'",),
    "setting of another name": ("INSERT INTO Settings VALUES ('close', 1)",),
}
PLANTS = {
    "diskcache": ("Cache", ANY | DISKCACHE),
    "sqlite": ("rows", ANY),
}


def sql(folder: Path, *, within_s: float) -> Outcome:
    """Plant each in a closed store and in an open one; the next opening must reject it in time."""
    outcome, slowest = Outcome(), 0.0
    for kind, (table, plants) in PLANTS.items():
        for name, statements in plants.items():
            what = f"{kind}, {name}"
            root = folder / what.replace(" ", "-")
            store = DiskStore(root, replace(CONFIG, index=kind))
            put(store, 1)
            store.close()
            path = root / "index" / FILES[kind]
            took, tries = float("inf"), 0
            while (
                took > within_s and tries < TRIES
            ):  # one slow opening may be the machine's fault, five are the store's
                store.close()
                if not _plant(path, table, statements):
                    break
                cpu = time.process_time()
                store = DiskStore(root, replace(CONFIG, index=kind))
                took, tries = min(took, time.process_time() - cpu), tries + 1
            if not tries:
                outcome.add("not known to this SQLite")
                continue
            slowest = max(slowest, took)
            _prove(store, path, outcome, what)
            outcome.add("plants")
            if _plant(path, table, statements):
                _use(store, outcome, f"{what}, while it is open")
            store.close()
            DiskStore(root, replace(CONFIG, index=kind)).close()
            outcome.check(not _foreign(path), f"{what}: is still there after the next opening")
    outcome.counts["slowest_rejection_ms"] = round(slowest * 1e3, 2)
    outcome.check(slowest < within_s, f"a rejection took {slowest * 1e3:.0f} ms")
    return outcome


def _plant(path: Path, table: str, statements: tuple[str, ...]) -> bool:
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        try:
            for statement in statements:
                database.execute(statement.format(table=table))
        except sqlite3.OperationalError:
            return False
    return True


def _foreign(path: Path) -> list[str]:
    """Names that nobody but :data:`PLANTS` gives, and the rows of what ran."""
    with closing(sqlite3.connect(path)) as database:
        names = [str(name) for (name,) in database.execute("SELECT name FROM sqlite_master")]
        known = {"planted", "hidden", "ran"}
        return [name for name in names if name in known]


def _ran(path: Path) -> bool:
    if not path.exists():
        return False
    with closing(sqlite3.connect(path)) as database:
        has_table = database.execute("SELECT 1 FROM sqlite_master WHERE name = 'ran'").fetchone()
        return bool(has_table and database.execute("SELECT 1 FROM ran").fetchone())


def _prove(store: DiskStore, path: Path, outcome: Outcome, what: str) -> None:
    """What was planted is away and has not run; the store is whole and takes chunks."""
    outcome.check(not _foreign(path), f"{what}: is still there")
    outcome.check(state(store, 1) == "readable", f"{what}: the chunk is lost")
    outcome.check(put(store, 2) > 0 and state(store, 2) == "readable", f"{what}: it takes no more chunks")
    agree(store, outcome, what)
    outcome.check(store.delete([key(2)]) == 1, f"{what}: nothing can be erased")
    aside = path.parent.with_name("index.damaged") / path.name
    outcome.check(not _ran(path) and not _ran(aside), f"{what}: it ran")


def _use(store: DiskStore, outcome: Outcome, what: str) -> None:
    """Under an open store SQLite itself runs a trigger, on this database and nothing else: no answer may be wrong."""
    for number in (1, 3):
        try:
            put(store, number)
        except StoreError:
            outcome.add("refused while open")
        outcome.check(state(store, number) != "wrong", f"{what}: wrong bits")
