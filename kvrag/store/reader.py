"""Read a blob layer by layer, by a few threads, in order: computing may start when layer 0 is there."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator

import torch

from kvrag.store.blob import Blob
from kvrag.store.header import BlobRejected
from kvrag.types import ChunkKV, LayerKV

HELPERS = 1 if (os.cpu_count() or 1) > 2 else 0
"""Threads beside the caller's own: one hashes while another one reads. With two processors that others use too, it costs more
than it saves."""

SMALL_BYTES = 16 * 2**20
"""Shorter blobs are read by the caller alone; a thread would come too late."""


def read_layers(blob: Blob, buffer: torch.Tensor, *, helpers: int = HELPERS) -> Generator[LayerKV, None, None]:
    """Yield the layers of a blob in order, each proven; the tensors are views of ``buffer``.

    The caller's thread reads too, layer 0 first, so it never waits for what nobody has begun.

    Parameters
    ----------
    blob
        The open blob; it must stay open until the iterator is exhausted or closed.
    buffer
        uint8 ``(num_bytes,)`` on the host.
    helpers
        Threads that read ahead.

    Raises
    ------
    BlobRejected, OSError
        At the first layer that is damaged or can't be read; those before it are good.
    """
    job = _Job(blob, buffer)
    threads: list[threading.Thread] = []
    try:
        yield job.wait_for(0)  # before any thread is started, which may take longer
        for _ in range(helpers if blob.header.num_bytes >= SMALL_BYTES else 0):
            thread = threading.Thread(target=job.help, name="kvrag-layers", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # too many threads, or the interpreter is about to exit
                break
            threads.append(thread)
        for index in range(1, blob.num_layers):
            yield job.wait_for(index)
    finally:
        job.stop()
        for thread in threads:
            thread.join()


def read_all(blob: Blob, buffer: torch.Tensor, *, helpers: int = HELPERS) -> ChunkKV:
    """Read and prove all layers; raises as :func:`read_layers`."""
    if blob.header.num_bytes < SMALL_BYTES:
        return blob.all(buffer)
    return ChunkKV(tuple(read_layers(blob, buffer, helpers=helpers)), blob.header.identity.kv_dtype)


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

    def __init__(self, blob: Blob, buffer: torch.Tensor) -> None:
        self._blob, self._buffer = blob, buffer
        self._next = 0
        self._done: dict[int, LayerKV | Exception] = {}
        self._changed = threading.Condition()

    def wait_for(self, index: int) -> LayerKV:
        """Return a layer, and read those before it, or it, or those after it, as long as it is not there."""
        while True:
            with self._changed:
                if index < self._next:
                    self._changed.wait_for(lambda: index in self._done)
                    found = self._done.pop(index)
                    if isinstance(found, Exception):
                        raise found
                    return found
            self._step()

    def help(self) -> None:
        """Read layers until none is left."""
        while self._step():
            pass

    def stop(self) -> None:
        """Let nobody begin another layer."""
        with self._changed:
            self._next = self._blob.num_layers

    def _step(self) -> bool:
        with self._changed:
            index = self._next
            if index >= self._blob.num_layers:
                return False
            self._next += 1
        result: LayerKV | Exception
        try:
            result = self._blob.layer(index, self._buffer)
        except Exception as error:
            result = error
        with self._changed:
            self._done[index] = result
            self._changed.notify_all()
        return not isinstance(result, Exception)
