"""The arithmetic behind docs/gpu.md, beside figures worked out by hand."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from roofline import (
    CHUNK,
    H100,
    SCHEDULES,
    SHAPES,
    Device,
    Work,
    full_prefill_ms,
    prediction,
    stages,
    ttft_ms,
)

LLAMA, QWEN = SHAPES
TOKENS = 32768
PLAIN = Device("600 TFLOP/s for everything", 600, 600, 600, 67, 3000, 50, "")


def test_a_full_prefill_of_32k_tokens():
    """457 TFLOP of linear layers and 281 of attention: 1.23 s at 600 TFLOP/s, of which a twentieth is 62 ms."""
    linear, attention = (
        2 * LLAMA.parameters * TOKENS / 1e12,
        LLAMA.attention_flop(TOKENS**2 / 2) / 1e12,
    )
    assert (round(linear), round(attention)) == (457, 281)
    assert full_prefill_ms(LLAMA, TOKENS, PLAIN) == pytest.approx(1231, abs=1)
    assert 1250 < full_prefill_ms(LLAMA, TOKENS, H100) < 1350


def test_the_kv_of_32k_tokens_over_the_link():
    """4.29 GB take 86 ms at 50 GB/s, more than a twentieth of the prefill; rounded to int8 43 ms, to int4 26 ms."""
    assert LLAMA.kv_bytes(TOKENS) == 4 * 2**30
    took = {
        wire: Work(link_bytes=LLAMA.kv_bytes(TOKENS, wire)).ms(PLAIN)
        for wire in ("bf16", "int8", "int4")
    }
    assert {wire: round(ms) for wire, ms in took.items()} == {"bf16": 86, "int8": 43, "int4": 26}
    assert took["bf16"] > full_prefill_ms(LLAMA, TOKENS, PLAIN) / 20
    assert QWEN.kv_bytes(1000) == 1000 * 36 * 2 * 2 * 128 * 2


def test_a_repair_costs_its_share_of_the_rows():
    """1.23 s · r: rows spread evenly see half of the keys each, and the live ones, here of no weight, all of them."""
    work = stages(LLAMA, 2**20, "int8", 0.10)
    for stage, whole in (
        ("repair, linear", Work(flop=2 * LLAMA.parameters * 2**20)),
        ("repair, attention", Work(attention_flop=LLAMA.attention_flop(2**40 / 2))),
    ):
        assert work[stage].ms(PLAIN) / whole.ms(PLAIN) == pytest.approx(0.10, rel=0.1), stage


def test_copies_are_counted_as_the_engine_makes_them():
    """64 chunks, 32 layers: 4,096 tensors in bfloat16, 10,240 with scales; sixteen contiguous pieces a chunk are 1,024."""
    ranges = next(s for s in SCHEDULES if s.ranges)
    assert TOKENS // CHUNK == 64
    for wire, schedule, copies in (
        ("bf16", SCHEDULES[0], 4096),
        ("int8", SCHEDULES[0], 10240),
        ("int8", ranges, 1024),
    ):
        assert stages(LLAMA, TOKENS, wire, 0.03, schedule)["copy"].host_ms == pytest.approx(
            copies * 0.01
        )
    assert stages(LLAMA, TOKENS, "device", 0.03)["copy"] == Work()


def test_a_stage_takes_as_long_as_its_slowest_resource():
    assert Work(flop=6e12, attention_flop=6e12).ms(PLAIN) == pytest.approx(20)
    assert Work(flop=6e12, device_bytes=9e10).ms(PLAIN) == pytest.approx(30)
    assert Work(flop=6e12, host_ms=11, link_bytes=50e6).ms(PLAIN) == pytest.approx(11)


def test_a_pipeline_hides_the_shorter_of_copying_and_computing():
    ms = {"plan": 1.0, "copy": 32.0, "stitch": 0.0, "probe": 4.0, "select": 2.0}
    ms |= {
        "repair, linear": 9.0,
        "repair, attention": 3.0,
        "repair, shift": 8.0,
        "repair, host": 5.0,
    }
    at_once = next(s for s in SCHEDULES if s.is_pipelined and s.probed == 0.25)
    assert ttft_ms(ms, SCHEDULES[0], 32) == 1 + 32 + 4 + 2 + 20
    assert ttft_ms(ms, at_once, 32) == 1 + 1 + 8 + 2 + 24, (
        "8 ms of copies hide the probe, 24 ms the repair"
    )
    assert ttft_ms(ms | {"copy": 0.0}, at_once, 32) == 1 + 4 + 2 + 20


def test_each_schedule_is_at_least_as_fast_as_the_one_before():
    assert len({s.name for s in SCHEDULES}) == len(SCHEDULES)
    for shape in SHAPES:
        for wire in ("bf16", "int8", "int4"):
            took = prediction(shape, TOKENS, wire, 0.03, H100)["ttft_ms"]
            assert took == sorted(took, reverse=True)


def test_what_the_document_says_of_twenty_times():
    """Not from the host in bfloat16; nearly with codes, if everything is done; far from it before, as the engine's stages added up."""

    def speed(wire, ratio, schedule):
        found = prediction(LLAMA, TOKENS, wire, ratio, H100)
        return found["full_ms"] / found["ttft_ms"][schedule]

    assert speed("bf16", 0.03, -1) < 15
    assert 19 < speed("int8", 0.03, -1) < speed("int4", 0.03, -1) < 20
    assert all(speed(wire, 0.10, -1) < 10 for wire in ("bf16", "int8", "int4", "device"))
    assert 3 < speed("bf16", 0.10, 0) < speed("bf16", 0.03, 0) < 6
