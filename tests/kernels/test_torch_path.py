"""The attention op on the CPU: the contract against float64, fullgraph compilation, memory, and refusals."""

from typing import Any

import pytest
import torch
from kernel_cases import BASE, CASES, Case, inputs_of

from kvrag_kernels import probe_mass, ragged_attention, ragged_plan, reference, torch_path


def run(case: Case, dtype: torch.dtype = torch.float32, **changed: Any) -> tuple[torch.Tensor, ...]:
    inputs = inputs_of(case, dtype) | changed
    options = {"prefix": case.prefix, "scale": case.scale, "softcap": case.softcap}
    return *ragged_attention(**inputs, **options), *reference.attention(**inputs, **options)


def assert_close(
    out: torch.Tensor, lse: torch.Tensor, want: torch.Tensor, want_lse: torch.Tensor, atol: float
) -> None:
    assert out.shape == want.shape
    assert lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), want, atol=atol, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse, atol=atol, rtol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_rows_see_exactly_their_keys(case):
    assert_close(*run(case), atol=2e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_path_without_a_fused_call_gives_the_same(case, monkeypatch):
    monkeypatch.setattr(torch_path, "_can_fuse", lambda *_: False)
    assert_close(*run(case), atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype):
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float64: 1e-6}[dtype]
    out, *rest = run(CASES[0], dtype)
    assert out.dtype == dtype
    assert_close(out, *rest, atol=tolerance)


def test_rows_without_keys_give_zero_and_minus_infinity():
    out, lse, *_ = run(next(c for c in CASES if c.name == "empty"))
    assert (out[:, :, :40] == 0).all()
    assert (lse[:, :, :40] == float("-inf")).all()
    assert torch.isfinite(out).all()


def test_no_row_reads_beyond_its_blocks_limit():
    """Rows of the buffer that nobody has written yet may hold anything."""
    inputs = inputs_of(BASE, torch.float32)
    hi = torch.arange(20, 20 + BASE.rows, dtype=torch.int32)
    for x in (inputs["k"], inputs["v"]):
        x[:, :, 20 + BASE.rows :] = float("nan")
    out, lse = ragged_attention(inputs["q"], inputs["k"], inputs["v"], hi, scale=0.1)
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse).all()


def test_parts_of_the_keys_merge_by_their_log_sums():
    inputs = inputs_of(BASE, torch.float32)
    q, k, v, hi = (inputs[n] for n in ("q", "k", "v", "hi"))
    whole, lse = ragged_attention(q, k, v, hi, scale=0.1)
    parts = [
        ragged_attention(q, k[:, :, a:b], v[:, :, a:b], hi - a, scale=0.1)
        for a, b in ((0, 60), (60, 131))
    ]
    merged = torch.logaddexp(parts[0][1], parts[1][1])
    torch.testing.assert_close(merged, lse)
    torch.testing.assert_close(
        sum(torch.exp(s - merged)[..., None] * o for o, s in parts), whole, atol=1e-5, rtol=0
    )


def test_the_output_is_stored_row_by_row():
    """So that the layer's output projection reads it without a copy."""
    out, *_ = run(CASES[0])
    assert out.transpose(1, 2).is_contiguous()


def test_compiles_into_one_graph():
    inputs = inputs_of(next(c for c in CASES if c.name == "window-sinks"), torch.float32)

    def layer(q, k, v, hi, lo):
        out, lse = ragged_attention(q * 2, k, v, hi, lo, 4, scale=0.1)
        return out.transpose(1, 2).flatten(2) + lse.sum()

    args = tuple(inputs[n] for n in ("q", "k", "v", "hi", "lo"))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*args), layer(*args))


def test_a_plan_compiles_into_the_same_graph():
    inputs = inputs_of(BASE, torch.float32)

    def forward(q, k, v, hi):
        plan = ragged_plan(q, k, hi)
        first, _ = ragged_attention(q, k, v, hi, scale=0.1, plan=plan)
        return ragged_attention(first * 2, k, v, hi, scale=0.1, plan=plan)[0]

    args = tuple(inputs[n] for n in ("q", "k", "v", "hi"))
    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*args), forward(*args))


def test_torch_finds_no_fault_in_the_op():
    inputs = inputs_of(CASES[0], torch.float32)
    args = tuple(inputs[n] for n in ("q", "k", "v", "hi"))
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(
        torch.ops.kvrag.ragged_attention.default, args, {"scale": 0.1}, test_utils=checks
    )


def test_blocks_stay_small_and_cut_their_keys():
    limits = torch_path.Limits.of(torch.arange(0, 100_000, 10), None, 0, 100_000)
    blocks = list(limits.blocks(heads=32, groups=4))
    assert all(
        (b.rows.stop - b.rows.start) * 32 * 100_000 <= torch_path.MAX_SCORES
        or b.rows.stop - b.rows.start == 1
        for b in blocks
    )
    assert [b.pieces[-1].stop for b in blocks[:2]] == [1, 11]
    few = list(
        torch_path.Limits.of(torch.arange(0, 4000, 10), None, 0, 4000).blocks(heads=4, groups=4)
    )
    assert [b.pieces for b in few[:2]] == [(slice(0, 1271),), (slice(0, 2551),)]
    window = torch_path.Limits.of(torch.tensor([500, 501]), torch.tensor([400, 401]), 8, 1000)
    assert next(window.blocks(1, 1)).pieces == (slice(0, 8), slice(400, 502))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": torch.zeros(4, 37, 64)}, "3, 4 and 4 dimensions"),
        ({"q": torch.zeros(1, 4, 37, 32)}, "do not fit"),
        ({"q": torch.zeros(1, 3, 37, 64)}, "3 query heads are not a multiple of 2"),
        ({"q": torch.zeros(1, 4, 37, 64).half()}, "convert them to one floating point dtype"),
        ({"hi": torch.zeros(36, dtype=torch.int32)}, r"hi is torch.int32 of shape \(36,\)"),
        ({"lo": torch.zeros(37)}, "lo is torch.float32"),
        ({"sinks": torch.zeros(2)}, "one score per query head"),
        ({"sinks": torch.zeros(4, device="meta")}, "sinks is on meta and q on cpu; move it"),
        ({"hi": torch.zeros(37, dtype=torch.int32, device="meta")}, "hi is on meta and q on cpu"),
        (
            {"plan": torch.zeros(8, dtype=torch.int32, device="meta")},
            "plan is on meta and q on cpu",
        ),
        ({"scale": 0.0}, "scale must be positive"),
        ({"softcap": -1.0}, "softcap at least 0"),
    ],
)
def test_refusals_name_what_is_wrong(changed, message):
    with pytest.raises(ValueError, match=message):
        ragged_attention(**({**inputs_of(BASE, torch.float32), "scale": 0.1} | changed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changed", [{}, {"softcap": 20.0}, {"sinks": True}, {"per_batch": True}], ids=str
)
def test_a_batch_of_none_gives_none(changed, dtype):
    """As no rows and no keys do; what comes before it may have left nothing to compute."""
    q, k, v = (
        torch.empty(0, *shape, dtype=dtype) for shape in ((4, 3, 64), (2, 5, 64), (2, 5, 32))
    )
    hi = torch.zeros((0, 3) if changed.get("per_batch") else 3, dtype=torch.int64)
    options = {
        "scale": 0.1,
        "softcap": changed.get("softcap", 0.0),
        "sinks": torch.ones(4) if changed.get("sinks") else None,
    }
    out, lse = ragged_attention(q, k, v, hi, hi, 1, **options)
    assert (out.shape, out.dtype) == ((0, 4, 3, 32), dtype)
    assert (lse.shape, lse.dtype) == ((0, 4, 3), torch.float32)
    assert probe_mass(q, k, lse, hi, hi, 1, **options).shape == (0, 5)
