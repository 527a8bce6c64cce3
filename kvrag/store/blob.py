"""One chunk, one file: a safetensors file that says itself whose KV it holds.

Every read proves it: the header must be the one that this module would write for the identity asked for, byte for
byte, and each layer must have the digest that the header gives. Whatever fails is a :class:`BlobRejected`, which
never leaves the package.

::

    u64 length | header | layer 0 keys | layer 0 values | layer 1 keys | ...

The header is JSON, padded with spaces so that the data starts at a multiple of 4096 bytes.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from pathlib import Path

import torch
import xxhash

from kvrag.errors import StoreError
from kvrag.store.header import MAX_HEADER_BYTES, NAMES, BlobRejected, Header, decode, shape_of
from kvrag.types import ChunkIdentity, ChunkKV, LayerKV, TextEntry


def check_kv(identity: ChunkIdentity, kv: ChunkKV) -> None:
    """Refuse KV that must not be stored.

    Raises
    ------
    StoreError
        If shapes or dtypes are not those of one chunk, or if a value is not finite: NaN would spread to every later
        answer.
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
            low, high = torch.aminmax(tensor.detach())
            if not (math.isfinite(low.item()) and math.isfinite(high.item())):
                raise StoreError(f"{where} hold a value that is not finite; the chunk is not stored, compute it again")


def encode(
    identity: ChunkIdentity, kv: ChunkKV, *, text: TextEntry | None, doc_id: str | None
) -> tuple[Header, list[memoryview]]:
    """Return a blob's header, and its bytes in pieces: head, then tensors, without a copy where they are contiguous.

    Raises
    ------
    StoreError
        If the KV must not be stored, see :func:`check_kv`, or the header would be too long.
    """
    check_kv(identity, kv)
    pieces, digests = [], []
    for layer in kv.layers:
        keys, values = _bytes(layer.keys), _bytes(layer.values)
        pieces += [keys, values]
        digest = xxhash.xxh3_128(keys)
        digest.update(values)
        digests.append(digest.hexdigest())
    header = Header(
        identity=identity,
        dtype=kv.layers[0].keys.dtype,
        shapes=tuple((shape_of(list(layer.keys.shape)), shape_of(list(layer.values.shape))) for layer in kv.layers),
        digests=tuple(digests),
        text=text,
        doc_id=doc_id,
    )
    head = header.encode()
    if len(head) > MAX_HEADER_BYTES:
        raise StoreError(f"the chunk of {len(identity.token_ids)} tokens is too long for one file; split it")
    return header, [memoryview(head), *pieces]


def read(path: Path, identity: ChunkIdentity) -> tuple[ChunkKV, Header]:
    """Read a blob and prove that it is the KV of ``identity``; the tensors are views of one new buffer.

    Raises
    ------
    BlobRejected
        If it is not.
    OSError
        If the file is absent or can't be read.
    """
    fd = _open(path)
    try:
        header, start = _read_header(fd)
        if header.identity != identity:
            raise BlobRejected("it belongs to another chunk")
        try:
            buffer = torch.empty(header.num_bytes, dtype=torch.uint8)
        except (MemoryError, RuntimeError):
            raise BlobRejected("it does not fit into memory") from None
        _fill(fd, _view(buffer), start)
    finally:
        os.close(fd)
    return _layers(header, buffer), header


def read_header(path: Path) -> Header:
    """Read and check a blob's header, without proof of the tensors; raises as :func:`read` does."""
    fd = _open(path)
    try:
        return _read_header(fd)[0]
    finally:
        os.close(fd)


def _open(path: Path) -> int:
    """Open without following a link and without waiting for the writer of a FIFO."""
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise BlobRejected("it is not a regular file") from None
        raise


def _read_header(fd: int) -> tuple[Header, int]:
    """Return the header and the offset of the data; the file's length must be that of header and data together."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise BlobRejected("it is not a regular file")
    head = bytearray(8)
    _fill(fd, memoryview(head), 0)
    start = 8 + int.from_bytes(head, "little")
    if start > min(status.st_size, MAX_HEADER_BYTES):
        raise BlobRejected("its header has an impossible length")
    head = bytearray(start)
    _fill(fd, memoryview(head), 0)
    header = decode(head)
    if status.st_size != start + header.num_bytes:
        raise BlobRejected("it has the wrong length")
    return header, start


def _bytes(tensor: torch.Tensor) -> memoryview:
    return _view(tensor.detach().cpu().contiguous().view(torch.uint8).flatten())


def _view(flat: torch.Tensor) -> memoryview:
    return flat.numpy().data


def _fill(fd: int, view: memoryview, offset: int) -> None:
    """Read until ``view`` is full; a read may return less than asked for."""
    while view:
        count = os.preadv(fd, [view], offset)
        if not count:
            raise BlobRejected("it has the wrong length")
        view, offset = view[count:], offset + count


def _layers(header: Header, buffer: torch.Tensor) -> ChunkKV:
    """Cut the buffer into layers, each after its digest has been proven."""
    layers, start = [], 0
    view = _view(buffer)
    for shapes, sizes, digest in zip(header.shapes, header.sizes(), header.digests, strict=True):
        middle, stop = start + sizes[0], start + sum(sizes)
        if xxhash.xxh3_128_hexdigest(view[start:stop]) != digest:
            raise BlobRejected("its data is damaged")
        keys = buffer[start:middle].view(header.dtype).view(shapes[0])
        values = buffer[middle:stop].view(header.dtype).view(shapes[1])
        layers.append(LayerKV(keys, values))
        start = stop
    return ChunkKV(tuple(layers))
