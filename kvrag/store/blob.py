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

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import xxhash

from kvrag.blend.quantise import parts
from kvrag.errors import StoreError
from kvrag.store.directory import Directory, NotRegular
from kvrag.store.guard import Guard, Opening
from kvrag.store.header import (
    MAX_HEADER_BYTES,
    MAX_LAYERS,
    NO_DIGEST,
    BlobRejected,
    Header,
    decode,
)
from kvrag.store.places import NAMES, Shape, shape_of
from kvrag.store.raw import fill, read_head
from kvrag.store.views import Views
from kvrag.types import ChunkIdentity, ChunkKV, LayerKV, TextEntry


@dataclass(frozen=True, slots=True)
class Plan:
    """A blob that is yet to be written: its header, digests left blank, the offset of its data, and who protects it."""

    header: Header
    start: int
    guard: Guard | None = None

    @property
    def size(self) -> int:
        """Length of the file."""
        return self.start + self.header.num_bytes


def plan(identity: ChunkIdentity, kv: ChunkKV, *, text: TextEntry | None, guard: Guard | None = None) -> Plan:
    """Say what a blob will look like; ``guard`` protects it by keys.

    Raises
    ------
    StoreError
        If shapes or dtypes are not those of one chunk, or the header would be too long.
    """
    tokens = len(identity.token_ids)
    if not kv.layers or not tokens:
        raise StoreError("the chunk has no layers or no tokens and can't be stored; pass the KV of at least one token")
    if len(kv.layers) > MAX_LAYERS:
        raise StoreError(
            f"the chunk has {len(kv.layers)} layers and can't be stored; a file holds at most {MAX_LAYERS}"
        )
    if kv.kv_dtype != identity.kv_dtype:
        raise StoreError(
            f"the chunk is kept as {identity.kv_dtype!r} and its KV is {kv.kv_dtype!r}; pass it through kvrag.blend.quantise.pack"
        )
    first = kv.layers[0]
    dtype = first.keys.dtype if first.scales is None else first.scales.dtype
    header = Header(
        identity=identity,
        dtype=dtype,
        shapes=tuple(_check_layers(identity, kv, dtype)),
        digests=(NO_DIGEST,) * len(kv.layers),
        text=text,
    )
    start = len(header.encode()) if guard is None else guard.head_size(header)
    if start > MAX_HEADER_BYTES:
        raise StoreError(f"the chunk of {tokens} tokens is too long for one file; split it")
    return Plan(header, start, guard)


def _check_layers(identity: ChunkIdentity, kv: ChunkKV, dtype: torch.dtype) -> Iterator[tuple[Shape, Shape]]:
    """Yield the shapes of keys and values of each layer, after a look at every tensor."""
    last, shapes = None, None
    for index, layer in enumerate(kv.layers):
        keys, values = layer.keys, layer.values
        kind = None if layer.scales is not None else (keys.dtype, keys.shape, values.dtype, values.shape)
        if shapes is None or kind is None or kind != last:  # layers are alike in most models
            last, shapes = kind, _check_layer(identity, layer, index, dtype)
        yield shapes


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
            f"codes or scales of layer {index} of the chunk are not those of {identity.kv_dtype!r}; make them with kvrag.blend.quantise.pack"
        )
    return shapes[0], shapes[1]


@dataclass(frozen=True, slots=True)
class Place:
    """Memory for a blob's data.

    Parameters
    ----------
    buffer
        uint8 ``(num_bytes,)`` on the host.
    view
        The same bytes.
    """

    buffer: torch.Tensor
    view: memoryview


class Blob:
    """An open blob whose header is proven, and whose layers have yet to be; a context manager.

    Parameters
    ----------
    directory, place
        Where it is.
    guard
        The keys that it must be protected by; ``None``: by none.

    Raises
    ------
    BlobRejected
        If it is no blob, or :class:`~kvrag.store.header.Foreign`: one of other keys.
    OSError
        If it is absent or can't be read.
    """

    def __init__(
        self, directory: Directory, *place: str, guard: Guard | None = None, max_header: int = MAX_HEADER_BYTES
    ) -> None:
        try:
            self._fd, status = directory.open(*place)
        except NotRegular:
            fault = BlobRejected("it is not a regular file")
            fault.inode = directory.inode(*place)
            raise fault from None
        self.inode = (status.st_dev, status.st_ino)
        """Which file it is."""
        try:
            self.header, self._start, self._opening = _read_header(self._fd, status.st_size, max_header, guard)
        except BaseException as fault:
            os.close(self._fd)
            if isinstance(fault, BlobRejected):
                fault.inode = self.inode
            raise
        self._offsets = self.header.tensors.offsets
        self._is_good = [False] * self.num_layers

    @property
    def good_layers(self) -> int:
        """Layers from 0 on that have been read and proven."""
        return [*self._is_good, False].index(False)

    @property
    def num_layers(self) -> int:
        """Layers of the chunk."""
        return len(self.header.digests)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def __enter__(self) -> Blob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def place(self, buffer: torch.Tensor) -> Place:
        """Say where all layers go: the start of ``buffer``, uint8 ``(num_bytes,)`` or longer."""
        buffer = buffer[: self._offsets[-1]]
        return Place(buffer, _view(buffer))

    def load(self, layers: range, place: Place) -> None:
        """Read layers that follow each other to their places with one call, and prove each, in order.

        Raises
        ------
        BlobRejected
            If one does not have its digest; those before it are good.
        OSError
            If they can't be read.
        """
        start, end = self._offsets[layers.start], self._offsets[layers.stop]
        stored = self._stored(place.view[start:end])
        fill(self._fd, stored, self._start + start)
        for index in layers:
            first, last = self._offsets[index : index + 2]
            self._prove(index, stored[first - start : last - start], place.view[first:last])

    def refused(self, reason: str) -> BlobRejected:
        """Make the fault of this file."""
        fault = BlobRejected(reason)
        fault.inode = self.inode
        return fault

    def is_good(self, layer: int) -> bool:
        """Whether a layer has been read and proven."""
        return self._is_good[layer]

    def tensors(self, place: Place) -> Sequence[LayerKV]:
        """Return the layers as views of the buffer; each is to be taken when it is loaded, and not before."""
        return self._alike(place.buffer) or Views(self.header, place.buffer)

    def _stored(self, view: memoryview) -> memoryview:
        """Memory for what is stored of a part: its own, or other one for what has yet to be decrypted."""
        if self._opening is None or not self._opening.guard.encrypts:
            return view
        try:
            return _view(torch.empty(len(view), dtype=torch.uint8))
        except (MemoryError, RuntimeError):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from None

    def _prove(self, index: int, stored: memoryview, out: memoryview) -> None:
        if self._opening is not None:
            self._opening.layer(index, stored, out)
        elif xxhash.xxh3_128_hexdigest(stored) != self.header.digests[index]:
            raise BlobRejected("its data is damaged")
        self._is_good[index] = True

    def _alike(self, buffer: torch.Tensor) -> tuple[LayerKV, ...] | None:
        """See all layers at once, if keys and values have one shape everywhere: one by one takes as long as reading a small chunk."""
        dtype, shape = self.header.dtype, self.header.shapes[0][0]
        is_alike = self.header.identity.kv_dtype == "auto" and set(self.header.shapes) == {(shape, shape)}
        if not is_alike or buffer.storage_offset() % dtype.itemsize:
            return None
        flat = buffer.view(dtype).view(-1, *shape).unbind()
        return tuple(map(LayerKV, flat[::2], flat[1::2]))


def max_header_bytes(identity: ChunkIdentity) -> int:
    """Longest header that the blob of this chunk may have: a hostile file is refused before much of it is read."""
    return min(MAX_HEADER_BYTES, 2**19 + 8 * len(identity.token_ids))


def open_blob(directory: Directory, *place: str, identity: ChunkIdentity, guard: Guard | None = None) -> Blob:
    """Open a blob and prove that it is that of ``identity``; raises as :class:`Blob`."""
    blob = Blob(directory, *place, guard=guard, max_header=max_header_bytes(identity))
    if blob.header.identity != identity:
        blob.close()
        raise blob.refused("it belongs to another chunk")
    return blob


def _read_header(fd: int, file_size: int, limit: int, guard: Guard | None) -> tuple[Header, int, Opening | None]:
    """Return the header, the offset of the data, and what opens it; the file's length must be that of both together."""
    head = read_head(fd, file_size, limit)
    header, opening = (decode(head), None) if guard is None else guard.decode(head)
    if file_size != len(head) + header.num_bytes:
        raise BlobRejected("it has the wrong length")
    return header, len(head), opening


def _view(flat: torch.Tensor) -> memoryview:
    return flat.numpy().data
