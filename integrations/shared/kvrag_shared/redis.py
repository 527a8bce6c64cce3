"""Blobs, and rows of the catalog, in Redis or Valkey, by redis-py: a memory that machines share.

A blob that the server evicts is a miss. A change of rows collects what it reads and what it writes.
Redis writes all of it in one step if what was read is still the same; otherwise another writer was
first, and the change is run again. So nothing is locked while a change is made, and a killed
process leaves nothing behind.
"""

from __future__ import annotations

import errno
import json
import logging
import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from kvrag import StoreError, require
from kvrag.config import redacted
from kvrag.store import WRITABLE, Blobs, Bytes, CatalogRows, ChunkKey, RowCipher

log = logging.getLogger(__name__)
T = TypeVar("T")

CONNECT_S, ANSWER_S = 2.0, 5.0  # timeouts of a connection and of an answer
READ_BYTES = 2**20  # received at once: with redis-py's 64 KB, a large value takes twice as long
# Expiry of a blob without its own: a server with a volatile policy evicts only keys that expire.
KEPT_S = 30 * 24 * 3600.0
PER_CALL = 512  # keys in one call
AGAIN_S = 5.0  # seconds after a fault until Redis is asked again
PAUSE_S = 0.25  # longest pause before a change is made again
ATTEMPTS = 100  # times that a change is made if other writers come first
STATE = "s"  # the row that every catalog has

COMMIT = """
local read, written = cjson.decode(ARGV[1]), cjson.decode(ARGV[2])
for name, text in pairs(read) do
  if redis.call('HGET', KEYS[1], name) ~= text then return 0 end
end
if ARGV[3] == '1' then redis.call('UNLINK', KEYS[1]) end
for name, text in pairs(written) do
  if text then
    redis.call('HSET', KEYS[1], name, text)
  else
    redis.call('HDEL', KEYS[1], name)
  end
end
return 1
"""
"""Write a change if the rows that it read are the same; absent rows are ``false`` in JSON."""
PER_SCAN = 10_000  # fields that the server looks at in one call


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
            raise StoreError(
                "the address of the Redis server can't be used; write "
                "redis://user:password@host:port/0, and / and # in a password as %2F and %23"
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
        gone = set[ChunkKey]()
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

    def catalog(self, store: str) -> Callable[..., CatalogRows]:
        """Return the function that makes the rows of a store's catalog in this server."""
        return partial(RedisRows, server=self._server, store=store)

    def close(self) -> None:
        """Close the connections."""
        self._server.close()

    def _call(self, command: str, key: ChunkKey, *arguments: Any) -> Any:
        with self._server.faults():
            return self._server.client.execute_command(command, self._head + key, *arguments)


@dataclass(slots=True)
class Draft:
    """Change that is being made: texts by name of the rows read and written, ``None`` if absent.

    ``is_whole``: rows that are not written are removed.
    """

    read: dict[str, str | None] = field(default_factory=dict)
    written: dict[str, str | None] = field(default_factory=dict)
    is_whole: bool = False

    def text(self, name: str) -> str | None:
        """Return the text of a row that was read or written, as this change left it."""
        if name in self.written or self.is_whole:
            return self.written.get(name)
        return self.read[name]


class RedisRows:
    """Rows in Redis or Valkey: fields of the hash ``kvrag:catalog:<store>``, which never expires.

    See :class:`kvrag.store.base.CatalogRows`. If the server can't be reached, its rows count as
    absent, and changes are refused.

    Parameters
    ----------
    seal, read_only, begin
        As for :func:`~kvrag.store.catalog.rows.open_table`.
    server, store
        The server, and the name of the store in it.

    Raises
    ------
    StoreError
        If the server may evict the hash.
    """

    remedy = WRITABLE
    pause_s = 60.0  # a change concerns all machines

    def __init__(
        self,
        seal: RowCipher | None,
        *,
        server: RedisServer,
        store: str,
        read_only: bool = False,
        begin: Callable[[CatalogRows, bool], None],
    ) -> None:
        self.read_only = read_only
        self._seal = seal
        self._begin = begin
        self._mine = threading.local()
        self._again_s = 0.0
        self._is_cut_off = self._is_closed = False
        self._server = server
        self._hash = f"kvrag:catalog:{store}"
        self._write = server.client.register_script(COMMIT)
        self._check()

    def get(self, name: str) -> str | None:
        """Return a row's value as JSON; ``None`` if it is absent or can't be read."""
        return self.many([name])[0]

    def many(self, names: Sequence[str]) -> list[str | None]:
        """Return the values of rows as JSON, in one round trip."""
        draft = self._draft
        if draft is not None:
            self.ahead(names)
            found = {name: draft.text(name) for name in names}
        else:
            found = self._look(lambda: self._rows(names), dict[str, str | None]())
        if self._seal is None:
            return [found.get(name) for name in names]
        return [self._seal.open(found.get(name) or "", name) for name in names]

    def ahead(self, names: Sequence[str]) -> None:
        """Read rows that the current change will ask for, in one round trip."""
        draft = self._draft
        if draft is None or draft.is_whole:
            return
        wanted = [name for name in names if name not in draft.read and name not in draft.written]
        draft.read.update(self._rows(wanted))
        if STATE in wanted and draft.read[STATE] is None:
            self._begin(self, False)

    def names(self, prefix: str) -> list[str]:
        """Return the rest of all names that begin with ``prefix``, sorted."""
        draft = self._draft
        if draft is None:
            found = self._look(lambda: set(self._names(prefix)), set[str]())
        else:
            known = () if draft.is_whole else self._names(prefix)
            found = {name for name in known if name not in draft.written}
            found |= {name for name, text in draft.written.items() if text is not None}
        return sorted(name[len(prefix) :] for name in found if name.startswith(prefix))

    def set(self, name: str, value: Any) -> None:
        """Insert or replace a row, inside :meth:`change`."""
        text = json.dumps(value, separators=(",", ":"))
        if self._seal is not None:
            text = self._seal.seal(text, name)
        self._mine.draft.written[name] = text

    def delete(self, name: str) -> None:
        """Remove a row if it exists, inside :meth:`change`."""
        self._mine.draft.written[name] = None

    def clear(self) -> None:
        """Remove all rows, inside :meth:`change`."""
        self._mine.draft.written.clear()
        self._mine.draft.is_whole = True

    def change(self, action: Callable[[], T]) -> T:
        """Run ``action`` as a single transaction of all machines, and return its result.

        ``action`` may run several times. Raises ``StoreError``, and changes nothing, if that fails.
        """
        if self._draft is not None:
            return action()
        try:
            for attempt in range(ATTEMPTS):
                draft = self._mine.draft = Draft()
                result = action()
                if not (draft.written or draft.is_whole) or self._commit(draft):
                    return result
                # Random, or the same writer is first again.
                time.sleep(random.uniform(0, min(PAUSE_S, 0.001 * 2**attempt)))
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(
                f"the shared KV store can't be changed: {error}; try again later"
            ) from error
        finally:
            self._mine.draft = None
        raise StoreError("too many writers change the shared KV store at once; try again later")

    def scrub(self) -> None:
        """Do nothing: Redis keeps no erased rows."""

    def close(self) -> None:
        """Close the connections; idempotent. Closed rows are absent and can't be changed."""
        self._is_closed = True
        self._server.close()

    @property
    def _draft(self) -> Draft | None:
        draft: Draft | None = getattr(self._mine, "draft", None)
        return draft

    def _rows(self, names: Sequence[str]) -> dict[str, str | None]:
        if self._is_closed:
            raise StoreError("the KV store is closed; open it again")
        return dict(zip(names, names and self._fetch(names), strict=True))

    def _look(self, action: Callable[[], T], default: T) -> T:
        """Read from Redis, and return ``default`` on a fault, and for a time after it."""
        if self._is_closed or time.monotonic() < self._again_s:
            return default
        try:
            found = action()
        except OSError as error:
            self._again_s = time.monotonic() + AGAIN_S
            if not self._is_cut_off:
                log.warning("the shared KV store can't be reached (%s); it counts as empty", error)
            self._is_cut_off = True
            return default
        self._is_cut_off = False
        return found

    def _check(self) -> None:
        try:
            found = self._server.client.config_get("maxmemory-policy")
        except self._server.redis.RedisError:  # asking is forbidden, or it can't be reached now
            return
        if "allkeys" in str(found):
            raise StoreError(
                f"the Redis server evicts any key ({found}), "
                "and would lose the store's catalog; "
                "set the policy to volatile-lru or noeviction"
            )

    def _fetch(self, names: Sequence[str]) -> list[str | None]:
        """Return the texts of rows, in one round trip."""
        with self._server.faults():
            found = self._server.client.hmget(self._hash, names)
        return [None if text is None else text.decode("utf-8", "replace") for text in found]

    def _names(self, prefix: str) -> Collection[str]:
        with self._server.faults():
            found = self._server.client.hscan_iter(self._hash, match=f"{prefix}*", count=PER_SCAN)
            return {name.decode("utf-8", "replace") for name, _ in found}

    def _commit(self, draft: Draft) -> bool:
        """Write a change in one step; return ``False`` if a row that it read is another by now."""
        read, written = (
            json.dumps({name: False if text is None else text for name, text in rows.items()})
            for rows in (draft.read, draft.written)
        )
        with self._server.faults():
            return bool(self._write(keys=[self._hash], args=[read, written, int(draft.is_whole)]))
