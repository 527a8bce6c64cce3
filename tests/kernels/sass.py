"""The kernels' machine code: disassembled, and counted per head dim and architecture in ``sass.json``.

python tests/kernels/sass.py    # count anew, after a change that is meant
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvrag_kernels import nvrtc, runtime

COUNTS = Path(__file__).with_name("sass.json")
ARCHS = ("sm_80", "sm_89", "sm_90a", "sm_100")
"""One of each kind of machine: Ampere, Ada, Hopper with its own instructions, Blackwell."""


def program() -> str | None:
    """Where ``nvdisasm`` is: in the wheel ``nvidia-cuda-nvdisasm``, or on the path."""
    wheels = (Path(p) / "nvidia" / "cu13" / "bin" / "nvdisasm" for p in sys.path)
    return next((str(p) for p in wheels if p.is_file()), shutil.which("nvdisasm"))


def disassemble(cubin: bytes, kernel: str) -> list[str]:
    """Return a kernel's instructions, and its labels as ``.L_x_7:``, in the order of the code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [str(program()), "-c", file.name], capture_output=True, text=True, check=True
        ).stdout
    body = re.search(
        rf"^\s*\.section\s+\.text\.{kernel},.*?\n(.*?)(?=^\s*\.section\s|\Z)",
        text,
        re.DOTALL | re.MULTILINE,
    )
    assert body, f"{kernel} is not in the cubin"
    found = re.findall(
        r"^(?:\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;.*|(\.L_x_\d+:))$", body[1], re.MULTILINE
    )
    return [instruction or label for instruction, label in found]


def main_loop(code: list[str]) -> list[str]:
    """Return the instructions of the loop over key tiles: the shortest that holds its products.

    Before the Hopper kernel's loop stand products with the first keys, and behind it those with the last values: half of all are in it.
    """
    labels = {line[:-1]: i for i, line in enumerate(code) if line.endswith(":")}
    is_product = [bool(re.search(r"\bH(G)?MMA", line)) for line in code]
    wanted = sum(is_product) // (2 if any("HGMMA" in line for line in code) else 1)
    loops = []
    for end, line in enumerate(code):
        target = re.search(r"\bBRA.*`\((\.L_x_\d+)\)", line)
        start = labels.get(target[1], end) if target else end
        if start < end and sum(is_product[start:end]) >= wanted:
            loops.append(code[start : end + 1])
    return [line for line in min(loops, key=len) if not line.endswith(":")]


def variants(arch: str) -> Iterator[runtime.Variant]:
    """Yield what is counted for an architecture: attention in bfloat16, without a soft cap."""
    for variant in runtime.variants(arch.removesuffix("a")):
        if (
            variant.arch == arch
            and variant.source.startswith("ragged_")
            and {"-DBF16=1", "-DSOFTCAP=0"} <= set(variant.options)
        ):
            yield variant


def count(variant: runtime.Variant, compiler: nvrtc.Nvrtc) -> dict[str, int]:
    """Return a variant's registers, spilled bytes, and instructions in its main loop and in all."""
    kernel = variant.source.removesuffix(".cu")
    made = compiler.compile(nvrtc.flat(variant.source), variant.options, variant.arch)
    code = disassemble(made.cubin, kernel)
    usage = made.usage[kernel]
    total = sum(not line.endswith(":") for line in code)
    return {
        "registers": usage.registers,
        "spills": usage.spill_bytes,
        "loop": len(main_loop(code)),
        "all": total,
    }


def name_of(variant: runtime.Variant) -> str:
    """As ``ragged_mma 128 sm_80``."""
    assert variant.geometry is not None
    return f"{variant.source.removesuffix('.cu')} {variant.geometry.dim} {variant.arch}"


if __name__ == "__main__":
    both, rows = {c.version: c for c in nvrtc.installed()}.values(), {}
    for one in (v for arch in ARCHS for v in variants(arch)):
        counts = [count(one, compiler) for compiler in both]
        rows[name_of(one)] = {key: max(c[key] for c in counts) for key in counts[0]}
    lines = ",\n".join(f' "{name}": {json.dumps(row)}' for name, row in rows.items())
    COUNTS.write_text(f"{{\n{lines}\n}}\n")
