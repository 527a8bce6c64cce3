"""What a fuzzer feeds: bytes to everything that reads what anyone may have written, and a proof of what comes of it.

Shared by the property tests (hypothesis, always) and by `make fuzz-reader` (atheris, on demand).
"""

from __future__ import annotations

import base64
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kvrag.store.guard import Guard
from kvrag.store.header import ALIGNMENT, FAULTS, BlobRejected, OtherVersion, decode, frame, split
from kvrag.store.index import load_value
from kvrag.store.keys import Keys, Naming
from kvrag.store.places import dump
from kvrag.store.reader import read_all, read_layers
from kvrag.store.row_seal import load_rows
from kvrag.store.usage import Usage
from reader_seeds import (
    DIRECTORY,
    ENCRYPTED,
    FOLDER,
    MAC,
    ME,
    PLAIN,
    RECORD,
    REFERENCE,
    REFERENCE_NAME,
    REFERENCE_PATH,
    ROUNDED,
    ROWS,
    SEAL,
    SEEDS,
    SIGNED,
    Sound,
)

from kvrag.prompt.spans import ANCHOR_CHARS, SpanIndex
from kvrag.store import blob, gcm, guard, references, rows
from kvrag.testing.chunks import same_bits
from kvrag.types import ChunkKV, TextEntry

__all__ = ["NEED_CRYPTOGRAPHY", "SEEDS", "TARGETS", "run"]


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


def _read(data: bytes, chunk: Sound) -> ChunkKV | None:
    """Read a whole file as the blob of a chunk, in both ways, which must agree."""
    fd = os.open(Path(FOLDER.name) / "blob", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.write(fd, data)
    os.close(fd)
    found: list[ChunkKV | None] = []
    kept = chunk.identity.kv_dtype
    for read in (read_all, lambda b, m: ChunkKV(tuple(read_layers(b, m, is_helped=False)), kept)):
        try:
            with blob.open_blob(DIRECTORY, "blob", identity=chunk.identity, guard=chunk.guard) as opened:
                found.append(read(opened, torch.empty(opened.header.num_bytes, dtype=torch.uint8)))
        except BlobRejected:
            found.append(None)
            continue
        assert opened.header.identity == chunk.identity
    first, second = found
    assert first is second is None or same_bits(first, second)
    return first


def _is_right(data: bytes, chunk: Sound) -> bool:
    """Read a file without keys: with another header, digests and all, it is a blob of its own; with this one it has these bits."""
    kv = _read(data, chunk)
    assert kv is None or data[: len(chunk.head)] != chunk.head or same_bits(kv, chunk.kv)
    assert kv is None or {tensor.shape[1] for layer in kv.layers for tensor in layer.tensors[:2]} == {len(ME.token_ids)}
    return kv is not None


def file(data: bytes) -> bool:
    """Read a whole file: the right bits, or none."""
    return _is_right(data, PLAIN)


def rounded_file(data: bytes) -> bool:
    """Read a whole file of codes and scales; the first byte says of which type."""
    return bool(data) and _is_right(data[1:], ROUNDED[data[0] % len(ROUNDED)])


def _protected(data: bytes, chunks: list[Sound]) -> bool:
    """Read a whole file with keys; the first byte says with which. Nothing but what was written with them is accepted."""
    chunk = chunks[data[0] % len(chunks)] if data else chunks[0]
    kv = _read(data[1:], chunk)
    assert kv is None or (data[1:] == chunk.content and same_bits(kv, chunk.kv))
    return kv is not None


def signed_file(data: bytes) -> bool:
    """Read a whole file with a MAC."""
    return _protected(data, SIGNED)


def encrypted_file(data: bytes) -> bool:
    """Read a whole encrypted file, with a MAC and without."""
    return _protected(data, ENCRYPTED)


def header_in_order(data: bytes) -> bool:
    """Parse a header as whoever can write it would: digest, MAC and encryption are put in order first, so that all behind them is reached.

    The first byte says which chunk's keys and salt it is written with.
    """
    chunks = [PLAIN, *ROUNDED, *SIGNED, *ENCRYPTED]
    chunk = chunks[data[0] % len(chunks)] if data else PLAIN
    try:
        head = _in_order(chunk, data[1:])
    except (*FAULTS, OtherVersion):
        return False
    try:
        if chunk.guard is None:
            found = decode(bytearray(head))
            again = found.encode()
        else:
            found, opening = chunk.guard.decode(bytearray(head))
            again = chunk.guard.encode(found, opening.marks)
    except BlobRejected:
        return False
    assert again == head
    assert {shape[1] for layer in found.shapes for shape in layer} == {len(found.identity.token_ids)}
    assert found.record().num_bytes == found.num_bytes > 0
    assert _is_usable(found.text)
    return True


def _in_order(chunk: Sound, text: bytes) -> bytes:
    """Return a header that says ``text``: as it stands, or encrypted."""
    keys = chunk.guard or Guard(Keys())
    metadata, tensors = split(bytearray(8) + (chunk.head[8:] if keys.encrypts else text))
    if keys.encrypts:
        clear = {name: metadata[name] for name in guard.CLEAR}
        bound, key = guard._bound(clear, json.loads(tensors)), keys._key(clear["key"], bytes.fromhex(clear["salt"]))
        parts, tag = gcm.encrypt(key, guard.HEADER_PLACE, [memoryview(text)], bound)
        metadata["sealed"] = base64.b64encode(b"".join([*parts, tag])).decode()
    said = {name: value for name, value in metadata.items() if name not in ("header_digest", "header_mac")}
    return frame(said, dump(json.loads(tensors)), keys._sign if keys.signs else None)


def reference(data: bytes) -> bool:
    """Parse the file of a reference."""
    found = references.decode(data)
    assert found is None or found.encode() == data
    assert found is None or (references.name_of(found.reference) and _is_usable(found.text))
    return found is not None


def sealed_reference(data: bytes) -> bool:
    """Read the file of an encrypted reference under its name; a reader without the key never believes more than the name does."""
    REFERENCE_PATH.write_bytes(data)
    sealed, plain = references.References(DIRECTORY, SEAL), references.References(DIRECTORY)
    found, other = sealed.read(REFERENCE_NAME), plain.read(REFERENCE_NAME)
    assert found is None or found == REFERENCE
    assert other is None or (other.reference == REFERENCE.reference and other.encode() == data)
    assert found is None or sealed.is_foreign(REFERENCE_NAME) is False
    plain.is_foreign(REFERENCE_NAME)
    return found is not None


def row(data: bytes) -> bool:
    """Parse a row of the index, name and value, as every kind of row."""
    name, value = _row_of(data)
    return _is_row(name, load_value(value))


def sealed_row(data: bytes) -> bool:
    """Decrypt a row, and parse it as every kind of row; a value is believed in its own row alone."""
    name, value = _row_of(data)
    for opened, content in load_rows([(name, value)], SEAL):
        assert content is None or (opened, content) in ROWS
        _is_row(opened, content)
        if content is not None:
            return True
    return False


def _row_of(data: bytes) -> tuple[str, str]:
    name, _, value = data.partition(b"\0")
    return name.decode("utf-8", "replace"), value.decode("utf-8", "replace")


def _is_row(name: str, parsed: Any) -> bool:
    assert all(isinstance(each, str) for each in rows.names_of(name))
    record = rows.record_of(RECORD.key, parsed)
    assert record is None or (type(record.num_bytes) is int and type(record.content) is str)
    text = rows.text_of(parsed)
    assert _is_usable(text)
    assert all(map(_is_usable, rows.texts_of(parsed)))
    assert all(isinstance(each, str) for each in rows.strings_of(parsed))
    assert len(rows.totals_of(parsed)) == 2
    usage = Usage.of(parsed)
    assert 0 <= usage.recent_hits(10**6) < 2**64
    assert 0 <= usage.priority_now() <= 100
    return record is not None or text is not None or usage != Usage()


def _is_usable(text: TextEntry | None) -> bool:
    """Whether the scanner takes what is said of a text, with a namespace secret or without: it scans every prompt for all texts."""
    if text is not None:
        spans = SpanIndex()
        spans.add([text, Naming(text=MAC).reveal(text)])
        spans.scan("a" * ANCHOR_CHARS)
    return True


TARGETS: dict[str, Callable[[bytes], bool]] = {
    "header": header,
    "framed header": framed_header,
    "file": file,
    "reference": reference,
    "row": row,
    "rounded file": rounded_file,
    "file with a MAC": signed_file,
    "header in order": header_in_order,
}
NEED_CRYPTOGRAPHY = {
    "encrypted file": encrypted_file,
    "sealed reference": sealed_reference,
    "sealed row": sealed_row,
}
if SEAL is not None:
    TARGETS |= NEED_CRYPTOGRAPHY


def run(number: int, data: bytes) -> tuple[str, bool]:
    """Feed bytes to the target of this number; its name, and whether it accepted them."""
    name = list(TARGETS)[number % len(TARGETS)]
    return name, TARGETS[name](data)
