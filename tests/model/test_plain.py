"""Models whose KV can't be reused: they answer like plain transformers, and every result says why nothing was reused."""

from dataclasses import replace

import pytest
import torch
from texts import make_chunks
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

from kvrag import (
    Chunk,
    ContextLengthError,
    KVRagEngine,
    ModelError,
    UnsupportedModelError,
    precompute_kv,
)
from kvrag.model.load import refuse
from kvrag.model.plain import NO_LIMIT, PlainLM
from kvrag.testing.models import REFUSED, tiny_model
from kvrag.testing.tokenizers import VOCAB_SIZE

CHUNKS = make_chunks(2, words=12)
PROMPT = ["Read this.\n", Chunk(CHUNKS[0]), "\n", Chunk(CHUNKS[1]), "\nWho keeps the ledger?"]

PROVEN = ("bloom", "gpt_oss", "llama4_text", "mpt", "phi3-longrope")
"""Some of those whose KV is reused: they must answer without, too, where their proof fails."""


@pytest.fixture(scope="module", params=[*sorted(REFUSED), *PROVEN])
def plain(request, tokenizer):
    """An engine on a model that is refused."""
    name = request.param
    model = tiny_model(name)
    engine = KVRagEngine.from_pretrained(model, tokenizer=tokenizer)
    if name not in REFUSED:
        engine._loaded = replace(engine.loaded, lm=refuse(model, "for a test"))
    assert isinstance(engine.loaded.lm, PlainLM)
    return engine


def test_a_refused_model_answers_like_plain_transformers(plain):
    assert plain.generate(PROMPT, max_new_tokens=1).exactness == "full"
    stream = plain.stream(PROMPT, mode="stitch", max_new_tokens=24)
    pieces = list(stream)
    answer = stream.result
    prompt = torch.tensor([answer.prompt_ids])
    expected = plain.loaded.lm.model.generate(
        prompt, max_new_tokens=24, do_sample=False, pad_token_id=0
    )
    assert answer.token_ids == expected[0, prompt.shape[1] :].tolist()
    assert "".join(pieces) == answer.text
    assert (answer.exactness, answer.cached_tokens, answer.repaired_tokens) == ("full", 0, 0)
    assert answer.computed_tokens == answer.prompt_tokens
    assert answer.sources == (("computed", answer.prompt_tokens),)
    assert answer.fallback_reason is not None
    assert answer.fallback_reason.startswith("KV of this model is not reused: ")


def test_a_refused_model_scores_and_prefills(plain):
    first = plain.prefill(PROMPT, mode="prefix")
    ids = plain.generate(PROMPT, max_new_tokens=8).token_ids
    score = plain.score(PROMPT, ids)
    assert score.fallback_reason == first.fallback_reason is not None
    whole = torch.tensor([first.prompt_ids + ids])
    logits = plain.loaded.lm.model(whole).logits[0, len(first.prompt_ids) - 1 : -1]
    assert (first.logits - logits[0]).abs().max() < 1e-3
    assert (score.logits - logits).abs().max() < 1e-3


@pytest.fixture
def gpt2(tokenizer):
    """An engine on a model with learned positions."""
    return KVRagEngine.from_pretrained(tiny_model("gpt2"), tokenizer=tokenizer)


def test_stop_strings_and_sampling_work_without_reuse(gpt2):
    text = gpt2.generate("Who?", max_new_tokens=24).text
    stop = text[5:8]
    cut = gpt2.generate("Who?", max_new_tokens=24, stop=stop)
    assert (cut.text, cut.finish_reason) == (text[: text.index(stop)], "stop")
    drawn = [
        gpt2.generate("Who?", max_new_tokens=24, temperature=1.0, seed=s).token_ids
        for s in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_precompute_says_that_nothing_can_be_stored_and_stores_nothing(gpt2):
    with pytest.raises(
        UnsupportedModelError, match=r"KV of this model is not reused: .*nothing can be stored"
    ):
        gpt2.precompute(CHUNKS, ids=["a", "b"])
    assert gpt2.document_ids() == []
    with pytest.warns(UserWarning, match="KV of this model is not reused"):
        report = precompute_kv(CHUNKS, llm=gpt2, on_error="warn")
    assert report.stored == 0


def test_explain_gives_the_reason(gpt2):
    explanation = gpt2.explain(PROMPT)
    assert (explanation.mode, explanation.hits) == ("full", 0)
    assert "KV of this model is not reused" in str(explanation)
    assert [s.reason is not None for s in explanation.spans] == [
        s.kind == "chunk" for s in explanation.spans
    ]
    assert explanation.prompt_tokens == gpt2.prefill(PROMPT).prompt_tokens


def test_training_mode_and_attention_are_left_as_they_were(tokenizer):
    model = tiny_model("gpt2").train()
    before = model.config._attn_implementation
    engine = KVRagEngine.from_pretrained(model, tokenizer=tokenizer)
    assert (
        engine.generate("Who?", max_new_tokens=8).token_ids
        == engine.generate("Who?", max_new_tokens=8).token_ids
    )
    assert model.training
    assert model.config._attn_implementation == before


def test_a_model_on_disk_is_refused_and_served_too(tokenizer, tmp_path):
    tiny_model("gpt2").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    engine = KVRagEngine.from_pretrained(tmp_path, kv_dir=tmp_path / "kv")
    assert "not reused" in (engine.generate("Who?", max_new_tokens=2).fallback_reason or "")


def test_angles_that_grow_with_the_prompt_are_transformers_own(tokenizer, monkeypatch):
    monkeypatch.setitem(
        REFUSED, "short-ntk", {**REFUSED["llama-dynamic-ntk"], "max_position_embeddings": 96}
    )
    model = tiny_model("short-ntk")
    engine = KVRagEngine.from_pretrained(model, tokenizer=tokenizer)
    answer = engine.generate(PROMPT, max_new_tokens=24)
    assert answer.prompt_tokens > 96, "or nothing would grow"
    fresh = tiny_model("short-ntk")  # its rotary module remembers the longest prompt
    ids = torch.tensor([answer.prompt_ids])
    expected = fresh.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)
    assert answer.token_ids == expected[0, ids.shape[1] :].tolist()
    with pytest.raises(ContextLengthError, match="context window of 384"):  # 4 x 96
        engine.generate(PROMPT, max_new_tokens=384)


@pytest.mark.parametrize(
    ("name", "options", "window"),
    [
        ("gpt2", {"n_positions": 512}, 512),
        ("mpt", {"max_seq_len": 512, "max_position_embeddings": None}, 512),
        ("mamba", {"max_position_embeddings": None}, NO_LIMIT),
        ("llama", {"max_position_embeddings": -1}, NO_LIMIT),
    ],
)
def test_the_context_window_is_the_configs(name, options, window):
    model = tiny_model(name)
    for option, value in options.items():
        setattr(model.config, option, value)
    assert PlainLM(model, "").context_window == window


def test_models_that_are_no_causal_lm_are_refused_by_name(tokenizer, tmp_path):
    small = {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 16,
        "num_layers": 1,
        "num_heads": 2,
        "vocab_size": VOCAB_SIZE,
    }
    t5 = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **small))
    with pytest.raises(ModelError, match="'t5' is an encoder-decoder"):
        KVRagEngine.from_pretrained(t5, tokenizer=tokenizer)
    t5.config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="'t5' is an encoder-decoder"):
        KVRagEngine.from_pretrained(tmp_path)
    headless = AutoModel.from_config(tiny_model("gpt2").config)
    with pytest.raises(ModelError, match="GPT2Model has no language model's head"):
        KVRagEngine.from_pretrained(headless, tokenizer=tokenizer)
    AutoConfig.for_model("vit").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no causal LM for 'vit'"):
        KVRagEngine.from_pretrained(tmp_path)
