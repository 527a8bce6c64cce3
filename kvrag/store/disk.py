"""The disk tier: one immutable file per chunk, and an index that can be rebuilt from them.

::

    root/format.json                         {"format": "kvrag", "version": 2}
    root/objects/<key[:2]>/<key>.safetensors the chunks
    root/index/                              rows about them
    root/tmp/                                files being written
    root/quarantine/                         files that failed the proof of identity or integrity
    root/lock                                held while a process opens the store

A file is complete before it has its name, so a process that is killed leaves nothing that could be read.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kvrag.errors import StoreError
from kvrag.fingerprint import FORMAT_VERSION, chunk_key
from kvrag.store import blob, files
from kvrag.store.base import Index, Record, StoreStats
from kvrag.store.fork import ForkAware
from kvrag.store.header import BlobRejected, Header
from kvrag.store.index import DiskIndex
from kvrag.store.loader import Loader
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, TextEntry

log = logging.getLogger(__name__)

KEY = re.compile(r"[0-9a-f]{64}")
SUFFIX = ".safetensors"


class DiskStore(ForkAware):
    """KV in a directory that several processes may share.

    Parameters
    ----------
    root
        The directory; made if absent.

    Raises
    ------
    StoreError
        If the directory can't be used.
    StoreFormatError
        If it was written by a newer kvrag.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__()
        self._root = Path(root).absolute()
        self._hits = self._misses = self._rejected = 0
        self._warned: set[str] = set()
        self._loader = Loader(self.get)
        self._closed = False
        files.prepare(self._root, ("objects", "tmp", "quarantine"))
        with files.locked(self._root / "lock"):
            files.check_format(self._root, FORMAT_VERSION)
            files.sweep(self._root / "tmp")
            self._index = DiskIndex(self._root / "index")
            if self._index.stale:
                self._index.rebuild(self._scan())
        self.index: Index = self._index

    def get(self, identity: ChunkIdentity) -> ChunkKV | None:
        """Return the chunk's KV, proven to be that of ``identity``, or ``None``; no fault of stored data is raised."""
        kv = None if self._closed else self._read(chunk_key(identity), identity)
        with self._lock:
            self._hits += kv is not None
            self._misses += kv is None
        return kv

    def get_many(self, identities: Sequence[ChunkIdentity], *, timeout_s: float) -> list[ChunkKV | None]:
        """Load several chunks at once; one that is not there in time is ``None``."""
        return self._loader.load_many(identities, timeout_s=timeout_s)

    def put(self, identity: ChunkIdentity, kv: ChunkKV, *, text: TextEntry | None, doc_id: str | None = None) -> int:
        """Store a chunk and return the bytes written; 0 if it was there already (then only the reference is added).

        Raises
        ------
        StoreError
            If it can't be written. Nothing of it is left then.
        """
        if self._closed:
            raise StoreError(f"the store {self._root} is closed; open it again")
        if self.link(identity, text=text, doc_id=doc_id):
            return 0
        header, pieces = blob.encode(identity, kv, text=text, doc_id=doc_id)
        record = header.record()
        is_new = self._publish(record.key, pieces)
        try:
            self.index.add(record, doc_id=doc_id)
        except StoreError:
            if is_new:
                # Without its row a chunk can't be found by its text nor erased with its document.
                with suppress(OSError):
                    files.unlink(self._path(record.key))
            raise
        return record.num_bytes if is_new else 0

    def link(self, identity: ChunkIdentity, *, text: TextEntry | None, doc_id: str | None) -> bool:
        """Add a reference to a chunk that is stored already; return whether it is."""
        key = chunk_key(identity)
        if self._closed or not self.contains(key):
            return False
        record = self.index.get(key)
        if record is None:
            header = self._header(key)
            if header is None:
                return False
            record = header.record()
            self.index.add(record, doc_id=header.doc_id)
        self.index.add(replace(record, text=text), doc_id=doc_id)
        return True

    def contains(self, key: ChunkKey) -> bool:
        """Whether a chunk's file is there, without proving its integrity."""
        return KEY.fullmatch(key) is not None and files.is_regular(self._path(key))

    def delete(self, keys: Sequence[ChunkKey]) -> int:
        """Erase chunks and return how many were there.

        Raises
        ------
        StoreError
            If something could not be erased; everything else is.
        """
        found = 0
        fault: Exception | None = None
        for key in dict.fromkeys(keys):
            if not KEY.fullmatch(key):
                continue
            try:
                found += files.unlink(self._path(key))
                files.unlink(self._quarantine(key))
                self.index.remove(key)
            except OSError as error:
                fault = error
        if fault is not None:
            raise StoreError(
                f"not everything could be erased from {self._root}: {fault}; make it writable, then delete again"
            )
        return found

    def stats(self) -> dict[str, StoreStats]:
        """Return the statistics of this tier, ``"disk"``."""
        chunks, num_bytes = self._index.totals()
        with self._lock:
            return {"disk": StoreStats(chunks, num_bytes, self._hits, self._misses, self._rejected)}

    def close(self) -> None:
        """Release resources; idempotent. A closed store has nothing and takes nothing."""
        self._closed = True
        self._index.close()

    def _path(self, key: str) -> Path:
        return self._root / "objects" / key[:2] / (key + SUFFIX)

    def _quarantine(self, key: str) -> Path:
        return self._root / "quarantine" / (key + SUFFIX)

    def _read(self, key: ChunkKey, identity: ChunkIdentity) -> ChunkKV | None:
        path = self._path(key)
        seen = files.inode(path)
        try:
            kv, header = blob.read(path, identity)
        except BlobRejected as fault:
            self._reject(key, seen, fault.reason)
            return None
        except (FileNotFoundError, NotADirectoryError):
            self._forget(key)
            return None
        except OSError as error:
            self._warn_once(f"a chunk could not be read: {error.strerror}; it counts as absent")
            return None
        if self.index.get(key) is None:
            self._restore(header)
        return kv

    def _header(self, key: ChunkKey) -> Header | None:
        """Return the header of the file under this key, or put away what is not a blob of this key."""
        path = self._path(key)
        seen = files.inode(path)
        try:
            header = blob.read_header(path)
            if chunk_key(header.identity) != key:
                raise BlobRejected("it belongs to another chunk")
        except BlobRejected as fault:
            self._reject(key, seen, fault.reason)
        except OSError as error:
            self._warn_once(f"a chunk could not be read: {error.strerror}; it counts as absent")
        else:
            return header
        return None

    def _reject(self, key: ChunkKey, seen: tuple[int, int] | None, reason: str) -> None:
        """Put a file away that is not what its name says, with its row."""
        with self._lock:
            self._rejected += 1
        self._warn_once(
            f"a file was moved to {self._root / 'quarantine'}, because {reason}; its chunk is computed again"
        )
        path = self._path(key)
        with suppress(OSError):
            # Another process may have put it away and written a good one since.
            if files.inode(path) == seen:
                os.replace(path, self._quarantine(key))
        with suppress(StoreError):
            self._index.remove(key)

    def _forget(self, key: ChunkKey) -> None:
        """Drop the row of a file that is gone; not if all are, because then the directory is, perhaps only for now."""
        if self._index.get(key) is None or not (self._root / "objects").is_dir():
            return
        with suppress(StoreError):
            self._index.remove(key)
        if self.contains(key) and (header := self._header(key)):
            self._restore(header)

    def _restore(self, header: Header) -> None:
        try:
            self._index.add(header.record(), doc_id=header.doc_id)
        except StoreError as error:
            self._warn_once(str(error))

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            log.warning("%s", message)

    def _publish(self, key: ChunkKey, pieces: Sequence[memoryview]) -> bool:
        """Write a blob; ``False`` if another writer was faster."""
        path = self._path(key)
        try:
            if files.inode(path) and not files.is_regular(path):
                os.replace(path, self._quarantine(key))
            return files.publish(pieces, path, tmp=self._root / "tmp" / files.tmp_name(key[:16]))
        except OSError as error:
            raise StoreError(
                f"the chunk can't be written to {path}: {error.strerror or error}; "
                "make sure that the directory exists, is writable and has free space"
            ) from error

    def _scan(self) -> Iterator[tuple[Record, str | None]]:
        """Yield what the index must know of every blob, oldest first."""
        paths = [path for path in (self._root / "objects").glob(f"??/*{SUFFIX}") if KEY.fullmatch(path.stem)]
        log.info("rebuilding the index of %s from %s files", self._root, len(paths))
        for path in sorted(paths, key=_age):
            if self._path(path.stem) == path and (header := self._header(ChunkKey(path.stem))):
                yield header.record(), header.doc_id


def _age(path: Path) -> int:
    try:
        return os.lstat(path).st_mtime_ns
    except OSError:
        return 0
