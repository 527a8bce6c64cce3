"""The CUDA driver by ctypes: load a cubin into torch's own context, launch with one by-value struct on torch's current stream."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

import torch

_MAX_DYNAMIC_SHARED_BYTES = 8
"""``CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES``."""

DEFAULT_SHARED_BYTES = 48 * 1024
"""What a kernel may use without asking for more."""


class DriverError(RuntimeError):
    """The driver is missing, or refused to load or launch a kernel."""


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
        raise DriverError(f"{doing} failed: {(text.value or b'unknown error').decode()} (CUresult {code})")


class CudaModule:
    """A cubin on one device.

    Parameters
    ----------
    cubin
        Its bytes.
    device
        Index of the device; torch has made its context.
    """

    def __init__(self, cubin: bytes, device: int) -> None:
        self._device = device
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._functions: dict[tuple[str, int], ctypes.c_void_p] = {}
        self._module = ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # makes the primary context current in this thread
            _check(_library().cuModuleLoadData(ctypes.byref(self._module), cubin), "loading a kernel")

    def _function(self, kernel: str, shared_bytes: int) -> ctypes.c_void_p:
        key = (kernel, shared_bytes)
        if key not in self._functions:
            function = ctypes.c_void_p()
            _check(
                _library().cuModuleGetFunction(ctypes.byref(function), self._module, kernel.encode()),
                f"finding {kernel}",
            )
            if shared_bytes > DEFAULT_SHARED_BYTES:
                code = _library().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes)
                _check(code, f"reserving {shared_bytes} bytes of shared memory for {kernel}")
            self._functions[key] = function
        return self._functions[key]

    def launch(self, kernel: str, blocks: int, threads: int, shared_bytes: int, arguments: bytes) -> None:
        """Launch a one-dimensional grid on torch's current stream of the device; capturable into a CUDA graph."""
        function = self._function(kernel, shared_bytes)
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        buffer = ctypes.create_string_buffer(arguments, len(arguments))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        u = ctypes.c_uint
        code = _library().cuLaunchKernel(
            function, u(blocks), u(1), u(1), u(threads), u(1), u(1), u(shared_bytes), stream, pointers, None
        )
        _check(code, f"launching {kernel}")
