"""One chunk, one blob: a safetensors file that says itself whose KV it holds, read through any ``read(offset, length)``.

::

    u64 length | header | layer 0 keys | layer 0 values | (scales of layer 0) | layer 1 keys | ...

The header is JSON, padded with spaces so that the data starts at a multiple of 4096 bytes. It counts only if writing it again gives the
same bytes, so nothing in it is left unchecked; each layer must have the xxh3-128 digest that the header gives.

With a key, layers and the plain header are encrypted (AES-256-GCM) and stand in a second header, in ``sealed``. Each blob has a key of its
own, derived with a random salt, so nonces can be places: layer 0, layer 1, ..., header. The layers' tags take the place of their digests.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
import xxhash

from kvrag.config import KV_DTYPES
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import FORMAT_VERSION, canonical, chunk_key, content_key, ids_bytes
from kvrag.store.base import Bytes, LateHead, Record
from kvrag.store.crypto import CIPHER, TAG_BYTES, decrypt, derive, encrypt, key_id
from kvrag.store.layers import (
    FLOATS,
    MAX_LAYERS,
    NAMES,
    Part,
    Shape,
    finite_bytes,
    own_kv,
    parts,
    shapes_of,
    view_layer,
)
from kvrag.threads import POOL
from kvrag.types import ChunkIdentity, ChunkKV, HoleReason, KVDtype, LayerKV

ALIGNMENT = 4096
"""Tensor data starts at a multiple of this, so that it can be read with direct I/O."""

HEAD_BYTES = 16 * 1024
"""Read first: most headers are not longer."""

STEP_BYTES = 8 * 2**20
"""Read at once, while the step before is proven."""

HELPED_BYTES = 4 * 2**20
"""Chunks from this size on are hashed by two threads."""

MAX_HEADER_BYTES = 4 * 2**20
"""Longer headers are neither written nor read: enough for half a million token ids."""

MAX_KEPT_LAYERS = 128
"""Descriptions of more layers are made each time: a few hostile headers must not fill the memory."""

METADATA = '{"__metadata__":'
NO_DIGEST = "0" * 32
DIGESTS = re.compile(rf"[0-9a-f]{{32}}(?:,[0-9a-f]{{32}}){{0,{MAX_LAYERS - 1}}}")
ENCODER, DECODER = json.JSONEncoder(separators=(",", ":")), json.JSONDecoder()
HEADER_NONCE = 2**32 - 1
SALT_BYTES = 32

FAULTS = (ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error, OverflowError, StoreError)
"""What parsing raises where a header is not one."""

T = TypeVar("T")
Read = Callable[[int, int], Bytes | None]
"""Returns ``length`` bytes from ``offset`` on, fewer at the end; ``None`` if the blob is absent. Raises ``OSError``."""


class BlobRejected(Exception):
    """A blob is not the proven KV of the chunk asked for; ``hole`` says so in a word, ``layer`` is the first that was not read."""

    def __init__(self, reason: str, hole: HoleReason = "damaged", layer: int | None = None) -> None:
        super().__init__(reason)
        self.reason, self.hole, self.layer = reason, hole, layer


class OtherVersion(BlobRejected):
    """The blob has another version of the format; it is left alone."""

    def __init__(self) -> None:
        super().__init__("it has another version of the format", "absent")


class Foreign(BlobRejected):
    """The blob is encrypted with another key, or not at all where there is a key; it is left alone."""

    def __init__(self) -> None:
        super().__init__("it is not protected by the key that the store was opened with", "absent")


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of each layer; where each layer begins in the data, and where the last one ends; and the header's JSON of them."""

    layers: tuple[tuple[Part, ...], ...]
    offsets: tuple[int, ...]
    json: bytes


@functools.lru_cache(maxsize=256)
def tensors_of(kv_dtype: KVDtype, dtype: torch.dtype, shapes: tuple[tuple[Shape, Shape], ...]) -> Tensors:
    """Lay out a blob's tensors; chunks of one model and length share the result."""
    layers = tuple(parts(kv_dtype, dtype, keys, values) for keys, values in shapes)
    places, offsets = {}, [0]
    for i, layer in enumerate(layers):
        start = offsets[-1]
        for part in layer:
            stop = start + part.num_bytes
            place = {"dtype": NAMES[part.dtype], "shape": list(part.shape), "data_offsets": [start, stop]}
            places[f"layer.{i:03d}.{part.name}"] = place
            start = stop
        offsets.append(start)
    return Tensors(layers, tuple(offsets), _dump(places))


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
        Shapes of keys and values per layer; for codes, of what they stand for.
    digests
        xxh3-128 (hex) of each layer's bytes; in an encrypted blob, the layers' GCM tags.
    """

    identity: ChunkIdentity
    dtype: torch.dtype
    shapes: tuple[tuple[Shape, Shape], ...]
    digests: tuple[str, ...]

    @functools.cached_property
    def tensors(self) -> Tensors:
        """The tensors of all layers; raises as :func:`kvrag.store.layers.parts`."""
        lay_out = tensors_of if len(self.shapes) <= MAX_KEPT_LAYERS else tensors_of.__wrapped__
        return lay_out(self.identity.kv_dtype, self.dtype, self.shapes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return self.tensors.offsets[-1]

    def encode(self) -> bytes:
        """Return the plain header's JSON, with a digest of itself."""
        identity = self.identity
        metadata = _dump(
            {
                "format": "kvrag",
                "version": str(FORMAT_VERSION),
                "model": identity.model,
                "namespace": identity.namespace,
                "prefix": identity.prefix,
                "context": identity.context,
                "token_ids": base64.b64encode(ids_bytes(identity.token_ids)).decode(),
                "kv_dtype": identity.kv_dtype,
                "dtype": NAMES[self.dtype],
                "layer_digests": ",".join(self.digests),
            }
        )
        tail = self.tensors.json
        digest = xxhash.xxh3_128_hexdigest(metadata + tail).encode()
        return METADATA.encode() + metadata[:-1] + b',"header_digest":"' + digest + b'"},' + tail[1:]


def record_of(identity: ChunkIdentity, num_bytes: int) -> Record:
    """Return what the catalog keeps of a chunk."""
    return Record(
        key=chunk_key(identity),
        content=content_key(identity),
        model=identity.model,
        namespace=identity.namespace,
        prefix=identity.prefix,
        context=identity.context,
        num_tokens=len(identity.token_ids),
        num_bytes=num_bytes,
    )


def plan(identity: ChunkIdentity, kv: ChunkKV) -> Header:
    """Return the header that a chunk will have, without digests.

    Raises
    ------
    StoreError
        If its shapes or dtypes are not those of one chunk, or the header would be too long.
    """
    dtype, shapes = shapes_of(identity, kv)
    header = Header(identity, dtype, shapes, (NO_DIGEST,) * len(shapes))
    if 2 * len(header.encode()) > MAX_HEADER_BYTES:
        raise StoreError(f"the chunk of {len(identity.token_ids)} tokens is too long for one file; split it")
    return header


def encode(identity: ChunkIdentity, kv: ChunkKV, cipher: bytes | None = None) -> Encoded:
    """Turn a chunk into the bytes of its blob, encrypted with ``cipher``; raises as :func:`plan`."""
    header = plan(identity, kv)
    return Encoded(header, own_kv(kv).layers, None if cipher is None else _Cipher.new(header, cipher))


class Encoded(LateHead):
    """The bytes of a chunk's blob, made while they are written: each layer is hashed while it is in the processor's cache.

    Raises ``StoreError`` while it is gone through, if a value is not finite.
    """

    def __init__(self, header: Header, layers: Sequence[LayerKV], seal: _Cipher | None) -> None:
        self.header, self._layers, self._seal = header, layers, seal
        self.head_bytes = len(self.head()) if seal is None else 0

    @functools.cached_property
    def parts(self) -> Iterable[Bytes]:
        """The parts to write; encrypted ones are made once, because no nonce may come twice."""
        return self if self._seal is None else list(self)

    def head(self) -> bytes:
        """Return the header; it is right when :meth:`body` was gone through."""
        plain = self.header.encode()
        return _pad(plain if self._seal is None else self._seal.seal(plain))

    def body(self) -> Iterator[memoryview]:
        """Yield the bytes of all layers; the next one is looked at meanwhile."""
        digests, ahead, count = list[str](), None, len(self._layers)
        is_large = self.header.num_bytes >= HELPED_BYTES
        for index in range(count):
            pieces, digest = self._layer(index) if ahead is None else ahead.result()
            ahead = begin(partial(self._layer, index + 1)) if is_large and index + 1 < count else None
            digests.append(digest)
            yield from pieces
        self.header = replace(self.header, digests=tuple(digests))

    def _layer(self, index: int) -> tuple[list[memoryview], str]:
        """Return a layer's bytes, and their digest."""
        digest = xxhash.xxh3_128()
        pieces = finite_bytes(self._layers[index], index, digest.update if self._seal is None else None)
        if self._seal is None:
            return pieces, digest.hexdigest()
        pieces, tag = encrypt(self._seal.key, index, pieces, self._seal.bound(index))
        return pieces, tag.hex()


def begin(action: Callable[[], T]) -> Future[T] | None:
    """Begin an action in another thread; ``None`` if none can be had."""
    with suppress(RuntimeError):
        return POOL.submit(action)
    return None


class Blob:
    """A blob whose header is proven, and whose layers have yet to be.

    Parameters
    ----------
    read
        Reads its bytes.
    identity
        Whose KV it must be; ``None``: anyone's.
    cipher
        The key that it must be encrypted with; ``None``: none.

    Raises
    ------
    BlobRejected
        If it is absent, or not a blob of this chunk.
    """

    def __init__(self, read: Read, identity: ChunkIdentity | None = None, cipher: bytes | None = None) -> None:
        self._read = read
        limit = MAX_HEADER_BYTES
        if identity is not None:  # a hostile blob is refused before much of it is read
            limit = min(limit, 2**19 + 16 * len(identity.token_ids))
        head = _read_head(read, limit)
        self._start = len(head)
        self.header, self._cipher = _parse(head, cipher)
        if identity is not None and self.header.identity != identity:
            raise BlobRejected("it belongs to another chunk")

    def load(self) -> ChunkKV:
        """Return all layers; raises as :meth:`layers`."""
        return ChunkKV(tuple(self.layers()), self.header.identity.kv_dtype)

    def layers(self) -> Iterator[LayerKV]:
        """Yield the layers in order, each proven.

        Raises
        ------
        BlobRejected
            At the first layer that is damaged or can't be read.
        """
        tensors, offsets = self.header.tensors, self.header.tensors.offsets
        runs, ahead = steps_of(offsets), None
        for number, run in enumerate(runs):
            data = self._run(run) if ahead is None else ahead.result()
            ahead = begin(partial(self._run, runs[number + 1])) if run is not runs[-1] else None
            flat = torch.frombuffer(data, dtype=torch.uint8)
            for index in run:
                first, last = (offset - offsets[run.start] for offset in offsets[index : index + 2])
                flat_layer = self._prove(index, data[first:last], flat[first:last])
                yield view_layer(self.header.dtype, tensors.layers[index], flat_layer)

    def _run(self, run: range) -> memoryview:
        """Read the bytes of some layers; behind the last one, the blob must end."""
        offsets = self.header.tensors.offsets
        start, size = offsets[run.start], offsets[run.stop] - offsets[run.start]
        is_last = run.stop == len(offsets) - 1
        data = _bytes(self._read, self._start + start, size + is_last, run.start)
        if len(data) != size:
            raise BlobRejected("it has the wrong length", layer=run.start)
        view = memoryview(data)
        return memoryview(bytearray(view)) if view.readonly else view  # torch wants to be able to write

    def _prove(self, index: int, stored: memoryview, flat: torch.Tensor) -> torch.Tensor:
        """Return a layer's bytes, decrypted where they are encrypted."""
        digest = self.header.digests[index]
        if self._cipher is None:
            is_right, out = xxhash.xxh3_128_hexdigest(stored) == digest, flat
        else:
            out = torch.empty(len(stored), dtype=torch.uint8)
            bound, tag = self._cipher.bound(index), bytes.fromhex(digest)
            is_right = decrypt(self._cipher.key, index, stored, tag, bound, out.numpy().data)
        if not is_right:
            raise BlobRejected("its data is damaged", layer=index)
        return out


@functools.lru_cache(maxsize=256)
def steps_of(offsets: tuple[int, ...]) -> tuple[range, ...]:
    """Cut layers into runs that are read at once."""
    ends = [0]
    for layer in range(1, len(offsets)):
        if offsets[layer] - offsets[ends[-1]] >= STEP_BYTES or layer == len(offsets) - 1:
            ends.append(layer)
    return tuple(range(start, end) for start, end in pairwise(ends))


@dataclass(frozen=True, slots=True)
class _Cipher:
    """Encryption of one blob: its own key, its salt, and what all of it is bound to."""

    key: bytes
    salt: bytes
    owner: bytes
    core: bytes
    clear: Mapping[str, str]
    num_layers: int
    sizes: bytes

    @classmethod
    def new(cls, header: Header, cipher: bytes, salt: bytes | None = None) -> _Cipher:
        """Make the encryption of a blob; its layers are bound to the header, digests aside."""
        salt = secrets.token_bytes(SALT_BYTES) if salt is None else salt
        owner = chunk_key(header.identity)
        blank = replace(header, digests=(NO_DIGEST,) * len(header.digests))
        clear = {"format": "kvrag", "version": str(FORMAT_VERSION), "key": owner, "cipher": CIPHER}
        clear |= {"cipher_key": key_id(cipher), "salt": salt.hex()}
        layers = {
            f"layer.{i:03d}": {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]}
            for i, (start, stop) in enumerate(pairwise(header.tensors.offsets))
        }
        core = hashlib.sha256(blank.encode()).digest()
        key = derive(cipher, f"blob {owner}", salt=salt)
        return cls(key, salt, owner.encode(), core, clear, len(header.digests), _dump(layers))

    def bound(self, index: int) -> bytes:
        """Return what a layer is bound to."""
        place = struct.pack("<II", index, self.num_layers)
        return canonical({"key": self.owner, "layer": place, "header": self.core, "clear": _dump(self.clear)})

    def seal(self, plain: bytes) -> bytes:
        """Return the JSON of the blob's header, with the plain one encrypted in it."""
        bound = canonical({"clear": _dump(self.clear)})
        sealed, tag = encrypt(self.key, HEADER_NONCE, [memoryview(plain)], bound)
        return self.frame(base64.b64encode(b"".join([*sealed, tag])).decode())

    def frame(self, sealed: str) -> bytes:
        """Return the JSON of the blob's header."""
        return METADATA.encode() + _dump({**self.clear, "sealed": sealed}) + b"," + self.sizes[1:]


def _read_head(read: Read, limit: int) -> bytes:
    """Read a header, whatever it says."""
    head = _bytes(read, 0, HEAD_BYTES)
    end = 8 + int.from_bytes(head[:8], "little")
    if len(head) < 8 or end > limit:
        raise BlobRejected("its header has an impossible length")
    rest = _bytes(read, len(head), end - len(head)) if end > len(head) == HEAD_BYTES else b""
    whole = bytes(head[:end]) + bytes(rest)
    if len(whole) != end:
        raise BlobRejected("it has the wrong length")
    return whole


def _bytes(read: Read, start: int, length: int, layer: int | None = None) -> Bytes:
    """Read bytes of a blob that has to be there."""
    try:
        data = read(start, length)
    except OSError as error:
        raise BlobRejected(f"it can't be read ({error})", "unreadable", layer) from None
    if data is None:
        raise BlobRejected("it is absent", "absent", layer)
    return data


def _parse(head: bytes, cipher: bytes | None) -> tuple[Header, _Cipher | None]:
    """Prove a header."""
    try:
        text = head[8:].decode("ascii").rstrip(" ")
        metadata, _ = _split(text)
        if metadata["format"] != "kvrag":
            raise ValueError("not kvrag's")
        if metadata["version"] != str(FORMAT_VERSION) and metadata["version"].isdecimal():
            raise OtherVersion
        if metadata.get("cipher_key") != (None if cipher is None else key_id(cipher)):
            raise Foreign
        header, seal, again = _decode(text) if cipher is None else _open(text, metadata, cipher)
        if _pad(again) != head:
            raise ValueError("not what would be written")
        return header, seal
    except FAULTS:
        raise BlobRejected("its header is damaged") from None


def _open(text: str, metadata: dict[str, Any], cipher: bytes) -> tuple[Header, _Cipher, bytes]:
    """Decrypt the header of an encrypted blob; raises one of :data:`FAULTS`."""
    sealed, salt = memoryview(base64.b64decode(metadata["sealed"], validate=True)), bytes.fromhex(metadata["salt"])
    if base64.b64encode(sealed).decode() != metadata["sealed"]:  # the last character has bits that decoding ignores
        raise ValueError("not what would be written")
    clear = {name: value for name, value in metadata.items() if name != "sealed"}
    plain = bytearray(len(sealed) - TAG_BYTES)
    key, bound = derive(cipher, f"blob {metadata['key']}", salt=salt), canonical({"clear": _dump(clear)})
    tag = bytes(sealed[-TAG_BYTES:])
    if not decrypt(key, HEADER_NONCE, sealed[:-TAG_BYTES], tag, bound, memoryview(plain)):
        raise ValueError("forged")
    inner = plain.decode("ascii")
    header, _, again = _decode(inner)
    seal = _Cipher.new(header, cipher, salt)
    if again.decode() != inner:
        raise ValueError("not what would be written")
    return header, seal, seal.frame(metadata["sealed"])


def _split(text: str) -> tuple[dict[str, Any], str]:
    """Return a header's metadata, and the JSON of its tensors; raises one of :data:`FAULTS`."""
    if not text.startswith(METADATA):
        raise ValueError("no metadata")
    metadata, end = DECODER.raw_decode(text, len(METADATA))
    if text[end : end + 1] != ",":
        raise ValueError("no tensors")
    return metadata, "{" + text[end + 1 :]


def _decode(text: str) -> tuple[Header, None, bytes]:
    """Parse a plain header and write it again; raises one of :data:`FAULTS`."""
    metadata, tensors = _split(text)
    if not DIGESTS.fullmatch(metadata["layer_digests"]):
        raise ValueError("not the digests of layers")
    digests = tuple(metadata["layer_digests"].split(","))
    ids = base64.b64decode(metadata["token_ids"], validate=True)
    kv_dtype = metadata["kv_dtype"]
    if kv_dtype not in KV_DTYPES:
        raise ValueError("not a type of KV")
    identity = ChunkIdentity(
        model=metadata["model"],
        namespace=metadata["namespace"],
        prefix=metadata["prefix"],
        token_ids=struct.unpack(f"<{len(ids) // 4}I", ids),
        kv_dtype=kv_dtype,
        context=metadata["context"],
    )
    "".join((identity.model, identity.namespace, identity.prefix, identity.context)).encode()  # as the key does
    shapes = _shapes if len(digests) <= MAX_KEPT_LAYERS else _shapes.__wrapped__
    header = Header(
        identity, FLOATS[metadata["dtype"]], shapes(tensors, len(digests), len(ids) // 4, kv_dtype), digests
    )
    return header, None, header.encode()


@functools.lru_cache(maxsize=256)
def _shapes(tensors: str, num_layers: int, num_tokens: int, kv_dtype: KVDtype) -> tuple[tuple[Shape, Shape], ...]:
    """Return the shapes of keys and values of each layer; raises one of :data:`FAULTS`."""
    fields: dict[str, Any] = json.loads(tensors)
    factor = 2 if kv_dtype == "int4" else 1
    shapes = []
    for i in range(num_layers):
        for name in ("keys", "values"):
            heads, tokens, dim = fields[f"layer.{i:03d}.{name}"]["shape"]
            if not all(type(size) is int and 0 < size < 2**31 for size in (heads, tokens, dim)) or tokens != num_tokens:
                raise ValueError("not a shape")
            shapes.append((heads, tokens, factor * dim))
    return tuple(zip(shapes[::2], shapes[1::2], strict=True))


def _pad(text: bytes) -> bytes:
    """Put the length before a header's JSON, and spaces after it."""
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _dump(fields: Mapping[str, Any]) -> bytes:
    return ENCODER.encode(fields).encode("ascii")
