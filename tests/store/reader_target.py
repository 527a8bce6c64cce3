"""What a fuzzer feeds: bytes to everything that reads what anyone may have written, and a proof of what comes of it.

Shared by the property tests (hypothesis, always) and by `make fuzz-reader` (atheris, on demand).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError
from stores import CHUNKS, KVS, SECRETS, blob_of, config_of, head_of, in_order, needs_cryptography

from kvrag.kv.crypto import RowCipher
from kvrag.kv.format import Blob, BlobRejected, Foreign, OtherVersion
from kvrag.kv.quantise import pack
from kvrag.prompt.spans import ANCHOR_CHARS, SpanIndex
from kvrag.store import Keys
from kvrag.store.catalog import ledger
from kvrag.store.catalog.ledger import record_of
from kvrag.store.eviction import Usage
from kvrag.testing.chunks import same_bits
from kvrag.types import ChunkIdentity, ChunkKV, KVDtype, TextEntry

ME, KV = CHUNKS[1], KVS[1]
HAS_CRYPTOGRAPHY = not needs_cryptography.args[0]


@dataclass(frozen=True)
class Sound:
    """A small sound chunk, and the bytes of its blob."""

    identity: ChunkIdentity
    kv: ChunkKV
    cipher: bytes | None
    raw: bytes

    @classmethod
    def of(cls, kv_dtype: KVDtype = "auto", key: str | None = None) -> Sound:
        """Write a chunk that is kept so, encrypted or not."""
        cipher, identity, kv = (
            Keys.of(config_of(key)).cipher,
            replace(ME, kv_dtype=kv_dtype),
            pack(KV, kv_dtype),
        )
        return cls(identity, kv, cipher, blob_of(identity, kv, cipher))

    @property
    def said(self) -> bytes:
        """What its header says."""
        return head_of(self.raw)[8:].rstrip()


PLAIN = [Sound.of(), *map(Sound.of, ("int8", "int4", "fp8"))]
ENCRYPTED = [Sound.of("auto", "cipher"), Sound.of("int4", "cipher")] if HAS_CRYPTOGRAPHY else []
SEAL = RowCipher(SECRETS["cipher"]) if HAS_CRYPTOGRAPHY else None
RECORD = record_of(ME, KV.num_bytes)
ENTRY = TextEntry("ab" * 32, 1, 2**64 - 1, 77)
CHUNK = ledger.ChunkRow(
    "content", "model", "namespace", "prefix", "", 3, KV.num_bytes, ["ab"], Usage(hits=1.0), False
)
VALUES: list[Any] = [
    CHUNK,
    ledger.Text(ENTRY, 7, [RECORD.key], 1),
    ledger.State(5, 1, 96, 3),
    [1, 2],
    {7: ENTRY},
    ["ab"],
]
SAID = [json.dumps(value) for value in VALUES]
FORMS = [ledger.CHUNK, ledger.TEXT, ledger.STATE, ledger.RANGE, ledger.PAGE, ledger.STRINGS]


def _load(raw: bytes, chunk: Sound) -> tuple[Blob, ChunkKV] | None:
    """Read bytes as the blob of a chunk."""
    try:
        blob = Blob(
            lambda offset, length: raw[offset : offset + length], chunk.identity, chunk.cipher
        )
        kv = blob.load()
    except BlobRejected:
        return None
    assert blob.header.identity == chunk.identity
    return blob, kv


def file(data: bytes) -> bool:
    """Read a whole blob: the right bits, or another header's, digests and all, or none. The first byte says of which type."""
    chunk = PLAIN[data[0] % len(PLAIN)] if data else PLAIN[0]
    found = _load(data[1:], chunk)
    if found is None:
        return False
    kv = found[1]
    assert data[1:].startswith(head_of(chunk.raw)) <= same_bits(kv, chunk.kv)
    assert {tensor.shape[1] for layer in kv.layers for tensor in layer.tensors[:2]} == {
        len(ME.token_ids)
    }
    return True


def encrypted_file(data: bytes) -> bool:
    """Read a whole encrypted blob: nothing but what was written with the key is accepted."""
    chunk = ENCRYPTED[data[0] % len(ENCRYPTED)] if data else ENCRYPTED[0]
    found = _load(data[1:], chunk)
    assert found is None or (data[1:] == chunk.raw and same_bits(found[1], chunk.kv))
    return found is not None


def header_in_order(data: bytes) -> bool:
    """Parse a header as whoever can write it would: its digest is put in order first, so that all behind it is reached."""
    try:
        raw = in_order(json.loads(data.decode("ascii", "replace")))
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
    try:
        header = Blob(lambda offset, length: raw[offset : offset + length]).header
    except (BlobRejected, OtherVersion, Foreign):
        return False
    assert header.encode() == raw[8:].rstrip()
    assert {shape[1] for layer in header.shapes for shape in layer} == {
        len(header.identity.token_ids)
    }
    assert record_of(header.identity, header.num_bytes).num_bytes > 0
    return True


def row(data: bytes) -> bool:
    """Parse a value of the catalog as every kind of row; what is accepted is within its bounds."""
    found = [_parsed(form, data) for form in FORMS]
    chunk, text, state, _, page, _ = found
    if chunk is not None:
        assert 0 <= chunk.record(RECORD.key).num_bytes < 2**62
        assert 0 <= chunk.usage.hits < 2**64
        assert 0 <= chunk.usage.priority_now() <= 100
    assert state is None or 0 <= state.generation < 2**62
    spans = SpanIndex()  # every prompt is scanned for all texts: none may be the end of that
    spans.add(
        [
            TextEntry(*entry)
            for entry in [*(page or {}).values(), text and text.entry]
            if entry is not None
        ]
    )
    spans.scan("a" * ANCHOR_CHARS)
    return any(value is not None for value in found)


def _parsed(form: Any, data: bytes) -> Any:
    try:
        return form.validate_json(data)
    except ValidationError:
        return None


def sealed_row(data: bytes) -> bool:
    """Decrypt a value of the catalog: one is believed in its own row alone, if it was written with the key."""
    assert SEAL is not None
    text = SEAL.open(data.decode("utf-8", "replace"), "c key")
    assert text is None or text in SAID
    return text is not None and row(text.encode())


def _numbered(contents: list[bytes]) -> list[bytes]:
    return [bytes([number]) + content for number, content in enumerate(contents)]


SEEDS: dict[str, list[bytes]] = {
    "file": _numbered([chunk.raw for chunk in PLAIN]),
    "header in order": [chunk.said for chunk in PLAIN],
    "row": [value.encode() for value in SAID],
}
TARGETS: dict[str, Callable[[bytes], bool]] = {
    "file": file,
    "header in order": header_in_order,
    "row": row,
}
NEED_CRYPTOGRAPHY = {"encrypted file": encrypted_file, "sealed row": sealed_row}
if SEAL is not None:
    SEEDS["encrypted file"] = _numbered([chunk.raw for chunk in ENCRYPTED])
    SEEDS["sealed row"] = [SEAL.seal(value, "c key").encode() for value in SAID]
    TARGETS |= NEED_CRYPTOGRAPHY


def run(number: int, data: bytes) -> tuple[str, bool]:
    """Feed bytes to the target of this number; its name, and whether it accepted them."""
    name = list(TARGETS)[number % len(TARGETS)]
    return name, TARGETS[name](data)
