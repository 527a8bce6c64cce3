"""Read a blob layer by layer, by a few threads, in order: computing may start when layer 0 is there."""

from __future__ import annotations

import errno
import functools
import os
from collections import deque
from collections.abc import Callable, Generator
from contextlib import ExitStack
from itertools import pairwise
from queue import SimpleQueue

import torch

from kvrag.store.blob import Blob, Place
from kvrag.store.header import BlobRejected
from kvrag.store.helpers import HELPED_BYTES, HELPERS
from kvrag.types import ChunkKV, LayerKV

STEP_BYTES = 2**20
"""What is read at once: after a short read a thread would have to win the interpreter back from the other one again and again."""


def read_layers(blob: Blob, buffer: torch.Tensor, *, is_helped: bool = True) -> Generator[LayerKV, None, None]:
    """Yield the layers of a blob in order, each proven; the tensors are views of ``buffer``.

    The caller's thread reads too, so it never waits for what nobody has begun.

    Parameters
    ----------
    blob
        The open blob; it must stay open until the iterator is exhausted or closed.
    buffer
        uint8 ``(num_bytes,)`` on the host.
    is_helped
        Whether other threads may read ahead.

    Raises
    ------
    BlobRejected, OSError
        At the first layer that is damaged or can't be read; those before it are good.
    """
    place = blob.place(buffer)
    job = _Job(blob, place)
    is_helped = is_helped and blob.header.num_bytes >= HELPED_BYTES
    with ExitStack() as helps:
        for _ in range(min(HELPERS.count, len(job.steps) - 1) if is_helped else 0):
            helps.enter_context(HELPERS.help(job.help))
        helps.callback(job.stop)  # runs first: then helpers are waited for
        layers = blob.tensors(place)
        for number, step in enumerate(job.steps):
            fault = job.wait_for(number)
            for index in step:
                if fault is not None and not blob.is_good(index):
                    raise fault
                yield layers[index]


def read_all(blob: Blob, buffer: torch.Tensor, *, is_helped: bool = True) -> ChunkKV:
    """Read and prove all layers; raises as :func:`read_layers`."""
    if blob.header.num_bytes >= HELPED_BYTES:
        layers = tuple(read_layers(blob, buffer, is_helped=is_helped))
    else:
        place = blob.place(buffer)
        blob.load(range(blob.num_layers), place)
        layers = tuple(blob.tensors(place))
    return ChunkKV(layers, blob.header.identity.kv_dtype)


@functools.lru_cache(maxsize=256)
def steps_of(offsets: tuple[int, ...], step_bytes: int) -> tuple[range, ...]:
    """Cut layers into runs that are read at once: layer 0 by itself, because it is waited for; then as many as make a long read."""
    ends = [1]
    for layer in range(1, len(offsets) - 1):
        if offsets[layer + 1] - offsets[ends[-1]] >= step_bytes or layer == len(offsets) - 2:
            ends.append(layer + 1)
    return tuple(range(start, end) for start, end in pairwise([0, *ends]))


class LayerStream:
    """Layers of a chunk in a file; the :class:`~kvrag.store.layers.Layers` of the disk.

    Parameters
    ----------
    blob
        The open blob; it is closed with the stream.
    layers
        From :func:`read_layers`.
    rejected, failed
        Told why the stream ended early: damage, or a fault of the disk.
    """

    def __init__(
        self,
        blob: Blob,
        layers: Generator[LayerKV, None, None],
        *,
        rejected: Callable[[str], None],
        failed: Callable[[OSError], None],
    ) -> None:
        self._blob, self._layers = blob, layers
        self._rejected, self._failed = rejected, failed
        self._closed = False
        self.num_layers = blob.num_layers
        """Layers of the chunk; fewer may come."""
        self.num_bytes = blob.header.num_bytes
        self.kv_dtype = blob.header.identity.kv_dtype

    def __iter__(self) -> LayerStream:
        return self

    def __next__(self) -> LayerKV:
        try:
            return next(self._layers)
        except StopIteration:
            self.close()
        except BlobRejected as fault:
            self.close()
            self._rejected(fault.reason)
        except OSError as error:
            self.close()
            self._failed(error)
        except BaseException:
            self.close()  # no other layer will come
            raise
        raise StopIteration

    def close(self) -> None:
        """Close the file; idempotent."""
        if not self._closed:
            self._closed = True
            self._layers.close()
            self._blob.close()

    def __enter__(self) -> LayerStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Job:
    """One blob: which of its steps nobody has begun, and what became of the others."""

    def __init__(self, blob: Blob, place: Place) -> None:
        self._blob, self._place, self._pid = blob, place, os.getpid()
        self.steps = steps_of(blob.header.tensors.offsets, STEP_BYTES)
        self._left = deque(range(len(self.steps)))
        self._done: dict[int, Exception | None] = {}
        self._helped: SimpleQueue[tuple[int, Exception | None]] = SimpleQueue()

    def wait_for(self, number: int) -> Exception | None:
        """Take steps as long as this one is not done; returns its fault. Raises ``OSError`` in a child that was forked meanwhile."""
        while number not in self._done:
            done = self._step() if self._helped.empty() else None
            if done is None and self._pid != os.getpid():
                raise OSError(errno.ESRCH, "the thread that reads it is in another process")
            other, fault = done or self._helped.get()
            self._done[other] = fault
        return self._done.pop(number)

    def help(self) -> None:
        """Take steps until none is left."""
        while (done := self._step()) is not None:
            self._helped.put(done)

    def stop(self) -> None:
        """Let nobody begin another step."""
        self._left.clear()

    def _step(self) -> tuple[int, Exception | None] | None:
        """Take the next step and return its number and its fault; ``None`` if every step is begun."""
        try:
            number = self._left.popleft()
        except IndexError:
            return None
        try:
            self._load(self.steps[number])
        except Exception as fault:
            self.stop()
            return number, fault
        return number, None

    def _load(self, layers: range) -> None:
        try:
            self._blob.load(layers, self._place)
        except OSError:
            for index in layers:  # those before the fault may be good
                self._blob.load(range(index, index + 1), self._place)
