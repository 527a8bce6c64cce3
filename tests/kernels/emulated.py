"""Run a case of the attention op through the kernels' source in the emulator, with poisoned and guarded memory."""

import mmap
import os
from collections.abc import Iterable
from typing import Any, TypeVar

import pytest
import torch
from emulator.build import COMPILER, EmulatedModule
from kernel_cases import Case, inputs_of

from kvrag_kernels import launch, reference
from kvrag_kernels.geometry import Geometry, geometry_of, hopper_geometry

T = TypeVar("T")
needs_compiler = pytest.mark.skipif(
    COMPILER is None, reason="the emulator needs g++ to compile the kernels' source"
)

EVERY_BUG = "KVRAG_PLANTED"
"""Environment variable; ``all``: plant every bug (``make kernel-bugs``, which takes a quarter of an hour), else a sample."""

SAMPLE = 8


def sampled(bugs: Iterable[T]) -> list[T]:
    """Return the bugs to plant: each costs a build of the kernel."""
    return list(bugs)[:: 1 if os.environ.get(EVERY_BUG) == "all" else SAMPLE]


HOPPER = 901
"""In place of an architecture: ``ragged_sm90.cu``, which is compiled for sm_90a."""


class Guarded:
    """An allocator whose memory is NaN, or nonsense in integers, until written, and the only memory that kernels may write."""

    def __init__(self, module: EmulatedModule, inputs: Iterable[torch.Tensor | None]) -> None:
        self._module, self._inputs, self.made = module, list(inputs), list[torch.Tensor]()

    def __call__(self, *args: Any, **options: Any) -> torch.Tensor:
        made = torch.empty(*args, **options)
        made.fill_(float("nan") if made.dtype.is_floating_point else -77777)
        self.made.append(made)
        self._module.allow(self._inputs, self.made)
        return made


def geometry_for(case: Case, arch: int) -> Geometry:
    if arch == HOPPER:
        return hopper_geometry(case.dim)
    return geometry_of(case.dim, (arch // 100, arch // 10 % 10), has_softcap=case.softcap > 0)


def emulated_module(
    case: Case, dtype: torch.dtype, *, arch: int = 900, min_item: int = 4, **options: Any
) -> EmulatedModule:
    geometry = geometry_for(case, arch)
    defines = (*geometry.defines(dtype, has_softcap=case.softcap > 0), f"-DMIN_ITEM={min_item}")
    return EmulatedModule(f"{geometry.kernel}.cu", defines, arch=min(arch, 900), **options)


def attend(
    case: Case, dtype: torch.dtype, module: EmulatedModule, arch: int = 900, **changed: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return ``out`` and ``lse`` of the kernels, and of the float64 reference."""
    inputs: dict[str, Any] = inputs_of(case, dtype) | changed
    sinks = inputs.pop("sinks")
    q, k, v, hi, lo = (inputs[n] for n in ("q", "k", "v", "hi", "lo"))
    call = launch.prepare(
        launch.Call(q, k, v, hi, lo, case.prefix, case.scale, case.softcap, sinks)
    )
    guarded = Guarded(module, [call.q, call.k, call.v, call.hi, call.lo, call.sinks])
    got = launch.attend(module, geometry_for(case, arch), call, empty=guarded)
    want = reference.attention(
        q, k, v, hi, lo, case.prefix, scale=case.scale, softcap=case.softcap, sinks=sinks
    )
    return *got, *want


def assert_equals_reference(
    out: torch.Tensor, lse: torch.Tensor, want: torch.Tensor, want_lse: torch.Tensor, atol: float
) -> None:
    assert out.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(out.double(), want, atol=atol, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse, atol=3e-6, rtol=1e-6)


def reserve(num_bytes: int) -> mmap.mmap:
    """Address space that takes no memory until it is written."""
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        return mmap.mmap(-1, num_bytes, flags=flags)
    except (OSError, ValueError):
        pytest.skip("this system reserves no 5 GiB of address space")


TOLERANCE = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
