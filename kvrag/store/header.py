"""The head of a blob: whose KV it holds, and where.

A header counts only if writing it again gives the same bytes. So names, order, offsets, padding and every other byte
are checked by the code that wrote them, and no rule can be forgotten.
"""

from __future__ import annotations

import base64
import functools
import json
import math
import re
import struct
from dataclasses import dataclass, replace
from typing import Any

import torch
import xxhash

from kvrag.fingerprint import FORMAT_VERSION, chunk_key, content_key, ids_bytes
from kvrag.store.base import Record
from kvrag.types import ChunkIdentity, TextEntry

ALIGNMENT = 4096
"""Tensor data starts at a multiple of this, so that it can be read with direct I/O."""

MAX_HEADER_BYTES = 4 * 2**20
"""Longer headers are neither written nor read: enough for half a million token ids."""

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

ENCODER = json.JSONEncoder(separators=(",", ":"))

Shape = tuple[int, int, int]


DIGEST = re.compile(r"[0-9a-f]{32}")
NO_DIGEST = "0" * 32
"""Stands for a layer's digest until the layer is written; a header's length does not depend on it."""


class BlobRejected(Exception):
    """A file is not the proven KV of the chunk asked for. ``reason`` is one of a few fixed phrases."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class OtherVersion(BlobRejected):
    """A file says that it has another version of the format: nothing is wrong with it, and nothing can be read."""

    def __init__(self) -> None:
        super().__init__("it has another version of the format")


@dataclass(frozen=True, slots=True)
class Header:
    """Everything in a blob but its tensors.

    Parameters
    ----------
    identity
        Whose KV it is.
    dtype
        The dtype of all tensors.
    shapes
        Shapes of keys and values, layer after layer.
    digests
        xxh3-128 (hex) of each layer's bytes, keys then values.
    text
        What the index must know again when it is rebuilt; the first writer's.
    """

    identity: ChunkIdentity
    dtype: torch.dtype
    shapes: tuple[tuple[Shape, Shape], ...]
    digests: tuple[str, ...]
    text: TextEntry | None

    def sizes(self) -> list[tuple[int, int]]:
        """Bytes of keys and values, layer after layer."""
        width = self.dtype.itemsize
        return [(math.prod(keys) * width, math.prod(values) * width) for keys, values in self.shapes]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(keys + values for keys, values in self.sizes())

    def record(self) -> Record:
        """Row of the index for this blob."""
        identity = self.identity
        return Record(
            key=chunk_key(identity),
            content=content_key(identity),
            model=identity.model,
            namespace=identity.namespace,
            prefix=identity.prefix,
            num_tokens=len(identity.token_ids),
            num_bytes=self.num_bytes,
            text=self.text,
        )

    def encode(self) -> bytes:
        """Length and padded header, as they stand at the head of the file."""
        layout = replace(self, identity=NOBODY, digests=(), text=None)
        metadata, tensors = _dump(self._metadata()), _tensors_of(layout)
        digest = xxhash.xxh3_128_hexdigest(b'{"__metadata__":' + metadata + b"," + tensors[1:])
        metadata = metadata[:-1] + b',"header_digest":"' + digest.encode() + b'"}'
        text = b'{"__metadata__":' + metadata + b"," + tensors[1:]
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        return struct.pack("<Q", len(text)) + text

    def _metadata(self) -> dict[str, str]:
        identity = self.identity
        fields = {
            "format": "kvrag",
            "version": str(FORMAT_VERSION),
            "model": identity.model,
            "namespace": identity.namespace,
            "prefix": identity.prefix,
            "token_ids": base64.b64encode(ids_bytes(identity.token_ids)).decode(),
            "content": content_key(identity),
            "layer_digests": ",".join(self.digests),
        }
        if self.text is not None:
            fields["text"] = json.dumps([self.text.digest, self.text.head, self.text.tail, self.text.num_chars])
        return fields

    def _tensors(self) -> dict[str, Any]:
        tensors: dict[str, Any] = {}
        start = 0
        for i, (shapes, sizes) in enumerate(zip(self.shapes, self.sizes(), strict=True)):
            for name, shape, size in zip(("keys", "values"), shapes, sizes, strict=True):
                place = {"dtype": NAMES[self.dtype], "shape": list(shape), "data_offsets": [start, start + size]}
                tensors[f"layer.{i:03d}.{name}"] = place
                start += size
        return tensors


NOBODY = ChunkIdentity("", "", "", ())


@functools.lru_cache(maxsize=64)
def _tensors_of(layout: Header) -> bytes:
    """JSON of the tensors. It is the same for all chunks of a model that have one length, and most of a header's work."""
    return _dump(layout._tensors())


def decode(head: bytearray) -> Header:
    """Parse a header; it counts only if writing it again gives the same bytes, which leaves nothing unchecked."""
    try:
        header = _parse(json.loads(head[8:].decode("ascii")))
        if header.encode() != head:
            raise BlobRejected("its header is damaged")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error, OverflowError):
        raise BlobRejected("its header is damaged") from None
    return header


def _parse(fields: dict[str, Any]) -> Header:
    metadata = fields["__metadata__"]
    digests = tuple(metadata["layer_digests"].split(","))
    if metadata["format"] == "kvrag" and metadata["version"] != str(FORMAT_VERSION) and metadata["version"].isdecimal():
        raise OtherVersion
    if not all(map(DIGEST.fullmatch, digests)):
        raise ValueError("not a digest")
    ids = base64.b64decode(metadata["token_ids"], validate=True)
    shapes = [
        shape_of(fields[f"layer.{i:03d}.{name}"]["shape"]) for i in range(len(digests)) for name in ("keys", "values")
    ]
    return Header(
        identity=ChunkIdentity(
            model=metadata["model"],
            namespace=metadata["namespace"],
            prefix=metadata["prefix"],
            token_ids=struct.unpack(f"<{len(ids) // 4}I", ids),
        ),
        dtype=DTYPES[fields["layer.000.keys"]["dtype"]],
        shapes=tuple(zip(shapes[::2], shapes[1::2], strict=True)),
        digests=digests,
        text=parse_text(json.loads(metadata["text"])) if "text" in metadata else None,
    )


def parse_text(value: object) -> TextEntry:
    """Build a text entry from its JSON form ``[digest, head, tail, num_chars]``; ``ValueError`` if it is not one."""
    match value:
        case [str(digest), int(head), int(tail), int(chars)] if 0 <= head < 2**64 and 0 <= tail < 2**64 and chars >= 0:
            return TextEntry(digest, head, tail, chars)
    raise ValueError("not a text entry")


def shape_of(value: list[int]) -> Shape:
    """Check three sizes; ``ValueError`` if they are no shape."""
    heads, tokens, dim = value
    # Written out, because it is run twice per layer of every blob that is read.
    is_shape = type(heads) is type(tokens) is type(dim) is int and min(heads, tokens, dim) > 0
    if not is_shape or max(heads, tokens, dim) >= 2**31:
        raise ValueError("not a shape")
    return heads, tokens, dim


def _dump(fields: dict[str, Any]) -> bytes:
    return ENCODER.encode(fields).encode("ascii")
