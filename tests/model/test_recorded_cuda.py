"""Recordings on a CUDA device: CUDA graphs give what launched forwards give, and are the way that requests take.

Only 16-bit models have them, because the kernels that attend in a recording are for 16-bit types.
"""

import pytest
import torch
from texts import make_chunks
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from kvrag import Chunk, KVRagEngine, RepairConfig
from kvrag.model import CausalLM
from kvrag.model.rows import Rows
from kvrag.model.shared import BUCKETS, Portion
from kvrag.model.steps import pool_of, scratch
from kvrag.testing.models import random_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

CHUNKS = make_chunks(6, words=60, seed=23)
PROMPT = [
    "Read this.\n",
    *(part for text in CHUNKS for part in (Chunk(text), "\n")),
    "Who built the tower?",
]
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 400,
    "max_position_embeddings": 4096,
}
CONFIGS = {"llama": LlamaConfig(**SHAPE), "window": MistralConfig(**SHAPE, sliding_window=200)}
FIRST = {"strategy": "first_k", "recompute_ratio": 0.1}
REQUESTS = {
    "default": {"mode": "stitch", "repair": RepairConfig(recompute_ratio=0.1)},
    "first rows": {"mode": "stitch", "repair": RepairConfig(**FIRST)},
    "without shift": {"mode": "stitch", "repair": RepairConfig(**FIRST, shift=0.0)},
    "unrepaired": {"mode": "stitch", "repair": RepairConfig(strategy="none")},
    "full": {"mode": "full"},
}


def model_of(name: str, dtype: torch.dtype, device: str = "cuda"):
    return random_model(CONFIGS[name], AutoModelForCausalLM, dtype=dtype).to(device)


def bound_of(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Allow thrice torch's own error in this dtype, against float32 on the CPU."""
    return max(1e-3, 3 * float((found.float().cpu() - exact).abs().max()))


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("name", CONFIGS)
def test_graphs_give_what_launched_forwards_give(
    name, kv_dtype, engine_of, tokenizer, monkeypatch, tmp_path, caplog
):
    plain = engine_of(model_of(name, torch.float32, "cpu"), kv_dir=tmp_path / "plain")
    exact = plain.prefill(PROMPT, mode="full").logits

    def engine(folder: str) -> KVRagEngine:
        return engine_of(
            model_of(name, torch.bfloat16),
            kv_dir=tmp_path / folder,
            prefix="Read this.\n",
            store_config={"kv_dtype": kv_dtype},
        )

    monkeypatch.setenv("KVRAG_POOL_SHARE", "0")
    launching = engine("launched")
    launching.precompute(CHUNKS)
    want = {kind: launching.prefill(PROMPT, **options) for kind, options in REQUESTS.items()}
    assert launching.loaded.lm.recorded is None

    monkeypatch.setenv("KVRAG_POOL_SHARE", "0.01")
    recording = engine("recorded")
    recording.precompute(CHUNKS)
    bound = bound_of(want["full"].logits, exact)
    for kind, options in [*REQUESTS.items()] * 2:
        got = recording.prefill(PROMPT, **options)
        assert got.repaired_tokens == want[kind].repaired_tokens
        # Rounding may choose a few other rows at the edge of the budget.
        allowed = 5 * bound if kind == "default" else bound
        assert float((got.logits - want[kind].logits).abs().max()) < allowed, kind
    pool = recording.stats()["pool"]
    assert pool["recordings"] >= 3
    assert pool["recording_ms"] > 0
    assert pool["taken"] == 0
    assert any(shape.waits for shape in recording.loaded.lm.recorded._made)
    assert "can't be recorded" not in caplog.text


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_each_number_of_rows_is_recorded(name):
    lm = CausalLM(model_of(name, torch.bfloat16))
    exact = CausalLM(model_of(name, torch.float32, "cpu"))
    lm.record(8192)
    generator = torch.Generator().manual_seed(0)
    for size in (1, *(bucket - 3 for bucket in BUCKETS)):
        ids = torch.randint(5, 200, (size,), generator=generator)
        rows = Rows.span(0, size)
        want = exact.forward(ids, rows, exact.buffer(size))[0]
        launched = lm.launch(Portion(ids, rows, lm.buffer(size), 1))[0]
        for _ in range(2):
            with scratch(lm, size) as kv:
                assert kv.start is not None
                got = lm.forward(ids, rows, kv)[0]
            assert float((got - launched).abs().max()) < bound_of(launched, want), size
    assert {shape.rows for shape in lm.recorded._made} == set(BUCKETS)
    assert lm.recorded.pool.num_taken == 0


@torch.inference_mode()
def test_next_rows_of_requests_share_a_graph():
    lm = CausalLM(model_of("llama", torch.bfloat16))
    exact = CausalLM(model_of("llama", torch.float32, "cpu"))
    lm.record(4096)
    pool, prompts = lm.recorded.pool, [torch.arange(5 + n, 60 + 2 * n) for n in range(8)]
    kvs = [lm.buffer(100, run=pool.take(100)) for _ in prompts]
    pieces, want, launched = [], [], []
    for ids, kv in zip(prompts, kvs, strict=True):
        own, plain = lm.buffer(100), exact.buffer(100)
        for model, buffer in ((lm, kv), (lm, own), (exact, plain)):
            model.forward(ids, Rows.span(0, len(ids)), buffer)
        rows, token = Rows.span(len(ids), len(ids) + 1), torch.tensor([7])
        pieces.append(Portion(token, rows, kv, 1))
        want.append(exact.forward(token, rows, plain)[0])
        launched.append(lm.launch(Portion(token, rows, own, 1))[0])
    for _ in range(2):  # recorded, and replayed
        for (got, _), exactly, alone in zip(
            lm.recorded.compute(pieces), want, launched, strict=True
        ):
            assert float((got - alone).abs().max()) < bound_of(alone, exactly)


def test_float32_is_launched():
    lm = CausalLM(model_of("llama", torch.float32))
    assert pool_of(lm) is None
    assert lm.records is False
