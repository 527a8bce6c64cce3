"""CUDA driver by ctypes.

Loads a cubin into torch's own context, and launches it with a by-value struct on torch's current
stream.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

import torch

from kvrag_kernels.launch import MAP_ALIGNMENT, map_sizes

_MAX_DYNAMIC_SHARED_BYTES = 8
"""``CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES``."""

DEFAULT_SHARED_BYTES = 48 * 1024
"""Shared memory that a kernel may use without an attribute that asks for more."""

_NUM_REGISTERS = 4
"""``CU_FUNC_ATTRIBUTE_NUM_REGS``."""

_MAP_TYPES = {torch.float16: 6, torch.bfloat16: 9}
"""``CUtensorMapDataType``."""

# The other options of a map are 0: no interleaving, zeros beyond the tensor.
_SWIZZLE_128_BYTES = 3  # CUtensorMapSwizzle
_PROMOTE_TO_256_BYTES = 3  # CUtensorMapL2promotion

_MAP_COLUMNS = 64
"""Columns of a box: 128 bytes of 16-bit elements, the swizzle's width."""


_FAULTS = frozenset({700, 702, 710, *range(714, 720)})
"""``CUresult`` after an earlier kernel faulted; the driver returns it for every later call, too."""


class DriverError(RuntimeError):
    """The driver is missing, or refused to load or launch a kernel."""


class DeviceFault(RuntimeError):
    """An earlier kernel has faulted and ended the process's CUDA context.

    No kernel can run on the device any more.
    """


@cache
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError as error:
        raise DriverError(
            f"the CUDA driver's library could not be loaded ({error}); install the NVIDIA driver"
        ) from error


def _check(code: int, doing: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _library().cuGetErrorString(code, ctypes.byref(text))
        what = f"{doing} failed: {(text.value or b'unknown error').decode()} (CUresult {code})"
        if code in _FAULTS:
            raise DeviceFault(
                f"{what}; a kernel before it faulted and ended the CUDA context: start the process "
                "anew, and look for that kernel with "
                "CUDA_LAUNCH_BLOCKING=1"
            )
        raise DriverError(what)


class CudaModule:
    """A cubin loaded on a device.

    Parameters
    ----------
    cubin
        Bytes of the cubin.
    device
        Index of the device; torch has created its context.
    """

    def __init__(self, cubin: bytes, device: int) -> None:
        self._device = device
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._functions: dict[tuple[str, int], ctypes.c_void_p] = {}
        self._module = ctypes.c_void_p()
        self._context = ctypes.c_void_p()
        with torch.cuda.device(device):
            number = ctypes.c_int()
            library = _library()
            _check(
                library.cuDeviceGet(ctypes.byref(number), ctypes.c_int(device)),
                f"finding device {device}",
            )
            # Never released: kernels stay loaded as long as the process.
            _check(
                library.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), number),
                "retaining torch's context",
            )
            self._make_current()
            _check(library.cuModuleLoadData(ctypes.byref(self._module), cubin), "loading a kernel")

    def _make_current(self) -> None:
        """Make torch's context of the device current in this thread.

        A thread that has not called CUDA yet has no context.
        """
        current = ctypes.c_void_p()
        _check(_library().cuCtxGetCurrent(ctypes.byref(current)), "asking for the thread's context")
        if current.value != self._context.value:
            _check(_library().cuCtxSetCurrent(self._context), "making torch's context current")

    def registers(self, kernel: str) -> int:
        """Return the registers per thread of a kernel at its launch."""
        count = ctypes.c_int()
        code = _library().cuFuncGetAttribute(
            ctypes.byref(count), _NUM_REGISTERS, self._function(kernel, 0)
        )
        _check(code, f"asking for the registers of {kernel}")
        return count.value

    def _function(self, kernel: str, shared_bytes: int) -> ctypes.c_void_p:
        key = (kernel, shared_bytes)
        if key not in self._functions:
            function = ctypes.c_void_p()
            _check(
                _library().cuModuleGetFunction(
                    ctypes.byref(function), self._module, kernel.encode()
                ),
                f"finding {kernel}",
            )
            # The driver refuses a launch with more than the default, unless the function has asked
            # for it.
            if shared_bytes > DEFAULT_SHARED_BYTES:
                code = _library().cuFuncSetAttribute(
                    function, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes
                )
                _check(code, f"reserving {shared_bytes} bytes of shared memory for {kernel}")
            self._functions[key] = function
        return self._functions[key]

    def tensor_map(self, x: torch.Tensor, box_rows: int) -> bytes:
        """Encode a ``CUtensorMap`` of ``(B, H, N, D)``.

        Elements have 16 bits, ``D`` is contiguous, and other strides are multiples of 16 bytes.
        """
        sizes, strides = map_sizes(x)
        buffer = ctypes.create_string_buffer(128 + MAP_ALIGNMENT)
        # ctypes aligns buffers less than the driver wants its maps.
        start = -ctypes.addressof(buffer) % MAP_ALIGNMENT
        u32 = ctypes.c_uint32 * 4
        code = _library().cuTensorMapEncodeTiled(
            ctypes.c_void_p(ctypes.addressof(buffer) + start),
            ctypes.c_int(_MAP_TYPES[x.dtype]),
            ctypes.c_uint32(4),
            ctypes.c_void_p(x.data_ptr()),
            (ctypes.c_uint64 * 4)(*sizes),
            (ctypes.c_uint64 * 3)(*strides),
            u32(_MAP_COLUMNS, box_rows, 1, 1),
            u32(1, 1, 1, 1),
            *(ctypes.c_int(x) for x in (0, _SWIZZLE_128_BYTES, _PROMOTE_TO_256_BYTES, 0)),
        )
        _check(
            code,
            f"describing keys of shape {tuple(x.shape)} and strides {x.stride()} to the copy unit",
        )
        return buffer.raw[start : start + 128]

    def launch(
        self, kernel: str, blocks: int, threads: int, shared_bytes: int, arguments: bytes
    ) -> None:
        """Launch a one-dimensional grid on torch's current stream of the device.

        The launch can be captured into a CUDA graph.
        """
        self._make_current()
        function = self._function(kernel, shared_bytes)
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        buffer = ctypes.create_string_buffer(arguments, len(arguments))
        # A single argument: the struct, by value.
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        u = ctypes.c_uint
        code = _library().cuLaunchKernel(
            function,
            u(blocks),
            u(1),
            u(1),
            u(threads),
            u(1),
            u(1),
            u(shared_bytes),
            stream,
            pointers,
            None,
        )
        _check(code, f"launching {kernel}")
