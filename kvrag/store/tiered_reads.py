"""What reading through two tiers needs: the half of a tiered store that promotes, reads ahead, and follows the erasures of others."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from kvrag.errors import StoreError, is_out_of_memory
from kvrag.identity.fingerprint import chunk_key
from kvrag.store.base import Index, KVStore, Shared, Tier
from kvrag.store.layers import HeldLayers, Layers, PromotedLayers
from kvrag.store.loader import Loader
from kvrag.store.memory import MemoryStore, copy_kv
from kvrag.store.prefetch import Load, Prefetch, Prefetcher
from kvrag.store.retention import Retention, Worth, priority_of
from kvrag.store.rows import erasures_of
from kvrag.threads import Deadline
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, Hole

log = logging.getLogger(__name__)

LOOK_S = 0.05
"""Time that a look at what was erased is given in any case, so that what is in memory comes however little time there is."""


class TieredReads:
    """Reads of a :class:`~kvrag.store.tiered.TieredStore`."""

    def __init__(self, memory: MemoryStore, disk: KVStore, prefetch: str) -> None:
        self._memory = memory
        self._disk = disk
        self._lower = disk if isinstance(disk, Tier) else None
        self._shared = disk if isinstance(disk, Shared) else None
        # In an empty tier there is nothing that could have been erased.
        self._followed = None if memory.keys() else self.erasure_mark()
        self._loader = Loader(self._load)
        self._prefetcher = Prefetcher(memory.max_bytes, prefetch)
        self.index: Index = disk.index
        memory.known_worth = self.worth

    def erasure_mark(self) -> str | None:
        """Return what is another value after each erasure or eviction by any process; ``None``: ask :meth:`is_known` about each chunk."""
        return "" if self._shared is None else self._shared.erasure_mark()

    def is_known(self, key: ChunkKey) -> bool:
        """Whether a copy of a chunk may be answered with: what has no row below was erased, or no erasure would find it."""
        return self._shared is None or self._shared.is_known(key)

    def known(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """Return those of many keys that :meth:`is_known` is true of."""
        return set(keys) if self._shared is None else self._shared.known(keys)

    def release(self) -> int:
        """Empty the upper tier, for the sake of its memory, and return its bytes."""
        return self._memory.release()

    def get(self, identity: ChunkIdentity) -> ChunkKV | None:
        """Return the chunk's KV from the nearest tier that has it, or ``None``."""
        kv = self._held([identity])[identity]
        if kv is None:
            return self._promote(identity)
        self.touch(chunk_key(identity))
        return kv

    def stream(self, identity: ChunkIdentity) -> Layers | None:
        """Return the chunk's layers in order from the nearest tier that has it; ``None`` for a miss.

        What comes from below is promoted with its last layer, and not if it breaks off or is left before that.
        """
        kv = self._held([identity])[identity]
        if kv is not None:
            self.touch(chunk_key(identity))
            return HeldLayers(kv)
        erasures = self._memory.erasures
        below = self._disk.stream(identity)
        if below is None:
            return None
        kept_as = self._memory.kept_as(below.kv_dtype)
        return PromotedLayers(below, kept_as, self._bring, lambda kv: self._keep(identity, kv, erasures))

    def get_many(self, identities: Sequence[ChunkIdentity], *, timeout_s: float) -> list[ChunkKV | None]:
        """Load several chunks at once; one that is late is ``None``, and is promoted when it comes. So is all where the index hangs.

        A chunk that :meth:`prefetch` is reading is not read twice; whether it is waited for is the policy's business.
        """
        deadline, looks = time.monotonic() + timeout_s, Deadline(max(timeout_s, LOOK_S))
        keys = {identity: chunk_key(identity) for identity in dict.fromkeys(identities)}
        with self.pinned(keys.values()):
            nothing: dict[ChunkIdentity, ChunkKV | None] = dict.fromkeys(keys)
            if any(map(self._memory.contains, keys.values())):
                found = looks.ask(lambda: self._held(keys), nothing, what="the KV store's index")
            else:  # nothing here that could have been erased
                found = nothing
                self._memory.missed(len(keys))
            absent = [identity for identity, kv in found.items() if kv is None]
            for identity in found.keys() - set(absent):
                self.touch(keys[identity])
            reads = self._prefetcher.begun([keys[identity] for identity in absent])
            ours = [identity for identity in absent if keys[identity] not in reads]
            left_s = max(0.0, deadline - time.monotonic())
            found.update(zip(ours, self._loader.load_many(ours, timeout_s=left_s), strict=True))
            brought = {i: self._prefetcher.result(reads[keys[i]], deadline) for i in absent if keys[i] in reads}
            if brought:
                # A read may have begun before an erasure that was over before this call.
                known: set[ChunkIdentity] = looks.ask(
                    lambda: {i for i in brought if self.is_known(keys[i])}, set(), what="the KV store's index"
                )
                found.update({i: (self._memory.peek(i) or kv) if i in known else None for i, kv in brought.items()})
        return [found[identity] for identity in identities]

    def prefetch(self, chunks: Iterable[ChunkIdentity | ChunkKey]) -> Prefetch:
        """Begin to read chunks into this tier and those below, and return at once; keys of nothing don't count as found.

        What is there already, or is being read, is not read again; what finds no room beside the reads under way is left out.
        """
        self._follow()
        wanted: dict[ChunkKey, ChunkIdentity | None] = {}
        for chunk in chunks:
            wanted.update({chunk: wanted.get(chunk)} if isinstance(chunk, str) else {chunk_key(chunk): chunk})
        loads: dict[ChunkKey, tuple[Load, int]] = {}
        found = 0
        for key, identity in wanted.items():
            if self._memory.contains(key):
                found += 1
            elif self._disk.contains(key):
                found += 1
                record = self.index.get(key)
                loads[key] = (self._reader(key, identity), 0 if record is None else record.num_bytes)
        return self._prefetcher.start(loads, found=found)

    def touch(self, key: ChunkKey) -> None:
        """Let the lower tiers know that a chunk is in use, so that they do not evict it for want of hits."""
        if self._lower is not None:
            self._lower.touch(key)

    def worth(self, key: ChunkKey) -> Worth:
        """Return a chunk's recent hits in whatever tier, and its cost, as far as the lower tier knows them."""
        return Worth() if self._lower is None else self._lower.worth(key)

    @contextmanager
    def pinned(self, keys: Iterable[ChunkKey]) -> Iterator[None]:
        """Keep chunks from being pushed out of any tier by this process until the context ends."""
        keys = list(keys)
        with self._memory.pinned(keys), nullcontext() if self._lower is None else self._lower.pinned(keys):
            yield

    def priority(self, key: ChunkKey) -> int:
        """Return a chunk's priority at present."""
        return priority_of(self.retention(key))

    def retention(self, key: ChunkKey) -> Retention | None:
        """Return what was said of a chunk's worth, with what is left of its duration; ``None`` if nothing was."""
        return self._disk.retention(key)

    def identity(self, key: ChunkKey) -> ChunkIdentity | None:
        """Return whose KV is stored under a key."""
        return self._memory.identity(key) or (None if self._lower is None else self._lower.identity(key))

    def hole(self, identity: ChunkIdentity) -> Hole | None:
        """Return what is known of the chunk's latest read, if that gave nothing or is not over; else ``None``."""
        return None if self._lower is None else self._lower.hole(identity)

    def _held(self, identities: Iterable[ChunkIdentity]) -> dict[ChunkIdentity, ChunkKV | None]:
        """Return what the upper tier has of some chunks and may be answered with."""
        is_told = self._follow()
        found = {identity: self._memory.get(identity) for identity in identities}
        unknown = (
            [] if is_told else [i for i, kv in found.items() if kv is not None and not self.is_known(chunk_key(i))]
        )
        if unknown:
            keys = map(chunk_key, unknown)
            self._memory.delete([key for key in keys if not self._disk.contains(key)])
        return {**found, **dict.fromkeys(unknown)}

    def _follow(self) -> bool:
        """Take out of memory what any process has erased or evicted since the last call; ``False`` if that can't be told."""
        mark = self.erasure_mark()
        if mark is not None and mark != self._followed:
            is_erasure = self._followed is None or erasures_of(mark) != erasures_of(self._followed)
            if is_erasure:  # first, so that no read that began before is kept after the look at what is here
                self._memory.delete(())
            held = self._memory.keys()
            known = self.known(held)
            unknown = [key for key in held if key not in known]
            self._memory.delete(unknown) if is_erasure else self._memory.drop(unknown)
            if isinstance(self._disk, TieredReads):
                self._disk._follow()
            self._followed = mark
        return mark is not None

    def _reader(self, key: ChunkKey, identity: ChunkIdentity | None) -> Load:
        def read() -> ChunkKV | None:
            owner = identity or self.identity(key)
            return None if owner is None else self._load(owner)

        return read

    def _load(self, identity: ChunkIdentity) -> ChunkKV | None:
        """Return a chunk that another thread has brought meanwhile, or promote it."""
        kv = self._memory.peek(identity)
        return kv if kv is not None and self.is_known(chunk_key(identity)) else self._promote(identity)

    def _promote(self, identity: ChunkIdentity) -> ChunkKV | None:
        erasures = self._memory.erasures
        below = self._disk.get(identity)
        brought = None if below is None else self._bring(below)
        if brought is None:
            return None
        kv, may_keep = brought
        if may_keep:
            self._keep(identity, kv, erasures)
        return kv

    def _bring(self, kv: ChunkKV) -> tuple[ChunkKV, bool] | None:
        """Return a chunk as this tier keeps it, and whether it has room for the copy; ``None`` if it can't be had so."""
        try:
            kv = self._memory.converted(kv)
        except StoreError as error:  # kept on disk by an engine that does not round
            log.warning("a chunk is computed: %s", error)
            return None
        own = self._on_device(kv)
        return own or kv, own is not None

    def _keep(self, identity: ChunkIdentity, kv: ChunkKV, erasures: int) -> None:
        retention = self.retention(chunk_key(identity))
        self._memory.keep(identity, kv, erasures=erasures, retention=retention)

    def _on_device(self, kv: ChunkKV) -> ChunkKV | None:
        """Return the chunk's tensors in the upper tier's memory; ``None`` where that is full, and then it is given up."""
        if _is_on(kv, self._memory.device):
            return kv
        try:
            return copy_kv(kv, self._memory.device)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.release()
            return None


def _is_on(kv: ChunkKV, device: torch.device) -> bool:
    """Whether a chunk's tensors are in a device's memory; a device without a number is the only one of its kind here."""
    here = kv.layers[0].keys.device
    return here.type == device.type and device.index in (None, here.index)
