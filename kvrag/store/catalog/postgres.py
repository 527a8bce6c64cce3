"""Rows in PostgreSQL, by psycopg 3: a table of all stores of a database."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from kvrag.config.address import redacted
from kvrag.errors import StoreError, require
from kvrag.kv.crypto import RowCipher
from kvrag.runtime import POOL
from kvrag.store.base import CatalogRows
from kvrag.store.catalog.remote import Draft, RemoteRows

T = TypeVar("T")

CONNECT_S, ANSWER_S = 2, 5.0  # timeouts of a connection and of an answer
SCHEMES = ("postgresql", "postgres")

IS_THERE = "SELECT to_regclass('kvrag_rows') IS NOT NULL"
CREATE = """
CREATE TABLE IF NOT EXISTS kvrag_rows (
    store text NOT NULL, name text COLLATE "C" NOT NULL, value text NOT NULL,
    PRIMARY KEY (store, name)
)
"""
FETCH = "SELECT name, value FROM kvrag_rows WHERE store = %s AND name = ANY(%s)"
NAMES = "SELECT name FROM kvrag_rows WHERE store = %s AND starts_with(name, %s)"
LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('kvrag ' || %s, 0))"
DELETE = "DELETE FROM kvrag_rows WHERE store = %s AND (%s OR name = ANY(%s))"
WRITE = """
INSERT INTO kvrag_rows SELECT %s, * FROM unnest(%s::text[], %s::text[])
ON CONFLICT (store, name) DO UPDATE SET value = excluded.value
"""


class PostgresRows(RemoteRows):
    """Rows of the table ``kvrag_rows``, which is created if it is missing.

    Changes are compared and written under the store's advisory lock, one at a time.

    Parameters
    ----------
    url, store
        Address of the database as libpq takes it, and the name of the store in it.
    seal, read_only, begin
        As for :class:`~kvrag.store.catalog.remote.RemoteRows`.

    Raises
    ------
    MissingDependencyError
        If psycopg is not installed.
    StoreError
        If the address can't be used.
    """

    def __init__(
        self,
        seal: RowCipher | None,
        *,
        url: str,
        store: str,
        read_only: bool = False,
        begin: Callable[[CatalogRows, bool], None],
    ) -> None:
        super().__init__(seal, read_only=read_only, begin=begin)
        self._psycopg: Any = require("psycopg", extra="postgres", purpose="a catalog in PostgreSQL")
        try:
            # A password that is not escaped would be taken for a host.
            is_clear = not set(url.partition("://")[2].rpartition("@")[0]) & set("@/#?")
            self._psycopg.conninfo.conninfo_to_dict(url)
        except self._psycopg.Error:  # its message may quote a part of the password
            is_clear = False
        if not is_clear:
            form = "postgresql://user:password@host:5432/database, with / in a password as %2F"
            raise StoreError(f"the address of the PostgreSQL server can't be used; write {form}")
        self._url = url
        self._store = store
        self._connection: Any = None
        self._lock = threading.Lock()

    def _fetch(self, names: Sequence[str]) -> list[str | None]:
        found = dict(self._ask(lambda connection: self._texts(connection, names)))
        return [found.get(name) for name in names]

    def _texts(self, connection: Any, names: Sequence[str]) -> Any:
        return connection.execute(FETCH, (self._store, list(names))).fetchall()

    def _names(self, prefix: str) -> Collection[str]:
        found = self._ask(
            lambda connection: connection.execute(NAMES, (self._store, prefix)).fetchall()
        )
        return {name for (name,) in found}

    def _commit(self, draft: Draft) -> bool:
        return self._ask(partial(self._write, draft))

    def _write(self, draft: Draft, connection: Any) -> bool:
        new = {name: text for name, text in draft.written.items() if text is not None}
        gone = [name for name, text in draft.written.items() if text is None]
        with connection.transaction():
            connection.execute(LOCK, (self._store,))
            there = dict(self._texts(connection, list(draft.read)))
            if any(there.get(name) != text for name, text in draft.read.items()):
                return False
            if gone or draft.is_whole:
                connection.execute(DELETE, (self._store, draft.is_whole, gone))
            if new:
                connection.execute(WRITE, (self._store, list(new), list(new.values())))
        return True

    def close(self) -> None:
        """Close the connection; idempotent."""
        super().close()
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def _ask(self, action: Callable[[Any], T]) -> T:
        """Return the result of ``action`` on the connection, for one thread at a time.

        All faults are ``OSError``. If an answer is late, the connection is ended.
        """
        with self._lock:
            try:
                answer = POOL.submit(partial(self._asked, action)).result(ANSWER_S)
                self._connection, result = answer
                return result
            except (self._psycopg.Error, RuntimeError) as error:  # or no thread can be started
                fault = redacted(str(error).partition("\n")[0])
                raise OSError(f"PostgreSQL: {fault or type(error).__name__}") from None
            except TimeoutError:
                self._hang_up()
                raise OSError(f"PostgreSQL: no answer within {ANSWER_S:g} s") from None

    def _asked(self, action: Callable[[Any], T]) -> tuple[Any, T]:
        """Return the connection, opened again if it has ended meanwhile, and the result."""
        connection = self._connection
        if connection is not None and not connection.closed:
            try:
                return connection, action(connection)
            except self._psycopg.OperationalError:
                if not connection.closed:
                    raise
        connection = self._opened()
        return connection, action(connection)

    def _opened(self) -> Any:
        connection = self._psycopg.connect(
            self._url, autocommit=True, connect_timeout=CONNECT_S, application_name="kvrag"
        )
        # The rows must be read after the lock is held, not when the transaction begins.
        connection.isolation_level = self._psycopg.IsolationLevel.READ_COMMITTED
        connection.prepare_threshold = None  # proxies pass statements to changing sessions
        ((is_there,),) = connection.execute(IS_THERE).fetchall()
        if not is_there and not self.read_only:
            with connection.transaction():
                connection.execute(LOCK, ("",))
                connection.execute(CREATE)
        return connection

    def _hang_up(self) -> None:
        """End a connection whose answer is late, so that the thread that waits for it goes on."""
        connection = self._connection
        self._connection = None
        with suppress(OSError, self._psycopg.Error, AttributeError):
            line = socket.socket(fileno=os.dup(connection.fileno()))
            line.shutdown(socket.SHUT_RDWR)
            line.close()
