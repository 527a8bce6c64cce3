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

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import xxhash

from kvrag.errors import StoreError
from kvrag.quantise import Part, layer_of, parts
from kvrag.store.directory import Directory, NotRegular
from kvrag.store.draft import Gather
from kvrag.store.guard import Guard, Opening, Sealing
from kvrag.store.header import MAX_HEADER_BYTES, NAMES, NO_DIGEST, BlobRejected, Header, Shape, decode, shape_of
from kvrag.store.helpers import HELPERS
from kvrag.store.scan import all_finite, all_finite_on_device
from kvrag.tensors import raw
from kvrag.types import ChunkIdentity, ChunkKV, LayerKV, TextEntry

Write = Callable[[list[memoryview], int], None]
"""Takes bytes that follow each other in the file, and their offset."""

HELPED_BYTES = 2**20
"""Shorter blobs are written and read by the caller alone: a helper would come when all is done."""

PART_BYTES = 1280 * 1024
"""What is scanned and hashed at once: short enough to stay in cache, long enough for few steps. Whole values of any dtype."""


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
    if kv.kv_dtype != identity.kv_dtype:
        raise StoreError(
            f"the chunk is kept as {identity.kv_dtype!r} and its KV is {kv.kv_dtype!r}; pass it through kvrag.quantise.pack"
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
    known: dict[tuple[object, ...], tuple[Shape, Shape]] = {}
    for index, layer in enumerate(kv.layers):
        scaled = None if layer.scales is None else layer.scales.dtype
        kind = (scaled, *((tensor.dtype, tensor.shape) for tensor in layer.tensors))
        if kind not in known:  # layers are alike in most models
            known[kind] = _check_layer(identity, layer, index, dtype)
        yield known[kind]


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
    for name, tensor in zip(TENSORS, kv.layers[layer].tensors, strict=False):
        if not all_finite_on_device(tensor):
            raise _not_finite(name, layer)


def _not_finite(name: str, layer: int) -> StoreError:
    return StoreError(
        f"{name} of layer {layer} of the chunk hold a value that is not finite; "
        "the chunk is not stored, compute it again"
    )


TENSORS = ("keys", "values", "scales of keys", "zeros of keys", "scales of values")
"""What the tensors of a layer are called to users."""


def _finite_parts(layer: LayerKV, index: int) -> Iterator[memoryview]:
    """Yield a layer's bytes part by part, each after a look at it; raises as :func:`check_finite`."""
    for number, tensor in enumerate(layer.tensors):
        yield from _looked_at(raw(tensor), tensor.dtype, index, number)


def _looked_at(view: memoryview, dtype: torch.dtype, index: int, number: int) -> Iterator[memoryview]:
    for start in range(0, len(view), PART_BYTES):
        part = view[start : start + PART_BYTES]
        if not all_finite(part, dtype):
            raise _not_finite(TENSORS[number], index)
        yield part


def check_kv(identity: ChunkIdentity, kv: ChunkKV) -> None:
    """Refuse KV that must not be stored; raises as :func:`plan` and :func:`check_finite`."""
    plan(identity, kv, text=None)
    for layer in range(len(kv.layers)):
        check_finite(kv, layer)


def write(plan: Plan, kv: ChunkKV, out: Write) -> Header:
    """Write a planned blob, scanned and hashed, its header last.

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
    sealing = None if plan.guard is None else Sealing(plan.guard, plan.header)
    is_helped = sealing is None and HELPERS.count > 0 and plan.header.num_bytes >= HELPED_BYTES
    digests = _write_helped(plan, kv, out) if is_helped else _write_alone(plan, kv, out, sealing)
    header = replace(plan.header, digests=tuple(digests))
    out([memoryview(header.encode() if sealing is None else sealing.head(header))], 0)
    return header


def _write_alone(plan: Plan, kv: ChunkKV, out: Write, sealing: Sealing | None) -> list[str]:
    """Scan, hash and write part by part, while each is in the processor's cache; returns the layers' digests."""
    gather, digests = Gather(out, plan.start), []
    for i, layer in enumerate(kv.layers):
        digest = xxhash.xxh3_128()
        for view in _finite_parts(layer, i) if sealing is None else sealing.layer(list(_finite_parts(layer, i))):
            digest.update(view)
            gather.write(view)
        digests.append(digest.hexdigest())
    gather.flush()
    return digests


def _write_helped(plan: Plan, kv: ChunkKV, out: Write) -> list[str]:
    """Write while a helper scans and hashes: what it refuses has been written, and is thrown away before it has a name."""
    layers = [[raw(tensor) for tensor in layer.tensors] for layer in kv.layers]
    proof = _Proof(kv, layers)
    with HELPERS.help(proof.work):
        try:
            out([*itertools.chain.from_iterable(layers)], plan.start)
        except BaseException:
            proof.stop()
            raise
        proof.work()
    if proof.fault is not None:
        raise proof.fault
    return proof.digests


class _Proof:
    """Layers that have yet to be scanned and hashed, by whoever has time for it."""

    def __init__(self, kv: ChunkKV, views: list[list[memoryview]]) -> None:
        self._kv, self._views = kv, views
        self._left = deque(range(len(views)))
        self.digests = [NO_DIGEST] * len(views)
        self.fault: Exception | None = None

    def stop(self) -> None:
        """Begin no other layer."""
        self._left.clear()

    def work(self) -> None:
        """Scan and hash layers until none is left."""
        while True:
            try:
                index = self._left.popleft()
            except IndexError:
                return
            try:
                self.digests[index] = self._digest(index)
            except Exception as fault:
                self.fault = fault
                self.stop()

    def _digest(self, index: int) -> str:
        digest = xxhash.xxh3_128()
        for number, view in enumerate(self._views[index]):
            for part in _looked_at(view, self._kv.layers[index].tensors[number].dtype, index, number):
                digest.update(part)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Place:
    """Memory for a blob's data.

    Parameters
    ----------
    buffer
        uint8 ``(num_bytes,)`` on the host.
    view
        The same bytes.
    layers
        What the layers are there; ``None`` where a tensor can be made only of bytes that are read.
    """

    buffer: torch.Tensor
    view: memoryview
    layers: tuple[LayerKV, ...] | None


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
            raise BlobRejected("it is not a regular file") from None
        try:
            self.header, self._start, self._opening = _read_header(self._fd, status.st_size, max_header, guard)
        except BaseException:
            os.close(self._fd)
            raise
        tensors = self.header.tensors
        self._layers, self._offsets = tensors.layers, tensors.offsets
        self._is_good = [False] * len(self._layers)

    @property
    def good_layers(self) -> int:
        """Layers from 0 on that have been read and proven."""
        return [*self._is_good, False].index(False)

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

    def place(self, buffer: torch.Tensor) -> Place:
        """Say where all layers go: the start of ``buffer``, uint8 ``(num_bytes,)`` or longer."""
        buffer = buffer[: self._offsets[-1]]
        return Place(buffer, _view(buffer), self._alike(buffer))

    def layer(self, index: int, place: Place) -> LayerKV:
        """Read a layer to its place, and prove it; the tensors are views of the buffer.

        Raises
        ------
        BlobRejected
            If it does not have its digest.
        OSError
            If it can't be read.
        """
        start, end = self._offsets[index : index + 2]
        stored = self._stored(place.view[start:end])
        fill(self._fd, stored, self._start + start)
        return self._proven(index, place, stored)

    def all(self, place: Place) -> ChunkKV:
        """Read all layers at once, which is quicker for a small chunk, and prove each; raises as :meth:`layer`."""
        stored = self._stored(place.view)
        fill(self._fd, stored, self._start)
        layers = tuple(self._proven(i, place, stored[a:b]) for i, (a, b) in enumerate(pairwise(self._offsets)))
        return ChunkKV(layers, self.header.identity.kv_dtype)

    def _stored(self, view: memoryview) -> memoryview:
        """Memory for what is stored of a part: its own, or other one for what has yet to be decrypted."""
        if self._opening is None or not self._opening.guard.encrypts:
            return view
        return _view(torch.empty(len(view), dtype=torch.uint8))

    def _proven(self, index: int, place: Place, stored: memoryview) -> LayerKV:
        start, end = self._offsets[index : index + 2]
        if self._opening is not None:
            self._opening.layer(index, stored, place.view[start:end])
        elif xxhash.xxh3_128_hexdigest(stored) != self.header.digests[index]:
            raise BlobRejected("its data is damaged")
        self._is_good[index] = True
        if place.layers is not None:
            return place.layers[index]
        tensors = []
        for part in self._layers[index]:
            tensors.append(_typed(place.buffer[start : start + part.num_bytes], part))
            start += part.num_bytes
        return layer_of(self.header.dtype, tensors)

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
        raise BlobRejected("it belongs to another chunk")
    return blob


def fill(fd: int, view: memoryview, offset: int) -> None:
    """Read until ``view`` is full; a read may return less than asked for."""
    while view:
        count = os.preadv(fd, [view], offset)
        if not count:
            raise BlobRejected("it has the wrong length")
        view, offset = view[count:], offset + count


def _read_header(fd: int, file_size: int, limit: int, guard: Guard | None) -> tuple[Header, int, Opening | None]:
    """Return the header, the offset of the data, and what opens it; the file's length must be that of both together."""
    head = read_head(fd, file_size, limit)
    header, opening = (decode(head), None) if guard is None else guard.decode(head)
    if file_size != len(head) + header.num_bytes:
        raise BlobRejected("it has the wrong length")
    return header, len(head), opening


def read_head(fd: int, file_size: int, limit: int = MAX_HEADER_BYTES) -> bytearray:
    """Read a header, whatever it says."""
    first = bytearray(8)
    fill(fd, memoryview(first), 0)
    start = 8 + int.from_bytes(first, "little")
    if start > min(file_size, limit):
        raise BlobRejected("its header has an impossible length")
    head = bytearray(start)
    fill(fd, memoryview(head), 0)
    return head


def _typed(flat: torch.Tensor, part: Part) -> torch.Tensor:
    """See bytes as a tensor; scales behind an odd number of codes are copied first."""
    if flat.storage_offset() % part.dtype.itemsize:
        flat = flat.clone()
    return flat.view(part.dtype).view(part.shape)


def _view(flat: torch.Tensor) -> memoryview:
    return flat.numpy().data
