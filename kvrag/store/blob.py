"""One chunk, one file: a safetensors file that says itself whose KV it holds.

Every read proves it: the header must be the one that this module would write for the identity asked for, byte for
byte, and each layer must have the digest that the header gives. Whatever fails is a :class:`BlobRejected`, which
never leaves the package.

::

    u64 length | header | layer 0 keys | layer 0 values | (scales of layer 0) | layer 1 keys | ...

The header is JSON, padded with spaces so that the data starts at a multiple of 4096 bytes. It is written last, when
the digests are known, so a file that was cut short has none.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import xxhash

from kvrag.errors import StoreError
from kvrag.quantise import FP8, layer_of, parts
from kvrag.store.directory import Directory, NotRegular
from kvrag.store.header import MAX_HEADER_BYTES, NAMES, NO_DIGEST, BlobRejected, Header, Shape, decode, shape_of
from kvrag.types import ChunkIdentity, ChunkKV, LayerKV, TextEntry

Write = Callable[[memoryview, int], None]
"""Takes bytes and their offset in the file."""


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
    if kv.kv_dtype != identity.kv_dtype:
        raise StoreError(
            f"the chunk is kept as {identity.kv_dtype!r} and its KV is {kv.kv_dtype!r}; pass it through kvrag.quantise.pack"
        )
    first = kv.layers[0]
    dtype = first.keys.dtype if first.scales is None else first.scales.dtype
    header = Header(
        identity=identity,
        dtype=dtype,
        shapes=tuple(_check_layer(identity, layer, i, dtype) for i, layer in enumerate(kv.layers)),
        digests=(NO_DIGEST,) * len(kv.layers),
        text=text,
    )
    start = len(header.encode())
    if start > MAX_HEADER_BYTES:
        raise StoreError(f"the chunk of {tokens} tokens is too long for one file; split it")
    return Plan(header, start)


def _check_layer(identity: ChunkIdentity, layer: LayerKV, index: int, dtype: torch.dtype) -> tuple[Shape, Shape]:
    """Return the shapes of keys and values, after a look at every tensor."""
    tokens, shapes = len(identity.token_ids), []
    packed = 2 if identity.kv_dtype == "int4" else 1
    for name, tensor in (("keys", layer.keys), ("values", layer.values)):
        where, shape = f"{name} of layer {index} of the chunk", tuple(tensor.shape)
        if tensor.ndim != 3 or tensor.shape[1] != tokens or not tensor.numel():
            raise StoreError(f"{where} have shape {shape}; it must be (heads, {tokens}, head dim), one row per token")
        if identity.kv_dtype == "auto" and (tensor.dtype not in NAMES or tensor.dtype != dtype):
            raise StoreError(f"{where} are {tensor.dtype}; all must be one of float32, float16 and bfloat16")
        shapes.append(shape_of([shape[0], shape[1], packed * shape[2]]))
    wanted = [(part.dtype, part.shape) for part in parts(identity.kv_dtype, dtype, shapes[0], shapes[1])]
    is_right = layer.scales is None or (layer.scales.dtype == dtype and dtype in NAMES)
    if not is_right or wanted != [(tensor.dtype, tuple(tensor.shape)) for tensor in layer.tensors]:
        raise StoreError(
            f"codes or scales of layer {index} of the chunk are not those of {identity.kv_dtype!r}; make them with kvrag.quantise.pack"
        )
    return shapes[0], shapes[1]


def check_finite(kv: ChunkKV, layer: int) -> None:
    """Refuse NaN and infinity in a layer: they would spread to every later answer.

    Raises
    ------
    StoreError
        If a value is not finite.
    """
    names = ("keys", "values", "scales of keys", "zeros of keys", "scales of values")
    for name, tensor in zip(names, kv.layers[layer].tensors, strict=False):
        if not _is_finite(tensor.detach()):
            raise StoreError(
                f"{name} of layer {layer} of the chunk hold a value that is not finite; "
                "the chunk is not stored, compute it again"
            )


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.dtype == FP8:  # torch compares none of them; e4m3 has no infinity, and NaN in either sign
        return not bool(((tensor.view(torch.uint8) & 0x7F) == 0x7F).any())
    low, high = torch.aminmax(tensor)
    return math.isfinite(low.item()) and math.isfinite(high.item())


def check_kv(identity: ChunkIdentity, kv: ChunkKV) -> None:
    """Refuse KV that must not be stored; raises as :func:`plan` and :func:`check_finite`."""
    plan(identity, kv, text=None)
    for layer in range(len(kv.layers)):
        check_finite(kv, layer)


def write(plan: Plan, kv: ChunkKV, out: Write) -> Header:
    """Write a planned blob, layer by layer while each is in the processor's cache, and its header last.

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
        check_finite(kv, i)
        digest = xxhash.xxh3_128()
        for view in map(_bytes, layer.tensors):
            digest.update(view)
            out(view, offset)
            offset += len(view)
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
        self._layers = self.header.layers()
        self._offsets = [0, *accumulate(sum(part.num_bytes for part in layer) for layer in self._layers)]

    @property
    def num_layers(self) -> int:
        """Layers of the chunk."""
        return len(self._layers)

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
        part = buffer[self._offsets[index] : self._offsets[index + 1]]
        fill(self._fd, _view(part), self._start + self._offsets[index])
        return self._proven(index, part)

    def all(self, buffer: torch.Tensor) -> ChunkKV:
        """Read all layers at once, which is quicker for a small chunk, and prove each; raises as :meth:`layer`."""
        fill(self._fd, _view(buffer), self._start)
        spans = zip(self._offsets, self._offsets[1:], strict=False)
        layers = tuple(self._proven(index, buffer[a:b]) for index, (a, b) in enumerate(spans))
        return ChunkKV(layers, self.header.identity.kv_dtype)

    def _proven(self, index: int, part: torch.Tensor) -> LayerKV:
        if xxhash.xxh3_128_hexdigest(_view(part)) != self.header.digests[index]:
            raise BlobRejected("its data is damaged")
        tensors, start = [], 0
        for tensor in self._layers[index]:
            stop = start + tensor.num_bytes
            tensors.append(_typed(part[start:stop], tensor.dtype).view(tensor.shape))
            start = stop
        return layer_of(self.header.dtype, tensors)


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


def _typed(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See bytes as numbers; scales behind an odd number of codes are copied, because torch takes no view there."""
    is_aligned = flat.storage_offset() % dtype.itemsize == 0
    return (flat if is_aligned else flat.clone()).view(dtype)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return _view(tensor.detach().cpu().contiguous().view(torch.uint8).flatten())


def _view(flat: torch.Tensor) -> memoryview:
    return flat.numpy().data
