"""Write a blob: scanned for what is not finite, hashed, and its header last."""

from __future__ import annotations

import ctypes
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import xxhash

from kvrag.errors import StoreError
from kvrag.identity.weights import raw
from kvrag.store.blob import Plan, plan
from kvrag.store.draft import Gather
from kvrag.store.guard import Sealing
from kvrag.store.header import Header
from kvrag.store.helpers import HELPED_BYTES, HELPERS
from kvrag.store.scan import all_finite, all_finite_on_device
from kvrag.types import ChunkIdentity, ChunkKV, LayerKV

Write = Callable[[list[memoryview], int], None]
"""Takes bytes that follow each other in the file, and their offset."""

PART_BYTES = 1280 * 1024
"""What is scanned and hashed at once: short enough to stay in cache, long enough for few steps. Whole values of any dtype."""


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
    if is_helped:
        header, head = _write_helped(plan, kv, out)
    else:
        header = replace(plan.header, digests=tuple(_write_alone(plan, kv, out, sealing)))
        head = header.encode() if sealing is None else sealing.head(header)
    out([memoryview(head)], 0)
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


def _write_helped(plan: Plan, kv: ChunkKV, out: Write) -> tuple[Header, bytes]:
    """Write all but the header, and return that, while a helper scans and hashes: what it refuses is thrown away before it has a name.

    It is written with few calls: between two of them the interpreter would have to be won back from the helper each time.
    """
    views = [[_bytes_of(tensor) for tensor in layer.tensors] for layer in kv.layers]
    together = [*itertools.chain.from_iterable(views)]
    proof = _Proof(plan.header, kv, views)
    with HELPERS.help(proof.work):
        try:
            out(together, plan.start)
        except BaseException:
            proof.stop()
            raise
        proof.work()
    return proof.head()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """See a tensor's bytes, as :func:`~kvrag.identity.weights.raw` in a third of the time, for as long as somebody else keeps the tensor."""
    if not (tensor.is_cpu and tensor.is_contiguous()):
        return raw(tensor)
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


class _Proof:
    """Layers that have yet to be scanned and hashed, by whoever has time for it."""

    def __init__(self, header: Header, kv: ChunkKV, views: list[list[memoryview]]) -> None:
        self._header, self._layers, self._views = header, kv.layers, views
        self._left = deque(range(len(views)))
        self._digests: list[str | None] = [None] * len(views)
        self._fault: Exception | None = None
        self._head: tuple[Header, bytes] | None = None

    def head(self) -> tuple[Header, bytes]:
        """Return the header when nobody works any more, or raise what a layer was refused for."""
        if self._fault is not None:
            raise self._fault
        return self._head or self._make_head()

    def stop(self) -> None:
        """Begin no other layer."""
        self._left.clear()

    def work(self) -> None:
        """Scan and hash layers until none is left; whoever ends last makes the header."""
        try:
            while True:
                try:
                    index = self._left.popleft()
                except IndexError:
                    break
                self._digests[index] = self._digest(index)
            if None not in self._digests:
                self._head = self._make_head()
        except Exception as fault:
            self._fault = fault
            self.stop()

    def _make_head(self) -> tuple[Header, bytes]:
        digests = tuple(digest for digest in self._digests if digest is not None)
        assert len(digests) == len(self._layers), "every layer has been hashed"
        header = replace(self._header, digests=digests)
        return header, header.encode()

    def _digest(self, index: int) -> str:
        digest = xxhash.xxh3_128()
        for number, view in enumerate(self._views[index]):
            for part in _looked_at(view, self._layers[index].tensors[number].dtype, index, number):
                digest.update(part)
        return digest.hexdigest()


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
