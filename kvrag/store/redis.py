"""Blobs in Redis or Valkey, by redis-py: a memory that machines share.

A blob that the server evicts is a miss.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from kvrag.config.address import redacted
from kvrag.errors import StoreError, require
from kvrag.kv.format import Bytes
from kvrag.store.base import Blobs
from kvrag.types import ChunkKey

CONNECT_S, ANSWER_S = 2.0, 5.0  # timeouts of a connection and of an answer
READ_BYTES = 2**20  # received at once: with redis-py's 64 KB, a large value takes twice as long
# Expiry of a blob without its own: a server with a volatile policy evicts only keys that expire.
KEPT_S = 30 * 24 * 3600.0
PER_CALL = 512  # keys in one call
SCHEMES = ("redis", "rediss", "unix")


class RedisServer:
    """Client of a server.

    Parameters
    ----------
    url
        ``redis://``, ``rediss://`` or ``unix://``, as redis-py takes it, with user, password and
        database number.

    Raises
    ------
    MissingDependencyError
        If redis-py is not installed.
    StoreError
        If the address can't be used.
    """

    def __init__(self, url: str) -> None:
        self.redis = require("redis", extra="redis", purpose="a KV store in Redis")
        # A connection that the server has closed meanwhile is opened again, at once.
        again = self.redis.retry.Retry(
            self.redis.backoff.NoBackoff(), 1, supported_errors=(self.redis.ConnectionError,)
        )
        with self.faults():
            user = url.partition("://")[2].rpartition("@")[0]
            if not url.startswith("unix:") and set(user) & set("@/#?"):
                raise ValueError("a password that is not escaped would be taken for a host")
            self.client: Any = self.redis.Redis.from_url(
                url,
                protocol=2,
                socket_connect_timeout=CONNECT_S,
                socket_timeout=ANSWER_S,
                socket_read_size=READ_BYTES,
                health_check_interval=30,
                retry=again,
            )

    @contextmanager
    def faults(self) -> Iterator[None]:
        """Turn errors of redis-py into ``OSError``, without keys and values."""
        try:
            yield
        except self.redis.RedisError as error:
            is_full = isinstance(error, self.redis.exceptions.OutOfMemoryError) or str(
                error
            ).startswith("OOM")
            raise OSError(
                errno.ENOSPC if is_full else errno.EIO, f"Redis: {redacted(str(error))}"
            ) from None
        except ValueError:  # its message may quote a part of the password
            form = "redis://user:password@host:port/0, and / and # in a password as %2F and %23"
            raise StoreError(
                f"the address of the Redis server can't be used; write {form}"
            ) from None

    def close(self) -> None:
        """Close the connections."""
        self.client.close()


class RedisBlobs(Blobs):
    """Blobs as strings named ``kvrag:<folder>:<key>``; see :class:`kvrag.store.base.Blobs`.

    ``url`` is as for :class:`RedisServer`, which tells what is raised.
    """

    is_remote = True

    def __init__(self, url: str, folder: str) -> None:
        self._server = RedisServer(url)
        self._head = f"kvrag:{folder}:"

    def read(self, key: ChunkKey, start: int = 0, length: int | None = None) -> Bytes | None:
        """Return bytes of a string; a single round trip also tells whether it exists."""
        if length == 0:
            if self._call("EXISTS", key):
                return b""
            return None
        # The server sends a whole string without a copy, and copies a range.
        if start == 0 and length is None:
            whole: bytes | None = self._call("GET", key)
            return whole
        with self._server.faults():
            pipe = self._server.client.pipeline(transaction=False)
            pipe.getrange(self._head + key, start, -1 if length is None else start + length - 1)
            pipe.exists(self._head + key)
            data: bytes
            data, is_there = pipe.execute()
        if data or is_there:
            return data
        return None

    def write(self, key: ChunkKey, parts: Iterable[Bytes]) -> int:
        """Set a string unless it exists."""
        data = b"".join(parts)
        if self._call(
            "SET",
            key,
            data,
            "NX",
            "PX",
            int(KEPT_S * 1000),
        ):
            return len(data)
        return 0

    def delete(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """Delete strings in the order of ``keys``, with few calls."""
        gone = set()
        ordered = list(keys)
        for start in range(0, len(ordered), PER_CALL):
            some = ordered[start : start + PER_CALL]
            with self._server.faults():
                pipe = self._server.client.pipeline(transaction=False)
                for key in some:
                    pipe.unlink(self._head + key)
                gone |= {key for key, count in zip(some, pipe.execute(), strict=True) if count}
        return gone

    def keys(self) -> set[ChunkKey]:
        """Return all keys; scans all names of the database."""
        with self._server.faults():
            names = self._server.client.scan_iter(match=f"{self._head}*", count=PER_CALL)
            return {ChunkKey(name[len(self._head) :].decode()) for name in names}

    def expire(self, key: ChunkKey, seconds: float) -> None:
        """Let a blob expire after a time."""
        self._call("PEXPIRE", key, max(1, int(seconds * 1000)))

    def close(self) -> None:
        """Close the connections."""
        self._server.close()

    def _call(self, command: str, key: ChunkKey, *arguments: Any) -> Any:
        with self._server.faults():
            return self._server.client.execute_command(command, self._head + key, *arguments)
