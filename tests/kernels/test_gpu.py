"""The kernels on a CUDA device, against the same float64 reference; graphs, and the fallback. ``make gpu-check`` runs them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import BASE, CASES, LONG, Case, inputs_of
from stitch_cases import CASES as STITCH_CASES
from stitch_cases import as_options, assert_stitched, stitching_of

from kvrag_kernels import probe_mass, ragged_attention, ragged_plan, reference, runtime, stitch
from kvrag_kernels.geometry import HOPPER
from kvrag_kernels.stitch_launch import Stitching

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.version.cuda is None, reason="needs a CUDA device"
    ),
    pytest.mark.filterwarnings("error:.*torch computes instead:RuntimeWarning"),
]

LARGE = [
    replace(
        BASE,
        name=f"large-{dim}-{heads}-{kv}",
        dim=dim,
        heads=heads,
        kv_heads=kv,
        rows=900,
        keys=5000,
    )
    for dim, heads, kv in (
        (64, 9, 3),
        (64, 14, 2),
        (128, 16, 2),
        (128, 32, 8),
        (96, 8, 8),
        (256, 8, 4),
    )
]


def on_device(case: Case, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Any]]:
    inputs = {n: None if x is None else x.cuda() for n, x in inputs_of(case, dtype).items()}
    return inputs, {"prefix": case.prefix, "scale": case.scale, "softcap": case.softcap}


def has_kernel(case: Case, dtype: torch.dtype) -> bool:
    inputs, _ = on_device(case, dtype)
    return bool(runtime.attention_variants(inputs["q"], inputs["v"], case.softcap))


@pytest.mark.parametrize("mode", ["sm90", "mma"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", [*CASES, *LONG, *LARGE], ids=lambda c: c.name)
def test_rows_see_exactly_their_keys(case, dtype, mode, monkeypatch):
    monkeypatch.setenv("KVRAG_KERNEL", mode)
    if not has_kernel(case, dtype):
        pytest.skip("no kernel for this dtype on this device")
    if mode == "sm90" and torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("the device has one attention kernel, which mma tests")
    inputs, options = on_device(case, dtype)
    want, want_lse = reference.attention(**inputs, **options)
    plan = ragged_plan(inputs["q"], inputs["k"], inputs["hi"], inputs["lo"], case.prefix)
    assert plan.numel(), "torch computed in place of the kernel"
    for given in (None, plan):
        out, lse = ragged_attention(**inputs, **options, plan=given)
        torch.testing.assert_close(
            out.double(), want, atol=1.5e-2 if dtype == torch.bfloat16 else 2e-3, rtol=0
        )
        torch.testing.assert_close(lse.double(), want_lse, atol=2e-5, rtol=1e-5)
    assert runtime.modules.failures == [], "a kernel was given up"


@pytest.mark.parametrize("case", LARGE, ids=lambda c: c.name)
def test_the_error_is_at_most_that_of_torch(case):
    dtype = torch.bfloat16 if has_kernel(case, torch.bfloat16) else torch.float16
    inputs, options = on_device(case, dtype)
    want, _ = reference.attention(**inputs, **options)
    ours, _ = ragged_attention(**inputs, **options)
    mask = reference.visible(inputs["hi"], inputs["lo"], case.prefix, case.keys)
    groups = case.heads // case.kv_heads
    k, v = (inputs[n].repeat_interleave(groups, dim=1) for n in ("k", "v"))
    theirs = F.scaled_dot_product_attention(inputs["q"], k, v, attn_mask=mask, scale=case.scale)
    assert (ours.double() - want).square().mean() <= 1.5**2 * (
        theirs.double() - want
    ).square().mean()
    assert (ours.double() - want).abs().max() <= 1.5 * (theirs.double() - want).abs().max()


def test_the_same_call_gives_the_same_bits():
    inputs, options = on_device(LARGE[3], torch.float16)
    assert torch.equal(
        ragged_attention(**inputs, **options)[0], ragged_attention(**inputs, **options)[0]
    )


def test_a_captured_graph_follows_its_inputs():
    """Plan and attention in one graph: new limits, written in place, take effect at the replay."""
    inputs, options = on_device(LARGE[2], torch.float16)

    def layer():
        plan = ragged_plan(inputs["q"], inputs["k"], inputs["hi"])
        return ragged_attention(**inputs, **options, plan=plan)[0]

    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    inputs["hi"].sub_(1).clamp_(min=0)
    inputs["q"].mul_(0.5)
    graph.replay()
    torch.testing.assert_close(out, ragged_attention(**inputs, **options)[0], atol=0, rtol=0)


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=lambda c: c.name)
def test_each_key_gets_its_probability(case):
    inputs, options = on_device(case, torch.float16)
    v, sinks = inputs.pop("v"), inputs.pop("sinks")
    _, lse = ragged_attention(**inputs, v=v, **options, sinks=sinks)
    p, _ = reference.probabilities(**inputs, **options, sinks=sinks)
    got = probe_mass(**inputs, lse=lse, **options, sinks=sinks)
    torch.testing.assert_close(
        got.double(), reference.mass(p, inputs["k"].shape[1]), atol=2e-3, rtol=1e-3
    )


@pytest.mark.parametrize("case", STITCH_CASES, ids=lambda c: c.name)
def test_parts_come_to_their_rows(case):
    if case.dtype == torch.bfloat16 and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("no bfloat16 on this device")
    host = stitching_of(case)
    keys, values = ([p.map(torch.Tensor.cuda) for p in side] for side in (host.keys, host.values))
    outs = ([o.cuda() for o in side] for side in (host.out_keys, host.out_values))
    skip = None if host.skip is None else host.skip.cuda()
    call = Stitching(
        keys,
        values,
        *outs,
        case.starts,
        host.cos.cuda(),
        host.sin.cuda(),
        case.tables,
        case.interleaved,
        skip,
    )
    before = len(runtime.modules.failures)
    stitch(**as_options(call))
    assert len(runtime.modules.failures) == before
    copied = ([o.cpu() for o in side] for side in (call.out_keys, call.out_values))
    assert_stitched(replace(host, out_keys=next(copied), out_values=next(copied)), case)
