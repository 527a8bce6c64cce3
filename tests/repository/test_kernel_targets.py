"""Verdicts of the kernels' benchmark: every target from made-up numbers, for it can be met nowhere here."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from kernel_shapes import SHORT
from kernel_targets import STITCHED, verdicts


def made_up(speed: float) -> dict[str, Any]:
    """A result in which everything of ours takes ``1 / speed`` times its yardstick's time."""
    rows = []
    for shape in SHORT:
        times = {
            "kvrag sm90": 1e-2 / speed,
            "kvrag mma": 1e-2 / speed,
            "flex attention": 1e-2,
            "sdpa cudnn, mask": 1e-2,
        }
        times |= {
            "sdpa efficient, mask": "RuntimeError: no",
            "sdpa flash, causal": 1e-2,
            "sdpa cudnn, causal": 1e-2,
        }
        rates = {"kvrag sm90": 800 * speed, "kvrag mma": 800 * speed}
        error = {"kvrag sm90": 1e-3 / speed, "kvrag mma": 1e-3 / speed, "sdpa": 1e-3}
        error = {"rms_error": error, "max_error": error}
        row = {"shape": shape.name, "dim": shape.dim, "keys": shape.keys, "ratio": shape.ratio}
        rows.append(row | {"ms": times, "useful_tflops": rates} | error)
    ours = {"device_ms": 1 / speed, "wall_ms": 2 / speed, "moved_bytes": 3e9, "gb_s": 3000 * speed}
    stitched = {f"{c}, auto": ours for c in STITCHED}
    chain = {f"{c}, torch": {"device_ms": 1.0, "wall_ms": 4.0, "gb_s": 3000} for c in STITCHED}
    precompute = {"packed_ms": 1 / speed, "one_at_a_time_ms": 1.0, "causal_prefill_ms": 1.0}
    return {
        "device": "NVIDIA H100 80GB HBM3",
        "capability": [9, 0],
        "matmul_tflops": 800.0,
        "copy_gb_s": 3000.0,
        "attention": rows,
        "stitch": stitched | chain,
        "precompute": precompute,
    }


def test_every_target_has_a_verdict():
    fast, slow = verdicts(made_up(5.0)), verdicts(made_up(0.2))
    assert {v["verdict"] for v in fast} == {"met"}
    assert {v["verdict"] for v in slow} == {"missed"}
    names = "\n".join(v["target"] for v in fast)
    for kernel in ("mma", "sm90"):
        for shape in ("16/2 hd128 N=32768", "32/8 hd128 N=8192", "14/2 hd64 N=32768"):
            assert f"{kernel}, {shape} 15% uniform: share of the matmul" in names
            assert f"{kernel}, {shape} 15% uniform: × the best SDPA with a mask" in names
            assert f"{kernel}, {shape} 15% uniform: × FlexAttention" in names
            assert f"{kernel}, {shape} 15% uniform: × SDPA's own error" in names
            assert f"{kernel}, {shape} 15% uniform: × SDPA's own largest error" in names
            assert f"{kernel}, {shape} 15% uniform: useful TFLOP/s" in names
        assert f"{kernel}, 32/8 hd128 N=2048 15% uniform: µs per layer" in names
    for what in ("useful TFLOP/s", "share of the matmul's TFLOP/s"):
        assert f"sm90, 32/8 hd128 N=32768 15% uniform: {what}, stretch goal" in names
    assert "mma, 32/8 hd128 N=8192 100% uniform: × sdpa flash, causal" in names
    assert "sm90, 32/8 hd128 N=8192 100% uniform: × sdpa cudnn, causal" in names
    for what in (
        "share of the device copy",
        "the eager chain",
        "one at a time",
        "one causal prefill",
    ):
        assert what in names


@pytest.mark.parametrize(
    ("speed", "target", "verdict"),
    [
        (0.5, "mma, 16/2 hd128 N=32768 15% uniform: share of the matmul's TFLOP/s", "met"),
        (0.5, "sm90, 16/2 hd128 N=32768 15% uniform: share of the matmul's TFLOP/s", "missed"),
        (1.7, "mma, 16/2 hd128 N=8192 15% uniform: × the best SDPA with a mask", "missed"),
        (1.7, "mma, 16/2 hd128 N=8192 15% uniform: × the best SDPA with a mask, floor", "met"),
    ],
)
def test_each_kernel_has_targets_and_floors_of_its_own(speed, target, verdict):
    assert {v["target"]: v["verdict"] for v in verdicts(made_up(speed))}[target] == verdict


def test_the_stitch_is_judged_by_device_time_and_wall_time_stands_beside():
    """The host's part makes the wall's share half as large: told, and no reason to call the target missed."""
    found = {v["target"]: v for v in verdicts(made_up(1.0))}
    for codec in STITCHED:
        share = found[f"stitch, {codec}, all layers: share of the device copy's GB/s"]
        assert (share["got"], share["by_wall_time"], share["verdict"]) == (1.0, 0.5, "met")
        times = found[f"stitch, {codec}, all layers: × the eager chain"]
        assert (times["got"], times["by_wall_time"], times["verdict"]) == (1.0, 2.0, "missed")


@pytest.mark.parametrize("absent", ["matmul_tflops", "copy_gb_s", "stitch", "precompute"])
def test_what_was_not_measured_is_neither_met_nor_missed(absent):
    result = made_up(5.0)
    del result[absent]
    found = {v["verdict"] for v in verdicts(result)}
    assert found == {"met", "not measured"}


def test_a_kernel_that_failed_is_not_measured_and_one_that_is_not_there_has_no_target():
    result = made_up(5.0)
    for row in result["attention"]:
        row["ms"]["kvrag sm90"] = "given up: see failures"
        row["useful_tflops"].pop("kvrag sm90")
        row["rms_error"].pop("kvrag sm90", None)
        row["max_error"].pop("kvrag sm90", None)
        del row["ms"]["kvrag mma"]
    found = [v for v in verdicts(result) if not v["target"].startswith(("stitch", "precompute"))]
    assert all(v["target"].startswith("sm90") and v["verdict"] == "not measured" for v in found)
    assert found


def without_hoppers_kernel(result: dict[str, Any]) -> dict[str, Any]:
    for row in result["attention"]:
        for part in ("ms", "useful_tflops", "rms_error", "max_error"):
            row[part].pop("kvrag sm90", None)
    return result


def test_on_hopper_the_kernel_that_did_not_load_keeps_its_targets():
    """Else a run in which it failed its own test would read as if nothing were wanted of it."""
    on_hopper = {v["target"]: v["verdict"] for v in verdicts(without_hoppers_kernel(made_up(5.0)))}
    hoppers = {verdict for target, verdict in on_hopper.items() if target.startswith("sm90")}
    assert hoppers == {"not measured"}
    assert len(on_hopper) == len(verdicts(made_up(5.0)))
    elsewhere = without_hoppers_kernel(made_up(5.0)) | {
        "capability": [8, 0],
        "device": "NVIDIA A100",
    }
    assert not [v for v in verdicts(elsewhere) if v["target"].startswith("sm90")]


def test_rates_are_wanted_in_numbers_on_an_h100_and_as_shares_everywhere():
    """A slow matmul in the same run does not lower what is wanted."""
    result = made_up(0.31)  # 248 TFLOP/s of the made-up 800
    result["matmul_tflops"] = 600.0
    shape = "mma, 16/2 hd128 N=32768 15% uniform"
    found = {v["target"]: v["verdict"] for v in verdicts(result)}
    assert found[f"{shape}: share of the matmul's TFLOP/s"] == "met"
    assert found[f"{shape}: useful TFLOP/s"] == "missed"
    other = {
        v["target"] for v in verdicts(result | {"device": "NVIDIA A100", "capability": [8, 0]})
    }
    assert f"{shape}: useful TFLOP/s" not in other
    assert f"{shape}: share of the matmul's TFLOP/s" in other
