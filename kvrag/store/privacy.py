"""Keep a store's folders and files private when they were made by someone else: by a copy, or by hand before the store was.

Only what is the store's own by name and kind is changed, and only rights of others are taken away. Links, and files that have other
names elsewhere, are left as they are.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress

from kvrag.store.directory import Directory

log = logging.getLogger(__name__)

OTHERS = stat.S_IRWXG | stat.S_IRWXO

SHARD, INDEX = re.compile(r"[0-9a-f]{2}"), re.compile(r"index(-[0-9a-f]{16})?(\.damaged)?")
FILES = {
    "objects": re.compile(r"[0-9a-f]{64}\.safetensors"),
    "references": re.compile(r"[0-9a-f]{64}\.json"),
    "quarantine": re.compile(r"[0-9a-f]{64}\.safetensors.*"),
    "tmp": re.compile(r".*"),
    "index": re.compile(r"(cache|rows)\.db.*"),
    "llama_index": re.compile(r"refs\.sqlite.*"),
}
"""The store's folders, and which of the files in them are its own; ``llama_index`` is the LlamaIndex adapter's."""
SHARDED = frozenset({"objects", "references"})
ROOT_FILES = frozenset({"format.json", "lock", "evict.lock", "ballast"})


def make_private(directory: Directory) -> None:
    """Take the rights of others from what they could read of a store, and say so once. A fault is logged, never raised.

    Files are looked at where a folder of the store was open to others: in folders that were private, nobody could reach them. A root
    that holds other things besides the store keeps its mode.

    Parameters
    ----------
    directory
        A store that is open for writing, whose ``format.json`` is in place.
    """
    run = _Run(directory)
    names = sorted(directory.names())
    strangers = [name for name in names if name not in ROOT_FILES and _kind_of(name) not in FILES]
    if not strangers:
        run.close()
    for name in names:
        if name in ROOT_FILES:
            run.close(name)
    # All folders first: as soon as they are closed, nobody reaches what is in them.
    for folder in [name for name in names if _kind_of(name) in FILES and run.close(name)]:
        _close_files(run, directory, folder)
    if run.closed:
        log.warning(
            "others had access to the store %s; %s of its folders and files were made private",
            directory.root,
            run.closed,
        )
    if run.left:
        log.warning(
            "others may have access to the store %s: %s of its folders and files could not be made private (%s first); let their owner "
            "run chmod -R go-rwx, or choose another directory",
            directory.root,
            len(run.left),
            "/".join(run.left[0]) or "the directory itself",
        )


class _Run:
    """Changes modes, and counts."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self.closed = 0
        self.left: list[Sequence[str]] = []

    def close(self, *place: str) -> bool:
        """Take the rights of others from a folder or a file, the root if no place is given; whether they had any and have none now."""
        with suppress(FileNotFoundError):
            try:
                return self._close(place)
            except OSError:
                self.left.append(place)
        return False

    def _close(self, place: tuple[str, ...]) -> bool:
        status = self._directory.status(*place) if place else None
        if status is not None and not stat.S_ISDIR(status.st_mode):
            # Another name of a file may be somebody else's, who needs its mode.
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1 or not status.st_mode & OTHERS:
                return False
            fd, _ = self._directory.open(*place)
            try:
                return self._take(fd, place, stat.S_IRUSR | stat.S_IWUSR)
            finally:
                os.close(fd)
        with self._directory.folder(*place) as fd:
            return self._take(fd, place, ~OTHERS)

    def _take(self, fd: int, place: tuple[str, ...], keep: int) -> bool:
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        if not mode & OTHERS:
            return False
        os.fchmod(fd, mode & keep)
        if os.fstat(fd).st_mode & OTHERS:  # a file system without modes
            self.left.append(place)
            return False
        self.closed += 1
        return True


def _kind_of(name: str) -> str:
    return "index" if INDEX.fullmatch(name) else name


def _close_files(run: _Run, directory: Directory, folder: str) -> None:
    for place in _files(directory, folder):
        run.close(*place)


def _files(directory: Directory, folder: str) -> Iterator[tuple[str, ...]]:
    """Yield the shards of a folder, each before its files, and the store's own files."""
    kind = _kind_of(folder)
    shards = (
        [(folder, name) for name in directory.names(folder) if SHARD.fullmatch(name)]
        if kind in SHARDED
        else [(folder,)]
    )
    for place in shards:
        if place != (folder,):
            yield place
        for name in directory.names(*place):
            if FILES[kind].fullmatch(name):
                yield (*place, name)
