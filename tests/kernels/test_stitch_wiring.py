"""What the engine hands to the ops has a form in the kernels, and comes out right: stitches in the emulator, attention in torch."""

from importlib import import_module
from typing import Any

import pytest
import torch
from emulated import needs_compiler
from kit import mapped
from test_stitch import run_emulated
from texts import make_chunks

import kvrag.blend.stitch as stitching
from kvrag.blend.layout import Layout, place
from kvrag.blend.stitch import stitch
from kvrag.kv.quantise import pack
from kvrag.model import CausalLM, attention
from kvrag.model.attention import ragged_attention
from kvrag.model.rows import EVERYTHING, KVBuffer, Limits, Reach
from kvrag.precompute.encode import encode_chunks, encode_prefix
from kvrag.testing.models import tiny_model
from kvrag.types import ChunkKV
from kvrag_kernels.stitch import stitch_in_torch

CHUNKS = [list(range(30, 76)), list(range(60, 69)), list(range(100, 140))]


def prompt_of(model: CausalLM, kv_dtype: Any) -> tuple[Layout, list[ChunkKV]]:
    """Chunks as the store keeps them, in bfloat16 or rounded from it: cut, whole, and parts that begin inside a group or with one."""
    prefix, _ = encode_prefix(model, [1, 2, 3])
    segments = [
        (3, "live", -1, 0),
        (39, "chunk", 0, 0),
        (5, "live", -1, 0),
        (9, "chunk", 1, 0),
        (39, "chunk", 2, 1),
        (4, "chunk", 2, 33),
        (7, "chunk", 0, 32),
        (2, "live", -1, 0),
    ]
    kvs = [
        pack(mapped(kv, torch.Tensor.bfloat16), kv_dtype)
        for kv in encode_chunks(model, prefix, CHUNKS)
    ]
    return place((n, kind, False, source, False, at) for n, kind, source, at in segments), kvs


@pytest.fixture
def computed_by(monkeypatch):
    """Let something compute what the engine gives to the op, as on a CUDA device."""

    def choose(compute):
        monkeypatch.setattr(stitching, "_has_kernel", lambda *_: True)
        monkeypatch.setattr(import_module("kvrag_kernels.stitch"), "stitch_in_torch", compute)

    return choose


@needs_compiler
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "int4", "fp8"])
@pytest.mark.parametrize("name", ["llama-yarn", "cohere2"])
def test_the_kernel_stitches_for_the_engine(name, kv_dtype, computed_by):
    model = CausalLM(tiny_model(name))
    layout, kvs = prompt_of(model, kv_dtype)
    found: list[KVBuffer] = []
    for compute in (lambda call: run_emulated(call, []), stitch_in_torch):
        computed_by(compute)
        buffer = KVBuffer.empty(
            model.shapes, layout.num_tokens, dtype=torch.bfloat16, device=torch.device("cpu")
        )
        for layer in range(model.num_layers):
            buffer.keys(layer).fill_(7.0), buffer.values(layer).fill_(7.0)
        skipped = torch.tensor([4, 50])
        stitch(buffer, layout, kvs, model.rotary(layout.num_tokens), skip=skipped)
        found.append(buffer)
    for layer in range(model.num_layers):
        for read in ("keys", "values"):
            one, other = (getattr(buffer, read)(layer).float() for buffer in found)
            # float32 may be fused here and not there, which moves few results to the next bfloat16
            torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-6)
            assert float((one != other).float().mean()) < 1e-2


@pytest.fixture
def with_kernel(monkeypatch):
    """Let the ops compute, or not."""
    return lambda is_on: monkeypatch.setattr(attention, "_has_kernel", lambda *_: is_on)


def test_layers_alike_share_their_limits(with_kernel):
    with_kernel(True)
    limits = Limits(torch.arange(0, 50, 2), 50)
    q, k = torch.randn(1, 4, 25, 64), torch.randn(1, 2, 50, 64)
    for reach in (EVERYTHING, Reach(window=10), EVERYTHING, Reach(window=1000)):
        ragged_attention(q, k, k, limits, scale=0.125, reach=reach)
    assert len(limits.for_kernels) == 2
    assert {made.lo is None for made in limits.for_kernels.values()} == {True, False}


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral"])
def test_answers_are_the_same(name, engine_of, with_kernel):
    engine = engine_of(name)
    chunks = make_chunks(3, words=30, seed=3)
    engine.precompute(chunks)
    prompt = "\n\n".join([chunks[2], chunks[0], chunks[1], "What is said?"])
    found = []
    for is_on in (False, True):
        with_kernel(is_on)
        found.append(engine.prefill(prompt, mode="stitch"))
    assert found[1].exactness == found[0].exactness == "repaired"
    torch.testing.assert_close(found[1].logits, found[0].logits, atol=1e-4, rtol=0)
