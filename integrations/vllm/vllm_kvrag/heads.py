"""Stored beginnings of prompts: token ids from the first position on that have exact KV."""

from __future__ import annotations

import struct
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np

from kvrag.adapters import ChunkIdentity, ChunkRecord, TieredStore, chunk_key, ids_digest

Parts = tuple[ChunkIdentity, ...]
TOKEN_BYTES = 4  # big-endian, so that bytes sort as token ids do
# After a listing, at least 9 times its duration passes before the next, so listings take at most a
# tenth of the time.
REST = 9


class Heads:
    """Stored prefixes of a model and namespace, alone and with chunks encoded right behind them.

    Quantised KV and chunks that were encoded behind a context are left out, because they are not
    exact. The store is listed again when it has changed; erased KV is never returned.
    """

    def __init__(self, store: TieredStore, model: str, namespace: str) -> None:
        self._store = store
        self._model = model
        self._namespace = store.names.namespace(namespace)
        self._identities = dict[str, ChunkIdentity]()
        self._parts = dict[bytes, Parts]()
        self._order: list[bytes] = []
        self._state: object = None
        self._next = 0.0
        self._lock = threading.Lock()

    def match(self, ids: Sequence[int]) -> tuple[Parts, int]:
        """Return the stored parts that a prompt begins with, and how many of its tokens they cover.

        The last part may be longer than the tokens it covers: a key and a value depend on no later
        token.
        """
        self._follow()
        wanted = struct.pack(f">{len(ids)}I", *ids)
        place = bisect_left(self._order, wanted)
        # In sorted order, a neighbour of the prompt's place shares the longest beginning with it.
        found = [
            (_common(run, wanted), self._parts[run])
            for run in self._order[max(0, place - 1) : place + 1]
        ]
        count, parts = max(found, key=lambda each: each[0], default=(0, ()))
        used = tuple(identity for identity, _, _ in cut(parts, 0, count))
        known = self._store.known([chunk_key(identity) for identity in used])
        for number, identity in enumerate(used):
            if chunk_key(identity) not in known:
                return used[:number], sum(len(each.token_ids) for each in used[:number])
        return used, count

    def _follow(self) -> None:
        state = self._store.catalog.state()[:3]  # erasures, chunks, bytes
        with self._lock:
            if state == self._state or time.monotonic() < self._next:
                return
            start = time.monotonic()
            self._list()
            self._state = state
            end = time.monotonic()
            self._next = end + REST * (end - start)

    def _list(self) -> None:
        """Read the token ids of new chunks from their headers, and join prefixes with chunks."""
        catalog = self._store.catalog
        records = [
            record
            for record in map(catalog.get, catalog.keys())
            if record and self._is_ours(record)
        ]
        found = [(r, self._identities.get(r.key) or self._store.identity(r.key)) for r in records]
        exact = {
            r.key: (r, each) for r, each in found if each is not None and each.kv_dtype == "auto"
        }
        self._identities = {key: identity for key, (_, identity) in exact.items()}
        nothing = ids_digest(())
        first = {
            ids_digest(each.token_ids): each
            for record, each in exact.values()
            if record.prefix == nothing
        }
        rows: list[Parts] = [(each,) for each in first.values()]
        rows += [
            (first[record.prefix], each)
            for record, each in exact.values()
            if record.prefix in first
        ]
        self._parts = {_run(parts): parts for parts in rows}
        self._order = sorted(self._parts)

    def _is_ours(self, record: ChunkRecord) -> bool:
        return (record.model, record.namespace, record.context) == (
            self._model,
            self._namespace,
            "",
        )


def cut(parts: Parts, start: int, stop: int) -> Iterator[tuple[ChunkIdentity, int, int]]:
    """Yield the parts of the prompt's rows ``start`` to ``stop``, with first and last row."""
    place = 0
    for identity in parts:
        count = len(identity.token_ids)
        first = max(start - place, 0)
        last = min(stop - place, count)
        if first < last:
            yield identity, first, last
        place += count


def _run(parts: Parts) -> bytes:
    ids = [token for identity in parts for token in identity.token_ids]
    return struct.pack(f">{len(ids)}I", *ids)


def _common(run: bytes, wanted: bytes) -> int:
    size = min(len(run), len(wanted))
    one = np.frombuffer(run[:size], np.uint32)
    other = np.frombuffer(wanted[:size], np.uint32)
    if size and (one != other).any():
        return int((one != other).argmax())
    return size // TOKEN_BYTES
