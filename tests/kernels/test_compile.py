"""Every variant for every architecture with both compilers that users have: no spills, registers within the budget.

Some 1,000 compilations, less than half a second each: seven core minutes (``make kernel-compile``). Elsewhere the compilers take turns, and
the attention's variants are compiled for every second architecture each.
"""

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import NoReturn, TypeVar

import pytest
import sass
import torch
from stitch_cases import CASES as STITCH_CASES
from stitch_cases import stitching_of

from kvrag_kernels import ahead, nvrtc, runtime, stitch_launch
from kvrag_kernels.geometry import ARCHS, HEAD_DIMS, HOPPER_REGISTERS

T = TypeVar("T")
BUDGET = {
    "ragged_mma": 255,  # blocks of 128 threads: two on a multiprocessor; of 256 threads: one
    "ragged_sm90": HOPPER_REGISTERS,
    "ragged_plan": 64,
    "ragged_combine": 80,
    "probe": 168,
    "stitch": 80,  # three blocks of 256 threads on a multiprocessor
}

KINDS = [*ARCHS, "sm_90a"]
"""Architectures as ptxas names them: ``sm_90a`` is what the Hopper kernel alone is compiled for."""


EVERY_PAIR = "KVRAG_COMPILE"
"""Environment variable; ``all``: compile each variant with each compiler."""


@cache
def compilers() -> dict[int, nvrtc.Nvrtc]:
    """One NVRTC per major version that is installed: users have the one that their torch brings."""
    return {c.version[0]: c for c in nvrtc.installed()}


def stop_without(what: str, package: str) -> NoReturn:
    """Skip, but where tests must not be left out."""
    stop = pytest.fail if os.environ.get("CI") and sys.platform == "linux" else pytest.skip
    stop(f"{what} is not installed: pip install {package}")


def compiler_for(major: int, arch: str) -> nvrtc.Nvrtc:
    compiler = compilers().get(major)
    if compiler is None:
        stop_without(
            f"NVRTC {major}", "nvidia-cuda-nvrtc-cu12" if major == 12 else "nvidia-cuda-nvrtc"
        )
    if int(arch[3:].removesuffix("a")) not in compiler.archs():
        pytest.skip(f"NVRTC {compiler.version} does not compile for {arch}")
    return compiler


def turn(variants: Iterable[T], major: int, *, of: int = 2, start: int = 0) -> list[T]:
    """Those that a compiler takes: every second, or less of them."""
    return (
        list(variants)
        if os.environ.get(EVERY_PAIR) == "all"
        else list(variants)[(start + major) % of :: of]
    )


def assert_fits(compiler: nvrtc.Nvrtc, source: str, options: tuple[str, ...], arch: str) -> None:
    """Compile, and see what ptxas says of each kernel in it."""
    made = compiler.compile(nvrtc.flat(source), options, arch)
    assert made.cubin[:4] == b"\x7fELF"
    assert made.usage, "ptxas reported nothing"
    assert "(C75" not in made.log, "ptxas puts waits between products, or leaves setmaxnreg out"
    for kernel, usage in made.usage.items():
        what = f"{kernel} of {source} {' '.join(options)} for {arch}"
        assert usage.spill_bytes == 0, f"{what} spills {usage.spill_bytes} bytes"
        assert usage.registers <= BUDGET[kernel], f"{what} uses {usage.registers} registers"
        if kernel == "ragged_sm90":
            assert usage.registers == HOPPER_REGISTERS, (
                f"{what}: warpgroups take more registers than the block was given"
            )


@pytest.fixture
def disassembler():
    if sass.program() is None:
        stop_without("nvdisasm", "nvidia-cuda-nvdisasm")


@pytest.mark.usefixtures("disassembler")
@pytest.mark.parametrize("major", [12, 13])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_a_tile_softens_while_the_tile_before_it_is_added_to_the_outputs(dim, major):
    """All exponentials stand between the wait for the scores and the wait for the outputs: ptxas would put the second wait first."""
    (variant,) = (v for v in sass.variants("sm_90a") if f"-DD={dim}" in v.options)
    made = compiler_for(major, "sm_90a").compile(
        nvrtc.flat(variant.source), variant.options, variant.arch
    )
    code = sass.disassemble(made.cubin, "ragged_sm90")
    waits = [i for i, line in enumerate(code) if "WARPGROUP.DEPBAR" in line]
    (scores,) = (i for i in waits if "gsb0, 0x1" in code[i])
    outputs = next(i for i in waits if i > scores)
    assert "gsb0, 0x0" in code[outputs]
    assert variant.geometry is not None
    # Its part of 16 rows, and a factor of each of its two rows.
    of_thread = variant.geometry.keys // 2 + 2
    assert sum("MUFU.EX2" in line for line in code[scores:outputs]) == of_thread


@pytest.mark.slow
@pytest.mark.usefixtures("disassembler")
@pytest.mark.parametrize("major", [12, 13])
@pytest.mark.parametrize("arch", sass.ARCHS)
def test_no_kernel_grows(arch, major):
    """A growth that is meant is written down by ``sass.py``."""
    compiler = compiler_for(major, arch)
    before = json.loads(sass.COUNTS.read_text())
    names = {sass.name_of(v) for a in sass.ARCHS for v in sass.variants(a)}
    assert before.keys() == names
    for variant in sass.variants(arch):
        name, now = sass.name_of(variant), sass.count(variant, compiler)
        for key, most in before[name].items():
            slack = 1.0 if key == "spills" else 1.03  # compilers of other minor versions
            assert now[key] <= most * slack, f"{name}: {key} {now[key]}, was {most}"


@pytest.mark.slow
@pytest.mark.parametrize("major", [12, 13])
@pytest.mark.parametrize("kind", KINDS)
def test_no_variant_spills(kind, major):
    compiler = compiler_for(major, kind)
    variants = [v for v in runtime.variants(kind.removesuffix("a")) if v.arch == kind]
    assert len(variants) == {"sm_75": 16, "sm_90a": 16}.get(kind, 32)
    assert len(set(variants)) == len(variants)
    for variant in turn(variants, major, of=4, start=2 * KINDS.index(kind)):
        assert_fits(compiler, variant.source, variant.options, variant.arch)


@pytest.mark.slow
@pytest.mark.parametrize("major", [12, 13])
def test_relatives_of_the_architectures_compile_too(major):
    """Compute capabilities that are no common GPU's take the same tiles: a variant of every head dim that holds the most registers."""
    relatives = [
        f"sm_{a}"
        for a in compiler_for(major, "sm_80").archs()
        if a >= 75 and f"sm_{a}" not in ARCHS
    ]
    assert relatives
    for arch in turn(relatives, major):
        for variant in runtime.variants(arch):
            if variant.source == "ragged_mma.cu" and {"-DBF16=1", "-DSOFTCAP=1"} <= set(
                variant.options
            ):
                assert_fits(compiler_for(major, arch), variant.source, variant.options, arch)


@pytest.mark.slow
@pytest.mark.parametrize("major", [12, 13])
@pytest.mark.parametrize("arch", ARCHS)
def test_no_form_of_the_stitch_spills(arch, major):
    cases = [replace(c, dtype=torch.float16) if arch == "sm_75" else c for c in STITCH_CASES]
    forms = {stitch_launch.defines(stitching_of(case)) for case in cases}
    assert None not in forms
    for options in turn(sorted(o for o in forms if o), major):
        assert_fits(compiler_for(major, arch), "stitch.cu", options, arch)


@pytest.mark.slow
@pytest.mark.parametrize("major", [12, 13])
@pytest.mark.parametrize("arch", ARCHS)
def test_no_form_that_is_built_ahead_spills(arch, major):
    """Each architecture takes its turn among the forms of all head dims, so that each form is compiled for one at least."""
    forms = ahead.stitch_variants(arch)
    assert len(forms) == {"sm_75": 120}.get(arch, 240)
    for variant in turn(forms[ARCHS.index(arch) :: len(ARCHS)], major):
        assert_fits(compiler_for(major, arch), variant.source, variant.options, variant.arch)


def test_registers_and_spills_are_read_from_the_report():
    log = (
        "ptxas info : Compiling entry function 'one' for 'sm_80'\nptxas info : Function properties for one\n"
        "    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\nptxas info : Used 99 registers, used 1 barriers\n"
    )
    assert nvrtc.parse_usage(log) == {"one": nvrtc.Usage(99, 16)}
