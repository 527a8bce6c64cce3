"""Table of the nodes of every document, stored beside the KV.

LlamaIndex deletes by ``ref_doc_id``. KV is referred to by ``node_id``, so that
``precompute_kv(index)``, ``sync_kv(index)`` and the vector store use the same names. The table that
connects the two must survive a restart and serve several processes.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

logger = logging.getLogger(__name__)

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS refs (namespace TEXT, node TEXT, document TEXT, PRIMARY KEY "
    "(namespace, node))",
    "CREATE INDEX IF NOT EXISTS documents ON refs (namespace, document)",
)
_BUSY_TIMEOUT_S = 10.0

Rows = list[tuple[str, ...]]


class RefTable:
    """Maps ``node_id`` to ``ref_doc_id``, per namespace and collection, in SQLite.

    A fault of the file costs disk space, never an answer.

    Parameters
    ----------
    kv_dir
        Directory of the KV store; the file is ``llama_index/refs.sqlite`` in it. With ``None``, the
        table is in memory, as is the KV. It is also in memory for a store shared by machines,
        which has no directory.
    """

    def __init__(self, kv_dir: str | os.PathLike[str] | None) -> None:
        root = None if kv_dir is None or "://" in str(kv_dir) else os.path.abspath(kv_dir)
        self._given = (root,)
        self._path = None if root is None else Path(root, "llama_index", "refs.sqlite")
        self._memory: sqlite3.Connection | None = None
        if root is None:
            self._memory = sqlite3.connect(":memory:", check_same_thread=False)
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: object) -> RefTable:
        """Return the table itself: a copy of a vector store has the same KV."""
        return self

    def __reduce__(self) -> tuple[type[RefTable], tuple[object, ...]]:
        """Reduce to the arguments, so that another process opens the file again."""
        return RefTable, self._given

    def add(self, space: str, documents: Iterable[tuple[str, str]]) -> None:
        """Remember ``(node_id, ref_doc_id)`` pairs."""
        self._run(
            "INSERT OR REPLACE INTO refs VALUES (?, ?, ?)",
            [(space, node, doc) for node, doc in documents],
        )

    def nodes(self, space: str, document: str | None = None) -> list[str]:
        """Return the nodes of a document, or all nodes."""
        query = "SELECT node FROM refs WHERE namespace = ?"
        if document is None:
            return [row[0] for row in self._run(query, [(space,)])]
        return [row[0] for row in self._run(f"{query} AND document = ?", [(space, document)])]

    def remove(self, space: str, nodes: Iterable[str]) -> None:
        """Forget nodes."""
        self._run(
            "DELETE FROM refs WHERE namespace = ? AND node = ?", [(space, node) for node in nodes]
        )

    def _run(self, statement: str, values: Sequence[tuple[str, ...]]) -> Rows:
        """Run a statement for all tuples of values in a single transaction; return its rows."""
        try:
            if self._memory is not None:
                with self._lock:
                    return _transact(self._memory, statement, values)
            # Connected for a single transaction: no connection stays open between calls, so threads
            # and forks are safe.
            assert self._path is not None
            os.makedirs(self._path.parent, mode=0o700, exist_ok=True)
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
            with closing(sqlite3.connect(self._path, timeout=_BUSY_TIMEOUT_S)) as db:
                return _transact(db, statement, values)
        except (OSError, sqlite3.Error) as error:
            logger.warning(
                "the table %s can't be used (%s); run sync_kv to erase KV of deleted nodes",
                self._path,
                error,
            )
            # A damaged file would stay damaged.
            if type(error) is sqlite3.DatabaseError and self._path is not None:
                self._path.unlink(missing_ok=True)
            return []


def _transact(db: sqlite3.Connection, statement: str, values: Sequence[tuple[str, ...]]) -> Rows:
    with db:
        for definition in _SCHEMA:
            db.execute(definition)
        texts = [
            [text.encode("utf-8", "backslashreplace").decode() for text in given]
            for given in values
        ]  # of ids that UTF-8 can't encode
        return [row for given in texts for row in db.execute(statement, given)]
