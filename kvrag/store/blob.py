"""One chunk, one file: a safetensors file that says itself whose KV it holds.

Every read proves it: the header must be the one that this module would write for the identity asked for, byte for
byte, and each layer must have the digest that the header gives. Whatever fails is a :class:`BlobRejected`, which
never leaves the package.

::

    u64 length | header | layer 0 keys | layer 0 values | layer 1 keys | ...

The header is JSON, padded with spaces so that the data starts at a multiple of 4096 bytes. It is written last, when
the digests are known, so a file that was cut short has none.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import xxhash

from kvrag.errors import StoreError
from kvrag.store.directory import Directory, NotRegular
from kvrag.store.header import MAX_HEADER_BYTES, NAMES, NO_DIGEST, BlobRejected, Header, Shape, decode, shape_of
from kvrag.store.scan import all_finite, all_finite_on_device
from kvrag.tensors import raw
from kvrag.types import ChunkIdentity, ChunkKV, LayerKV, TextEntry

Write = Callable[[memoryview, int], None]
"""Takes bytes and their offset in the file. The bytes stay as they are until the blob is written."""

PART_BYTES = 1280 * 1024
"""What is scanned, hashed and written at once: short enough to stay in cache, long enough for few steps. Whole values of any dtype."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A blob that is yet to be written: its header, digests left blank, and the offset of its data."""

    header: Header
    start: int

    @property
    def size(self) -> int:
        """Length of the file."""
        return self.start + self.header.num_bytes


def plan(identity: ChunkIdentity, kv: ChunkKV, *, text: TextEntry | None) -> Plan:
    """Say what a blob will look like.

    Raises
    ------
    StoreError
        If shapes or dtypes are not those of one chunk, or the header would be too long.
    """
    tokens = len(identity.token_ids)
    if not kv.layers or not tokens:
        raise StoreError("the chunk has no layers or no tokens and can't be stored; pass the KV of at least one token")
    dtype = kv.layers[0].keys.dtype
    for i, layer in enumerate(kv.layers):
        for name, tensor in (("keys", layer.keys), ("values", layer.values)):
            where = f"{name} of layer {i} of the chunk"
            if tensor.ndim != 3 or tensor.shape[1] != tokens or not tensor.numel():
                shape = tuple(tensor.shape)
                raise StoreError(
                    f"{where} have shape {shape}; it must be (heads, {tokens}, head dim), one row per token"
                )
            if tensor.dtype not in NAMES or tensor.dtype != dtype:
                raise StoreError(f"{where} are {tensor.dtype}; all must be one of float32, float16 and bfloat16")
    header = Header(
        identity=identity,
        dtype=dtype,
        shapes=tuple((shape_of(list(layer.keys.shape)), shape_of(list(layer.values.shape))) for layer in kv.layers),
        digests=(NO_DIGEST,) * len(kv.layers),
        text=text,
    )
    start = len(header.encode())
    if start > MAX_HEADER_BYTES:
        raise StoreError(f"the chunk of {tokens} tokens is too long for one file; split it")
    return Plan(header, start)


def check_finite(kv: ChunkKV, layer: int) -> None:
    """Refuse NaN and infinity in a layer: they would spread to every later answer.

    Raises
    ------
    StoreError
        If a value is not finite.
    """
    for name, tensor in (("keys", kv.layers[layer].keys), ("values", kv.layers[layer].values)):
        if not all_finite_on_device(tensor):
            raise _not_finite(name, layer)


def _not_finite(name: str, layer: int) -> StoreError:
    return StoreError(
        f"{name} of layer {layer} of the chunk hold a value that is not finite; "
        "the chunk is not stored, compute it again"
    )


def check_kv(identity: ChunkIdentity, kv: ChunkKV) -> None:
    """Refuse KV that must not be stored; raises as :func:`plan` and :func:`check_finite`."""
    plan(identity, kv, text=None)
    for layer in range(len(kv.layers)):
        check_finite(kv, layer)


def write(plan: Plan, kv: ChunkKV, out: Write) -> Header:
    """Write a planned blob, scanned, hashed and handed on part by part while each is in the processor's cache; its header last.

    Returns
    -------
    Header
        The header with its digests.

    Raises
    ------
    StoreError
        If a value is not finite.
    OSError
        If ``out`` fails.
    """
    offset, digests = plan.start, []
    for i, layer in enumerate(kv.layers):
        digest = xxhash.xxh3_128()
        for name, tensor in (("keys", layer.keys), ("values", layer.values)):
            view = raw(tensor)
            for start in range(0, len(view), PART_BYTES):
                part = view[start : start + PART_BYTES]
                if not all_finite(part, tensor.dtype):
                    raise _not_finite(name, i)
                digest.update(part)
                out(part, offset)
                offset += len(part)
        digests.append(digest.hexdigest())
    header = replace(plan.header, digests=tuple(digests))
    out(memoryview(header.encode()), 0)
    return header


class Blob:
    """An open blob whose header is proven, and whose layers have yet to be; a context manager.

    Parameters
    ----------
    directory, place
        Where it is.

    Raises
    ------
    BlobRejected
        If it is no blob.
    OSError
        If it is absent or can't be read.
    """

    def __init__(self, directory: Directory, *place: str, max_header: int = MAX_HEADER_BYTES) -> None:
        try:
            self._fd, status = directory.open(*place)
        except NotRegular:
            raise BlobRejected("it is not a regular file") from None
        try:
            self.header, self._start = _read_header(self._fd, status.st_size, max_header)
        except BaseException:
            os.close(self._fd)
            raise
        self._sizes = self.header.sizes()
        self._offsets = [0, *accumulate(keys + values for keys, values in self._sizes)]

    @property
    def num_layers(self) -> int:
        """Layers of the chunk."""
        return len(self._sizes)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def __enter__(self) -> Blob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def layer(self, index: int, buffer: torch.Tensor) -> LayerKV:
        """Read a layer to its place in ``buffer``, uint8 ``(num_bytes,)``, and prove it; the tensors are views of it.

        Raises
        ------
        BlobRejected
            If it does not have its digest.
        OSError
            If it can't be read.
        """
        start, end = self._offsets[index : index + 2]
        view = _view(buffer)
        fill(self._fd, view[start:end], self._start + start)
        return self._proven(index, buffer, view)

    def all(self, buffer: torch.Tensor) -> ChunkKV:
        """Read all layers at once, which is quicker for a small chunk, and prove each; raises as :meth:`layer`."""
        view = _view(buffer)
        fill(self._fd, view, self._start)
        return ChunkKV(tuple(self._proven(index, buffer, view) for index in range(self.num_layers)))

    def _proven(self, index: int, buffer: torch.Tensor, view: memoryview) -> LayerKV:
        start, end = self._offsets[index : index + 2]
        if xxhash.xxh3_128_hexdigest(view[start:end]) != self.header.digests[index]:
            raise BlobRejected("its data is damaged")
        keys, values = self.header.shapes[index]
        middle = start + self._sizes[index][0]
        return LayerKV(self._tensor(buffer, start, keys), self._tensor(buffer, middle, values))

    def _tensor(self, buffer: torch.Tensor, start: int, shape: Shape) -> torch.Tensor:
        """View bytes as a tensor in one step: a small chunk has many, and each step takes a microsecond."""
        typed, (_, tokens, dim) = buffer.view(self.header.dtype), shape
        return typed.as_strided(shape, (tokens * dim, dim, 1), typed.storage_offset() + start // typed.itemsize)


def max_header_bytes(identity: ChunkIdentity) -> int:
    """Longest header that the blob of this chunk may have: a hostile file is refused before much of it is read."""
    return min(MAX_HEADER_BYTES, 2**19 + 6 * len(identity.token_ids))


def open_blob(directory: Directory, *place: str, identity: ChunkIdentity) -> Blob:
    """Open a blob and prove that it is that of ``identity``; raises as :class:`Blob`."""
    blob = Blob(directory, *place, max_header=max_header_bytes(identity))
    if blob.header.identity != identity:
        blob.close()
        raise BlobRejected("it belongs to another chunk")
    return blob


def fill(fd: int, view: memoryview, offset: int) -> None:
    """Read until ``view`` is full; a read may return less than asked for."""
    while view:
        count = os.preadv(fd, [view], offset)
        if not count:
            raise BlobRejected("it has the wrong length")
        view, offset = view[count:], offset + count


def _read_header(fd: int, file_size: int, limit: int) -> tuple[Header, int]:
    """Return the header and the offset of the data; the file's length must be that of header and data together."""
    first = bytearray(8)
    fill(fd, memoryview(first), 0)
    start = 8 + int.from_bytes(first, "little")
    if start > min(file_size, limit):
        raise BlobRejected("its header has an impossible length")
    head = bytearray(start)
    fill(fd, memoryview(head), 0)
    header = decode(head)
    if file_size != start + header.num_bytes:
        raise BlobRejected("it has the wrong length")
    return header, start


def _view(flat: torch.Tensor) -> memoryview:
    return flat.numpy().data
