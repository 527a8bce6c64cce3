"""What the kernels are to reach, and whether they did: verdicts from the numbers of one run of ``bench_kernels.py``.

On an H100 rates are wanted in TFLOP/s; there and elsewhere also as shares of the matmul and of the copy measured in the same run, which
mean the same on every device. Which rates are wanted depends on the kernel: ``sm90`` multiplies by wgmma, ``mma`` by mma.sync, which
reaches less on Hopper. There ``mma`` has floors too, below what is wanted of the kernel that is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TFLOPS_ON_H100 = {  # head dim, keys: useful TFLOP/s, by kernel
    (128, 32768): {"mma": 300, "sm90": 500},
    (128, 8192): {"mma": 250, "sm90": 420},
    (64, 32768): {"mma": 220, "sm90": 330},
}
STRETCH = {(128, 32768): {"sm90": (600, 0.75)}}  # TFLOP/s, and the share of the matmul's
SHARE_OF_MATMUL = {  # head dim, keys: share of an 8192³ matmul's TFLOP/s, by kernel
    (128, 32768): {"mma": 0.38, "sm90": 0.63},
    (128, 8192): {"mma": 0.31, "sm90": 0.53},
    (64, 32768): {"mma": 0.28, "sm90": 0.41},
}
TIMES_MASKED_SDPA, TIMES_FLEX = (2.0, 1.5), (1.3, 1.0)  # what is wanted, and the floor
CAUSAL = {
    "mma": ("sdpa flash, causal", 0.9),
    "sm90": ("sdpa cudnn, causal", 0.85),
}  # share of another kernel's speed
MICROSECONDS_AT_2K = (15.0, 25.0)
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
        is_met = self.got is not None and (
            self.got <= self.wanted if self.is_limit else self.got >= self.wanted
        )
        verdict = "not measured" if self.got is None else "met" if is_met else "missed"
        bound = "at most" if self.is_limit else "at least"
        row = {
            "target": self.target,
            "wanted": f"{bound} {self.wanted:g}",
            "got": self.got,
            "verdict": verdict,
        }
        return row if self.by_wall is None else row | {"by_wall_time": self.by_wall}


def verdicts(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a verdict for every target, from what a run measured."""
    found = [
        v
        for row in result.get("attention", [])
        for kernel in ("mma", "sm90")
        for v in of_shape(row, kernel, result)
    ]
    return [v.row() for v in [*found, *of_stitch(result), *of_precompute(result)]]


def of_shape(row: dict[str, Any], kernel: str, result: dict[str, Any]) -> list[Verdict]:
    """Return the verdicts of one kernel on one shape; none where the device has no such kernel."""
    is_hopper = result.get("capability") == [9, 0]
    if f"kvrag {kernel}" not in row["ms"] and not (kernel == "sm90" and is_hopper):
        return []
    times, name = row["ms"], f"{kernel}, {row['shape']}"
    ours = _number(times.get(f"kvrag {kernel}"))
    found = list(_of_rate(row, kernel, result)) if row["ratio"] == 0.15 else []
    if row["keys"] >= 8192 and row["ratio"] == 0.15:
        masked = [
            t for n, t in times.items() if n.startswith("sdpa") and "mask" in n and _number(t)
        ]
        best = _over(min(masked) if masked else None, ours)
        flex = _over(_number(times.get("flex attention")), ours)
        found += _with_floor(
            f"{name}: × the best SDPA with a mask", TIMES_MASKED_SDPA, best, kernel
        )
        found += _with_floor(
            f"{name}: × FlexAttention, its mask not counted", TIMES_FLEX, flex, kernel
        )
    if row["keys"] == 2048 and row["ratio"] == 0.15:
        got = None if ours is None else ours * 1e3
        found += _with_floor(
            f"{name}: µs per layer", MICROSECONDS_AT_2K, got, kernel, is_limit=True
        )
    if row["ratio"] == 1.0:
        other, share = CAUSAL[kernel]
        found.append(Verdict(f"{name}: × {other}", share, _over(_number(times.get(other)), ours)))
    for kind, what in (("rms_error", "own error"), ("max_error", "own largest error")):
        error = row.get(kind) or {}
        got = _over(error.get(f"kvrag {kernel}"), error.get("sdpa"))
        found.append(Verdict(f"{name}: × SDPA's {what}", TIMES_SDPA_ERROR, got, is_limit=True))
    return found


def _of_rate(row: dict[str, Any], kernel: str, result: dict[str, Any]) -> Iterator[Verdict]:
    """Yield the verdicts on useful TFLOP/s, for the shapes that have a target."""
    kind, name = (row["dim"], row["keys"]), f"{kernel}, {row['shape']}"
    rate = _number(row["useful_tflops"].get(f"kvrag {kernel}"))
    share, stretch = _over(rate, result.get("matmul_tflops")), STRETCH.get(kind, {}).get(kernel)
    if kind not in SHARE_OF_MATMUL:
        return
    if "H100" in result.get("device", ""):
        yield Verdict(f"{name}: useful TFLOP/s", TFLOPS_ON_H100[kind][kernel], rate)
        if stretch:
            yield Verdict(f"{name}: useful TFLOP/s, stretch goal", stretch[0], rate)
    yield Verdict(f"{name}: share of the matmul's TFLOP/s", SHARE_OF_MATMUL[kind][kernel], share)
    if stretch:
        yield Verdict(f"{name}: share of the matmul's TFLOP/s, stretch goal", stretch[1], share)


def _with_floor(
    name: str,
    wanted: tuple[float, float],
    got: float | None,
    kernel: str,
    *,
    is_limit: bool = False,
) -> Iterator[Verdict]:
    """Yield what is wanted, and of ``mma`` its floor too."""
    yield Verdict(name, wanted[0], got, is_limit=is_limit)
    if kernel == "mma":
        yield Verdict(f"{name}, floor", wanted[1], got, is_limit=is_limit)


def of_stitch(result: dict[str, Any]) -> list[Verdict]:
    """Return the verdicts of the stitch of all layers, by device time."""
    rows, copy = result.get("stitch", {}), result.get("copy_gb_s")
    found = []
    for codec in STITCHED:
        ours, chain = rows.get(f"{codec}, auto", {}), rows.get(f"{codec}, torch", {})
        by_wall = _over(ours.get("moved_bytes"), (ours.get("wall_ms") or 0.0) * 1e6)
        name, shares = (
            f"stitch, {codec}, all layers",
            (_over(ours.get("gb_s"), copy), _over(by_wall, copy)),
        )
        found.append(
            Verdict(
                f"{name}: share of the device copy's GB/s",
                SHARE_OF_COPY,
                shares[0],
                by_wall=shares[1],
            )
        )
        faster, by_wall = (
            _over(chain.get(time), ours.get(time)) for time in ("device_ms", "wall_ms")
        )
        found.append(
            Verdict(f"{name}: × the eager chain", TIMES_EAGER_STITCH, faster, by_wall=by_wall)
        )
    return found


def of_precompute(result: dict[str, Any]) -> list[Verdict]:
    """Return the verdicts of precompute."""
    rows = result.get("precompute", {})
    batch = _number(rows.get("batch_ms"))
    one, causal = (
        _over(_number(rows.get(name)), batch) for name in ("one_at_a_time_ms", "causal_prefill_ms")
    )
    return [
        Verdict("precompute of 512-token chunks: × one at a time", TIMES_ONE_CHUNK, one),
        Verdict(
            "precompute: share of one causal prefill's tokens/s", SHARE_OF_CAUSAL_PREFILL, causal
        ),
    ]


def _number(x: Any) -> float | None:
    return float(x) if isinstance(x, int | float) else None


def _over(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None
