"""KV of one adapter is never used for another: the fingerprint follows what is loaded, switched, disabled, merged and deleted."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit import assert_reuse_is_exact
from texts import make_chunks
from transformers.integrations.peft import MIN_PEFT_VERSION, check_peft_version

import kvrag.identity.model
import kvrag.precompute.run
from kvrag import KVRagEngine, ModelError, RepairConfig, UnsupportedModelError
from kvrag.identity.adapters import PROVEN, unwrap
from kvrag.identity.model import weights_digest
from kvrag.model.load import load
from kvrag.model.source import ModelSource
from kvrag.testing.models import save_tiny_model, tiny_model

peft = pytest.importorskip(
    "peft", reason="the package peft is not installed: adapters can't be loaded here"
)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def follows_peft() -> str:
    """Say why transformers' own integration can't be used with the peft that is installed; nothing if it can."""
    try:
        check_peft_version(min_version=MIN_PEFT_VERSION)
    except ValueError as error:
        return str(error)
    return ""


needs_integration = pytest.mark.skipif(
    bool(follows_peft()), reason=f"transformers refuses this peft: {follows_peft()}"
)

CHUNKS = make_chunks(3, words=30)
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
TOLERANCE = 1e-3


def lora(**options: Any) -> Any:
    """A LoRA that changes something from the start: its B is not zero."""
    return peft.LoraConfig(
        **{"r": 4, "target_modules": TARGETS, "init_lora_weights": False, **options}
    )


def with_adapter(seed: int = 0, name: str = "a", **options: Any) -> Any:
    """A tiny Llama in a PeftModel with one random LoRA."""
    model = tiny_model()
    torch.manual_seed(seed)
    return peft.get_peft_model(model, lora(**options), adapter_name=name).eval()


def add(model: Any, name: str, seed: int, **options: Any) -> None:
    torch.manual_seed(seed)
    model.add_adapter(name, lora(**options))


def fingerprint_of(model: Any, tokenizer: Any) -> str:
    return load(ModelSource(model, tokenizer)).fingerprint


@pytest.fixture
def plain(tokenizer):
    """Fingerprint of the model without any adapter."""
    return fingerprint_of(tiny_model(), tokenizer)


# -- what an adapter is --------------------------------------------------------------------------------------------------------


def test_an_adapter_is_known_by_content_not_by_name(tokenizer, plain):
    one = fingerprint_of(with_adapter(seed=1, name="a"), tokenizer)
    assert fingerprint_of(with_adapter(seed=1, name="b"), tokenizer) == one
    assert fingerprint_of(with_adapter(seed=2, name="a"), tokenizer) != one
    assert plain != one


@pytest.mark.parametrize(
    "options",
    [{"lora_alpha": 16}, {"use_rslora": True}, {"target_modules": ["q_proj"]}, {"use_dora": True}],
)
def test_scaling_and_kind_count(options, tokenizer):
    assert fingerprint_of(with_adapter(**options), tokenizer) != fingerprint_of(
        with_adapter(), tokenizer
    )


def test_what_adds_nothing_does_not_count(tokenizer, plain):
    model = with_adapter(seed=1)
    one = fingerprint_of(model, tokenizer)
    add(model, "idle", seed=2)
    assert fingerprint_of(model, tokenizer) == one
    assert fingerprint_of(with_adapter(seed=1, lora_dropout=0.5), tokenizer) == one
    with model.disable_adapter():
        assert fingerprint_of(model, tokenizer) == plain


def test_the_base_weights_are_the_same_with_and_without_an_adapter():
    assert weights_digest(unwrap(with_adapter())) == weights_digest(tiny_model())


KINDS: dict[str, Callable[[], Any]] = {
    "ADALORA": lambda: peft.AdaLoraConfig(
        target_modules=TARGETS, init_r=4, total_step=10, init_lora_weights=False
    ),
    "BOFT": lambda: peft.BOFTConfig(target_modules=TARGETS, boft_block_size=4, init_weights=False),
    "HRA": lambda: peft.HRAConfig(target_modules=TARGETS, r=4, init_weights=False),
    "IA3": lambda: peft.IA3Config(
        target_modules=["k_proj", "v_proj"], feedforward_modules=[], init_ia3_weights=False
    ),
    "LN_TUNING": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "LOHA": lambda: peft.LoHaConfig(target_modules=TARGETS, r=4, init_weights=False),
    "LOKR": lambda: peft.LoKrConfig(target_modules=TARGETS, r=4, init_weights=False),
    "LORA": lora,
    "OFT": lambda: peft.OFTConfig(
        target_modules=TARGETS, oft_block_size=4, r=0, init_weights=False
    ),
    "TRAINABLE_TOKENS": lambda: peft.TrainableTokensConfig(
        token_indices=[5, 40, 41], init_weights=False
    ),
    "VERA": lambda: peft.VeraConfig(target_modules=["q_proj", "o_proj"], r=4, init_weights=False),
}


def random_adapter(kind: str, seed: int) -> Any:
    model = peft.get_peft_model(tiny_model(), KINDS[kind]()).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def test_every_accepted_kind_is_tested():
    assert sorted(KINDS) == sorted(PROVEN)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_its_own_fingerprint_and_stays_exact(kind, tokenizer, engine_of, plain):
    model = random_adapter(kind, seed=0)
    engine = engine_of(model)
    one = engine.loaded.fingerprint
    assert len({one, plain, fingerprint_of(random_adapter(kind, seed=1), tokenizer)}) == 3
    assert fingerprint_of(random_adapter(kind, seed=0), tokenizer) == one
    assert_reuse_is_exact(engine)


def test_the_answer_is_that_of_the_peft_model(engine_of):
    model = with_adapter()
    engine = engine_of(model)
    result = engine.prefill(CHUNKS[0], mode="full")
    with torch.no_grad():
        expected = model(torch.tensor([result.prompt_ids])).logits[0, -1]
        with model.disable_adapter():
            without = model(torch.tensor([result.prompt_ids])).logits[0, -1]
    assert torch.allclose(result.logits, expected, atol=TOLERANCE)
    assert not torch.allclose(result.logits, without, atol=0.1)


# -- switches after the engine was built ---------------------------------------------------------------------------------------

PROMPT = [{"role": "user", "content": f"{CHUNKS[1]}\n\n{CHUNKS[0]}\n\nWho keeps the ledger?"}]


def reuses(engine: KVRagEngine) -> bool:
    """Whether stored KV is used for a prompt; what comes out must be right either way."""
    reused = engine.prefill(PROMPT, mode="stitch", repair=RepairConfig(strategy="all"))
    full = engine.prefill(PROMPT, mode="full")
    assert float((reused.logits - full.logits).abs().max()) < TOLERANCE
    exact = engine.prefill(PROMPT, mode="prefix")
    assert float((exact.logits - full.logits).abs().max()) < TOLERANCE, (
        "KV of another adapter was used"
    )
    return reused.cached_tokens + reused.repaired_tokens > 0


def test_a_switch_between_requests_is_followed(engine_of):
    model = with_adapter(seed=1, name="a")
    add(model, "b", seed=2)
    engine = engine_of(model)
    engine.precompute(CHUNKS)
    assert reuses(engine)
    model.set_adapter("b")
    assert not reuses(engine)
    engine.precompute(CHUNKS)
    assert reuses(engine)
    with model.disable_adapter():
        assert not reuses(engine)
    model.set_adapter("a")
    assert reuses(engine)


def test_switching_to_and_fro_hashes_each_adapter_once(engine_of, monkeypatch):
    model = with_adapter(seed=1, name="a")
    add(model, "b", seed=2)
    engine = engine_of(model)
    first, calls = engine.loaded.fingerprint, []
    for name in ("adapters_digest", "weights_digest"):
        real = getattr(kvrag.identity.model, name)
        monkeypatch.setattr(
            kvrag.identity.model,
            name,
            lambda m, real=real, name=name: (calls.append(name), real(m))[1],
        )
    seen = []
    for name in ("b", "a", "b", "a"):
        model.set_adapter(name)
        seen.append(engine.loaded.fingerprint)
    assert seen == [seen[0], first, seen[0], first]
    assert seen[0] != first
    assert calls == ["adapters_digest"]


@pytest.mark.usefixtures("few_objects")
def test_an_adapter_loaded_later_under_the_same_name_is_another(engine_of, tmp_path):
    for seed in (1, 2):
        with_adapter(seed=seed, name="default").save_pretrained(tmp_path / str(seed))
    model = peft.PeftModel.from_pretrained(tiny_model(), tmp_path / "1").eval()
    engine = engine_of(model)
    engine.precompute(CHUNKS)
    assert reuses(engine)
    add(model, "spare", seed=3)
    model.set_adapter("spare")
    for place, is_first in (("2", False), ("1", True)) * 2:
        model.delete_adapter("default")
        gc.collect()  # memory that is free again is what the next adapter gets
        model.load_adapter(tmp_path / place, "default")
        model.set_adapter("default")
        assert reuses(engine) is is_first
        model.set_adapter("spare")


def test_merging_is_followed_there_and_back(engine_of):
    model = with_adapter(seed=1)
    engine = engine_of(model)
    engine.precompute(CHUNKS)
    apart = engine.loaded.fingerprint
    model.merge_adapter()
    merged = engine.loaded.fingerprint
    assert merged != apart
    assert not reuses(engine)
    model.unmerge_adapter()
    assert engine.loaded.fingerprint != merged
    # The weights went through two roundings: the same model or not, the answer is right.
    reuses(engine)


def test_merged_weights_that_were_taken_out_again_are_not_the_old_ones(engine_of):
    """Merging rounds: the weights are a rounding apart."""
    model = with_adapter(seed=1)
    engine = engine_of(model)
    before, content = engine.loaded.fingerprint, weights_digest(engine.loaded.lm.model)
    model.merge_adapter()
    merged = engine.loaded.fingerprint
    model.unmerge_adapter()
    assert weights_digest(engine.loaded.lm.model) != content
    assert len({before, merged, engine.loaded.fingerprint}) == 3


def test_a_layer_that_is_disabled_while_merged_is_neither(engine_of, plain):
    """Its next forward takes the merged weights out: what it computes is not what its weights say now."""
    model = with_adapter(seed=1)
    engine = engine_of(model)
    model.merge_adapter()
    merged = engine.loaded.fingerprint
    model.base_model.disable_adapter_layers()
    assert engine.loaded.fingerprint != merged
    assert engine.precompute(CHUNKS).stored == 0, (
        "the weights changed in the forward: nothing may be stored for them"
    )
    assert engine.precompute(CHUNKS).stored == len(CHUNKS)
    assert reuses(engine)


def test_a_merged_model_is_known_by_its_weights(tokenizer, engine_of):
    model = with_adapter(seed=1)
    engine = engine_of(model)
    engine.precompute(CHUNKS)
    merged = model.merge_and_unload()
    assert not reuses(engine)
    assert engine.loaded.fingerprint == fingerprint_of(merged, tokenizer)
    assert engine.loaded.fingerprint == fingerprint_of(
        with_adapter(seed=1, name="z").merge_and_unload(), tokenizer
    )


def two_active(model: Any) -> None:
    model.base_model.set_adapter(["a", "b"])


def other_scaling(model: Any) -> None:
    model.base_model.model.model.layers[0].self_attn.k_proj.set_scale("a", 0.5)


def one_number(model: Any) -> None:
    model.base_model.model.model.layers[3].self_attn.v_proj.lora_B["a"].weight[0, 0] += 1e-4


def training(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.add_(0.01)


@pytest.mark.parametrize("change", [two_active, other_scaling, one_number, training])
def test_a_change_of_the_adapters_is_followed(change, engine_of, plain):
    model = with_adapter(seed=1, name="a")
    add(model, "b", seed=2)
    engine = engine_of(model)
    seen = [plain, engine.loaded.fingerprint]
    with torch.no_grad():
        change(model)
    seen.append(engine.loaded.fingerprint)
    model.base_model.set_adapter("b")
    seen.append(engine.loaded.fingerprint)
    assert len(set(seen)) == 4
    model.unload()
    assert engine.loaded.fingerprint == plain


def test_modules_to_save_are_followed(engine_of):
    model = with_adapter(modules_to_save=["embed_tokens"])
    engine = engine_of(model)
    seen = [engine.loaded.fingerprint]
    with torch.no_grad():
        engine.loaded.lm.model.get_input_embeddings().modules_to_save["a"].weight.mul_(1.1)
    seen.append(engine.loaded.fingerprint)
    with model.disable_adapter():
        seen.append(engine.loaded.fingerprint)
    assert len(set(seen)) == 3


def test_adapters_that_change_during_a_precompute_store_nothing_wrong(engine_of, monkeypatch):
    model = with_adapter(seed=1, name="a")
    add(model, "b", seed=2)
    engine = engine_of(model)
    real = kvrag.precompute.run.encode_chunks

    def switching(*arguments):
        model.set_adapter("b")
        return real(*arguments)

    monkeypatch.setattr(kvrag.precompute.run, "encode_chunks", switching)
    report = engine.precompute(CHUNKS)
    assert report.stored == 0
    assert {reason.split(" while ")[0] for _, reason in report.failed} == {
        "the model's adapters or weights changed"
    }
    model.set_adapter("a")
    reuses(engine)  # the prefix, which was computed before: what comes out is right
    assert not engine.explain(PROMPT).hits


# -- transformers' own way with adapters, and directories ----------------------------------------------------------------------


@needs_integration
def test_transformers_own_integration_is_followed(tokenizer, engine_of, tmp_path, plain):
    for seed in (1, 2):
        with_adapter(seed=seed).save_pretrained(tmp_path / str(seed), selected_adapters=["a"])
    model = tiny_model()
    engine = engine_of(model)
    engine.precompute(CHUNKS)
    assert reuses(engine)
    model.load_adapter(tmp_path / "1" / "a", adapter_name="x")
    first = engine.loaded.fingerprint
    assert not reuses(engine)
    model.load_adapter(tmp_path / "2" / "a", adapter_name="y")
    second = engine.loaded.fingerprint
    model.set_adapter("x")
    assert engine.loaded.fingerprint == first
    assert len({plain, first, second}) == 3
    assert first == fingerprint_of(with_adapter(seed=1), tokenizer)
    model.disable_adapters()
    assert engine.loaded.fingerprint == plain
    assert reuses(engine)
    model.enable_adapters()
    assert engine.loaded.fingerprint == first
    model.delete_adapter(["x", "y"])
    assert engine.loaded.fingerprint == plain


@pytest.fixture
def adapter_dir(tmp_path):
    """Save an adapter of a saved model, as users have them."""

    def make(seed, *, base="base", **options):
        if not (tmp_path / base).exists():
            save_tiny_model(tmp_path / base)
        model = with_adapter(seed=seed, name="default", **options)
        model.peft_config["default"].base_model_name_or_path = str(tmp_path / base)
        model.save_pretrained(tmp_path / f"{base}-adapter-{seed}")
        return tmp_path / f"{base}-adapter-{seed}"

    return make


@needs_integration
def test_a_directory_with_an_adapter_is_loaded_with_it(adapter_dir, tmp_path):
    one, two, elsewhere = adapter_dir(1), adapter_dir(2), adapter_dir(1, base="other-place")
    engine = KVRagEngine.from_pretrained(one, kv_dir=tmp_path / "kv", context=None)
    base = load(ModelSource(tmp_path / "base")).fingerprint
    first = engine.loaded.fingerprint
    assert len({first, base, load(ModelSource(two)).fingerprint}) == 3
    assert load(ModelSource(elsewhere)).fingerprint == first
    engine.loaded.lm.model.disable_adapters()
    assert engine.loaded.fingerprint == base
    engine.loaded.lm.model.enable_adapters()
    assert_reuse_is_exact(engine)
    assert engine.loaded.fingerprint == first
    engine.close()
    settings = two / "adapter_config.json"
    settings.write_text(
        settings.read_text().replace(str(tmp_path / "base"), str(tmp_path / "gone"))
    )
    with pytest.raises(ModelError, match="could not load"):
        KVRagEngine.from_pretrained(two)


def test_an_adapter_with_biases_is_known_by_the_weights_it_left(tmp_path):
    """Biases are no part of the adapter's layers: loading them overwrites the model's own."""
    prints = []
    for value in (0.5, 0.7):
        base = tmp_path / f"base-{value}"
        save_tiny_model(base, "qwen2")
        model = peft.get_peft_model(tiny_model("qwen2"), lora(bias="all"))
        torch.manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora" in name:
                    parameter.copy_(torch.randn_like(parameter))
                elif name.endswith("bias"):
                    parameter.fill_(value)
        model.peft_config["default"].base_model_name_or_path = str(base)
        model.save_pretrained(tmp_path / f"adapter-{value}")
        prints.append(load(ModelSource(tmp_path / f"adapter-{value}")).fingerprint)
    assert prints[0] != prints[1]


# -- refusals ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            lambda: peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
            "PROMPT_TUNING",
        ),
        (
            lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
            "PREFIX_TUNING",
        ),
        (lambda: lora(alora_invocation_tokens=[5, 6], task_type="CAUSAL_LM"), "activated LoRA"),
    ],
)
def test_adapters_that_look_beyond_a_row_are_refused(config, message, engine_of):
    model = peft.get_peft_model(tiny_model(), config())
    with pytest.raises(UnsupportedModelError, match=message):
        engine_of(model)


@needs_integration
def test_an_adapter_of_a_refused_kind_that_comes_later_is_refused_then(engine_of):
    model = tiny_model()
    engine = engine_of(model)
    assert engine.loaded.fingerprint
    model.add_adapter(peft.C3AConfig(target_modules=["q_proj"], block_size=16), "late")
    with pytest.raises(UnsupportedModelError, match="C3A"):
        _ = engine.loaded.fingerprint
