"""The proof on a loaded model: it passes where reuse is exact, fails where something is wrong, and its result is kept."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from kit import raising
from texts import make_chunks

import kvrag.model.load
import kvrag.model.proof
from kvrag import Chunk, ConfigError, KVRagEngine, UnsupportedModelError
from kvrag.model import CausalLM
from kvrag.model.forward import Forward, switched
from kvrag.model.load import has_passed, proof_file, proven
from kvrag.model.plain import PlainLM
from kvrag.model.proof import LIMIT, Check, Proof, prove
from kvrag.model.rope import RotaryTable
from kvrag.model.rows import EVERYTHING, Limits
from kvrag.testing.models import TINY, save_tiny_model, tiny_model

CHUNKS = make_chunks(2, words=12)
PROMPT = ["Read.\n", Chunk(CHUNKS[1]), "\n", Chunk(CHUNKS[0]), "\nWho?"]
FAMILIES = "llama mistral gemma2 gemma3_text olmo llama4_text phi gptj bloom qwen3_moe gemma4_text"


def failed(proof: Proof) -> set[str]:
    """Promises that a proof found broken."""
    return {check.promise for check in proof.checks if not check.passed}


@pytest.mark.parametrize("name", sorted(TINY))
def test_reuse_is_proven_for_every_accepted_architecture(name):
    proof = prove(CausalLM(tiny_model(name)))
    assert proof.passed, proof.failure
    assert proof.max_error < 1e-3
    assert all(check.limit <= 1e-3 for check in proof.checks), (
        "in float32 no room for rounding is needed"
    )
    assert proof.fault > 10e-3, "a planted mistake must be seen"
    assert not [n for n in proof.notes if "window" in n], "every window of these models is crossed"
    assert len(proof.checks) == 6


_RELEASED: dict[str, dict[str, Any]] = {
    "E2B": {
        "num_hidden_layers": 35,
        "num_kv_shared_layers": 20,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "use_double_wide_mlp": True,
    },
    "31B": {
        "num_hidden_layers": 12,  # of 60: two of its ten rounds
        "num_kv_shared_layers": 0,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kept"), [("E2B", 15), ("31B", 12)])
def test_gemma_4_is_proven_with_the_heads_of_its_releases(name, kept, monkeypatch):
    own = {"head_dim": 256, "global_head_dim": 512, "sliding_window": 64}
    monkeypatch.setitem(TINY, name, {**TINY["gemma4_text"], **own, **_RELEASED[name]})
    monkeypatch.setitem(TINY[name], "model_type", "gemma4_text")

    model = tiny_model(name)
    with torch.no_grad():  # as sharp as the attention of a trained model, not a choice of one key
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.fill_(0.05)
    lm = CausalLM(model)
    assert (lm.num_layers, lm.depth) == (kept, len(model.model.layers))
    assert {shape.key_dim for shape in lm.shapes} == {256, 512}
    proof = prove(lm)
    assert proof.passed
    assert proof.is_conclusive
    assert all(check.limit <= LIMIT for check in proof.checks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FAMILIES.split())
def test_the_proof_has_power_in_low_precision(name, dtype):
    proof = prove(CausalLM(tiny_model(name, dtype=dtype)))
    assert proof.passed, proof.failure
    assert proof.is_conclusive, "room for rounding must be smaller than a planted mistake"


def test_a_proof_that_could_miss_a_mistake_says_so(count, caplog):
    lm = CausalLM(tiny_model())
    count(replace(GOOD, fault=1e-4))
    assert proven(lm, "a fingerprint") is lm
    assert "could miss a mistake" in caplog.text


def test_the_proof_leaves_the_model_as_it_was():
    model = tiny_model("gemma2").train()
    model.model.layers[0].eval()  # frozen
    modes = [part.training for part in model.modules()]
    before, weights = model.config._attn_implementation, [p.clone() for p in model.parameters()]
    assert prove(CausalLM(model)).passed
    assert [part.training for part in model.modules()] == modes
    assert model.config._attn_implementation == before
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))


# -- what breaks a promise fails the proof ---------------------------------------------------------------------------------


def test_a_mask_aligned_bottom_right_is_found(monkeypatch):
    """The mask of CacheBlend's and LMCache's code."""
    original = Limits.__post_init__

    def bottom_right(self):
        rows = len(self.hi)
        if 1 < rows < self.num_keys:
            self.hi = torch.arange(self.num_keys - rows, self.num_keys)
        original(self)

    lm = CausalLM(tiny_model())
    monkeypatch.setattr(Limits, "__post_init__", bottom_right)
    assert "3" in failed(prove(lm))


@pytest.mark.parametrize("name", ["mistral", "llama4_text"])
def test_a_dropped_window_is_found(name):
    lm = CausalLM(tiny_model(name))
    lm._switch = replace(lm._switch, reach=dict.fromkeys(lm._switch.reach, EVERYTHING))
    assert "0" in failed(prove(lm))


@pytest.mark.parametrize(("name", "option"), [("gemma2", "softcap"), ("gpt_oss", "sinks")])
def test_a_dropped_option_of_attention_is_found(name, option, monkeypatch):
    import kvrag.model.forward as forward

    real = forward.ragged_attention
    monkeypatch.setattr(
        forward, "ragged_attention", lambda *a, **k: real(*a, **{**k, option: None})
    )
    assert "0" in failed(prove(CausalLM(tiny_model(name))))


def test_where_transformers_attentions_disagree_the_eager_one_decides():
    """As with Gemma 2 and the SDPA of transformers 5.17, which drops the soft cap."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def sloppy(*args, softcap=None, **options):
        return sdpa_attention_forward(*args, **options)

    AttentionInterface.register("sloppy", sloppy)
    AttentionMaskInterface.register("sloppy", sdpa_mask)
    model = tiny_model("gemma2")
    model.config._attn_implementation = "sloppy"
    proof = prove(CausalLM(model))
    assert proof.passed
    assert "'sloppy' attention differs from its 'eager' one" in proof.notes[0]
    assert model.config._attn_implementation == "sloppy"


def test_keys_rotated_one_row_too_far_are_found(monkeypatch):
    lm = CausalLM(tiny_model())
    real = RotaryTable.rotate

    def one_off(self, keys, rows):
        at = torch.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        return real(self, keys, (at - 1).clamp_min(0))

    monkeypatch.setattr(RotaryTable, "rotate", one_off)
    assert {"1", "4"} <= failed(prove(lm))


def test_values_of_another_row_are_found(monkeypatch):
    real = kvrag.model.proof.encode

    def mixed(*args):
        prefix, first, *rest = real(*args)
        return [prefix, [(keys, values.roll(1, dims=1)) for keys, values in first], *rest]

    monkeypatch.setattr(kvrag.model.proof, "encode", mixed)
    assert "1" in failed(prove(CausalLM(tiny_model())))


@pytest.mark.parametrize("which", [0, 1], ids=["keys", "values"])
@pytest.mark.parametrize("row", [1, 5, -1])
def test_a_forward_that_forgets_to_write_a_row_is_found(row, which, monkeypatch):
    """Also where its memory still holds the right rows of an earlier run of the same proof."""
    lm = CausalLM(tiny_model())
    memory: list[list[torch.Tensor]] = []
    handed: list[list[torch.Tensor]] = []
    real = Forward.update

    def again(shapes, dtype, device):
        if len(handed) == len(memory):
            memory.append([torch.zeros(shape, dtype=dtype, device=device) for shape in shapes])
        handed.append(memory[len(handed)])
        return handed[-1]

    def forgetful(self, keys, values, layer, *others, **options):
        rows = self._kv.layers[layer][which][:, :, : self._rows.stop]
        at = min(row, self._rows.stop - 1)
        before = rows[:, :, at].clone()
        found = real(self, keys, values, layer, *others, **options)
        rows[:, :, at] = before
        return found

    monkeypatch.setattr("kvrag.model.rows._allocate", again)
    assert prove(lm).passed
    used = len(handed)
    handed.clear()
    monkeypatch.setattr(Forward, "update", forgetful)
    proof = prove(lm)
    assert "1" in failed(proof)
    assert not proof.passed
    assert len(handed) >= used, "every buffer of the first run was handed out again"


def test_weights_that_are_not_finite_prove_nothing():
    lm = CausalLM(tiny_model())
    with torch.no_grad():
        next(lm.model.parameters()).fill_(float("nan"))
    assert not prove(lm).passed
    assert not Proof((), (), 0, 0.0, 0.0).passed, "no checks, no proof"


def test_a_window_longer_than_the_prompt_is_said_not_to_be_crossed():
    model = tiny_model("mistral")
    for owner in (
        model.config,
        *(module for module in model.modules() if hasattr(module, "sliding_window")),
    ):
        owner.sliding_window = 2048
    proof = prove(CausalLM(model))
    assert proof.passed
    assert proof.notes == (
        f"the sliding window of 2048 was not crossed: the proof's prompt has {proof.tokens} tokens",
    )


def test_a_short_context_window_gets_a_short_prompt():
    model = tiny_model()
    model.config.max_position_embeddings = 24
    proof = prove(CausalLM(model))
    assert proof.passed
    assert proof.tokens < 24


# -- what comes of a proof -------------------------------------------------------------------------------------------------

GOOD = Proof((Check("1", "a claim", 1e-6, 1e-3, "logits"),), ("a note",), 32, 2.5, 0.1)
BAD = replace(GOOD, checks=(replace(GOOD.checks[0], error=0.5),))


@pytest.fixture
def count(monkeypatch, tmp_path):
    """Let :func:`prove` return a given proof, count its calls, and keep proofs in a directory of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def install(result):
        calls: list[int] = []

        def fake(lm):
            calls.append(1)
            return result

        monkeypatch.setattr(kvrag.model.load, "prove", fake)
        return calls

    return install


def test_a_failed_proof_refuses_reuse_and_answers_in_full(count, tokenizer, caplog):
    count(BAD)
    model = tiny_model()
    engine = KVRagEngine.from_pretrained(model, tokenizer=tokenizer)
    answer = engine.generate(PROMPT, mode="stitch", max_new_tokens=16)
    prompt = torch.tensor([answer.prompt_ids])
    expected = model.generate(prompt, max_new_tokens=16, do_sample=False, pad_token_id=0)
    assert answer.token_ids == expected[0, prompt.shape[1] :].tolist()
    assert answer.exactness == "full"
    reason = "the proof on this model failed: a claim (largest difference 0.5, allowed 0.001)"
    assert reason in (answer.fallback_reason or "")
    assert reason in str(engine.explain(PROMPT))
    assert reason in caplog.text
    with pytest.raises(UnsupportedModelError, match="a claim"):
        engine.precompute(CHUNKS)


def test_kv_that_was_stored_before_is_not_used_by_a_refused_model(count, tokenizer, tmp_path):
    model = tiny_model()
    trusting = KVRagEngine.from_pretrained(
        model, tokenizer=tokenizer, kv_dir=tmp_path / "kv", prove="off"
    )
    trusting.precompute(CHUNKS)
    assert trusting.prefill(PROMPT, mode="stitch").cached_tokens > 0
    count(BAD)
    refused = KVRagEngine.from_pretrained(model, tokenizer=tokenizer, kv_dir=tmp_path / "kv")
    assert refused.prefill(PROMPT, mode="stitch").cached_tokens == 0
    assert refused.explain(PROMPT).hits == 0


def test_a_proof_that_cannot_run_refuses_reuse(monkeypatch, tokenizer, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kvrag.model.load, "prove", raising(RuntimeError, "no kernel for this"))
    engine = KVRagEngine.from_pretrained(tiny_model(), tokenizer=tokenizer)
    assert "its proof could not run (RuntimeError: no kernel for this)" in (
        engine.prefill("Who?").fallback_reason or ""
    )


def test_a_model_whose_probing_fails_is_refused(monkeypatch):
    monkeypatch.setattr(kvrag.model.load, "CausalLM", raising(AttributeError, "no such layer"))
    lm = kvrag.model.load.accept(tiny_model())
    assert isinstance(lm, PlainLM)
    assert "could not be probed (AttributeError: no such layer)" in lm.refusal


def test_a_passed_proof_is_kept_and_a_damaged_one_is_made_again(count):
    calls, lm = count(GOOD), CausalLM(tiny_model())
    for _ in range(3):
        assert proven(lm, "a fingerprint") is lm
    assert len(calls) == 1
    file = proof_file(lm, "a fingerprint")
    assert has_passed(Proof, file)
    assert not list(file.parent.glob("*.tmp"))
    nan = GOOD.to_dict() | {"checks": [{**GOOD.to_dict()["checks"][0], "error": float("nan")}]}
    damaged = [
        "",
        "{",
        "[]",
        "null",
        json.dumps({"checks": []}),
        json.dumps(BAD.to_dict()),
        json.dumps(nan),
    ]
    for made, text in enumerate(damaged, start=2):
        file.write_text(text)
        assert not has_passed(Proof, file)
        assert proven(lm, "a fingerprint") is lm
        assert len(calls) == made, text
    assert has_passed(Proof, file)


@pytest.mark.parametrize("is_good", [False, True])
def test_a_proof_that_failed_or_cannot_be_written_is_made_again(
    is_good, count, tmp_path, monkeypatch
):
    calls, lm = count(GOOD if is_good else BAD), CausalLM(tiny_model())
    if is_good:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for made in (1, 2):
        assert isinstance(proven(lm, "x"), CausalLM if is_good else PlainLM)
        assert len(calls) == made
    assert not proof_file(lm, "x").exists()


def test_all_that_a_proof_depends_on_is_in_its_name(monkeypatch):
    lm = CausalLM(tiny_model())
    names = [proof_file(lm, "one"), proof_file(lm, "two")]
    names.append(proof_file(CausalLM(tiny_model(dtype=torch.bfloat16)), "one"))
    eager = tiny_model()
    eager.config._attn_implementation = (
        "eager" if lm.model.config._attn_implementation != "eager" else "sdpa"
    )
    names.append(proof_file(CausalLM(eager), "one"))
    with switched(lm.model, "another"):  # what a thread sees while a forward of another one runs
        assert proof_file(lm, "one") == names[0]
    for version in (
        "kvrag.__version__",
        "torch.__version__",
        "transformers.__version__",
        "PROOF_VERSION",
    ):
        with (
            monkeypatch.context() as patch
        ):  # as load.py knows it: importing peft makes the module transformers anew
            patch.setattr(f"kvrag.model.load.{version}", "another")
            names.append(proof_file(lm, "one"))
    assert len(set(names)) == len(names)
    assert proof_file(lm, "one") == names[0]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/somewhere")
    assert proof_file(lm, "one").is_relative_to("/somewhere/.cache/kvrag/proofs")


def test_proving_can_be_switched_off(count, tmp_path):
    # Not loaded, and so not proven, by any other test.
    own_dir = save_tiny_model(tmp_path / "model")
    calls = count(BAD)
    engine = KVRagEngine.from_pretrained(own_dir, prove="off")
    assert isinstance(engine.loaded.lm, CausalLM)
    assert calls == []
    assert isinstance(
        KVRagEngine.from_pretrained(own_dir, kv_dir=tmp_path / "kv").loaded.lm, PlainLM
    ), "not shared"
    with pytest.raises(ConfigError, match="prove is 'always'; it must be 'auto'"):
        KVRagEngine.from_pretrained(own_dir, prove="always")
    with pytest.raises(ConfigError, match="did you mean 'prove'"):
        KVRagEngine.from_pretrained(own_dir, proves="off")


def test_both_frameworks_pass_it_on(tiny_dir):
    chat = pytest.importorskip("langchain_kvrag").ChatKVRag(model=tiny_dir, prove="off")
    index = pytest.importorskip("llama_index.llms.kvrag").KVRagLLM(model=tiny_dir, prove="off")
    assert chat.engine.source.prove == index.engine.source.prove == "off"
    for make in (type(chat), type(index)):
        with pytest.raises(ConfigError, match="prove is 'never'"):
            make(model=tiny_dir, prove="never")
