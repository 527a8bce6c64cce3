"""Choose between the CUDA kernels and torch.

Kernels are compiled at first use and kept for the process. A kernel that fails is given up with a
single warning.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from kvrag_kernels import launch, nvrtc, selftest, stitch_launch
from kvrag_kernels.driver import CudaModule, DriverError
from kvrag_kernels.geometry import (
    DTYPES,
    HEAD_DIMS,
    HOPPER,
    OLDEST,
    Geometry,
    geometry_of,
    hopper_geometry,
    supports,
)
from kvrag_kernels.stitch_launch import Stitching

T = TypeVar("T")

MODES = ("auto", "torch", "mma", "sm90")
"""Values of ``KVRAG_KERNEL``.

``sm90`` asks for the Hopper kernel where a device supports it; ``mma`` leaves that kernel out.
"""

PROVEN = Path(__file__).with_name("proven.json")
"""File that names the kernels that have passed ``make gpu-check`` on a GPU, and where.

A green run writes it.
"""

_PROBE = "probe.cu"
_STITCH = "stitch.cu"


def mode() -> str:
    """Return the mode that ``KVRAG_KERNEL`` asks for.

    Raises
    ------
    ValueError
        If the value is not in :data:`MODES`.
    """
    value = os.environ.get("KVRAG_KERNEL", "").lower() or "auto"
    if value not in MODES:
        raise ValueError(f"KVRAG_KERNEL is {value!r}; it must be one of {', '.join(MODES)}")
    return value


@functools.cache
def proven() -> frozenset[str]:
    """Return the names of kernels that have passed on a GPU."""
    return frozenset(json.loads(PROVEN.read_text()))


def takes_hopper(capability: tuple[int, int]) -> bool:
    """Whether a device uses the Hopper kernel.

    That kernel could hang, so it is no default before it has passed on a GPU.
    """
    return capability == HOPPER and (mode() == "sm90" or (mode() == "auto" and "sm90" in proven()))


@dataclass(frozen=True, slots=True)
class Variant:
    """A compilation: source file, options, architecture, and an attention kernel's tiles."""

    source: str
    options: tuple[str, ...]
    arch: str
    geometry: Geometry | None = None

    def cubin(self, compiler: nvrtc.Nvrtc) -> bytes:
        """Return the compiled variant, from the cache if it was compiled before."""
        text = nvrtc.flat(self.source)
        arch = compiler.nearest(self.arch)
        key = nvrtc.key_of(text, (*nvrtc.FLAGS, *self.options), compiler.version, arch)
        return nvrtc.cached(key, lambda: compiler.compile(text, self.options, arch).cubin)


def arch_of(capability: tuple[int, int]) -> str:
    """Return the name of an architecture, e.g. ``sm_90``."""
    return f"sm_{capability[0]}{capability[1]}"


def capability_of(arch: str) -> tuple[int, int]:
    """Return the compute capability of an architecture: (9, 0) for ``sm_90``."""
    return int(arch[3:-1]), int(arch[-1])


Best = tuple[Variant, CudaModule]


class Modules:
    """Variants of this process, compiled at first use, once per device and kind.

    A failure is remembered, so that it is paid for and reported once; torch computes from then on.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiler: nvrtc.Nvrtc | None = None
        self._loaded: dict[tuple[Variant, int], CudaModule | None] = {}
        self._best: dict[tuple[object, ...], Best | None] = {}
        self.failures: list[str] = []

    def best(
        self, kind: Callable[..., list[Variant]], q: torch.Tensor, v: torch.Tensor, softcap: float
    ) -> Best | None:
        """Return the first variant of a kind that works for a call.

        Later calls with the same head dims, dtype and device take a single look-up.
        """
        key = (
            kind,
            q.shape[3],
            v.shape[3],
            q.dtype,
            softcap > 0,
            q.device,
            # Read at every call: it may change while the process runs.
            os.environ.get("KVRAG_KERNEL"),
        )
        known = self._best  # a failure in another thread replaces the dict
        if key not in known:
            loaded = (
                (variant, self.get(variant, q.device.index)) for variant in kind(q, v, softcap)
            )
            known[key] = next(
                ((variant, module) for variant, module in loaded if module is not None), None
            )
        return known[key]

    def get(self, variant: Variant, device: int) -> CudaModule | None:
        """Return the variant on a device, unless it failed.

        Raises
        ------
        RuntimeError
            If the variant is not loaded yet and a CUDA graph is being captured, which loading
            would spoil.
        """
        key = (variant, device)
        # Looked up without the lock first, because every launch comes here.
        if key not in self._loaded:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"{variant.source} is not loaded yet and can't be while a CUDA graph is "
                    "captured; run the call once before"
                )
            with self._lock:
                if key not in self._loaded:
                    self._loaded[key] = self._load(variant, device)
        return self._loaded[key]

    def _load(self, variant: Variant, device: int) -> CudaModule | None:
        try:
            self._compiler = self._compiler or nvrtc.find()
            module = CudaModule(variant.cubin(self._compiler), device)
            if variant.geometry is not None and variant.geometry.uses_tma:
                selftest.check(module, variant.geometry, variant.options, device)
            return module
        except (nvrtc.CompileError, DriverError, OSError) as error:
            self._warn(
                f"the kernel {variant.source} can't be used for {variant.arch}, "
                f"{_instead(variant)}: {error}"
            )
            return None

    def give_up(self, variant: Variant, device: int, error: DriverError) -> None:
        """Replace a variant by the next variant after a failed launch."""
        with self._lock:
            self._loaded[variant, device] = None
            # A new dict: a thread that is choosing may still write to the old one.
            self._best = {}
        self._warn(
            f"a launch of {variant.source} for {variant.arch} failed, {_instead(variant)}: {error}"
        )

    def _warn(self, message: str) -> None:
        self.failures.append(message)
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def _instead(variant: Variant) -> str:
    is_last = variant.geometry is None or not variant.geometry.uses_tma
    if is_last:
        return "torch computes instead"
    return "ragged_mma.cu computes instead"


modules = Modules()


def attention_variants(q: torch.Tensor, v: torch.Tensor, softcap: float) -> list[Variant]:
    """Return the variants that can compute a call, the best first; empty where torch computes."""
    if not _may_use_kernels(q, v):
        return []
    capability = torch.cuda.get_device_capability(q.device)
    geometries = [geometry_of(q.shape[3], capability, has_softcap=softcap > 0)]
    if takes_hopper(capability):
        geometries.insert(0, hopper_geometry(q.shape[3]))
    return [_variant(f"{g.kernel}.cu", g, q.dtype, softcap > 0, capability) for g in geometries]


def probe_variants(q: torch.Tensor, v: torch.Tensor, softcap: float) -> list[Variant]:
    """Return the variant of the probe for a call; empty where torch computes."""
    if not _may_use_kernels(q, v):
        return []
    capability = torch.cuda.get_device_capability(q.device)
    geometry = geometry_of(q.shape[3], capability, has_softcap=softcap > 0)
    return [_variant(_PROBE, geometry, q.dtype, softcap > 0, capability)]


def _may_use_kernels(q: torch.Tensor, v: torch.Tensor) -> bool:
    if not q.is_cuda or torch.version.cuda is None or mode() == "torch" or v.shape[3] != q.shape[3]:
        return False
    return supports(q.shape[3], q.dtype, torch.cuda.get_device_capability(q.device))


def _variant(
    source: str,
    geometry: Geometry,
    dtype: torch.dtype,
    has_softcap: bool,
    capability: tuple[int, int],
) -> Variant:
    arch = arch_of(capability) + ("a" if geometry.uses_tma else "")
    return Variant(source, geometry.defines(dtype, has_softcap=has_softcap), arch, geometry)


def has_kernel(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether a kernel computes attention of these shapes, dtype and device, and has not failed."""
    return q.is_cuda and modules.best(attention_variants, q, v, 0.0) is not None


def tier(dim: int, dtype: torch.dtype, device: torch.device) -> str:
    """Return the path of attention for a head dim, dtype and device.

    The path is ``"sm90"``, ``"mma"`` or ``"torch"``. Compiles and loads the kernel, because a
    kernel that can't be loaded doesn't count.
    """
    if device.type != "cuda":
        return "torch"
    probe = torch.empty((1, 1, 1, dim), dtype=dtype, device=device)
    best = modules.best(attention_variants, probe, probe, 0.0)
    if best is None:
        return "torch"
    return best[0].source.removeprefix("ragged_").removesuffix(".cu")


def attend(
    call: launch.Call, plan: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Run the attention kernels on a call; return ``None`` where torch computes."""
    return _run(
        attention_variants,
        call,
        lambda module, tiles: launch.attend(module, tiles, launch.prepare(call), plan),
    )


def make_plan(call: launch.Call) -> torch.Tensor | None:
    """Make the plan of a request; return ``None`` where torch computes and needs no plan."""
    return _run(
        attention_variants,
        call,
        lambda module, tiles: launch.make_plan(module, tiles, launch.prepare(call)),
    )


def probe(call: launch.Call, lse: torch.Tensor) -> torch.Tensor | None:
    """Run the kernel of the probe; return ``None`` where torch computes."""
    rows = lse.float().contiguous()
    return _run(
        probe_variants,
        call,
        lambda module, tiles: launch.probe(module, tiles, launch.prepare(call), rows),
    )


def _run(
    kind: Callable[..., list[Variant]], call: launch.Call, run: Callable[[CudaModule, Geometry], T]
) -> T | None:
    """Return the result of the first variant that works; variants that fail are given up."""
    while (best := modules.best(kind, call.q, call.v, call.softcap)) is not None:
        variant, module = best
        assert variant.geometry is not None
        try:
            with torch.cuda.device(call.q.device):
                return run(module, variant.geometry)
        # Not after a DeviceFault: no other kernel could run, either.
        except DriverError as error:
            modules.give_up(variant, call.q.device.index, error)
    return None


def has_stitch(dim: int, rotary: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the stitch kernel supports a head dim, rotated channels and buffer dtype on a device.

    ``rotary`` is the number of rotated channels.
    """
    if (
        device.type != "cuda"
        or torch.version.cuda is None
        or mode() == "torch"
        or dim % 16
        or rotary % 16
    ):
        return False
    oldest = {torch.float16: OLDEST, torch.bfloat16: (8, 0)}.get(dtype)
    return oldest is not None and torch.cuda.get_device_capability(device) >= oldest


def stitch(call: Stitching) -> bool:
    """Run the stitch kernel; return whether it ran.

    It does not run while a CUDA graph is captured: a replay would read the table from its staging
    memory, which holds other data by then.
    """
    out = call.out_keys[0]
    device = out.device
    if not has_stitch(out.shape[2], call.rotary, out.dtype, device) or _is_capturing(device):
        return False
    options = stitch_launch.defines(call)
    if options is None:
        return False
    variant = Variant(_STITCH, options, arch_of(torch.cuda.get_device_capability(device)))
    module = modules.get(variant, device.index)
    if module is None:
        return False
    try:
        with torch.cuda.device(device):
            # The caching host allocator reuses pinned memory only after the copies from it are
            # done, in the order of their stream.
            staged = functools.partial(torch.empty, pin_memory=True)
            stitch_launch.run(module, call, lambda x: x.to(device, non_blocking=True), staged)
    except DriverError as error:
        modules.give_up(variant, device.index, error)
        return False
    return True


def _is_capturing(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def variants(arch: str, dims: Sequence[int] = HEAD_DIMS) -> list[Variant]:
    """Return every variant of the attention and probe kernels for an architecture and head dims."""
    capability = capability_of(arch)
    return [
        _variant(source or f"{geometry.kernel}.cu", geometry, dtype, capped, capability)
        for dim in dims
        for dtype in DTYPES
        if supports(dim, dtype, capability)
        for capped in (False, True)
        for source, geometry in (
            ("", geometry_of(dim, capability, has_softcap=capped)),
            (_PROBE, geometry_of(dim, capability, has_softcap=capped)),
            *([("", hopper_geometry(dim))] if capability == HOPPER else []),
        )
    ]
