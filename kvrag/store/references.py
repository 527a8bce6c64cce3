"""Which document holds on to which text: a small file each, from which a lost index is rebuilt.

The name of a file is the digest of what it says, so documents come and go without rewriting anything, and erasing a
document's file leaves no trace of its id.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import xxhash

from kvrag.fingerprint import canonical
from kvrag.store.directory import Directory
from kvrag.store.draft import write_file
from kvrag.store.header import parse_text
from kvrag.store.rows import as_list
from kvrag.store.store_index import Reference
from kvrag.types import ChunkKey, TextEntry

FOLDER = "references"
SUFFIX = ".json"
MAX_BYTES = 2**20


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
    """The folder of references in a store's directory."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def add(self, file: ReferenceFile) -> bool:
        """Write a reference; ``False`` if it is there. Raises ``OSError``."""
        place = _place(name_of(file.reference))
        return not self._directory.is_file(*place) and write_file(self._directory, file.encode(), *place)

    def contains(self, reference: Reference) -> bool:
        """Whether a reference has its file."""
        return self._directory.is_file(*_place(name_of(reference)))

    def remove(self, reference: Reference) -> bool:
        """Erase a reference; whether it was there. Raises ``OSError``."""
        return self._directory.unlink(*_place(name_of(reference)))

    def names(self) -> set[str]:
        """Names of all references."""
        shards = self._directory.names(FOLDER)
        files = (name for shard in shards for name in self._directory.names(FOLDER, shard) if name[:2] == shard)
        return {name.removesuffix(SUFFIX) for name in files if name.endswith(SUFFIX)}

    def read(self, name: str) -> ReferenceFile | None:
        """Read a reference; ``None`` if it is damaged, or says something else than its name."""
        try:
            file = decode(self._directory.read(*_place(name), limit=MAX_BYTES))
        except OSError:
            return None
        return file if file and name_of(file.reference) == name else None

    def discard(self, name: str) -> bool:
        """Erase the file of this name, whatever it says."""
        return self._directory.unlink(*_place(name))


def _place(name: str) -> tuple[str, str, str]:
    return FOLDER, name[:2], name + SUFFIX
