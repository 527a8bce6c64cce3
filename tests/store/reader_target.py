"""What a fuzzer feeds: bytes to everything that reads what anyone may have written, and a proof of what comes of it.

Shared by the property tests (hypothesis, always) and by `make fuzz-reader` (atheris, on demand).
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from kvrag.fingerprint import chunk_key
from kvrag.store import blob, references, rows, writer
from kvrag.store.base import Record
from kvrag.store.directory import Directory
from kvrag.store.header import ALIGNMENT, BlobRejected, decode
from kvrag.store.index import load_value
from kvrag.store.reader import read_all, read_layers
from kvrag.store.usage import Usage
from kvrag.testing.chunks import make_identity, make_kv, make_text, same_bits
from kvrag.types import ChunkKV, TextEntry

ME = make_identity(1)
KV = make_kv(ME)
RECORD = Record(chunk_key(ME), "content", "model", "namespace", "prefix", 3, KV.num_bytes, make_text("a"))
REFERENCE = references.ReferenceFile("namespace", "doc", make_text("a"), chunk_key(ME)).encode()
FOLDER = tempfile.TemporaryDirectory(
    dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None, prefix="kvrag-fuzz-", ignore_cleanup_errors=True
)
DIRECTORY = Directory(Path(FOLDER.name))


def whole_blob() -> bytes:
    """Return the file of a small sound chunk."""
    plan = blob.plan(ME, KV, text=make_text("a"))
    content = bytearray(plan.size)

    def put(views: list[memoryview], at: int) -> None:
        data = b"".join(views)
        content[at : at + len(data)] = data

    writer.write(plan, KV, put)
    return bytes(content)


BLOB = whole_blob()
HEAD = BLOB[: 8 + int.from_bytes(BLOB[:8], "little")]


def header(data: bytes) -> bool:
    """Parse a header as it stands; what is accepted must be written again to the same bytes."""
    try:
        found = decode(bytearray(data))
    except BlobRejected:
        return False
    assert found.encode() == data
    return True


def framed_header(data: bytes) -> bool:
    """Put length and padding in order first, so that what is inside is reached."""
    text = data + b" " * (-(8 + len(data)) % ALIGNMENT)
    return header(struct.pack("<Q", len(text)) + text)


def file(data: bytes) -> bool:
    """Read a whole file as the blob of a chunk, in both ways: the right bits, or none."""
    fd = os.open(Path(FOLDER.name) / "blob", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.write(fd, data)
    os.close(fd)
    accepted = []
    for read in (lambda b, m: read_all(b, m), lambda b, m: ChunkKV(tuple(read_layers(b, m, is_helped=False)))):
        try:
            with blob.open_blob(DIRECTORY, "blob", identity=ME) as opened:
                kv = read(opened, torch.empty(opened.header.num_bytes, dtype=torch.uint8))
        except BlobRejected:
            accepted.append(False)
            continue
        assert opened.header.identity == ME
        # With another header, digests and all, it is a blob of its own; with this one it has these bits.
        assert data[: len(HEAD)] != HEAD or same_bits(kv, KV)
        accepted.append(True)
    assert accepted[0] == accepted[1]
    return accepted[0]


def reference(data: bytes) -> bool:
    """Parse the file of a reference."""
    found = references.decode(data)
    assert found is None or found.encode() == data
    return found is not None


def row(data: bytes) -> bool:
    """Parse a row of the index, name and value, as every kind of row."""
    name, _, value = data.partition(b"\0")
    names = rows.names_of(name.decode("utf-8", "replace"))
    assert all(isinstance(each, str) for each in names)
    parsed = load_value(value.decode("utf-8", "replace"))
    record = rows.record_of(RECORD.key, parsed)
    assert record is None or (type(record.num_bytes) is int and type(record.content) is str)
    text = rows.text_of(parsed)
    assert text is None or isinstance(text, TextEntry)
    assert all(isinstance(each, TextEntry) for each in rows.texts_of(parsed))
    assert all(isinstance(each, str) for each in rows.strings_of(parsed))
    assert len(rows.totals_of(parsed)) == 2
    usage = Usage.of(parsed)
    assert 0 <= usage.recent_hits(10**6) < 2**64
    assert 0 <= usage.priority_now() <= 100
    return record is not None or text is not None or usage != Usage()


TARGETS: dict[str, Callable[[bytes], bool]] = {
    "header": header,
    "framed header": framed_header,
    "file": file,
    "reference": reference,
    "row": row,
}
ROW = rows.merged({}, RECORD)
SEEDS: dict[str, list[bytes]] = {
    "header": [HEAD],
    "framed header": [HEAD[8:].rstrip()],
    "file": [BLOB],
    "reference": [REFERENCE],
    "row": [
        name.encode() + b"\0" + json.dumps(value).encode()
        for name, value in (
            (rows.row_of("key", RECORD.key), ROW),
            (rows.log_row("namespace", 1), rows.as_list(make_text("a"))),
            (rows.row_of("use", RECORD.key), Usage(hits=1.0).row()),
            ("total", [1, 72]),
        )
    ],
}


def run(number: int, data: bytes) -> tuple[str, bool]:
    """Feed bytes to the target of this number; its name, and whether it accepted them."""
    name = list(TARGETS)[number % len(TARGETS)]
    return name, TARGETS[name](data)
