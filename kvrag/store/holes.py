"""What became of reads that gave nothing: how many layers of which chunk were proven, and what was wrong with the next one.

Layers of a chunk can't be used without those after them: a row's keys and values in layer ``l`` come from its hidden state there,
which nothing but a forward through the layers before gives. So the first bad layer makes the whole chunk a hole to compute, and the
forward that fills it gives every layer, the good ones too. The bitmap says how far the read came.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvrag.identity.fingerprint import chunk_key
from kvrag.store.base import KVStore, Tier
from kvrag.store.blob import Blob
from kvrag.store.fork import ForkAware
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, Hole

Reason = Literal["late", "absent", "damaged", "unreadable"]

MAX_READINGS = 1024
"""Latest reads that are remembered."""


@dataclass(slots=True, eq=False)
class Reading:
    """One read: its blob, once that is open, and why it gave nothing, once that is known."""

    blob: Blob | None = None
    reason: Reason | None = None

    def opened(self, blob: Blob) -> None:
        """Note the blob whose layers are read."""
        self.blob = blob


class Readings(ForkAware):
    """The latest read of each chunk, as long as it is under way or has failed."""

    def __init__(self) -> None:
        super().__init__()
        self._latest: OrderedDict[ChunkKey, Reading] = OrderedDict()

    def begin(self, key: ChunkKey) -> Reading:
        """Note that a chunk is being read."""
        reading = Reading()
        with self._lock:
            self._latest[key] = reading
            self._latest.move_to_end(key)
            while len(self._latest) > MAX_READINGS:
                self._latest.popitem(last=False)
        return reading

    def end(self, key: ChunkKey, *, is_found: bool) -> None:
        """Forget a chunk's read if it gave the chunk."""
        if is_found:
            with self._lock:
                self._latest.pop(key, None)

    def hole(self, key: ChunkKey) -> Hole | None:
        """Describe a chunk's latest read; ``None`` if it gave the chunk, or was long ago."""
        with self._lock:
            reading = self._latest.get(key)
        if reading is None:
            return None
        blob = reading.blob
        return Hole(key, reading.reason or "late", None if blob is None else blob.good_layers)


def in_words(holes: Sequence[Hole]) -> str | None:
    """Say which chunks could not be loaded, and why; ``None`` if there are none."""
    what = "; ".join(map(str, holes))
    return (
        f"{len(holes)} stored chunk(s) could not be loaded in time or intact, and were computed: {what}"
        if holes
        else None
    )


def holes_of(store: KVStore, loaded: Mapping[ChunkIdentity, ChunkKV | None]) -> tuple[Hole, ...]:
    """Say of each chunk that a load did not give how far it came, and why it ended there.

    Parameters
    ----------
    store
        Where the chunks were loaded from.
    loaded
        What came; ``None`` where nothing did.
    """
    missing = [identity for identity, kv in loaded.items() if kv is None]
    known = [store.hole(identity) if isinstance(store, Tier) else None for identity in missing]
    # No read of it is known: it was not begun in time.
    return tuple(hole or Hole(chunk_key(i), "late", None) for i, hole in zip(missing, known, strict=True))
