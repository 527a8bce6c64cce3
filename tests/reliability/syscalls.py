"""What a process changed on disk, call by call: recorded by strace, and replayed as far as a power cut lets it survive."""

from __future__ import annotations

import os
import random
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from world import fork, wait

_CHANGES = """
open openat creat close dup dup2 dup3 write writev pwrite64 pwritev pwritev2 ftruncate truncate
fallocate fsync fdatasync sync_file_range link linkat symlink symlinkat unlink unlinkat rmdir
rename renameat renameat2 mkdir mkdirat
"""
CHANGES = tuple(_CHANGES.split())
HARMLESS = frozenset({"sync_file_range", "dup", "dup2", "dup3"})
NOTES = 100
"""Descriptor that notes are written to; it leads nowhere."""
STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
SECTOR = 512


def attach(pid: int, options: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Let strace trace a process that is there, and return when it does."""
    strace = subprocess.Popen(
        ["strace", "-q", "-o", str(log), *options, "-p", str(pid)], stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 10
    while (
        "TracerPid:\t0" in Path(f"/proc/{pid}/status").read_text() and time.monotonic() < deadline
    ):
        time.sleep(0.002)
    return strace


def traced(begin: Callable[[], Callable[[], int]], options: list[str], log: Path) -> int:
    """Run what ``begin`` returns, in a child that strace traces; its exit status."""
    ready_out, ready_in = os.pipe()
    go_out, go_in = os.pipe()

    def child() -> int:
        work = begin()
        os.write(ready_in, b"1")
        os.read(go_out, 1)
        return work()

    pid = fork(child)
    os.read(ready_out, 1)
    strace = attach(pid, options, log)
    os.write(go_in, b"1")
    status = wait(pid)
    strace.wait(20)
    for fd in (ready_out, ready_in, go_out, go_in):
        os.close(fd)
    return status


def record(work: Callable[[], None], log: Path) -> int:
    """Run ``work`` in a child, every change that its thread makes on disk being written to ``log``; its exit status."""

    def begin() -> Callable[[], int]:
        os.dup2(os.open(os.devnull, os.O_WRONLY), NOTES)
        return lambda: work() or 0

    calls = f"trace={','.join('?' + call for call in CHANGES)}"
    return traced(begin, ["-xx", "-v", "-s", str(2**24), "-e", calls], log)


def note(text: str) -> None:
    """Write into the record that something was acknowledged."""
    os.write(NOTES, text.encode())


@dataclass(eq=False)
class Node:
    """A file or a folder: what it is known as does not matter."""

    is_folder: bool
    entries: dict[bytes, Node] = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """One change of one node: ``entry`` sets or removes names in a folder, ``data`` and ``size`` change a file, ``sync`` makes all
    changes of the node before it durable, ``note`` is what the process said.
    """

    kind: str
    node: Node | None = None
    names: tuple[tuple[Node, bytes, Node | None], ...] = ()
    offset: int = 0
    content: bytes = b""


class Recording:
    """The changes below a folder that was empty when the recording began.

    Parameters
    ----------
    log
        From :func:`record`.
    folder
        Absolute path of the folder.
    """

    def __init__(self, log: Path, folder: Path) -> None:
        self.changes: list[Change] = []
        self.root = Node(is_folder=True)
        self._folder = os.fsencode(folder)
        self._open: dict[int, tuple[Node, int]] = {}
        for line in log.read_text().splitlines():
            match = re.match(r"(\w+)\((.*)\) += (-?\d+)", line)
            if match and not match[3].startswith("-"):
                self._apply(match[1], match[2], int(match[3]))

    def _apply(self, call: str, args: str, result: int) -> None:
        strings = [bytes.fromhex(text.replace("\\x", "")) for text in STRING.findall(args)]
        rest = STRING.sub("@", args)
        words = [word.strip() for word in rest.split(",")]
        if call in ("open", "openat", "creat"):
            self._opened(
                self._at(words[0] if call == "openat" else "AT_FDCWD", strings[0]), rest, result
            )
        elif call in ("write", "writev", "pwrite64", "pwritev", "pwritev2"):
            # Of the offset among the arguments.
            places = {"pwrite64": -1, "pwritev": -1, "pwritev2": -2}
            offset = int(words[places[call]]) if call in places else None
            self._written(int(words[0]), b"".join(strings)[:result], offset)
        elif call in ("ftruncate", "fallocate"):
            node, _ = self._open.get(int(words[0]), (None, 0))
            size = int(words[1]) if call == "ftruncate" else -int(words[2]) - int(words[3])
            self._note_change("size", node, offset=size)
        elif call in ("fsync", "fdatasync"):
            self._note_change("sync", self._open.get(int(words[0]), (None, 0))[0])
        elif call == "close":
            self._open.pop(int(words[0]), None)
        elif call in ("mkdir", "mkdirat"):
            self._enter(
                self._at(words[0] if call == "mkdirat" else "AT_FDCWD", strings[0]),
                Node(is_folder=True),
            )
        elif call in ("unlink", "unlinkat", "rmdir"):
            self._enter(self._at(words[0] if call == "unlinkat" else "AT_FDCWD", strings[0]), None)
        elif call in ("link", "linkat", "rename", "renameat", "renameat2"):
            ends = (
                (words[0], words[2]) if call.endswith(("at", "at2")) else ("AT_FDCWD", "AT_FDCWD")
            )
            self._linked(
                *(self._at(end, name) for end, name in zip(ends, strings, strict=True)),
                moves=call[0] == "r",
            )
        elif call not in HARMLESS:
            raise NotImplementedError(f"{call} is not modelled")

    def _at(self, start: str, path: bytes) -> tuple[Node, bytes] | None:
        """Folder and name that a path leads to; ``None`` outside."""
        if path.startswith(b"/"):
            if not (path + b"/").startswith(self._folder + b"/"):
                return None
            node, path = self.root, path[len(self._folder) :]
        elif start == "AT_FDCWD" or int(start) not in self._open:
            return None
        else:
            node = self._open[int(start)][0]
        *folders, name = [part for part in path.split(b"/") if part not in (b"", b".")] or [b""]
        for part in folders:
            node = node.entries[part]
        return node, name

    def _opened(self, place: tuple[Node, bytes] | None, rest: str, fd: int) -> None:
        self._open.pop(fd, None)
        if place is None:
            return
        folder, name = place
        node = folder.entries.get(name) if name else folder
        if node is None:
            assert "O_CREAT" in rest, "a file that was not made"
            node = Node(is_folder=False)
            self._enter(place, node)
        elif "O_TRUNC" in rest:
            self._note_change("size", node, offset=0)
        self._open[fd] = (node, 0)

    def _written(self, fd: int, content: bytes, offset: int | None) -> None:
        if fd == NOTES:
            self.changes.append(Change("note", content=content))
        if fd not in self._open:
            return
        node, position = self._open[fd]
        if offset is None:  # nothing of the store appends, and nothing seeks
            offset = position
            self._open[fd] = (node, position + len(content))
        self._note_change("data", node, offset=offset, content=content)

    def _linked(
        self, source: tuple[Node, bytes] | None, target: tuple[Node, bytes] | None, *, moves: bool
    ) -> None:
        if source is None or target is None:
            assert source is target, "something was moved out of the store, or into it"
            return
        node = source[0].entries[source[1]]
        names = ((*target, node), (*source, None)) if moves else ((*target, node),)
        self._change_names(names)

    def _enter(self, place: tuple[Node, bytes] | None, node: Node | None) -> None:
        if place is not None:
            self._change_names(((*place, node),))

    def _change_names(self, names: tuple[tuple[Node, bytes, Node | None], ...]) -> None:
        for folder, name, node in names:
            if node is None:
                folder.entries.pop(name)
            else:
                folder.entries[name] = node
        self.changes.append(Change("entry", names[0][0], names))

    def _note_change(
        self, kind: str, node: Node | None, *, offset: int = 0, content: bytes = b""
    ) -> None:
        if node is not None:
            self.changes.append(Change(kind, node, offset=offset, content=content))

    def notes(self, end: int) -> list[str]:
        """What the process had said before change ``end``."""
        return [change.content.decode() for change in self.changes[:end] if change.kind == "note"]

    def survivors(self, end: int, luck: random.Random, share: float, *, torn: bool) -> list[Change]:
        """Changes that survive a power cut before change ``end``.

        What was synced does; of the rest each one with probability ``share``, and of a torn write some sectors.
        """
        synced: set[Node] = set()
        kept: list[Change] = []
        for change in reversed(self.changes[:end]):
            if change.kind == "sync" and change.node is not None:
                synced.add(change.node)
            elif change.kind == "note":
                continue
            elif change.node in synced:
                kept.append(change)
            elif luck.random() < share:
                kept += list(_torn(change, luck)) if torn and change.kind == "data" else [change]
        return kept[::-1]


def _torn(change: Change, luck: random.Random) -> Iterator[Change]:
    for start in range(0, len(change.content), SECTOR):
        if luck.random() < 0.5:
            part = change.content[start : start + SECTOR]
            yield Change("data", change.node, offset=change.offset + start, content=part)


def rebuild(root: Node, changes: list[Change], folder: Path) -> None:
    """Write what the changes leave to an empty folder."""
    entries: dict[Node, dict[bytes, Node]] = {}
    content: dict[Node, bytearray] = {}
    for change in changes:
        if change.kind == "entry":
            for parent, name, node in change.names:
                names = entries.setdefault(parent, {})
                names.pop(name, None) if node is None else names.__setitem__(name, node)
            continue
        assert change.node is not None
        data = content.setdefault(change.node, bytearray())
        # A negative size is space that was reserved: the file grows and never shrinks.
        size = change.offset + len(change.content) if change.kind == "data" else abs(change.offset)
        if change.kind == "size" and change.offset >= 0:
            del data[size:]
        data.extend(bytes(max(0, size - len(data))))
        if change.kind == "data":
            data[change.offset : size] = change.content
    _write(root, os.fsencode(folder), entries, content)


def _write(
    node: Node, path: bytes, entries: dict[Node, dict[bytes, Node]], content: dict[Node, bytearray]
) -> None:
    for name, inner in entries.get(node, {}).items():
        place = path + b"/" + name
        if inner.is_folder:
            os.mkdir(place, 0o700)
            _write(inner, place, entries, content)
        else:
            with open(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(content.get(inner, b""))
