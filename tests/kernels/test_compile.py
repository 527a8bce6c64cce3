"""Every variant for every architecture with the compiler that users have: no spills, registers within the budget."""

from __future__ import annotations

import pytest

from kvrag_kernels import nvrtc, runtime, sources
from kvrag_kernels.geometry import ARCHS

BUDGET = {
    "ragged_mma": 255,  # blocks of 128 threads: two on a multiprocessor; of 256 threads: one
    "ragged_plan": 64,
    "ragged_combine": 80,
    "probe": 255,
}


def compiler_or_skip() -> nvrtc.Nvrtc:
    try:
        return nvrtc.find()
    except nvrtc.CompileError as error:
        pytest.skip(f"no kernel can be compiled here: {error}")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_no_variant_spills(arch: str) -> None:
    compiler = compiler_or_skip()
    if int(arch[3:]) not in compiler.archs():
        pytest.skip(f"NVRTC {compiler.version} does not compile for {arch}")
    variants = runtime.variants(arch)
    assert len(variants) >= 8
    for variant in variants:
        made = compiler.compile(sources.flat(variant.source), variant.options, arch)
        assert made.cubin[:4] == b"\x7fELF"
        assert made.usage, "ptxas reported nothing"
        for kernel, usage in made.usage.items():
            assert usage.spill_bytes == 0, f"{kernel} of {variant} spills {usage.spill_bytes} bytes"
            assert usage.registers <= BUDGET[kernel], f"{kernel} of {variant} uses {usage.registers} registers"


def test_registers_and_spills_are_read_from_the_report() -> None:
    log = (
        "ptxas info : Compiling entry function 'one' for 'sm_80'\nptxas info : Function properties for one\n"
        "    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\nptxas info : Used 99 registers, used 1 barriers\n"
    )
    assert nvrtc.parse_usage(log) == {"one": nvrtc.Usage(99, 16)}
