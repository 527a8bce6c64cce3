"""The memory tier: chunks on the host, least recently used ones leave first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch

from kvrag.errors import StoreError
from kvrag.fingerprint import chunk_key, content_key
from kvrag.store.base import Index, Record, Retention, StoreStats
from kvrag.store.blob import check_kv
from kvrag.store.fork import ForkAware
from kvrag.store.memory_index import MemoryIndex
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, LayerKV, TextEntry


class MemoryStore(ForkAware):
    """KV in memory up to a byte budget.

    It is a store by itself, or the upper tier of a :class:`~kvrag.store.tiered.TieredStore`.

    Parameters
    ----------
    max_bytes
        Budget; what has not been used for longest leaves when it is exceeded.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._rows = MemoryIndex()
        self.index: Index = self._rows
        self._max_bytes = max_bytes
        self._chunks: OrderedDict[ChunkKey, tuple[ChunkIdentity, ChunkKV]] = OrderedDict()
        self._num_bytes = 0
        self._hits = 0
        self._misses = 0
        self._erasures = 0

    def get(self, identity: ChunkIdentity) -> ChunkKV | None:
        """Return the chunk's KV, or ``None``; the tensors are shared and must not be written to."""
        key = chunk_key(identity)
        with self._lock:
            owner, kv = self._chunks.get(key, (None, None))
            if kv is None or owner != identity:
                self._misses += 1
                return None
            self._chunks.move_to_end(key)
            self._hits += 1
            return kv

    def get_many(self, identities: Sequence[ChunkIdentity], *, timeout_s: float) -> list[ChunkKV | None]:
        """Return several chunks; memory is never late."""
        return [self.get(identity) for identity in identities]

    def put(
        self,
        identity: ChunkIdentity,
        kv: ChunkKV,
        *,
        text: TextEntry | None,
        doc_id: str | None = None,
        retention: Retention | None = None,
    ) -> int:
        """Keep a copy of a chunk and return its bytes; 0 if it was there already. ``retention`` is not used.

        Raises
        ------
        StoreError
            If the KV must not be stored or is larger than the whole budget.
        """
        if self.link(identity, text=text, doc_id=doc_id):
            return 0
        check_kv(identity, kv)
        record = _record(identity, kv.num_bytes, text)
        # The row first: the chunk may be pushed out by another thread at once, and takes its row with it then.
        self.index.add(record, doc_id=doc_id)
        if not self.keep(identity, copy_kv(kv)):
            self.index.remove(record.key)
            raise StoreError(
                f"a chunk of {kv.num_bytes} bytes is larger than the memory store's budget of {self._max_bytes} bytes; "
                "raise StoreConfig.ram_bytes or give the store a directory"
            )
        return kv.num_bytes

    def link(self, identity: ChunkIdentity, *, text: TextEntry | None, doc_id: str | None) -> bool:
        """Add a reference to a chunk that is stored already; return whether it is."""
        with self._lock:
            _, kv = self._chunks.get(chunk_key(identity), (None, None))
        if kv is None:
            return False
        self.index.add(_record(identity, kv.num_bytes, text), doc_id=doc_id)
        return True

    def contains(self, key: ChunkKey) -> bool:
        """Whether a chunk is in memory."""
        with self._lock:
            return key in self._chunks

    def identities(self, namespace: str, digest: str) -> list[ChunkIdentity]:
        """Return whose KV is stored for a text."""
        keys = self._rows.text_keys(namespace, digest)
        with self._lock:
            return [self._chunks[key][0] for key in keys if key in self._chunks]

    def knows(self, namespace: str, digest: str) -> bool:
        """Whether a text is registered now, with or without KV."""
        return self._rows.text(namespace, digest) is not None

    def delete(self, keys: Sequence[ChunkKey]) -> int:
        """Erase chunks and return how many were there."""
        with self._lock:
            self._erasures += 1
            found = sum(self._drop(key) for key in keys)
        for key in keys:
            self.index.remove(key)
        return found

    def forget(self, namespace: str, doc_id: str) -> int:
        """Erase a document and all KV that only it held on to; return how many chunks were erased."""
        return self.delete(self.index.unlink(namespace, doc_id))

    def stats(self) -> dict[str, StoreStats]:
        """Return the statistics of this tier, ``"host"``."""
        with self._lock:
            return {"host": StoreStats(len(self._chunks), self._num_bytes, self._hits, self._misses, rejected=0)}

    def close(self) -> None:
        """Forget everything; idempotent."""
        with self._lock:
            self._chunks.clear()
            self._num_bytes = 0

    @property
    def erasures(self) -> int:
        """Calls of :meth:`delete` so far, for :meth:`keep`."""
        return self._erasures

    def keep(self, identity: ChunkIdentity, kv: ChunkKV, *, erasures: int | None = None) -> bool:
        """Take ownership of ``kv`` if it fits into the budget; return whether it does. No row is added to the index.

        Parameters
        ----------
        identity, kv
            The chunk; its tensors must hold on to no more memory than they show.
        erasures
            Value of :attr:`erasures` before the chunk was read elsewhere: if something was erased since, the chunk
            isn't kept, because it may be what was erased.
        """
        size = kv.num_bytes
        if size > self._max_bytes:
            return False
        key = chunk_key(identity)
        pushed_out = []
        with self._lock:
            if erasures is not None and erasures != self._erasures:
                return False
            self._drop(key)
            while self._num_bytes + size > self._max_bytes:
                pushed_out.append(next(iter(self._chunks)))
                self._drop(pushed_out[-1])
            self._chunks[key] = (identity, kv)
            self._num_bytes += size
        for old in pushed_out:
            if not self.contains(old):
                self.index.remove(old)
        return True

    def _drop(self, key: ChunkKey) -> bool:
        _, kv = self._chunks.pop(key, (None, None))
        if kv is None:
            return False
        self._num_bytes -= kv.num_bytes
        return True


def copy_kv(kv: ChunkKV) -> ChunkKV:
    """Copy a chunk to tensors of its own on the host: a slice would keep the whole batch that it was cut from alive."""

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)

    return ChunkKV(tuple(LayerKV(own(layer.keys), own(layer.values)) for layer in kv.layers))


def _record(identity: ChunkIdentity, num_bytes: int, text: TextEntry | None) -> Record:
    return Record(
        key=chunk_key(identity),
        content=content_key(identity),
        model=identity.model,
        namespace=identity.namespace,
        prefix=identity.prefix,
        num_tokens=len(identity.token_ids),
        num_bytes=num_bytes,
        text=text,
    )
