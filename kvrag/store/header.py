"""The head of a blob: whose KV it holds, and where.

A header counts only if writing it again gives the same bytes. So names, order, offsets, padding and every other byte
are checked by the code that wrote them, and no rule can be forgotten.
"""

from __future__ import annotations

import base64
import functools
import json
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from kvrag.config import KV_DTYPES
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import FORMAT_VERSION, chunk_key, content_key, ids_bytes
from kvrag.store.base import Record
from kvrag.store.places import DTYPES, NAMES, Shape, Tensors, dump, shape_of, tensors_of, unpacked
from kvrag.types import ChunkIdentity, KVDtype, TextEntry

ALIGNMENT = 4096
"""Tensor data starts at a multiple of this, so that it can be read with direct I/O."""

MAX_HEADER_BYTES = 4 * 2**20
"""Longer headers are neither written nor read: enough for half a million token ids."""

MAX_LAYERS = 512
"""More layers are neither written nor read: a hostile header must not take long, nor leave much in memory."""

DIGESTS = re.compile(rf"[0-9a-f]{{32}}(?:,[0-9a-f]{{32}}){{0,{MAX_LAYERS - 1}}}")

MAX_CHARS = 2**48
"""Longer texts there are none; the scanner counts in 64 bits."""

MAX_KEPT_BYTES = 64 * 1024
"""Longer descriptions of tensors are parsed each time: a few hostile headers must not fill the memory."""

METADATA = '{"__metadata__":'
"""What a header's JSON begins with."""

DECODER = json.JSONDecoder()

Sign = Callable[[bytes], str]
"""Gives the MAC of a header's content."""


NO_DIGEST = "0" * 32
"""Stands for a layer's digest until the layer is written; a header's length does not depend on it."""


class BlobRejected(Exception):
    """A file is not the proven KV of the chunk asked for. ``reason`` is one of a few fixed phrases, ``inode`` the file's if it is known."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.inode: tuple[int, int] | None = None


class OtherVersion(BlobRejected):
    """A file says that it has another version of the format: nothing is wrong with it, and nothing can be read."""

    def __init__(self) -> None:
        super().__init__("it has another version of the format")


class Foreign(BlobRejected):
    """A file is protected otherwise than by the keys at hand: nothing may be wrong with it, and nothing can be believed."""

    def __init__(self) -> None:
        super().__init__("it is not protected by the keys that the store was opened with")


@dataclass(frozen=True)
class Header:
    """Everything in a blob but its tensors.

    Parameters
    ----------
    identity
        Whose KV it is.
    dtype
        The dtype of all keys and values.
    shapes
        Shapes of keys and values, layer after layer; of codes, the shapes of what they stand for.
    digests
        xxh3-128 (hex) of each layer's bytes, tensor after tensor.
    text
        What the index must know again when it is rebuilt; the first writer's.
    """

    identity: ChunkIdentity
    dtype: torch.dtype
    shapes: tuple[tuple[Shape, Shape], ...]
    digests: tuple[str, ...]
    text: TextEntry | None

    @functools.cached_property
    def tensors(self) -> Tensors:
        """The tensors of all layers; raises as :func:`kvrag.blend.quantise.parts`."""
        return tensors_of(self.identity.kv_dtype, self.dtype, self.shapes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return self.tensors.offsets[-1]

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

    def encode(self, extra: Mapping[str, str] | None = None, sign: Sign | None = None) -> bytes:
        """Length and padded header, as they stand at the head of the file, with what a key adds to it."""
        return frame({**self._metadata(), **(extra or {})}, self.tensors.json, sign)

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
        if identity.kv_dtype != "auto":
            fields |= {"kv_dtype": identity.kv_dtype, "dtype": NAMES[self.dtype]}
        if self.text is not None:
            fields["text"] = json.dumps([self.text.digest, self.text.head, self.text.tail, self.text.num_chars])
        return fields


def frame(metadata: Mapping[str, str], tensors: bytes, sign: Sign | None = None) -> bytes:
    """Write a header: length, JSON with a digest of itself, and a MAC where there is a key for it, and padding. ``tensors`` is JSON."""
    head, tail = dump(metadata), tensors
    content = METADATA.encode() + head + b"," + tail[1:]
    marks = b',"header_digest":"' + xxhash.xxh3_128_hexdigest(content).encode() + b'"'
    if sign is not None:
        marks += b',"header_mac":"' + sign(content).encode() + b'"'
    return pad(METADATA.encode() + head[:-1] + marks + b"}," + tail[1:])


def pad(text: bytes) -> bytes:
    """Put the length before a header's JSON, and spaces after it."""
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


FAULTS = (ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error, OverflowError, StoreError)
"""What parsing raises where a header is not one."""


def decode(head: bytearray) -> Header:
    """Parse a header; it counts only if writing it again gives the same bytes, which leaves nothing unchecked."""
    try:
        metadata, tensors = split(head)
        if any(key_ids(metadata)):
            raise Foreign
        header = parse(metadata, tensors)
        if header.encode() != head:
            raise BlobRejected("its header is damaged")
    except FAULTS:
        raise BlobRejected("its header is damaged") from None
    return header


def split(head: bytearray) -> tuple[dict[str, Any], bytes]:
    """Parse a header's metadata, and return the JSON of its tensors; raises one of :data:`FAULTS`, or :class:`OtherVersion`."""
    text = head[8:].decode("ascii")
    if not text.startswith(METADATA):
        raise ValueError("no metadata")
    metadata, end = DECODER.raw_decode(text, len(METADATA))
    if metadata["format"] == "kvrag" and metadata["version"] != str(FORMAT_VERSION) and metadata["version"].isdecimal():
        raise OtherVersion
    if text[end : end + 1] != ",":
        raise ValueError("no tensors")
    return metadata, b"{" + text[end + 1 :].rstrip(" ").encode("ascii")


def key_ids(metadata: dict[str, Any]) -> tuple[str | None, str | None]:
    """Names of the keys that a file is protected by: that of its MAC, and that of its encryption."""
    return metadata.get("mac_key"), metadata.get("cipher_key")


def parse(metadata: dict[str, Any], tensors: bytes) -> Header:
    """Read what a header says; raises one of :data:`FAULTS`."""
    if not DIGESTS.fullmatch(metadata["layer_digests"]):
        raise ValueError("not the digests of layers")
    digests = tuple(metadata["layer_digests"].split(","))
    metadata["prefix"].encode()  # as the chunk's key does; writing the header again asks for all else
    ids = base64.b64decode(metadata["token_ids"], validate=True)
    kv_dtype = metadata.get("kv_dtype", "auto")
    if kv_dtype not in KV_DTYPES:
        raise ValueError("not a type of KV")
    # What one file says is kept for the next one, unless it could be much.
    read = _shapes_in if len(tensors) <= MAX_KEPT_BYTES else _shapes_in.__wrapped__
    dtype, shapes = read(tensors, len(digests), len(ids) // 4, kv_dtype)
    return Header(
        identity=ChunkIdentity(
            model=metadata["model"],
            namespace=metadata["namespace"],
            prefix=metadata["prefix"],
            token_ids=struct.unpack(f"<{len(ids) // 4}I", ids),
            kv_dtype=kv_dtype,
        ),
        dtype=DTYPES[dtype if kv_dtype == "auto" else metadata["dtype"]],
        shapes=shapes,
        digests=digests,
        text=parse_text(json.loads(metadata["text"])) if "text" in metadata else None,
    )


@functools.lru_cache(maxsize=256)
def _shapes_in(
    tensors: bytes, num_layers: int, num_tokens: int, kv_dtype: KVDtype
) -> tuple[str, tuple[tuple[Shape, Shape], ...]]:
    """Return the dtype of a header's first tensor, and the shapes of keys and values of each layer; raises one of :data:`FAULTS`."""
    fields: dict[str, Any] = json.loads(tensors)
    shapes = [
        unpacked(shape_of(fields[f"layer.{i:03d}.{name}"]["shape"]), kv_dtype)
        for i in range(num_layers)
        for name in ("keys", "values")
    ]
    if any(tokens != num_tokens for _, tokens, _ in shapes):
        raise ValueError("not one row per token")
    return fields["layer.000.keys"]["dtype"], tuple(zip(shapes[::2], shapes[1::2], strict=True))


def parse_text(value: object) -> TextEntry:
    """Build a text entry from its JSON form ``[digest, head, tail, num_chars]``; ``ValueError`` if it is not one."""
    match value:
        case [str(digest), int(head), int(tail), int(chars)] if digest.isascii():
            if 0 <= head < 2**64 and 0 <= tail < 2**64 and 0 <= chars < MAX_CHARS:
                return TextEntry(digest, head, tail, chars)
    raise ValueError("not a text entry")
