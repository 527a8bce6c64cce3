"""The engine's attention through the ops, as on a CUDA device; here the ops' torch paths compute."""

import pytest
import torch
from texts import make_chunks

from kvrag.model import attention
from kvrag.model.attention import ragged_attention
from kvrag.model.rows import EVERYTHING, Limits, Reach


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
