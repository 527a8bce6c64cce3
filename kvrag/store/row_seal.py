"""Encryption of the index's rows and of references: AES-SIV by ``cryptography``.

The names in a row's name are encrypted each by itself, and always to the same bytes, so that rows are found, and found in order, as
before. What remains to be seen is how many rows of which kind there are, which of them share a name, and how long they are. Values are
bound to their rows: a value that was moved to another row counts as absent.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from typing import Any

from kvrag.errors import require
from kvrag.store.keys import Keys, derive, key_id
from kvrag.store.rows import DECODER


class RowSeal:
    """Encrypts and decrypts rows with a key of its own.

    Parameters
    ----------
    key
        The store's key for encryption.

    Raises
    ------
    MissingDependencyError
        If ``cryptography`` is not installed.
    """

    def __init__(self, key: bytes) -> None:
        aead = require(
            "cryptography.hazmat.primitives.ciphers.aead", extra="crypto", purpose="encryption of the KV store"
        )
        self._siv = aead.AESSIV(derive(key, "rows 1") + derive(key, "rows 2"))
        self.id = key_id(key)
        """Public name of the key."""

    @classmethod
    def of(cls, keys: Keys) -> RowSeal | None:
        """Return what seals the rows of a store; ``None`` where they are plain."""
        return None if keys.cipher is None else cls(keys.cipher)

    def seal(self, content: bytes, bound: str) -> str:
        """Encrypt some bytes, bound to a name; base64."""
        return base64.urlsafe_b64encode(self._siv.encrypt(content, [bound.encode("ascii")])).decode()

    def open(self, sealed: str, bound: str) -> bytes | None:
        """Decrypt, or return ``None``: it was not encrypted with this key, or bound to another name."""
        from cryptography.exceptions import InvalidTag

        try:
            raw = base64.b64decode(sealed.encode("ascii"), altchars=b"-_", validate=True)
            return bytes(self._siv.decrypt(raw, [bound.encode("ascii")]))
        except (InvalidTag, ValueError):
            return None

    def name(self, row: str) -> str:
        """Encrypt the names in a row's name, or in the beginning of one; its kind and its numbers stay."""
        kind = row.partition(" ")[0]
        parts = [
            json.dumps(self.seal(part.encode(), f"{kind} {i}")) if is_name else part for i, part, is_name in _parts(row)
        ]
        return "".join(parts)

    def open_name(self, row: str) -> str | None:
        """Undo :meth:`name`; ``None`` for what it has not made."""
        kind = row.partition(" ")[0]
        parts = []
        for i, part, is_name in _parts(row):
            opened = self.open(json.loads(part), f"{kind} {i}") if is_name else part.encode()
            if opened is None:
                return None
            parts.append(opened.decode())
        return "".join(parts)

    def value(self, row: str, value: str) -> str:
        """Encrypt the value of a row, whose name is encrypted already."""
        return self.seal(value.encode(), row)

    def open_value(self, row: str, value: Any) -> str | None:
        """Undo :meth:`value`."""
        opened = self.open(value, row) if isinstance(value, str) else None
        return None if opened is None else opened.decode("utf-8", "replace")


def _parts(row: str) -> Iterator[tuple[int, str, bool]]:
    """Cut a row's name into JSON strings and what stands between them: place, text, and whether it is a string."""
    at = start = count = 0
    while (at := row.find('"', at)) >= 0:
        yield count, row[start:at], False
        try:
            _, end = DECODER.raw_decode(row, at)
        except ValueError:
            start = at
            break
        yield count, row[at:end], True
        at = start = end
        count += 1
    yield count, row[start:], False


def load_value(value: Any) -> Any:
    """Parse a row's value; what is not JSON is absent."""
    try:
        return None if value is None else json.loads(value)
    except (ValueError, RecursionError, TypeError):
        return None


def load_rows(rows: Iterable[tuple[str, Any]], seal: RowSeal | None) -> Iterator[tuple[str, Any]]:
    """Yield names and values of rows as they are meant, those of other keys left out."""
    for name, value in rows:
        row = name if seal is None else seal.open_name(name)
        if row is not None:
            yield row, load_value(value if seal is None else seal.open_value(name, value))


def folder_of(seal: RowSeal | None) -> str:
    """Name of the index's folder: each key has an index of its own, which others can't take for damaged."""
    return "index" if seal is None else f"index-{seal.id}"
