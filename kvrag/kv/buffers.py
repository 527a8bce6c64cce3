"""Reusable host memory for stored KV.

It is page-locked on machines with CUDA, so that copies to a device run asynchronously. Torch's own
allocator of pinned memory rounds sizes up to powers of two, up to twice the size of the KV; here
the overhead is at most a sixteenth.
"""

from __future__ import annotations

import logging
import mmap
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import torch
from torch import Tensor

from kvrag.types import ChunkKV

logger = logging.getLogger(__name__)

IDLE_BYTES = 256 * 2**20  # maximum memory kept for reuse
SMALL_BYTES = 64 * 1024  # smaller buffers are not worth keeping
PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all devices
TAKEN = (208, 712)  # cudaErrorAlreadyMapped, cudaErrorHostMemoryAlreadyRegistered
MAX_PLACES = 3  # addresses to try for a buffer if the driver takes them for locked


class Buffers:
    """Pool of memory for KV; a buffer returns to it when its last view is gone.

    A fresh page costs as much as reading its content, and a page-locked page costs more.
    """

    def __init__(self) -> None:
        # By size. No lock: a buffer may come back at any moment, in a thread that holds any lock,
        # or in a forked child.
        self._idle: dict[int, list[Tensor]] = {}

    def take(self, num_bytes: int) -> memoryview:
        """Return ``num_bytes`` writable bytes, not initialised; raises ``MemoryError``."""
        if num_bytes < SMALL_BYTES:
            return memoryview(bytearray(num_bytes))
        let_go()
        step = 2 ** (num_bytes.bit_length() - 1) // 16  # chunks of similar length share buffers
        size = -(-num_bytes // step) * step
        try:
            try:
                owner = self._idle[size].pop()
            except LookupError:
                owner = page_locked(size)
        except (RuntimeError, OSError) as error:
            raise MemoryError(f"cannot allocate memory for {num_bytes} bytes of KV") from error
        array = owner.numpy()
        # Views of the array keep it alive.
        weakref.finalize(array, self._come_back, owner, os.getpid())
        return array.data[:num_bytes]

    def _come_back(self, owner: Tensor, process: int) -> None:
        if process != os.getpid():  # page-locked memory is shared with the parent
            return
        idle = sum(size * len(buffers) for size, buffers in list(self._idle.items()))
        if idle + owner.numel() <= IDLE_BYTES:
            self._idle.setdefault(owner.numel(), []).append(owner)


# Pool of all stores of this process.
BUFFERS = Buffers()


# Memory that the driver refused to unlock.
_stuck = list[mmap.mmap]()
# What copies under way read, by an event behind them.
# Torch's allocators don't know that the device reads this module's memory.
_sources = dict[torch.cuda.Event, object]()


_streams = dict[torch.device, torch.cuda.Stream]()


def let_go() -> None:
    """Let go of the sources whose copies are done; never waits."""
    for event in list(_sources):
        if event.query():  # type: ignore[no-untyped-call]
            _sources.pop(event, None)  # another thread may have done so


@contextmanager
def held(sources: object, stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Queue copies on a stream, and keep what they read alive until they are done, without waiting.

    ``None`` stands for a device whose copies are done when they return.
    """
    if stream is None:
        yield
        return
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        _sources[stream.record_event()] = sources


def copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return the stream of all copies of stored KV to a device; ``None`` if it is no CUDA device.

    Who reads a chunk on this stream comes after the copies that bring it. Memory that is allocated
    there is used again there, in order.
    """
    if device.type == "cuda" and device not in _streams:  # two threads get one stream
        _streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    return _streams.get(device)


# In a forked child, copies and page-locked buffers are the parent's.
os.register_at_fork(after_in_child=_sources.clear)
os.register_at_fork(after_in_child=BUFFERS._idle.clear)


def pinned(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host in memory from which a copy to the device is asynchronous."""
    return x.pin_memory() if device.type == "cuda" else x


def page_locked(num_bytes: int) -> Tensor:
    """Return page-locked memory, uint8, that a CUDA device reads without the host's help.

    It is ordinary memory without a device, if the driver refuses to lock more, and in a process
    that was forked after its parent used CUDA.

    Raises
    ------
    OSError, RuntimeError
        If memory can't be allocated.
    """
    # A range of addresses that the driver takes for locked stays mapped until another is found.
    places = list[mmap.mmap]()
    with suppress(RuntimeError):
        while torch.cuda.is_available() and len(places) < MAX_PLACES:
            # Shared: of private pages, the device may read others than the process after a fork.
            places.append(mmap.mmap(-1, num_bytes))
            array = np.frombuffer(places[-1], np.uint8)
            address = array.ctypes.data
            error = _ask("Register", address, num_bytes, PORTABLE)
            if not error:
                # Not at exit: the driver may be gone.
                weakref.finalize(array, _unlock, places[-1], address).atexit = False
                return torch.from_numpy(array)
            if error not in TAKEN:
                break
    return torch.empty(num_bytes, dtype=torch.uint8)


def _unlock(memory: mmap.mmap, address: int) -> None:
    """Unlock memory.

    If it stays locked, it stays mapped: the driver would refuse to lock what comes after it at its
    address.
    """
    with suppress(RuntimeError):
        if _ask("Unregister", address):
            _stuck.append(memory)


def _ask(what: str, *given: int) -> int:
    """Have the driver register or unregister memory, and return its error, 0 for success.

    The error is logged and cleared, because the next kernel launch would raise it. Raises
    ``RuntimeError`` in a process that was forked after its parent used CUDA.
    """
    error = int(
        getattr(torch.cuda.cudart(), f"cudaHost{what}")(*given)  # type: ignore[no-untyped-call]
    )
    if error:
        logger.warning("cudaHost%s fails with error %d", what, error)
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")
    return error


def arrived(kv: ChunkKV) -> ChunkKV:
    """Let the current stream read a chunk that a copy may still bring, and return the chunk."""
    device = kv.layers[0].keys.device
    copies = copy_stream(device)
    if copies is not None:
        current = torch.cuda.current_stream(device)
        current.wait_stream(copies)
        for layer in kv.layers:
            for x in layer.tensors:
                x.record_stream(current)
    return kv
