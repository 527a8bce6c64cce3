"""What the kernels are to reach, and whether they did: verdicts from the numbers of one run of ``bench_kernels.py``.

Rates are shares of the matmul and of the copy measured in the same run, so that the targets mean the same on every device. Which numbers
are wanted depends on the kernel: ``sm90`` multiplies by wgmma, ``mma`` by mma.sync, which reaches less on Hopper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SHARE_OF_MATMUL = {  # head dim, keys: share of an 8192³ matmul's TFLOP/s, by kernel
    (128, 32768): {"mma": 0.38, "sm90": 0.63},
    (128, 8192): {"mma": 0.31, "sm90": 0.53},
    (64, 32768): {"mma": 0.28, "sm90": 0.41},
}
TIMES_MASKED_SDPA = {"mma": 1.5, "sm90": 2.0}
TIMES_FLEX = {"mma": 1.0, "sm90": 1.3}
CAUSAL = {"mma": ("sdpa flash, causal", 0.9), "sm90": ("sdpa cudnn, causal", 0.85)}  # share of another kernel's speed
MICROSECONDS_AT_2K = {"mma": 25.0, "sm90": 15.0}
TIMES_SDPA_ERROR = 1.5
SHARE_OF_COPY, TIMES_EAGER_STITCH = 0.85, 4.0
STITCHED = ("16-bit", "int8", "int8 with zeros", "int4 with zeros")
TIMES_ONE_CHUNK, SHARE_OF_CAUSAL_PREFILL = 2.0, 0.85


@dataclass(frozen=True)
class Verdict:
    """One target: what was wanted (at least, or at most), what was measured, ``None`` where nothing was.

    ``by_wall`` is the same by wall time, the host's part included: told beside it, and no part of the verdict.
    """

    target: str
    wanted: float
    got: float | None
    is_limit: bool = False
    by_wall: float | None = None

    def row(self) -> dict[str, Any]:
        """Return the verdict for the JSON: ``met``, ``missed`` or ``not measured``."""
        is_met = self.got is not None and (self.got <= self.wanted if self.is_limit else self.got >= self.wanted)
        verdict = "not measured" if self.got is None else "met" if is_met else "missed"
        bound = "at most" if self.is_limit else "at least"
        row = {"target": self.target, "wanted": f"{bound} {self.wanted:g}", "got": self.got, "verdict": verdict}
        return row if self.by_wall is None else row | {"by_wall_time": self.by_wall}


def verdicts(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a verdict for every target, from what a run measured."""
    found = [
        v for row in result.get("attention", []) for kernel in ("mma", "sm90") for v in of_shape(row, kernel, result)
    ]
    return [v.row() for v in [*found, *of_stitch(result), *of_precompute(result)]]


def of_shape(row: dict[str, Any], kernel: str, result: dict[str, Any]) -> list[Verdict]:
    """Return the verdicts of one kernel on one shape; none where the device has no such kernel."""
    times = row["ms"]
    ours = _number(times.get(f"kvrag {kernel}"))
    if f"kvrag {kernel}" not in times:
        return []
    dim, keys, ratio, name = row["dim"], row["keys"], row["ratio"], f"{kernel}, {row['shape']}"
    found = []
    wanted = SHARE_OF_MATMUL.get((dim, keys), {}).get(kernel)
    if wanted is not None and ratio == 0.15:
        rate = row["useful_tflops"].get(f"kvrag {kernel}")
        found.append(
            Verdict(f"{name}: share of the matmul's TFLOP/s", wanted, _over(rate, result.get("matmul_tflops")))
        )
    if keys >= 8192 and ratio == 0.15:
        masked = [t for n, t in times.items() if n.startswith("sdpa") and "mask" in n and _number(t)]
        best = min(masked) if masked else None
        found.append(Verdict(f"{name}: × the best SDPA with a mask", TIMES_MASKED_SDPA[kernel], _over(best, ours)))
        flex = _number(times.get("flex attention"))
        found.append(Verdict(f"{name}: × FlexAttention, its mask not counted", TIMES_FLEX[kernel], _over(flex, ours)))
    if keys == 2048 and ratio == 0.15:
        got = None if ours is None else ours * 1e3
        found.append(Verdict(f"{name}: µs per layer", MICROSECONDS_AT_2K[kernel], got, is_limit=True))
    if ratio == 1.0:
        other, share = CAUSAL[kernel]
        found.append(Verdict(f"{name}: × {other}", share, _over(_number(times.get(other)), ours)))
    error = row.get("rms_error") or {}
    got = _over(error.get(f"kvrag {kernel}"), error.get("sdpa"))
    found.append(Verdict(f"{name}: × SDPA's own error", TIMES_SDPA_ERROR, got, is_limit=True))
    return found


def of_stitch(result: dict[str, Any]) -> list[Verdict]:
    """Return the verdicts of the stitch of all layers, by device time."""
    rows, copy = result.get("stitch", {}), result.get("copy_gb_s")
    found = []
    for codec in STITCHED:
        ours, chain = rows.get(f"{codec}, auto", {}), rows.get(f"{codec}, torch", {})
        by_wall = _over(ours.get("moved_bytes"), (ours.get("wall_ms") or 0.0) * 1e6)
        name, shares = f"stitch, {codec}, all layers", (_over(ours.get("gb_s"), copy), _over(by_wall, copy))
        found.append(Verdict(f"{name}: share of the device copy's GB/s", SHARE_OF_COPY, shares[0], by_wall=shares[1]))
        faster, by_wall = (_over(chain.get(time), ours.get(time)) for time in ("device_ms", "wall_ms"))
        found.append(Verdict(f"{name}: × the eager chain", TIMES_EAGER_STITCH, faster, by_wall=by_wall))
    return found


def of_precompute(result: dict[str, Any]) -> list[Verdict]:
    """Return the verdicts of packed precompute."""
    rows = result.get("precompute", {})
    packed = _number(rows.get("packed_ms"))
    one, causal = (_over(_number(rows.get(name)), packed) for name in ("one_at_a_time_ms", "causal_prefill_ms"))
    return [
        Verdict("precompute of 512-token chunks: × one at a time", TIMES_ONE_CHUNK, one),
        Verdict("precompute: share of one causal prefill's tokens/s", SHARE_OF_CAUSAL_PREFILL, causal),
    ]


def _number(x: Any) -> float | None:
    return float(x) if isinstance(x, int | float) else None


def _over(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None
