"""Encode chunks as blobs: safetensors files that hold the KV and the identity of a chunk.

::

    u64 length | header | layer 0 keys | layer 0 values | (scales of layer 0) | layer 1 keys | ...

A blob is read through any ``read(offset, length)``. The header is JSON, padded with spaces. It is
valid only if encoding it again gives the same bytes, so all of it is checked. The layers must match
the xxh3-128 digests in the header.

With a key, layers and header are encrypted (AES-256-GCM), and the encrypted header is embedded in a
plain outer header. The key of a blob is derived with a random salt, so layer indices can serve as
nonces. GCM tags replace the digests of the layers.
"""

from __future__ import annotations

import base64
import json
import secrets
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import xxhash
from torch import Tensor

from kvrag.errors import StoreError
from kvrag.identity.fingerprint import FORMAT_VERSION, chunk_key, ids_bytes
from kvrag.kv.buffers import BUFFERS
from kvrag.kv.crypto import TAG_BYTES, decrypt, derive, encrypt, key_id
from kvrag.kv.layers import (
    FLOATS,
    MAX_LAYERS,
    NAMES,
    BlobLayout,
    Shapes,
    bytes_of,
    layout_of,
    scanned,
    shapes_of,
    view_layer,
)
from kvrag.runtime import POOL
from kvrag.types import ChunkIdentity, ChunkKV, HoleReason, LayerKV

Bytes = bytes | bytearray | memoryview

ALIGNMENT = 4096  # data starts at a multiple of this, so that it can be read with direct I/O
HEAD_BYTES = 16 * 1024  # read first: most headers are not longer
STEP_BYTES = 4 * 2**20  # bytes of layers that a thread hashes or reads at once
# Longer headers are neither written nor read: enough for half a million token ids.
MAX_HEADER_BYTES = 4 * 2**20
# No layer has this index, so the header shares its nonce with none.
HEADER_NONCE = 2**32 - 1
SALT_BYTES = 32
KIND = {"format": "kvrag", "version": str(FORMAT_VERSION)}
NAMED = ("model", "namespace", "prefix", "context", "kv_dtype")
START = '{"__metadata__":'
NO_DIGEST = b"0" * 32
FAULTS = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    RecursionError,
    struct.error,
    StoreError,
)  # raised for a malformed header
dump = json.JSONEncoder(separators=(",", ":")).encode
parse = json.JSONDecoder().raw_decode
# ``length`` bytes from ``offset`` on, as Blobs.read returns them.
Read = Callable[[int, int], Bytes | None]


class BlobRejected(Exception):
    """The blob is not the verified KV of the requested chunk.

    ``hole`` is the reason in a word, ``layer`` the first layer that was not read.
    """

    def __init__(self, reason: str, hole: HoleReason = "damaged", layer: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.hole = hole
        self.layer = layer


class OtherVersion(BlobRejected):
    """The blob has another version of the format; reads leave it in place."""


class Foreign(BlobRejected):
    """The blob's key is not the store's, or only the blob or the store has a key.

    Reads leave the blob in place.
    """


@dataclass(frozen=True)
class Header:
    """Contents of a blob without its tensors.

    ``digests`` are the xxh3-128 of the layers' bytes, or the GCM tags of encrypted layers.
    ``dtype`` and ``shapes`` describe keys and values, before quantisation if the blob holds codes.
    """

    identity: ChunkIdentity
    dtype: torch.dtype
    shapes: Shapes
    digests: tuple[bytes, ...]

    @property
    def layout(self) -> BlobLayout:
        """Layout of the tensors."""
        return layout_of(self.identity.kv_dtype, self.dtype, self.shapes)

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return self.layout.offsets[-1]

    def encode(self) -> bytes:
        """Return the plain header as JSON, with a digest of itself."""
        sizes = (f"{keys[0]},{keys[2]},{values[0]},{values[2]}" for keys, values in self.shapes)
        metadata = {
            "header_digest": NO_DIGEST.decode(),
            **KIND,
            **{name: getattr(self.identity, name) for name in NAMED},
            "token_ids": base64.b64encode(ids_bytes(self.identity.token_ids)).decode(),
            "dtype": NAMES[self.dtype],
            "shapes": ";".join(sizes),
            "layer_digests": b"".join(self.digests).hex(),
        }
        text = f"{START}{dump(metadata)},{self.layout.json}}}".encode()
        # Of the header with zeros in its place, which are as long.
        return text.replace(NO_DIGEST, xxhash.xxh3_128_hexdigest(text).encode(), 1)


def _runs(offsets: Sequence[int]) -> list[range]:
    """Split the layers of a blob into runs that are hashed or read at once."""
    layers = len(offsets) - 1
    count = max(1, STEP_BYTES * layers // offsets[-1])
    return [range(start, min(start + count, layers)) for start in range(0, layers, count)]


class Encoded:
    """Bytes of a chunk's blob, hashed or encrypted while they are written.

    The digests, and so the head, are known last. A writer that can seek writes the body first,
    after a gap of ``head_bytes`` bytes. With ``cipher``, header and layers are encrypted. Raises
    ``StoreError`` if the chunk can't be stored.
    """

    def __init__(self, identity: ChunkIdentity, kv: ChunkKV, cipher: bytes | None = None) -> None:
        dtype, shapes = shapes_of(identity, kv)
        self.header = Header(identity, dtype, shapes, (bytes(TAG_BYTES),) * len(shapes))
        self._cipher = cipher
        self._salt = secrets.token_bytes(SALT_BYTES)
        try:
            self._layers = [
                [x.detach().cpu().contiguous() for x in layer.tensors] for layer in kv.layers
            ]
            self.head_bytes = len(self.head())
        except (MemoryError, RuntimeError) as error:
            raise StoreError(
                f"memory is short for the chunk ({error}); free some, then try again"
            ) from error
        if self.head_bytes > MAX_HEADER_BYTES:
            raise StoreError(
                f"the chunk of {len(identity.token_ids)} tokens is too long for one file; split it"
            )

    def __iter__(self) -> Iterator[Bytes]:
        """Return all parts in file order."""
        # First, because the head holds the digests of the body.
        body = sum(self.body(), list[memoryview]())
        return iter([self.head(), *body])

    def head(self) -> bytes:
        """Return the header; it is final once :meth:`body` is exhausted."""
        return _head(self.header, self._cipher, self._salt)

    def body(self) -> Iterator[list[memoryview]]:
        """Yield the bytes of all layers, many at a time.

        Raises ``StoreError``, at the end at the latest, if a value is not finite. Other threads
        hash plain layers meanwhile, so write with few calls: every call must reacquire the GIL.
        """
        # A new salt for every pass: a key must not encrypt two headers.
        self._salt = secrets.token_bytes(SALT_BYTES)
        if self._cipher is None:
            runs = _runs(self.header.layout.offsets)
            proofs = POOL.ahead(self._digests, runs) if runs[1:] else map(self._digests, runs)
            yield from (bytes_of(self._layers[run.start : run.stop]) for run in runs)
            digests = [digest for run in proofs for digest in run]
        else:
            key = derive(self._cipher, f"blob {chunk_key(self.header.identity)}", salt=self._salt)
            digests = []
            for index, layer in enumerate(self._layers):
                pieces, tag = encrypt(key, index, scanned(index, layer))
                digests.append(tag)
                yield pieces
        self.header = replace(self.header, digests=tuple(digests))

    def _digests(self, run: range) -> list[bytes]:
        """Return the digests of a run of layers."""
        digests = [xxhash.xxh3_128() for _ in run]
        for index, digest in zip(run, digests, strict=True):
            scanned(index, self._layers[index], digest.update)
        return [digest.digest() for digest in digests]


class Blob:
    """Blob with a verified header; its layers are verified when they are read.

    With ``identity``, the blob must hold this chunk. With ``cipher``, it must be encrypted with
    this key; without, it must be plain. Raises ``BlobRejected`` if the blob is absent or does not
    match.
    """

    def __init__(
        self, read: Read, identity: ChunkIdentity | None = None, cipher: bytes | None = None
    ) -> None:
        self._read = read
        head = self._bytes(0, HEAD_BYTES)
        self._start = 8 + int.from_bytes(head[:8], "little")
        if len(head) < 8 or self._start > MAX_HEADER_BYTES:
            raise BlobRejected("its header has an impossible length")
        if self._start > len(head):
            head = bytes(head) + bytes(self._bytes(len(head), self._start - len(head)))
        self.header, self._key = _parse(bytes(head[: self._start]), cipher)
        if identity is not None and self.header.identity != identity:
            raise BlobRejected("it belongs to another chunk")

    def load(self) -> ChunkKV:
        """Return all layers; raises like :meth:`layers`."""
        return ChunkKV(tuple(self.layers()))

    def layers(self) -> Iterator[LayerKV]:
        """Yield the verified layers in order.

        Raises ``BlobRejected`` if a layer is damaged or can't be read.
        """
        layers = self.header.layout.layers
        runs = _runs(self.header.layout.offsets)
        done = POOL.ahead(self._run, runs) if runs[1:] else map(self._run, runs)
        proven = (data for run in done for data in run)
        yield from (
            view_layer(self.header.dtype, *each) for each in zip(layers, proven, strict=True)
        )

    def _run(self, run: range) -> list[Tensor]:
        """Read and verify a run of layers; the blob must end after the last layer.

        Plain layers are slices of a single tensor.
        """
        offsets = self.header.layout.offsets
        start = offsets[run.start]
        end = offsets[run.stop]
        data = memoryview(
            # One byte more behind the last layer, where the blob must end.
            self._bytes(self._start + start, end - start + (end == offsets[-1]), run.start)
        )
        if len(data) != end - start:
            raise BlobRejected("it has the wrong length", layer=run.start)
        if data.readonly:  # torch needs writable memory
            stored = data
            data = BUFFERS.take(len(data))
            data[:] = stored
        whole = torch.frombuffer(data, dtype=torch.uint8)
        proven = list[Tensor]()
        for index in run:
            place = slice(offsets[index] - start, offsets[index + 1] - start)
            plain = self._proven(index, data[place])
            proven.append(
                whole[place] if self._key is None else torch.frombuffer(plain, dtype=torch.uint8)
            )
        return proven

    def _bytes(self, start: int, length: int, layer: int | None = None) -> Bytes:
        """Read a range of the blob; raises ``BlobRejected`` if that is absent or unreadable."""
        try:
            data = self._read(start, length)
        except OSError as error:
            raise BlobRejected(f"it can't be read ({error})", "unreadable", layer) from None
        if data is None:
            raise BlobRejected("it is absent", "absent", layer)
        return data

    def _proven(self, index: int, stored: memoryview) -> memoryview:
        """Return the verified bytes of a layer, decrypted if the blob is encrypted."""
        digest = self.header.digests[index]
        plain = None
        if self._key is not None:
            plain = decrypt(self._key, index, stored, digest)
        elif xxhash.xxh3_128_digest(stored) == digest:
            plain = stored
        if plain is None:
            raise BlobRejected("its data is damaged", layer=index)
        return plain


def _parse(head: bytes, cipher: bytes | None) -> tuple[Header, bytes | None]:
    """Verify a header; return it and the key of its layers.

    The metadata determines the whole header: the header is valid if encoding the metadata gives the
    same bytes.
    """
    try:
        (metadata, _), key, salt = parse(str(head[8:], "ascii"), len(START)), None, b""
        if metadata["version"] != KIND["version"] and metadata["version"].isdecimal():
            raise OtherVersion("it has another version of the format", "absent")
        if metadata.get("cipher_key") != (None if cipher is None else key_id(cipher)):
            raise Foreign("it is not protected by the key that the store was opened with", "absent")
        if cipher is not None:
            salt = bytes.fromhex(metadata["salt"])
            sealed = memoryview(base64.b64decode(metadata["sealed"]))
            key = derive(cipher, f"blob {metadata['key']}", salt=salt)
            plain = decrypt(key, HEADER_NONCE, sealed[:-TAG_BYTES], bytes(sealed[-TAG_BYTES:]))
            # The length counts: a salt padded with zeros would derive the same key.
            if plain is None or len(salt) != SALT_BYTES:
                raise ValueError("forged")
            metadata, _ = parse(str(plain, "ascii"), len(START))
        header = _decode(metadata)
        if _head(header, cipher, salt) != head:
            raise ValueError("differs from what kvrag writes")
        return header, key
    except FAULTS:
        raise BlobRejected("its header is damaged") from None


def _decode(metadata: dict[str, Any]) -> Header:
    """Parse the metadata of a plain header; raises an exception of :data:`FAULTS`."""
    names = {name: metadata[name] for name in NAMED}
    "".join(names.values()).encode()  # as chunk_key does: it must not fail later
    ids = base64.b64decode(metadata["token_ids"])
    raw = bytes.fromhex(metadata["layer_digests"])
    count = len(ids) // 4
    token_ids = struct.unpack(f"<{count}I", ids)
    digests = tuple(raw[place : place + TAG_BYTES] for place in range(0, len(raw), TAG_BYTES))
    sizes = [*map(int, metadata["shapes"].replace(";", ",").split(",", 4 * MAX_LAYERS))]
    if (
        not count
        or TAG_BYTES * len(sizes) != 4 * len(raw)
        or not 0 < min(sizes) <= max(sizes) < 2**32
    ):
        raise ValueError("not a chunk")
    layers = zip(*(sizes[place::4] for place in range(4)), strict=True)
    shapes = tuple(
        ((heads, count, dim), (v_heads, count, v_dim)) for heads, dim, v_heads, v_dim in layers
    )
    identity = ChunkIdentity(token_ids=token_ids, **names)
    return Header(identity, FLOATS[metadata["dtype"]], shapes, digests)


def _head(header: Header, cipher: bytes | None, salt: bytes) -> bytes:
    """Return the header after its length, padded with spaces.

    With a key, the header is encrypted and embedded in an outer header.
    """
    text = header.encode()
    if cipher is not None:
        owner = chunk_key(header.identity)
        end = header.num_bytes
        sealed, tag = encrypt(
            derive(cipher, f"blob {owner}", salt=salt), HEADER_NONCE, [memoryview(text)]
        )
        inner = base64.b64encode(b"".join([*sealed, tag])).decode()
        metadata = {
            **KIND,
            "cipher_key": key_id(cipher),
            "key": owner,
            "salt": salt.hex(),
            "sealed": inner,
        }
        layers = dump({"dtype": "U8", "shape": [end], "data_offsets": [0, end]})
        text = f'{START}{dump(metadata)},"layers":{layers}}}'.encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
