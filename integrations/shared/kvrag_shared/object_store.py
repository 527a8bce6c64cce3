"""Blobs in an object store, by obstore.

Supports S3, Google Cloud Storage, Azure, a shared directory, and memory for tests.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from kvrag import StoreError, require
from kvrag.config import redacted
from kvrag.store import POOL, Blobs, Bytes, ChunkKey

ANSWER_S = 10.0  # timeout of an answer, its retries included
PARTS_FROM = 64 * 2**20  # bytes from which on a blob is written in parts

_first_process = 0  # process id at the first use of obstore


class ObjectBlobs(Blobs):
    """Blobs as objects below ``<url>/<folder>/``; see :class:`kvrag.store.base.Blobs`.

    Parameters
    ----------
    url
        ``s3://bucket/prefix``, ``gs://``, ``az://`` or ``file:///directory``; credentials and
        endpoints come from the environment, by the providers' names (``AWS_ENDPOINT_URL``, ...).
    folder
        Separates blobs of different kinds.

    Raises
    ------
    MissingDependencyError
        If obstore is not installed.
    StoreError
        If the address or the environment can't be used, or in a process that was forked after the
        first use of obstore.
    """

    is_remote = True

    def __init__(self, url: str, folder: str) -> None:
        self._obstore: Any = require(
            "obstore", extra="objects", purpose="a KV store in an object store"
        )
        _check_process()
        self._head = f"{folder}/"
        limit = timedelta(seconds=ANSWER_S)
        options: dict[str, Any] = {}
        if not url.startswith(("file:", "memory:")):
            options = {
                "client_options": {
                    "timeout": limit,
                    "connect_timeout": limit / 4,
                    "allow_http": True,
                },
                "retry_config": {"max_retries": 3, "retry_timeout": limit},
            }
        elif url.startswith("file:"):
            options = {"mkdir": True}
        try:
            self._store = self._obstore.store.from_url(url, **options)
        except (self._obstore.exceptions.BaseError, ValueError, OSError) as error:
            raise StoreError(
                f"the object store {url.partition('://')[0]}://... can't be used "
                f"({type(error).__name__}); check its address"
            ) from None  # an address may hold a password

    def read(self, key: ChunkKey, start: int = 0, length: int | None = None) -> Bytes | None:
        """Return a range of an object."""
        wanted: Any = {"offset": start} if length is None else (start, start + max(1, length))
        try:
            found = self._obstore.get(self._store, self._head + key, options={"range": wanted})
            return memoryview(found.bytes())[:length]
        except FileNotFoundError:
            return None
        except self._obstore.exceptions.BaseError as error:
            with self._faults():
                if self._obstore.head(self._store, self._head + key)["size"] <= start:
                    return b""
            raise _outage(error) from None

    def write(self, key: ChunkKey, parts: Iterable[Bytes]) -> int:
        """Write an object unless it exists.

        A large object is written in parts. Two writers that meet both write it, with the same
        bytes.
        """
        data = b"".join(parts)
        path = self._head + key
        with self._faults():
            if len(data) >= PARTS_FROM:
                if self._size(path) is not None:
                    return 0
                self._obstore.put(self._store, path, data, use_multipart=True)
                return len(data)
            try:
                self._obstore.put(self._store, path, data, mode="create", use_multipart=False)
            except self._obstore.exceptions.AlreadyExistsError:
                return 0
        return len(data)

    def delete(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """Delete objects and return the keys that existed."""
        return {
            key
            for key, was_there in zip(keys, POOL.ahead(self._delete, list(keys)), strict=True)
            if was_there
        }

    def keys(self) -> set[ChunkKey]:
        """Return all keys."""
        with self._faults():
            pages = self._obstore.list(self._store, self._head)
            return {ChunkKey(each["path"].rpartition("/")[2]) for page in pages for each in page}

    def close(self) -> None:
        """Do nothing: connections close by themselves."""

    def _delete(self, key: ChunkKey) -> bool:
        path = self._head + key
        with self._faults():
            if self._size(path) is None:
                return False
            try:
                self._obstore.delete(self._store, path)
            except FileNotFoundError:
                return False
        return True

    def _size(self, path: str) -> int | None:
        try:
            return int(self._obstore.head(self._store, path)["size"])
        except FileNotFoundError:
            return None

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Turn errors of obstore into ``OSError``."""
        try:
            yield
        except self._obstore.exceptions.BaseError as error:
            raise _outage(error) from None


def _check_process() -> None:
    """Raise ``StoreError`` in a process that was forked after the first use of obstore.

    The threads of obstore are gone there, and a call would wait for them.
    """
    global _first_process
    _first_process = _first_process or os.getpid()
    if _first_process != os.getpid():
        raise StoreError(
            "obstore was used before this process was forked, and waits here for threads that it "
            "lacks; start processes by 'spawn'"
        )


def _outage(error: Exception) -> OSError:
    first_line = str(error).partition("\n")[0]
    return OSError(errno.EIO, f"object store: {redacted(first_line)}")
