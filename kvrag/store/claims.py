"""Who holds rows that have no files: a process that keeps their chunks in its memory, and only as long as it lives.

The claim is a file in ``tmp/`` that its process has locked, like a file being written: a kill unlocks it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat

from kvrag.store.directory import Directory
from kvrag.store.draft import tmp_name
from kvrag.store.fork import ForkAware

NAME = re.compile(r"[0-9]{1,20}\.[0-9a-f]{8}\.[0-9a-f]{16}")


class Claim(ForkAware):
    """What this process holds in one store.

    Parameters
    ----------
    directory
        The store's.
    """

    def __init__(self, directory: Directory) -> None:
        super().__init__()
        self._directory = directory
        self._name, self._fd = "", -1

    def name(self) -> str:
        """Name of the claim, which is made when it is first asked for. Raises ``OSError``."""
        with self._lock:
            if self._fd < 0:
                name = tmp_name()
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
                with self._directory.folder("tmp") as tmp:
                    fd = os.open(name, flags, 0o600, dir_fd=tmp)
                with contextlib.suppress(OSError):  # no locks here: see is_alive
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._name, self._fd = name, fd
            return self._name

    def close(self) -> None:
        """Give everything up; idempotent."""
        with self._lock:
            if self._fd >= 0:
                with contextlib.suppress(OSError), self._directory.folder("tmp") as tmp:
                    os.unlink(self._name, dir_fd=tmp)
                self._in_child()

    def _in_child(self) -> None:
        # The lock is its parent's as long as that lives, and must not last longer.
        fd, self._name, self._fd = self._fd, "", -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


def is_alive(directory: Directory, name: str | None) -> bool:
    """Whether the process that made a claim lives. Where files can't be locked, as long as the claim is there.

    Parameters
    ----------
    directory
        The store's.
    name
        From the index, which anyone may have written.
    """
    if name is None or not NAME.fullmatch(name):
        return False
    try:
        with directory.folder("tmp") as tmp:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=tmp)
    except OSError:
        return False
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
