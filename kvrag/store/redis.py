"""Blobs in Redis or Valkey, by redis-py: a memory that machines share.

A blob that the server evicts is a miss.
"""

from __future__ import annotations

import errno
import re
import socket
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from kvrag.address import redacted
from kvrag.buffers import BUFFERS
from kvrag.errors import StoreError, require
from kvrag.store.base import Bytes
from kvrag.types import ChunkKey

CONNECT_S, ANSWER_S = 2.0, 5.0  # timeouts of a connection and of an answer
# Expiry of a blob without its own: a server with a volatile policy evicts only keys that expire.
KEPT_S = 30 * 24 * 3600.0
PER_CALL = 512  # keys in one call


class RedisBlobs:
    """Blobs as strings named ``kvrag:<folder>:<key>``; see :class:`kvrag.store.base.Blobs`.

    Parameters
    ----------
    url
        ``redis://``, ``rediss://`` or ``unix://``, as redis-py takes it, with user, password and
        database number.
    folder
        Separates blobs of different kinds.
    is_endless
        Whether blobs stay until they are erased.

    Raises
    ------
    MissingDependencyError
        If redis-py is not installed.
    """

    is_remote = True  # a second request costs more than bytes that are not needed

    def __init__(self, url: str, folder: str, *, is_endless: bool = False) -> None:
        self._redis = require("redis", extra="redis", purpose="a KV store in Redis")
        with self._faults():
            user = url.partition("://")[2].rpartition("@")[0]
            if not url.startswith("unix:") and set(user) & set("@/#?"):
                raise ValueError("a password that is not escaped would be taken for a host")
            self._client: Any = self._redis.Redis.from_url(
                url,
                protocol=2,
                socket_connect_timeout=CONNECT_S,
                socket_timeout=ANSWER_S,
                health_check_interval=30,
            )
        self._head = f"kvrag:{folder}:"
        self._is_endless = is_endless

    def read(self, key: ChunkKey, start: int = 0, length: int | None = None) -> Bytes | None:
        """Return bytes of a string; a single round trip also tells whether it exists."""
        if length == 0:
            if self._call("EXISTS", key):
                return b""
            return None
        # The server sends a whole string without a copy, and copies a range.
        if start == 0 and length is None:
            return self._whole(key)
        with self._faults():
            pipe = self._client.pipeline(transaction=False)
            pipe.getrange(self._head + key, start, -1 if length is None else start + length - 1)
            pipe.exists(self._head + key)
            data, is_there = pipe.execute()
        return data if data or is_there else None

    def write(self, key: ChunkKey, parts: Iterable[Bytes]) -> int:
        """Set a string unless it exists."""
        data = b"".join(parts)
        end = () if self._is_endless else ("PX", int(KEPT_S * 1000))
        if self._call("SET", key, data, "NX", *end):
            return len(data)
        return 0

    def delete(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """Delete strings in the order of ``keys``, with few calls."""
        gone = set()
        ordered = list(keys)
        for start in range(0, len(ordered), PER_CALL):
            some = ordered[start : start + PER_CALL]
            with self._faults():
                pipe = self._client.pipeline(transaction=False)
                for key in some:
                    pipe.unlink(self._head + key)
                gone |= {key for key, count in zip(some, pipe.execute(), strict=True) if count}
        return gone

    def keys(self) -> set[ChunkKey]:
        """Return all keys; scans all names of the database."""
        with self._faults():
            names = self._client.scan_iter(match=f"{self._head}*", count=PER_CALL)
            return {ChunkKey(name[len(self._head) :].decode()) for name in names}

    def expire(self, key: ChunkKey, seconds: float) -> None:
        """Let a blob expire after a time."""
        self._call("PEXPIRE", key, max(1, int(seconds * 1000)))

    def check(self) -> None:
        """Raise :class:`~kvrag.errors.StoreError` if the server may evict names without an expiry.

        The journal has such names, and must stay whole.
        """
        try:
            policy = self._client.config_get("maxmemory-policy").get("maxmemory-policy", "")
        except self._redis.RedisError:  # asking is forbidden, or the server can't be reached now
            return
        if policy.startswith("allkeys"):
            raise StoreError(
                f"the Redis server evicts any key (maxmemory-policy {policy}), "
                "and would lose the store's journal; "
                "set the policy to volatile-lru or noeviction"
            )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _whole(self, key: ChunkKey) -> Bytes | None:
        """Return a string, received in its final buffer.

        redis-py would read it in pieces and copy them twice.
        """
        with self._faults():
            connection = (pool := self._client.connection_pool).get_connection()
            try:
                connection.send_command("GET", self._head + key)
                return _value(connection._sock, time.monotonic() + ANSWER_S)
            except BaseException:
                connection.disconnect()  # the rest of the answer may still come
                raise
            finally:
                pool.release(connection)

    def _call(self, command: str, key: ChunkKey, *arguments: Any) -> Any:
        with self._faults():
            return self._client.execute_command(command, self._head + key, *arguments)

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Turn errors of redis-py into ``OSError``, without keys and values."""
        try:
            yield
        except self._redis.RedisError as error:
            is_full = isinstance(error, self._redis.exceptions.OutOfMemoryError) or str(
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


def _value(sock: socket.socket, until: float) -> Bytes | None:
    """Receive a value (``$length``, end of line, value, end of line); raises ``OSError``."""
    got = 0
    head = bytearray(512)
    while b"\r\n" not in head:
        got += _received(sock, memoryview(head)[got:], until)
    line, _, rest = bytes(head[:got]).partition(b"\r\n")
    if line == b"$-1":
        return None
    if not re.fullmatch(rb"\$\d{1,10}", line):
        raise OSError(
            errno.EIO,
            f"Redis: {line.decode('ascii', 'replace') if line[:1] == b'-' else 'no value'}",
        )
    whole = BUFFERS.take(int(line[1:]) + 2)
    got = len(rest)
    whole[:got] = rest[: len(whole)]
    while got < len(whole):
        got += _received(sock, whole[got:], until)
    return whole[:-2]


def _received(sock: socket.socket, into: memoryview, until: float) -> int:
    """Receive some bytes; raises ``OSError`` if the stream ends or the time is over."""
    if time.monotonic() < until and (got := sock.recv_into(into)):
        return got
    raise OSError(errno.EIO, "Redis: the answer takes too long or ends too early")
