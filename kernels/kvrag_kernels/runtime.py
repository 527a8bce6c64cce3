"""Which path computes, and why: kernels compiled at first use, kept for the process, and given up with one warning when they fail."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from kvrag_kernels import cubin_cache, launch, nvrtc, sources, stitch_launch
from kvrag_kernels.driver import CudaModule, DriverError
from kvrag_kernels.geometry import ARCHS, DTYPES, HEAD_DIMS, Geometry, geometry_of, supports
from kvrag_kernels.stitch_launch import Stitching

T = TypeVar("T")

MODES = ("auto", "torch", "mma", "sm90")
"""Values of ``KVRAG_KERNEL``; ``sm90`` is reserved: there is no such kernel yet, and it means ``mma``."""

_ATTENTION, _PROBE, _STITCH = "ragged_mma.cu", "probe.cu", "stitch.cu"


def mode() -> str:
    """Return the mode that ``KVRAG_KERNEL`` asks for.

    Raises
    ------
    ValueError
        If it is none of :data:`MODES`.
    """
    value = os.environ.get("KVRAG_KERNEL", "auto").lower()
    if value not in MODES:
        raise ValueError(f"KVRAG_KERNEL is {value!r}; it must be one of {', '.join(MODES)}")
    return value


@dataclass(frozen=True, slots=True)
class Variant:
    """One compilation: a source file with its options for an architecture."""

    source: str
    options: tuple[str, ...]
    arch: str

    def cubin(self, compiler: nvrtc.Nvrtc) -> bytes:
        """Return the compiled variant, from the cache where it was compiled before."""
        text, arch = sources.flat(self.source), compiler.nearest(self.arch)
        key = cubin_cache.key_of(text, self.options, compiler.version, arch)
        return cubin_cache.get(key, lambda: compiler.compile(text, self.options, arch).cubin)


def arch_of(capability: tuple[int, int]) -> str:
    """Return the architecture's name, as ``sm_90``."""
    return f"sm_{capability[0]}{capability[1]}"


class Modules:
    """The variants of this process: compiled once per device and kind, at first use.

    A failure is remembered, so that it is paid and told once; the torch path computes from then on.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiler: nvrtc.Nvrtc | None = None
        self._loaded: dict[tuple[Variant, int], CudaModule | None] = {}
        self.failures: list[str] = []

    def get(self, variant: Variant, device: int) -> CudaModule | None:
        """Return the variant on a device, or ``None`` where it failed."""
        key = (variant, device)
        if key not in self._loaded:
            with self._lock:
                if key not in self._loaded:
                    self._loaded[key] = self._load(variant, device)
        return self._loaded[key]

    def _load(self, variant: Variant, device: int) -> CudaModule | None:
        try:
            self._compiler = self._compiler or nvrtc.find()
            return CudaModule(variant.cubin(self._compiler), device)
        except (nvrtc.CompileError, DriverError, OSError) as error:
            self._warn(f"the kernel {variant.source} can't be used for {variant.arch}, torch computes instead: {error}")
            return None

    def give_up(self, variant: Variant, device: int, error: DriverError) -> None:
        """Use torch in place of a variant whose launch failed."""
        with self._lock:
            self._loaded[variant, device] = None
        self._warn(f"a launch of {variant.source} for {variant.arch} failed, torch computes instead: {error}")

    def _warn(self, message: str) -> None:
        self.failures.append(message)
        warnings.warn(message, RuntimeWarning, stacklevel=2)


modules = Modules()


def attention_variant(q: torch.Tensor, v: torch.Tensor, softcap: float, source: str = _ATTENTION) -> Variant | None:
    """Return the variant for a call, or ``None`` where torch has to compute."""
    dim = q.shape[3]
    if not q.is_cuda or torch.version.cuda is None or mode() == "torch" or v.shape[3] != dim:
        return None
    capability = torch.cuda.get_device_capability(q.device)
    if not supports(dim, q.dtype, capability):
        return None
    options = geometry_of(dim, capability, has_softcap=softcap > 0).defines(q.dtype, has_softcap=softcap > 0)
    return Variant(source, options, arch_of(capability))


def has_kernel(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether a kernel of ours computes attention of these shapes, dtype and device, and has not failed here before."""
    variant = attention_variant(q, v, 0.0)
    return variant is not None and modules.get(variant, q.device.index) is not None


def attend(call: launch.Call, plan: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Run the attention kernels on a call, or return ``None`` where torch has to compute."""
    return _try(call, _ATTENTION, lambda module, geometry: launch.attend(module, geometry, launch.prepare(call), plan))


def make_plan(call: launch.Call) -> torch.Tensor | None:
    """Make the plan of a request, or return ``None`` where torch computes and needs none."""
    return _try(call, _ATTENTION, lambda module, geometry: launch.make_plan(module, geometry, launch.prepare(call)))


def probe(call: launch.Call, lse: torch.Tensor) -> torch.Tensor | None:
    """Run the probe's kernel, or return ``None`` where torch has to compute."""
    rows = lse.float().contiguous()
    return _try(call, _PROBE, lambda module, geometry: launch.probe(module, geometry, launch.prepare(call), rows))


def _try(call: launch.Call, source: str, run: Callable[[CudaModule, Geometry], T]) -> T | None:
    found = _module_for(call, source)
    if found is None:
        return None
    variant, module, geometry = found
    try:
        with torch.cuda.device(call.q.device):
            return run(module, geometry)
    except DriverError as error:
        modules.give_up(variant, call.q.device.index, error)
        return None


def stitch(call: Stitching) -> bool:
    """Run the stitch kernel; returns whether it could be."""
    device = call.out_keys[0].device
    options = None if torch.version.cuda is None or mode() == "torch" else stitch_launch.defines(call)
    capability = torch.cuda.get_device_capability(device) if options else (0, 0)
    if options is None or capability < (7, 5) or ("-DBF16=1" in options and capability < (8, 0)):
        return False
    variant = Variant(_STITCH, options, arch_of(capability))
    module = modules.get(variant, device.index)
    if module is None:
        return False
    try:
        with torch.cuda.device(device):
            stitch_launch.run(module, call, lambda x: x.pin_memory().to(device, non_blocking=True))
    except DriverError as error:
        modules.give_up(variant, device.index, error)
        return False
    return True


def _module_for(call: launch.Call, source: str) -> tuple[Variant, CudaModule, Geometry] | None:
    variant = attention_variant(call.q, call.v, call.softcap, source)
    module = None if variant is None else modules.get(variant, call.q.device.index)
    if variant is None or module is None:
        return None
    capability = torch.cuda.get_device_capability(call.q.device)
    return variant, module, geometry_of(call.q.shape[3], capability, has_softcap=call.softcap > 0)


def variants(arch: str) -> list[Variant]:
    """Return every variant of the attention kernel and of the probe's for an architecture."""
    capability = (int(arch[3:-1]), int(arch[-1]))
    return [
        Variant(source, geometry_of(dim, capability, has_softcap=capped).defines(dtype, has_softcap=capped), arch)
        for dim in HEAD_DIMS
        for dtype in DTYPES
        if supports(dim, dtype, capability)
        for capped in (False, True)
        for source in (_ATTENTION, _PROBE)
    ]


def build(archs: tuple[str, ...] = ARCHS) -> dict[str, int]:
    """Compile every variant for architectures into the cache, as an image build does; no device is needed.

    Returns
    -------
    dict[str, int]
        Variants in the cache per architecture.

    Raises
    ------
    CompileError
        If NVRTC is missing, or refuses a variant.
    """
    compiler = nvrtc.find()
    return {arch: sum(1 for v in variants(arch) if v.cubin(compiler)) for arch in archs}


def info() -> dict[str, Any]:
    """Return which path computes here and why: for ``kvrag kernels info`` and bug reports."""
    try:
        compiler = nvrtc.find()
        found: str = f"{compiler.version[0]}.{compiler.version[1]} ({compiler.path})"
    except nvrtc.CompileError as error:
        found = str(error)
    devices = []
    for i in range(torch.cuda.device_count() if torch.version.cuda else 0):
        capability = torch.cuda.get_device_capability(i)
        kinds = [str(d).removeprefix("torch.") for d in DTYPES if supports(64, d, capability)]
        path = "torch" if mode() == "torch" or not kinds else f"ragged_mma ({', '.join(kinds)})"
        devices.append({"name": torch.cuda.get_device_name(i), "arch": arch_of(capability), "attention": path})
    return {
        "mode": mode(),
        "devices": devices,
        "attention_elsewhere": "torch",
        "nvrtc": found,
        "cache": str(cubin_cache.folder()),
        "failures": list(modules.failures),
    }
