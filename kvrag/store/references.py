"""Which document holds on to which text: a small file each, from which a lost index is rebuilt.

The name of a file is the digest of what it says, so documents come and go without rewriting anything, and erasing a
document's file leaves no trace of its id.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import xxhash

from kvrag.identity.fingerprint import canonical
from kvrag.store.directory import Directory
from kvrag.store.draft import Draft, write_file
from kvrag.store.header import parse_text
from kvrag.store.row_seal import RowSeal
from kvrag.store.rows import as_list
from kvrag.store.store_index import Reference
from kvrag.types import ChunkKey, TextEntry

FOLDER = "references"
SUFFIX = ".json"
MAX_BYTES = 2**20
SEALED = "kvrag sealed reference"
BROKEN = "?"
"""Stands for the key of what is no reference."""


@dataclass(frozen=True, slots=True)
class ReferenceFile:
    """What one file says: a document references a text, whose KV is or was under this key, among others."""

    namespace: str
    doc_id: str
    text: TextEntry
    key: ChunkKey

    @property
    def reference(self) -> Reference:
        """The reference itself."""
        return self.namespace, self.text.digest, self.doc_id

    def encode(self) -> bytes:
        """Content of the file, ASCII: JSON escapes everything else, lone surrogates too."""
        fields = {
            "format": "kvrag reference",
            "namespace": self.namespace,
            "document": self.doc_id,
            "text": as_list(self.text),
            "key": self.key,
        }
        fields["digest"] = xxhash.xxh3_128_hexdigest(json.dumps(fields).encode("ascii"))
        return json.dumps(fields).encode("ascii")


def decode(content: bytes) -> ReferenceFile | None:
    """Parse a file; it counts only if writing it again gives the same bytes."""
    try:
        match json.loads(content):
            case {"namespace": str(namespace), "document": str(doc_id), "text": text, "key": str(key)}:
                file = ReferenceFile(namespace, doc_id, parse_text(text), ChunkKey(key))
                return file if file.encode() == content else None
    except (ValueError, RecursionError):
        pass
    return None


def name_of(reference: Reference) -> str:
    """Name of a reference's file, without its suffix."""
    namespace, text, doc_id = (part.encode("utf-8", "surrogatepass") for part in reference)
    fields = {"kind": b"reference", "namespace": namespace, "text": text, "document": doc_id}
    return hashlib.sha256(canonical(fields)).hexdigest()


class References:
    """The folder of references in a store's directory.

    Parameters
    ----------
    directory
        The store's.
    seal
        Encrypts the files; ``None``: they are plain. Their names need no key: they cover the namespace's digest, which has one.
    """

    def __init__(self, directory: Directory, seal: RowSeal | None = None) -> None:
        self._directory = directory
        self._seal = seal

    def add(self, file: ReferenceFile) -> bool:
        """Write a reference; ``False`` if it is there. Raises ``OSError``."""
        if self.contains(file.reference):
            return False
        return write_file(self._directory, self._encoded(file), *place_of(file.reference))

    @contextmanager
    def prepared(self, file: ReferenceFile) -> Iterator[Callable[[], bool]]:
        """Bring a reference to the disk without its name, and give what names it, as :meth:`add` would; its folder is to be synced then.

        Raises ``OSError``.
        """
        content = self._encoded(file)
        with Draft(self._directory, len(content)) as draft:
            draft.write(memoryview(content), 0)
            draft.sync()
            yield lambda: draft.publish(*place_of(file.reference), is_synced=False)

    def _encoded(self, file: ReferenceFile) -> bytes:
        content = file.encode()
        if self._seal is None:
            return content
        sealed = self._seal.seal(content, name_of(file.reference))
        return json.dumps({"format": SEALED, "key": self._seal.id, "content": sealed}).encode("ascii")

    def contains(self, reference: Reference) -> bool:
        """Whether a reference has its file."""
        return self._directory.is_file(*place_of(reference))

    def remove(self, reference: Reference) -> bool:
        """Erase a reference; whether it was there. Raises ``OSError``."""
        return self._directory.unlink(*place_of(reference))

    def names(self) -> set[str]:
        """Names of all references."""
        shards = self._directory.names(FOLDER)
        files = (name for shard in shards for name in self._directory.names(FOLDER, shard) if name[:2] == shard)
        return {name.removesuffix(SUFFIX) for name in files if name.endswith(SUFFIX)}

    def read(self, name: str) -> ReferenceFile | None:
        """Read a reference; ``None`` if it is damaged, of another key, or says something else than its name."""
        content = self._content(name)
        if content is None or _key_of(content) != self._key:
            return None
        if self._seal is not None:
            content = self._seal.open(json.loads(content).get("content", ""), name)
        file = None if content is None else decode(content)
        return file if file and name_of(file.reference) == name else None

    def is_foreign(self, name: str) -> bool:
        """Whether a reference is encrypted with another key, or is plain where those of this store are not."""
        content = self._content(name)
        return content is not None and _key_of(content) not in (self._key, BROKEN)

    @property
    def _key(self) -> str:
        return "" if self._seal is None else self._seal.id

    def _content(self, name: str) -> bytes | None:
        try:
            return self._directory.read(*_place(name), limit=MAX_BYTES)
        except OSError:
            return None

    def discard(self, name: str) -> bool:
        """Erase the file of this name, whatever it says."""
        return self._directory.unlink(*_place(name))


def place_of(reference: Reference) -> tuple[str, str, str]:
    """Place of a reference's file below the store's root."""
    return _place(name_of(reference))


def _place(name: str) -> tuple[str, str, str]:
    return FOLDER, name[:2], name + SUFFIX


def _key_of(content: bytes) -> str:
    """Public name of the key that a file is encrypted with; empty for a plain one."""
    try:
        match json.loads(content):
            case {"format": "kvrag sealed reference", "key": str(key), "content": str()}:
                return key or BROKEN
            case {"format": "kvrag reference"}:
                return ""
    except (ValueError, RecursionError):
        pass
    return BROKEN
