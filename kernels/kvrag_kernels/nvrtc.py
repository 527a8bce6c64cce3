"""Compile kernels with NVRTC and cache the cubins.

NVRTC is the compiler library that torch's CUDA wheels bring along; no toolkit and no headers are
needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

CSRC = Path(__file__).parent / "csrc"
_INCLUDE = re.compile(r'^#include "(?!emu\.h)([a-z_0-9]+\.cuh)"$', re.MULTILINE)

FLAGS = ("--std=c++17", "--ptxas-options=-v")
"""Options of every compilation, beside the architecture and the variant's own options."""


class CompileError(RuntimeError):
    """NVRTC is missing or refused a kernel."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Registers and spills that ptxas reports of a kernel."""

    registers: int
    spill_bytes: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """A cubin, the usage of its kernels by name, and the compiler's log."""

    cubin: bytes
    usage: dict[str, Usage]
    log: str = ""


class Nvrtc:
    """A loaded NVRTC library.

    Parameters
    ----------
    path
        Path of the library; its ``nvrtc-builtins`` is looked for beside it.
    """

    def __init__(self, path: str) -> None:
        for builtins in (
            sorted(Path(path).parent.glob("libnvrtc-builtins.so*")) if os.sep in path else ()
        ):
            if ".alt." not in builtins.name:
                # Else NVRTC fails with BUILTIN_OPERATION_FAILURE when it is loaded by path.
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        self._library = ctypes.CDLL(path)
        major = ctypes.c_int()
        minor = ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.path = path
        self.version = (major.value, minor.value)

    def _check(self, code: int) -> None:
        if code:
            # By default, ctypes takes a result for an int, and cuts a pointer to 32 bits.
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise CompileError(f"NVRTC failed: {self._library.nvrtcGetErrorString(code).decode()}")

    def archs(self) -> tuple[int, ...]:
        """Return the architectures that NVRTC compiles for, as 75, 80, …, 120."""
        count = ctypes.c_int()
        self._check(self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        found = (ctypes.c_int * count.value)()
        self._check(self._library.nvrtcGetSupportedArchs(found))
        return tuple(found)

    def nearest(self, arch: str) -> str:
        """Return the architecture, or the newest known architecture whose cubins it runs.

        That is an architecture of the same major version and no newer minor version. Cubins of
        ``sm_90a`` run on no other architecture, so a name with ``a`` has no other nearest.
        """
        wanted = int(arch[3:].removesuffix("a"))
        if arch.endswith("a") and wanted in self.archs():
            return arch
        known = [
            a
            for a in self.archs()
            if a // 10 == wanted // 10 and a <= wanted and not arch.endswith("a")
        ]
        if not known:
            raise CompileError(
                f"NVRTC {self.version[0]}.{self.version[1]} knows no architecture that {arch} "
                "runs; install a newer one"
            )
        return f"sm_{max(known)}"

    def compile(self, source: str, options: Sequence[str], arch: str) -> Compiled:
        """Compile to a cubin.

        Every driver of the toolkit's major version loads cubins, unlike PTX.

        Parameters
        ----------
        source
            Flat source text.
        options
            ``-D`` options.
        arch
            Architecture, as ``sm_90``.

        Raises
        ------
        CompileError
            With the compiler's log.
        """
        flags = [f"--gpu-architecture={arch}", *FLAGS, *options]
        program = ctypes.c_void_p()
        text = source.encode()
        self._check(
            self._library.nvrtcCreateProgram(
                ctypes.byref(program), text, b"kernel.cu", 0, None, None
            )
        )
        try:
            array = (ctypes.c_char_p * len(flags))(*(f.encode() for f in flags))
            code = self._library.nvrtcCompileProgram(program, len(flags), array)
            log = self._read(program, "ProgramLog").decode(errors="replace").rstrip("\0")
            if code:
                raise CompileError(
                    f"NVRTC {self.version[0]}.{self.version[1]} refused the kernel for "
                    f"{arch}:\n{log[:4000]}"
                )
            return Compiled(self._read(program, "CUBIN"), parse_usage(log), log)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw


_ENTRY = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used "
    r"(\d+) registers",
    re.DOTALL,
)


def parse_usage(log: str) -> dict[str, Usage]:
    """Read registers and spills per kernel from ptxas's report."""
    return {
        name: Usage(int(used), int(stores) + int(loads))
        for name, stores, loads, used in _ENTRY.findall(log)
    }


def candidates() -> Iterator[str]:
    """Yield paths and names of NVRTC: in torch's wheels, as torch has loaded it, in a toolkit.

    The paths in wheels come before the bare name: only a path says where the builtins lie.
    """
    folders = [Path(p) / "nvidia" for p in sys.path if p and (Path(p) / "nvidia").is_dir()]
    yield from _libraries(
        (folder / "cu*" / "lib", folder / "cuda_nvrtc" / "lib") for folder in folders
    )
    if torch.version.cuda:
        yield f"libnvrtc.so.{torch.version.cuda.partition('.')[0]}"
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if home:
            yield from _libraries([(Path(home) / "lib64",)])


def _libraries(groups: Iterable[tuple[Path, ...]]) -> Iterator[str]:
    for patterns in groups:
        for pattern in patterns:
            for folder in sorted(
                Path(pattern.anchor or ".").glob(str(pattern.relative_to(pattern.anchor)))
            ):
                yield from (
                    str(x) for x in sorted(folder.glob("libnvrtc.so.*")) if ".alt." not in x.name
                )


def installed() -> Iterator[Nvrtc]:
    """Yield every NVRTC that can be loaded."""
    for path in candidates():
        with contextlib.suppress(OSError):
            yield Nvrtc(path)


def find() -> Nvrtc:
    """Return the first NVRTC of the major version of torch's CUDA; any NVRTC if torch has no CUDA.

    Raises
    ------
    CompileError
        If no such NVRTC is found.
    """
    cuda = torch.version.cuda
    passed = []
    for library in installed():
        # The driver runs torch's CUDA, so it loads cubins of the same major version.
        if cuda is None or library.version[0] == int(cuda.partition(".")[0]):
            return library
        passed.append(f"{library.path} is {library.version[0]}.{library.version[1]}")
    wanted = f"for CUDA {cuda}" if cuda else "of any version"
    raise CompileError(
        f"no NVRTC {wanted} was found ({'; '.join(passed) or 'none at all'}); pip install "
        "nvidia-cuda-nvrtc"
    )


@cache
def flat(name: str) -> str:
    """Return a file of ``csrc`` as a single text, so that the compiler needs no include path.

    Every include of this package is inserted a single time.
    """
    seen: set[str] = set()

    def put_in(match: re.Match[str]) -> str:
        if match[1] in seen:
            return ""
        seen.add(match[1])
        return expand((CSRC / match[1]).read_text())

    def expand(text: str) -> str:
        return _INCLUDE.sub(put_in, text.replace("#pragma once\n", ""))

    return expand((CSRC / name).read_text())


def cache_folder() -> Path | None:
    """Return ``$KVRAG_CACHE/kernels``, ``$KVRAG_CACHE_DIR/kernels`` or a default.

    The default is ``$XDG_CACHE_HOME/kvrag/kernels`` or ``~/.cache/kvrag/kernels``; ``None`` for a
    user without a home, as in some containers.
    """
    root = os.environ.get("KVRAG_CACHE") or os.environ.get("KVRAG_CACHE_DIR")
    if root:
        return Path(root, "kernels")
    root = os.environ.get("XDG_CACHE_HOME")
    if root:
        return Path(root, "kvrag", "kernels")
    try:
        return Path.home() / ".cache" / "kvrag" / "kernels"
    except RuntimeError:
        return None


def key_of(source: str, options: Sequence[str], version: tuple[int, int], arch: str) -> str:
    """Return the SHA-256 of source, options, compiler version and architecture.

    Parts are hashed with their lengths, so different parts can't give the same input.
    """
    digest = hashlib.sha256()
    for part in (source, *options, f"{version[0]}.{version[1]}", arch):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def cached(key: str, make: Callable[[], bytes]) -> bytes:
    """Return the cubin of a key, compiled only if the cache lacks it.

    A cache folder that is missing, unreadable or read-only costs a compilation, never an error. A
    cubin is written to a temporary file and moved into place, with its own digest in front, so a
    torn or damaged file is compiled again.
    """
    root = cache_folder()
    if root is None:
        return make()
    path = root / f"{key}.cubin"
    with contextlib.suppress(OSError):
        data = path.read_bytes()
        if data[:32] == hashlib.sha256(data[32:]).digest():
            return data[32:]
    cubin = make()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(cubin).digest() + cubin)
            Path(name).replace(path)
        finally:
            Path(name).unlink(missing_ok=True)
    return cubin
