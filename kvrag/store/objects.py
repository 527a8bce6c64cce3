"""The blobs of a store's directory, by their keys: no index, no tensors of anyone else."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress

import torch

from kvrag.identity.fingerprint import chunk_key
from kvrag.store import blob, reader, writer
from kvrag.store.buffers import Buffers
from kvrag.store.directory import Directory
from kvrag.store.draft import Draft
from kvrag.store.guard import Guard
from kvrag.store.header import BlobRejected, Foreign, Header, OtherVersion
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV

KEY = re.compile(r"[0-9a-f]{64}")
SUFFIX = ".safetensors"
OBJECTS, QUARANTINE = "objects", "quarantine"

Rejected = Callable[[ChunkKey, str, bool], None]
"""Told key and reason of a file that is not what its name says, and whether it was put away: where nothing may change, it stays."""

Confirm = Callable[[Callable[[], bool]], bool]


class Objects:
    """Blobs in a directory. What is not the proven blob of its key is put away in ``quarantine/``.

    Parameters
    ----------
    directory
        The store's.
    rejected
        Told of what is put away, or would be.
    read_only
        Leave everything where it is.
    guard
        The keys that blobs are protected by.
    """

    def __init__(
        self, directory: Directory, rejected: Rejected, *, read_only: bool = False, guard: Guard | None = None
    ) -> None:
        self.guard = guard
        self.foreign: set[ChunkKey] = set()
        """Files met that other keys protect, or none: they are left alone."""
        self.on_left: Callable[[ChunkKey, str], None] = lambda key, reason: None
        """Told key and reason of a file that was asked for and left alone."""
        self._directory = directory
        self._rejected = rejected
        self._read_only = read_only
        self._buffers = Buffers()

    def contains(self, key: str) -> bool:
        """Whether a chunk's file is there, without proving its integrity."""
        return KEY.fullmatch(key) is not None and self._directory.is_file(*place_of(key))

    def open(self, identity: ChunkIdentity, key: ChunkKey | None = None) -> blob.Blob | None:
        """Open the blob of a chunk, ``key`` its key where that is known; ``None`` if what is there is not that, which is put away.

        Raises ``OSError``.
        """
        key = key or chunk_key(identity)
        try:
            return blob.open_blob(self._directory, *place_of(key), identity=identity, guard=self.guard)
        except BlobRejected as fault:
            self._refuse(key, fault.inode, fault)
            return None

    def read(
        self,
        identity: ChunkIdentity,
        key: ChunkKey | None = None,
        *,
        is_helped: bool,
        opened: Callable[[blob.Blob], None] = lambda _: None,
    ) -> tuple[ChunkKV, Header] | None:
        """Read and prove a chunk; ``None`` if it is damaged, and then put away. ``opened`` is told its blob. Raises ``OSError``."""
        key = key or chunk_key(identity)
        file = self.open(identity, key)
        if file is None:
            return None
        try:
            with file:
                opened(file)
                return reader.read_all(file, self.buffer(file.header.num_bytes), is_helped=is_helped), file.header
        except BlobRejected as fault:
            self._refuse(key, file.inode, fault)
            return None

    def _refuse(self, key: ChunkKey, seen: tuple[int, int] | None, fault: BlobRejected) -> None:
        """Put away what is damaged. What other keys protect stays until its place is needed: it may be good to others."""
        if isinstance(fault, Foreign):
            self.foreign.add(key)
            self.on_left(key, fault.reason)
        else:
            self.put_away(key, seen, fault.reason)

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Return memory for a chunk's tensors, uint8, pinned where there is CUDA; ``OSError`` if there is not enough."""
        try:
            return self._buffers.take(num_bytes)
        except (MemoryError, RuntimeError):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from None

    def header(self, key: ChunkKey) -> Header | None:
        """Return the header of the file under this key, or put away what is not a blob of this key."""
        try:
            with blob.Blob(self._directory, *place_of(key), guard=self.guard) as file:
                if chunk_key(file.header.identity) != key:
                    raise file.refused("it belongs to another chunk")
                return file.header
        except OtherVersion:
            pass  # an older or newer kvrag may want it
        except Foreign:
            self.foreign.add(key)  # who has its keys may want it
        except BlobRejected as fault:
            self.put_away(key, fault.inode, fault.reason)
        return None

    def publish(self, plan: blob.Plan, kv: ChunkKV, key: ChunkKey, confirm: Confirm | None = None) -> bool:
        """Write a blob; ``False`` if it is there already. Raises ``OSError``, and leaves nothing then.

        ``confirm`` is given what names the blob, once all its bytes are on the disk, and calls that or not, and has yet to sync the
        blob's folder; its result is returned.
        """
        with Draft(self._directory, plan.size) as draft:
            writer.write(plan, kv, draft.write_all)
            if confirm is None:
                return self._name(draft, key)
            draft.sync()
            return confirm(lambda: self._name(draft, key, is_synced=False))

    def _name(self, draft: Draft, key: ChunkKey, *, is_synced: bool = True) -> bool:
        """Give a file its name; what is in the way is put away first. As :meth:`publish`."""
        try:
            if draft.publish(*place_of(key), is_synced=is_synced):
                self.foreign.discard(key)
                return True
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
        # The name is taken: by this chunk's file, or by what has no business there.
        return self._clear_way(key) and draft.publish(*place_of(key), is_synced=is_synced)

    def erase(self, key: ChunkKey) -> bool:
        """Erase a chunk's file, in quarantine too, and return whether it was there. Raises ``OSError``."""
        found = self._directory.unlink(*place_of(key))
        if self._directory.is_file(QUARANTINE, key + SUFFIX):
            self._directory.unlink(QUARANTINE, key + SUFFIX)
        return found

    def empty_quarantine(self) -> None:
        """Erase the files that were put away. Raises ``OSError``."""
        for name in self._directory.names(QUARANTINE):
            if self._directory.is_file(QUARANTINE, name):
                self._directory.unlink(QUARANTINE, name)

    def put_away(self, key: ChunkKey, seen: tuple[int, int] | None, reason: str) -> None:
        """Move a file that is not what its name says to quarantine, unless nothing may change here, and tell."""
        with suppress(OSError):
            # Another process may have put it away and written a good one since.
            if not self._read_only and self._directory.inode(*place_of(key)) == seen:
                self._move_away(place_of(key))
        self._rejected(key, reason, not self._read_only)

    def _move_away(self, place: tuple[str, ...]) -> None:
        """Move a file, or a link or whatever, to quarantine; files keep their names, to be erased with their chunks."""
        target = place[-1] if self._directory.is_file(*place) else f"{place[-1]}.{secrets.token_hex(4)}"
        try:
            self._directory.move(place, (QUARANTINE, target))
        except OSError:
            self._directory.unlink(*place)

    def keys(self) -> set[ChunkKey]:
        """Keys of all files that have the name of a blob, whatever they are."""
        found = set()
        for shard in self._directory.names(OBJECTS):
            for name in self._directory.names(OBJECTS, shard):
                key = name.removesuffix(SUFFIX)
                if name.endswith(SUFFIX) and KEY.fullmatch(key) and key[:2] == shard:
                    found.add(ChunkKey(key))
        return found

    def age(self, key: ChunkKey) -> int:
        """Time of the last change, for sorting."""
        status = self._directory.status(*place_of(key))
        return 0 if status is None else status.st_mtime_ns

    def _clear_way(self, key: ChunkKey) -> bool:
        """Put away what is no folder or no file where one has to be, and what is of other keys; return whether anything was.

        A link itself goes, not its target.
        """
        place, is_cleared = place_of(key), False
        for what, is_right in ((place[:2], stat.S_ISDIR), (place, stat.S_ISREG)):
            status = self._directory.status(*what)
            if status is not None and not is_right(status.st_mode):
                self._move_away(what)
                is_cleared = True
        # Names depend on the keys, so a file of other keys has this name only if someone gave it that.
        if key in self.foreign and self.header(key) is None and self._directory.is_file(*place):
            self._move_away(place)
            is_cleared = True
        self.foreign.discard(key)
        return is_cleared


def place_of(key: str) -> tuple[str, str, str]:
    """Place of a key's blob below the store's root."""
    return OBJECTS, key[:2], key + SUFFIX
