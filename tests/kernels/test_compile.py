"""Variants for every architecture with the compilers that users have: no spills, registers within the budget.

A sample by default, every architecture and kernel in it; all of them with ``KVRAG_COMPILE=all`` (``make kernel-compile``, some 20 minutes).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TypeVar

import pytest
import torch
from stitch_cases import CASES as STITCH_CASES
from stitch_cases import stitching_of

from kvrag_kernels import nvrtc, runtime, sources, stitch_launch
from kvrag_kernels.geometry import ARCHS

BUDGET = {
    "ragged_mma": 255,  # blocks of 128 threads: two on a multiprocessor; of 256 threads: one
    "ragged_sm90": 168,  # at launch, 384 threads; then 232 for those who multiply and 40 for those who copy
    "ragged_plan": 64,
    "ragged_combine": 80,
    "probe": 168,
    "stitch": 80,  # three blocks of 256 threads on a multiprocessor
}


T = TypeVar("T")


def sampled(everything: Sequence[T], arch: str, step: int) -> list[T]:
    """Return all, or every so many, begun at another one for each architecture."""
    is_all = os.environ.get("KVRAG_COMPILE") == "all"
    return list(everything) if is_all else list(everything[ARCHS.index(arch) % step :: step])


@cache
def compilers() -> dict[int, nvrtc.Nvrtc]:
    """One NVRTC per major version that is installed: users have the one that their torch brings."""
    return {c.version[0]: c for c in nvrtc.installed()}


def compiler_for(major: int, arch: str) -> nvrtc.Nvrtc:
    compiler = compilers().get(major)
    if compiler is None:
        pytest.skip(
            f"NVRTC {major} is not installed: pip install {'nvidia-cuda-nvrtc-cu12' if major == 12 else 'nvidia-cuda-nvrtc'}"
        )
    if int(arch[3:].removesuffix("a")) not in compiler.archs():
        pytest.skip(f"NVRTC {compiler.version} does not compile for {arch}")
    return compiler


@pytest.mark.slow
@pytest.mark.parametrize("major", [12, 13])
@pytest.mark.parametrize("arch", ARCHS)
def test_no_variant_spills(arch: str, major: int) -> None:
    compiler = compiler_for(major, arch)
    variants = runtime.variants(arch)
    assert len(variants) >= 16
    hopper = [v for v in variants if v.source == "ragged_sm90.cu"]
    assert len(hopper) == (16 if arch == "sm_90" else 0)
    others = [v for v in variants if v not in hopper]
    for variant in [*sampled(others, arch, 15), *sampled(hopper, arch, 8)]:
        made = compiler.compile(sources.flat(variant.source), variant.options, variant.arch)
        assert made.cubin[:4] == b"\x7fELF"
        assert made.usage, "ptxas reported nothing"
        assert "(C75" not in made.log, "ptxas puts waits between products"
        for kernel, usage in made.usage.items():
            assert usage.spill_bytes == 0, f"{kernel} of {variant} spills {usage.spill_bytes} bytes"
            assert usage.registers <= BUDGET[kernel], f"{kernel} of {variant} uses {usage.registers} registers"


@pytest.mark.slow
@pytest.mark.parametrize("major", [12, 13])
@pytest.mark.parametrize("arch", ARCHS)
def test_no_form_of_the_stitch_spills(arch: str, major: int) -> None:
    compiler = compiler_for(major, arch)
    for case in sampled(STITCH_CASES, arch, 12):
        case = replace(case, dtype=torch.float16) if arch == "sm_75" else case
        options = stitch_launch.defines(stitching_of(case))
        assert options is not None
        usage = compiler.compile(sources.flat("stitch.cu"), options, arch).usage["stitch"]
        assert usage.spill_bytes == 0, f"{case.name} spills {usage.spill_bytes} bytes"
        assert usage.registers <= BUDGET["stitch"], f"{case.name} uses {usage.registers} registers"


def test_registers_and_spills_are_read_from_the_report() -> None:
    log = (
        "ptxas info : Compiling entry function 'one' for 'sm_80'\nptxas info : Function properties for one\n"
        "    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\nptxas info : Used 99 registers, used 1 barriers\n"
    )
    assert nvrtc.parse_usage(log) == {"one": nvrtc.Usage(99, 16)}
