"""Compile the kernels' own source with g++ against ``emu.h``, and launch it like a module of the device."""

import ctypes
import hashlib
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from kvrag_kernels import launch, nvrtc

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
_BUILT = Path(tempfile.gettempdir()) / "kvrag-emulator"


class EmulatorError(AssertionError):
    """What the emulator found: a race, a touch out of bounds, a deadlock, a copy read before it landed."""


def compile_source(text: str, options: Sequence[str], arch: int = 900) -> ctypes.CDLL:
    """Compile a kernel's flat source; a library that was built before is loaded again."""
    flags = [
        "-std=c++17",
        "-O1",
        "-w",
        "-shared",
        "-fPIC",
        "-DKV_EMU",
        f"-DEMU_ARCH={arch}",
        f"-I{HERE}",
        *options,
    ]
    headers = [path.read_text() for path in sorted(HERE.glob("*.h"))]
    digest = hashlib.sha256("\0".join([text, *headers, *flags]).encode()).hexdigest()[:24]
    library = _BUILT / f"{digest}.so"
    if not library.exists():
        _BUILT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_BUILT) as folder:
            source, made = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
            source.write_text(text)
            done = subprocess.run(
                [str(COMPILER), *flags, str(source), "-o", str(made)],
                capture_output=True,
                text=True,
            )
            if done.returncode:
                raise RuntimeError(f"the emulator's build failed:\n{done.stderr[:4000]}")
            made.replace(library)
    # A private copy, so that two tests never share the machine's state through one loaded library.
    return ctypes.CDLL(str(library))


class EmulatedModule:
    """A compiled variant in the emulator.

    Parameters
    ----------
    name
        Source file in ``csrc``.
    options
        ``-D`` options of the variant.
    processors
        Multiprocessors to pretend, for the plan.
    seed
        Order in which warps run.
    replace
        Planted bugs: pairs of text to find, exactly once, and what to put there.
    """

    def __init__(
        self,
        name: str,
        options: Sequence[str],
        *,
        processors: int = 4,
        seed: int = 0,
        arch: int = 900,
        replace: Iterable[tuple[str, str]] = (),
    ) -> None:
        text = nvrtc.flat(name)
        for old, new in replace:
            if text.count(old) != 1:
                raise RuntimeError(f"{old!r} occurs {text.count(old)} times")
            text = text.replace(old, new)
        self.processors, self._seed = processors, seed
        self._library = compile_source(text, options, arch)
        self._library.emu_error.restype = ctypes.c_char_p
        self._library.emu_bank_conflicts.restype = ctypes.c_uint64
        self.bank_conflicts = 0
        self._tensors: list[torch.Tensor] = []

    def allow(self, inputs: Iterable[torch.Tensor | None], outputs: Iterable[torch.Tensor]) -> None:
        """Register the memory that kernels may read, and write."""
        self._library.emu_forget()
        for writable, tensors in ((0, inputs), (1, outputs)):
            for x in tensors:
                if x is not None and x.numel():
                    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1
                    size = ctypes.c_uint64(last * x.element_size())
                    self._library.emu_register(ctypes.c_void_p(x.data_ptr()), size, writable)

    def tensor_map(self, x: torch.Tensor, box_rows: int) -> bytes:
        """Encode what ``emu_sm90.h`` reads in place of the driver's map."""
        sizes, strides = launch.map_sizes(x)
        assert all(s % 16 == 0 and 0 < s < 2**40 for s in strides), (
            "the driver would refuse these strides"
        )
        assert x.data_ptr() % 16 == 0, "the driver would refuse this address"
        return struct.pack("Q 7q I 4x", x.data_ptr(), *sizes, *strides, box_rows).ljust(128, b"\0")

    def launch(
        self, kernel: str, blocks: int, threads: int, shared_bytes: int, arguments: bytes
    ) -> None:
        """Run a kernel's blocks one after the other."""
        run = getattr(self._library, kernel)
        assert getattr(self._library, f"{kernel}_params")() == len(arguments), (
            "the struct and its packing differ"
        )
        grid = (ctypes.c_uint * 3)(blocks, 1, 1)
        if run(arguments, grid, ctypes.c_uint(shared_bytes), ctypes.c_uint(self._seed)):
            raise EmulatorError(self._library.emu_error().decode())
        self.bank_conflicts += self._library.emu_bank_conflicts()
