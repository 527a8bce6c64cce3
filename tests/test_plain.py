"""Models whose KV can't be reused: they answer like plain transformers, and every result says why nothing was reused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from texts import make_chunks
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from kvrag import Chunk, KVRagEngine, ModelError, UnsupportedModelError, precompute_kv
from kvrag.plain import NO_LIMIT, PlainLM
from kvrag.testing.tokenizers import VOCAB_SIZE

CHUNKS = make_chunks(2, words=12)
PROMPT = ["Read this.\n", Chunk(CHUNKS[0]), "\n", Chunk(CHUNKS[1]), "\nWho keeps the ledger?"]

_SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
_GPT = {"n_layer": 2, "n_embd": 32, "n_head": 2}
_MLA = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 2, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
    **{"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "max_position_embeddings": 2048},
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": _GPT,
    "opt": {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "word_embed_proj_dim": 32},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 2},
    "mpt": {"d_model": 32, "n_heads": 2, "n_layers": 2},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "rwkv": {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2},
    "jamba": {
        **_SMALL,
        **{"num_hidden_layers": 4, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
        **{"expert_layer_period": 2, "mamba_d_state": 4},
    },
    "bamba": {
        **_SMALL,
        **{"num_hidden_layers": 2, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "attn_layer_indices": [1]},
    },
    "qwen3_next": {
        **_SMALL,
        **{"num_hidden_layers": 4, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "linear_num_value_heads": 2},
        **{"linear_num_key_heads": 1, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    },
    "deepseek_v2": {**_MLA, "q_lora_rank": None},
    "deepseek_v3": {**_MLA, "q_lora_rank": 16},
    "llama-dynamic": {
        **_SMALL,
        **{"num_hidden_layers": 2, "max_position_embeddings": 128},
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    },
}  # fmt: skip


def build(name: str, **options: Any) -> PreTrainedModel:
    """A random model; its weights are larger than usual, so that answers are not one token over and over."""
    torch.manual_seed(0)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    given = {"vocab_size": VOCAB_SIZE, **ids, **MODELS[name], **options}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name.partition("-")[0], **given), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.15)
    return model.eval()


@pytest.fixture(params=sorted(MODELS))
def plain(request: pytest.FixtureRequest, tokenizer: Any) -> KVRagEngine:
    """An engine on a model that is refused."""
    engine = KVRagEngine.from_pretrained(build(request.param), tokenizer=tokenizer)
    if not isinstance(engine.loaded.lm, PlainLM):
        pytest.skip("reuse is proven for this architecture now")
    return engine


@pytest.mark.parametrize("mode", ["auto", "stitch"])
def test_a_refused_model_answers_like_plain_transformers(plain: KVRagEngine, mode: Any) -> None:
    pieces: list[str] = []
    stream = plain.stream(PROMPT, mode=mode, max_new_tokens=24)
    pieces.extend(stream)
    answer = stream.result
    prompt = torch.tensor([answer.prompt_ids])
    expected = plain.loaded.lm.model.generate(prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)
    assert answer.token_ids == expected[0, prompt.shape[1] :].tolist()
    assert "".join(pieces) == answer.text
    assert (answer.exactness, answer.cached_tokens, answer.repaired_tokens) == ("full", 0, 0)
    assert answer.computed_tokens == answer.prompt_tokens
    assert answer.fallback_reason is not None
    assert answer.fallback_reason.startswith("KV of this model is not reused: ")


def test_a_refused_model_scores_and_prefills(plain: KVRagEngine) -> None:
    first = plain.prefill(PROMPT, mode="prefix")
    ids = plain.generate(PROMPT, max_new_tokens=8).token_ids
    score = plain.score(PROMPT, ids)
    assert score.fallback_reason == first.fallback_reason is not None
    whole = torch.tensor([first.prompt_ids + ids])
    logits = plain.loaded.lm.model(whole).logits[0, len(first.prompt_ids) - 1 : -1]
    assert (first.logits - logits[0]).abs().max() < 1e-3
    assert (score.logits - logits).abs().max() < 1e-3


@pytest.fixture
def gpt2(tokenizer: Any) -> KVRagEngine:
    """An engine on a model with learned positions."""
    return KVRagEngine.from_pretrained(build("gpt2"), tokenizer=tokenizer)


def test_stop_strings_and_sampling_work_without_reuse(gpt2: KVRagEngine) -> None:
    text = gpt2.generate("Who?", max_new_tokens=24).text
    stop = text[5:8]
    cut = gpt2.generate("Who?", max_new_tokens=24, stop=stop)
    assert (cut.text, cut.finish_reason) == (text[: text.index(stop)], "stop")
    drawn = [gpt2.generate("Who?", max_new_tokens=24, temperature=1.0, seed=s).token_ids for s in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_async_answers_are_the_same(gpt2: KVRagEngine) -> None:
    async def run() -> tuple[str, str]:
        pieces = [piece async for piece in gpt2.astream(PROMPT, max_new_tokens=12)]
        return "".join(pieces), (await gpt2.agenerate(PROMPT, max_new_tokens=12)).text

    one, two = asyncio.run(run())
    assert one == two == gpt2.generate(PROMPT, max_new_tokens=12).text


def test_precompute_says_that_nothing_can_be_stored_and_stores_nothing(gpt2: KVRagEngine) -> None:
    with pytest.raises(UnsupportedModelError, match=r"KV of this model is not reused: .*nothing can be stored"):
        gpt2.precompute(CHUNKS, ids=["a", "b"])
    assert gpt2.document_ids() == []
    with pytest.warns(UserWarning, match="KV of this model is not reused"):
        report = precompute_kv(CHUNKS, llm=gpt2, on_error="warn")
    assert report.stored == 0


def test_explain_gives_the_reason(gpt2: KVRagEngine) -> None:
    explanation = gpt2.explain(PROMPT)
    assert (explanation.mode, explanation.hits) == ("full", 0)
    assert "KV of this model is not reused" in str(explanation)
    assert [s.reason is not None for s in explanation.spans] == [s.kind == "chunk" for s in explanation.spans]
    assert explanation.prompt_tokens == gpt2.prefill(PROMPT).prompt_tokens


def test_verify_does_not_pass_where_nothing_is_reused(gpt2: KVRagEngine) -> None:
    report = gpt2.verify([PROMPT])
    assert not report.passed
    assert report.mean_kl == 0


def test_training_mode_and_attention_are_left_as_they_were(tokenizer: Any) -> None:
    model = build("gpt2").train()
    before = model.config._attn_implementation
    engine = KVRagEngine.from_pretrained(model, tokenizer=tokenizer)
    assert engine.generate("Who?", max_new_tokens=8).token_ids == engine.generate("Who?", max_new_tokens=8).token_ids
    assert model.training
    assert model.config._attn_implementation == before


def test_a_model_on_disk_is_refused_and_served_too(tokenizer: Any, tmp_path: Path) -> None:
    build("gpt2").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    engine = KVRagEngine.from_pretrained(tmp_path, kv_dir=tmp_path / "kv")
    assert "not reused" in (engine.generate("Who?", max_new_tokens=2).fallback_reason or "")


@pytest.mark.parametrize(
    ("name", "options", "window"),
    [
        ("gpt2", {}, 1024),
        ("mpt", {"max_seq_len": 512}, 512),
        ("bloom", {}, NO_LIMIT),
        ("mamba", {}, NO_LIMIT),
        ("llama-dynamic", {}, 512),
    ],
)
def test_the_context_window_is_the_configs(name: str, options: dict[str, Any], window: int) -> None:
    assert PlainLM(build(name, **options), "").context_window == window


def test_models_that_are_no_causal_lm_are_refused_by_name(tokenizer: Any, tmp_path: Path) -> None:
    small = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": VOCAB_SIZE}
    t5 = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **small))
    with pytest.raises(ModelError, match="'t5' is an encoder-decoder"):
        KVRagEngine.from_pretrained(t5, tokenizer=tokenizer)
    t5.config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="'t5' is an encoder-decoder"):
        KVRagEngine.from_pretrained(tmp_path)
    headless = AutoModel.from_config(build("gpt2").config)
    with pytest.raises(ModelError, match="GPT2Model has no language model's head"):
        KVRagEngine.from_pretrained(headless, tokenizer=tokenizer)
    AutoConfig.for_model("vit").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no causal LM for 'vit'"):
        KVRagEngine.from_pretrained(tmp_path)
