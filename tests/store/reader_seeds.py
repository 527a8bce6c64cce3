"""Small sound chunks, references and rows, as they are stored: what a fuzzer begins with."""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvrag.store.directory import Directory
from kvrag.store.guard import Guard, _plain
from kvrag.store.keys import Keys
from kvrag.store.row_seal import RowSeal
from kvrag.store.usage import Usage

from kvrag.blend.quantise import pack
from kvrag.identity.fingerprint import chunk_key
from kvrag.store import blob, references, rows, writer
from kvrag.store.base import Record
from kvrag.testing.chunks import make_identity, make_kv, make_text
from kvrag.types import ChunkIdentity, ChunkKV, KVDtype

ME = make_identity(1)
KV = make_kv(ME)
RECORD = Record(chunk_key(ME), "content", "model", "namespace", "prefix", 3, KV.num_bytes, make_text("a"))
REFERENCE = references.ReferenceFile("namespace", "doc", make_text("a"), chunk_key(ME))
REFERENCE_NAME = references.name_of(REFERENCE.reference)
FOLDER = tempfile.TemporaryDirectory(
    dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None, prefix="kvrag-fuzz-", ignore_cleanup_errors=True
)
DIRECTORY = Directory(Path(FOLDER.name))
REFERENCE_PATH = Path(FOLDER.name, references.FOLDER, REFERENCE_NAME[:2], REFERENCE_NAME + references.SUFFIX)
for made in (Path(FOLDER.name, "tmp"), REFERENCE_PATH.parent):
    made.mkdir(parents=True)


@dataclass(frozen=True)
class Sound:
    """A small sound chunk, and the file that holds it."""

    identity: ChunkIdentity
    kv: ChunkKV
    guard: Guard | None
    content: bytes

    @property
    def head(self) -> bytes:
        """Length and header."""
        return self.content[: 8 + int.from_bytes(self.content[:8], "little")]

    @property
    def said(self) -> bytes:
        """What its header says, in clear."""
        if self.guard is None or not self.guard.encrypts:
            return self.head[8:].rstrip()
        return _plain(self.guard.decode(bytearray(self.head))[0])


def sound(kv_dtype: KVDtype = "auto", guard: Guard | None = None) -> Sound:
    """Write a chunk that is kept so, protected by these keys."""
    me, kv = replace(ME, kv_dtype=kv_dtype), pack(KV, kv_dtype)
    plan = blob.plan(me, kv, text=make_text("a"), guard=guard)
    content = bytearray(plan.size)

    def put(views: list[memoryview], at: int) -> None:
        data = b"".join(views)
        content[at : at + len(data)] = data

    writer.write(plan, kv, put)
    return Sound(me, kv, guard, bytes(content))


MAC, CIPHER = (bytes([number]) * 32 for number in (1, 2))
HAS_CRYPTOGRAPHY = importlib.util.find_spec("cryptography") is not None
PLAIN = sound()
HEAD = PLAIN.head
ROUNDED = [sound("int8"), sound("int4"), sound("fp8")]
SIGNED = [sound("int8", Guard(Keys(mac=MAC)))]
ENCRYPTED = [sound(guard=Guard(Keys(mac=mac, cipher=CIPHER))) for mac in (None, MAC)] if HAS_CRYPTOGRAPHY else []
SEAL = RowSeal(CIPHER) if HAS_CRYPTOGRAPHY else None
ROWS: list[tuple[str, Any]] = [
    (rows.row_of("key", RECORD.key), rows.merged({}, RECORD)),
    (rows.log_row("namespace", 1), rows.as_list(make_text("a"))),
    (rows.row_of("use", RECORD.key), Usage(hits=1.0).row()),
    ("total", [1, 72]),
]


def _rows(seal: RowSeal | None) -> list[bytes]:
    seeds = []
    for row, content in ROWS:
        name, value = row, json.dumps(content)
        if seal is not None:
            name = seal.name(row)
            value = seal.value(name, value)
        seeds.append(name.encode() + b"\0" + value.encode())
    return seeds


def _reference(seal: RowSeal) -> bytes:
    references.References(DIRECTORY, seal).add(REFERENCE)
    return REFERENCE_PATH.read_bytes()


def _numbered(contents: list[bytes]) -> list[bytes]:
    return [bytes([number]) + content for number, content in enumerate(contents)]


SEEDS: dict[str, list[bytes]] = {
    "header": [HEAD],
    "framed header": [PLAIN.said],
    "file": [PLAIN.content],
    "reference": [REFERENCE.encode()],
    "row": _rows(None),
    "rounded file": _numbered([chunk.content for chunk in ROUNDED]),
    "file with a MAC": _numbered([chunk.content for chunk in SIGNED]),
    "header in order": _numbered([chunk.said for chunk in (PLAIN, *ROUNDED, *SIGNED, *ENCRYPTED)]),
}
if SEAL is not None:
    SEEDS |= {
        "encrypted file": _numbered([chunk.content for chunk in ENCRYPTED]),
        "sealed reference": [_reference(SEAL)],
        "sealed row": _rows(SEAL),
    }
