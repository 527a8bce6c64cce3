"""Read a blob layer by layer, by a few threads, in order: computing may start when layer 0 is there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from contextlib import ExitStack
from queue import SimpleQueue

import torch

from kvrag.store.blob import HELPED_BYTES, Blob, Place
from kvrag.store.header import BlobRejected
from kvrag.store.helpers import HELPERS
from kvrag.types import ChunkKV, LayerKV


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
    if not is_helped or not HELPERS.count or blob.header.num_bytes < HELPED_BYTES:
        for index in range(blob.num_layers):
            yield blob.layer(index, place)
        return
    job = _Job(blob, place)
    with ExitStack() as helps:
        for _ in range(min(HELPERS.count, blob.num_layers - 1)):
            helps.enter_context(HELPERS.help(job.help))
        helps.callback(job.stop)  # runs first: then helpers are waited for
        for index in range(blob.num_layers):
            yield job.wait_for(index)


def read_all(blob: Blob, buffer: torch.Tensor, *, is_helped: bool = True) -> ChunkKV:
    """Read and prove all layers; raises as :func:`read_layers`."""
    if blob.header.num_bytes < HELPED_BYTES:
        return blob.all(blob.place(buffer))
    return ChunkKV(tuple(read_layers(blob, buffer, is_helped=is_helped)), blob.header.identity.kv_dtype)


class LayerStream:
    """Layers of a chunk, in order, each proven when it is given; an iterator and a context manager.

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
    """One blob: which layers nobody has begun, and what became of the others."""

    def __init__(self, blob: Blob, place: Place) -> None:
        self._blob, self._place = blob, place
        self._left = deque(range(blob.num_layers))
        self._done: dict[int, LayerKV | Exception] = {}
        self._helped: SimpleQueue[tuple[int, LayerKV | Exception]] = SimpleQueue()

    def wait_for(self, index: int) -> LayerKV:
        """Return a layer, and read others as long as it is not there."""
        while index not in self._done:
            done = self._step() if self._helped.empty() else None
            number, result = done or self._helped.get()
            self._done[number] = result
        found = self._done.pop(index)
        if isinstance(found, Exception):
            raise found
        return found

    def help(self) -> None:
        """Read layers until none is left."""
        while (done := self._step()) is not None:
            self._helped.put(done)

    def stop(self) -> None:
        """Let nobody begin another layer."""
        self._left.clear()

    def _step(self) -> tuple[int, LayerKV | Exception] | None:
        """Read the next layer; ``None`` if every layer is begun."""
        try:
            index = self._left.popleft()
        except IndexError:
            return None
        try:
            return index, self._blob.layer(index, self._place)
        except Exception as error:
            self.stop()
            return index, error
