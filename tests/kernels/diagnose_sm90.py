"""Which element lands where in the Hopper kernel: for its first run on a device, before its tests.

Each row sees one key, so that the log-sum-exp is one score and the output is one row of values. Queries pick a column of a key; keys and
values hold the number of their row, key, tile or column. Maps show the wrong share of each 8×8 block: ``.`` none, 1 to 9 tenths. A wait
that does not end is given up and told. Where something is wrong, other strides of the operands are tried.

    python tests/kernels/diagnose_sm90.py [--dry-run] [--out FOLDER]    # 0: all is right; 1: not; 2: no such device
"""

import argparse
import json
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "kernels"))

from kvrag_kernels import launch, nvrtc, torch_path
from kvrag_kernels.driver import CudaModule
from kvrag_kernels.geometry import HEAD_DIMS, HOPPER, HOPPER_REGISTERS, Geometry, hopper_geometry

CODES = ("row", "key", "tile", "column")
BARRIERS = ("keys are there", "values are there", "keys' stage is free", "values' stage is free")
TILES, POLLS, EXAMPLES = 4, 20_000, 6
MASS_AT = 2 * 128 + 11 * 8  # in struct TmaAttention, an address that only the probe uses
SWEEP = (
    "V_TRANSPOSED=0",
    "V_LEADING=ATOM -DV_STRIDE=(BN*PANEL_ROW)",
    "K_LEADING=0",
    "K_LEADING=ATOM -DK_STRIDE=16",
)
"""Other readings of the operands' descriptors."""


class Reporting:
    """A module whose attention kernel gets a place to tell of waits that it gave up: four integers a warp."""

    def __init__(self, module: Any, device: str) -> None:
        self.processors, self.tensor_map, self._launch = (
            module.processors,
            module.tensor_map,
            module.launch,
        )
        self.lines = torch.zeros((12, 4), dtype=torch.int32, device=device)

    def launch(
        self, kernel: str, blocks: int, threads: int, shared_bytes: int, arguments: bytes
    ) -> None:
        edited = bytearray(arguments)
        if kernel == "ragged_sm90":
            struct.pack_into("Q", edited, MASS_AT, self.lines.data_ptr())
        self._launch(kernel, blocks, threads, shared_bytes, bytes(edited))

    def given_up(self) -> list[str]:
        said = "block {}, thread {} ({}): waited in vain until {}, tile {}"
        return [
            said.format(
                block - 1, thread, "copies" if thread >= 256 else "multiplies", BARRIERS[kind], tile
            )
            for block, thread, kind, tile in self.lines.tolist()
            if block
        ]


def call_of(geometry: Geometry, code: str, seen: torch.Tensor, device: str) -> launch.Call:
    """Return the call whose row ``i`` sees key ``seen[i]`` alone."""
    row, key, column = (
        torch.arange(n)[:, None] for n in (geometry.rows, TILES * geometry.keys, geometry.dim)
    )
    q = (column.T == 0) * row if code == "row" else row % geometry.dim == column.T
    k = {
        "row": key**0,
        "key": key % geometry.keys,
        "tile": key // geometry.keys,
        "column": column.T,
    }[code]
    wide = (x.expand(n, geometry.dim)[None, None] for x, n in ((q, len(row)), (k, len(key))))
    q, k = (x.contiguous().to(device, torch.bfloat16) for x in wide)
    limit = seen.int().to(device)
    return launch.prepare(launch.Call(q, k, k, limit, limit, 0, 1.0))


def block_map(wrong: torch.Tensor) -> list[str]:
    """Return a line per eight rows and a character per eight columns."""
    share = wrong.float().unflatten(1, (-1, 8)).unflatten(0, (-1, 8)).mean(dim=(1, 3))
    return [
        "".join("." if x == 0 else str(max(1, int(9 * x))) for x in line) for line in share.tolist()
    ]


def examine(
    geometry: Geometry,
    run: Callable[..., Any],
    shifts: Sequence[int],
    reporting: Reporting | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Look at each score of a tile, and at each element of the outputs, by its codes."""
    rows, columns, num_keys = torch.arange(geometry.rows), torch.arange(geometry.dim), geometry.keys
    wrong = {
        "scores": torch.zeros(geometry.rows, num_keys),
        "outputs": torch.zeros(geometry.rows, geometry.dim),
    }
    examples: list[dict[str, Any]] = []
    for shift in shifts:
        seen = (rows + shift) % num_keys + (
            rows + shift
        ) % TILES * num_keys  # of all tiles, so that stages are used again
        wanted = torch.stack([rows, seen % num_keys, seen // num_keys, rows % geometry.dim]).float()
        results = []
        for code in CODES:
            results.append(
                [x[0, 0].float().cpu() for x in run(call_of(geometry, code, seen, device))]
            )
            if reporting and (told := reporting.given_up()):
                return {"gave_up": told}
        out, lse = (torch.stack(x) for x in zip(*results, strict=True))
        values = wanted[:, :, None].expand_as(out).clone()
        values[0], values[3] = 1.0, columns.float()  # where rows are the code, values are ones
        is_off, is_out = (~((x - y).abs() < 0.1) for x, y in ((lse, wanted), (out, values)))
        wrong["scores"][rows, seen % num_keys] += is_off.any(dim=0)
        wrong["outputs"] += is_out.any(dim=0)
        for kind, got, want, off in (
            ("score", lse, wanted, is_off),
            ("output", out, values, is_out),
        ):
            for at in off.any(dim=0).nonzero()[: EXAMPLES - len(examples)].tolist():
                pair = (
                    {c: float(x[i][tuple(at)]) for i, c in enumerate(CODES)} for x in (want, got)
                )
                examples.append(
                    {
                        kind: at,
                        "key": int(seen[at[0]]),
                        **dict(zip(("wanted", "got"), pair, strict=True)),
                    }
                )
    maps = {
        name: {"wrong": int((x > 0).sum()), "map": block_map(x > 0)} for name, x in wrong.items()
    }
    return maps | {"examples": examples}


def is_right(found: dict[str, Any]) -> bool:
    return found.get("examples") == []


def on_device(
    geometry: Geometry, shifts: Sequence[int], options: Sequence[str] = ()
) -> dict[str, Any]:
    """Examine the kernel on the device; what it, or its compiler, refuses is a result too."""
    defines = (*geometry.defines(torch.bfloat16), f"-DBOUNDED_WAITS={POLLS}", *options)
    try:
        made = nvrtc.find().compile(nvrtc.flat("ragged_sm90.cu"), defines, "sm_90a")
        module = CudaModule(made.cubin, torch.cuda.current_device())
        if (count := module.registers("ragged_sm90")) != HOPPER_REGISTERS:
            return {"error": f"{count} registers a thread: the warpgroups would wait for ever"}
        reporting = Reporting(module, "cuda")
        return examine(
            geometry,
            lambda call: launch.attend(reporting, geometry, call),
            shifts,
            reporting,
            "cuda",
        )
    except RuntimeError as error:
        return {"error": str(error)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="torch in the kernel's place: a check of this script"
    )
    parser.add_argument("--out", type=Path, help="folder for diagnose_sm90.json")
    args = parser.parse_args(arguments)
    if not args.dry_run and not (
        torch.cuda.is_available() and torch.cuda.get_device_capability() == HOPPER
    ):
        print("no device of compute capability 9.0 here; --dry-run checks the script")
        return 2
    report: dict[str, Any] = {"measured": not args.dry_run, "head_dims": {}, "sweep": {}}
    for dim in HEAD_DIMS:
        tiles = hopper_geometry(dim)
        found = (
            examine(tiles, torch_path.attend, (0, 5))
            if args.dry_run
            else on_device(tiles, range(tiles.keys))
        )
        report["head_dims"][dim] = found
        print(
            f"head dim {dim}: {'right' if is_right(found) else json.dumps(found, indent=1)}",
            flush=True,
        )
        for options in SWEEP if not is_right(found) and "error" not in found else ():
            report["sweep"][f"{dim} {options}"] = on_device(
                tiles, range(0, tiles.keys, 16), f"-D{options}".split()
            )
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "diagnose_sm90.json").write_text(json.dumps(report, indent=1) + "\n")
    return int(not all(is_right(found) for found in report["head_dims"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
