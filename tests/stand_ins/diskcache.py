"""What the package diskcache gives to kvrag, in memory: for ``make gpu-check`` on a machine without network that lacks it.

Rows live as long as the process, by directory: a store that is closed can be opened again, and no other process sees it.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

DBNAME, MODE_RAW = "cache.db", 1

_ROWS: dict[str, dict[str, str]] = defaultdict(dict)
_LOCK = threading.RLock()


class Timeout(Exception):
    """Never raised."""


class Disk:
    """What the serialisation derives from; nothing is serialised here."""


class Cache:
    """Rows of a directory."""

    def __init__(self, directory: str, **_: Any) -> None:
        self._rows = _ROWS[directory]

    @contextmanager
    def transact(self, retry: bool = False) -> Iterator[None]:
        """Make changes one step for all threads; undo them after an error."""
        with _LOCK:
            before = dict(self._rows)
            try:
                yield
            except BaseException:
                self._rows.clear()
                self._rows.update(before)
                raise

    def get(self, key: str, default: Any = None, **_: Any) -> Any:
        """Return a row."""
        return self._rows.get(key, default)

    def set(self, key: str, value: str, **_: Any) -> None:
        """Insert or replace a row."""
        self._rows[key] = value

    def delete(self, key: str, **_: Any) -> None:
        """Remove a row."""
        self._rows.pop(key, None)

    def clear(self, **_: Any) -> None:
        """Remove all rows."""
        self._rows.clear()

    def __iter__(self) -> Iterator[str]:
        yield from list(self._rows)

    def reset(self, *_: Any, **__: Any) -> None:
        """Change no setting."""

    def close(self) -> None:
        """Keep the rows."""

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def __len__(self) -> int:
        return len(self._rows)


sys.modules["diskcache.core"] = sys.modules[__name__]
