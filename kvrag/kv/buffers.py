"""Reusable host memory for stored KV.

It is page-locked on machines with CUDA, so that copies to a device run asynchronously. Torch's own
allocator of pinned memory rounds sizes up to powers of two, up to twice the size of the KV; here
the overhead is at most a sixteenth.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from contextlib import suppress
from itertools import accumulate

import numpy as np
import torch

from kvrag.kv.layers import PLACE_BYTES, layer_of
from kvrag.types import ChunkKV

logger = logging.getLogger(__name__)

IDLE_BYTES = 256 * 2**20  # maximum memory kept for reuse
SMALL_BYTES = 64 * 1024  # smaller buffers are not worth keeping
PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all devices


class Buffers:
    """Pool of memory for KV; a buffer returns to it when its last view is gone.

    A fresh page costs as much as reading its content, and a page-locked page costs more.
    """

    def __init__(self) -> None:
        # By size. No lock: a buffer may come back at any moment, in a thread that holds any lock,
        # or in a forked child.
        self._idle: dict[int, list[torch.Tensor]] = {}

    def take(self, num_bytes: int) -> memoryview:
        """Return ``num_bytes`` writable bytes, not initialised; raises ``MemoryError``."""
        if num_bytes < SMALL_BYTES:
            return memoryview(bytearray(num_bytes))
        step = 2 ** (num_bytes.bit_length() - 1) // 16  # chunks of similar length share buffers
        size = -(-num_bytes // step) * step
        idle = self._idle.get(size)
        try:
            if idle:
                owner = idle.pop()
            elif torch.cuda.is_available():
                owner = page_locked(size)
            else:
                owner = torch.empty(size, dtype=torch.uint8)
        except (RuntimeError, OSError) as error:
            raise MemoryError(f"cannot allocate memory for {num_bytes} bytes of KV") from error
        array = owner.numpy()
        weakref.finalize(array, self._come_back, owner)  # views of the array keep it alive
        return array.data[:num_bytes]

    def _come_back(self, owner: torch.Tensor) -> None:
        idle = sum(size * len(buffers) for size, buffers in list(self._idle.items()))
        if idle + owner.numel() <= IDLE_BYTES:
            self._idle.setdefault(owner.numel(), []).append(owner)


BUFFERS = Buffers()
"""Pool of all stores of this process."""


def page_locked(num_bytes: int) -> torch.Tensor:
    """Return page-locked memory, uint8, that the device reads without the host's help.

    It is ordinary memory if the driver refuses to lock more.

    Raises
    ------
    OSError
        If memory can't be allocated.
    """
    array = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if _is_done(int(runtime.cudaHostRegister(array.ctypes.data, num_bytes, PORTABLE)), "lock"):
        weakref.finalize(array, _unlock, array.ctypes.data).atexit = False  # the driver may be gone
    return torch.from_numpy(array)


def _unlock(address: int) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    _is_done(int(runtime.cudaHostUnregister(address)), "unlock")


def _is_done(error: int, what: str) -> bool:
    """Whether the driver succeeded.

    If not, log its error and clear it, because the next kernel launch would raise it.
    """
    if error:
        logger.warning(
            "CUDA refused to %s pages of the host's memory (error %d); their copies are slower",
            what,
            error,
        )
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")
    return not error


def copied(kv: ChunkKV) -> ChunkKV:
    """Return a copy of a chunk in a single buffer; raises ``MemoryError``.

    The buffer is laid out as on a device, so that the transfer takes few copies.
    """
    rows = [layer.tensors for layer in kv.layers]
    sizes = [-(-x.nbytes // PLACE_BYTES) * PLACE_BYTES for row in rows for x in row]
    whole = torch.frombuffer(BUFFERS.take(sum(sizes)), dtype=torch.uint8)
    places = iter(accumulate(sizes, initial=0))
    dtype = kv.layers[0].dtype
    own = [
        [
            whole[(at := next(places)) : at + x.nbytes].view(x.dtype).view(x.shape).copy_(x)
            for x in row
        ]
        for row in rows
    ]
    return ChunkKV(tuple([layer_of(dtype, row) for row in own]))
