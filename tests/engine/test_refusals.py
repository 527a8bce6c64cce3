"""What can't be moved is refused, with the true reason: by the config where it shows, else by what one forward shows."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig

import kvrag.model.plain as support
from kvrag.errors import UnsupportedModelError
from kvrag.model import CausalLM, check_supported
from kvrag.model.candidates import read_mask
from kvrag.model.rows import EVERYTHING, Reach
from kvrag.testing.models import REFUSED, TINY, tiny_model

REASONS = {
    "gpt2": "absolute position.*one position only",
    "opt": "absolute position.*one position only",
    "falcon-alibi": "ALiBi once .* and twice",
    "llama-dynamic-ntk": "'dynamic'.*changes its angles with the prompt's length",
    "deepseek_v32": "sparse indexer, which caches keys of its own",
    "glm_moe_dsa": "sparse indexer, which caches keys of its own",
    "deepseek_v4": "more in their cache than a key and a value per token.*compressed",
    "inkling_text": "convolutions with a state of their own|keep more in their cache",
    "doge": "makes its own attention mask",
    "mamba": "running state",
    "rwkv": "running state instead of keys and values",
    "jamba": "mixes attention with layers that keep a running state",
    "bamba": "mixes attention with layers that keep a running state",
    "falcon_h1": "mixes attention with layers of another kind .mamba.",
    "lfm2": "running state.*conv",
    "qwen3_next": "running state.*linear_attention",
    "qwen3_5": "running state.*linear_attention",
}


def test_every_refused_row_has_its_reason():
    assert set(REASONS) == set(REFUSED)
    assert not set(REFUSED) & set(TINY)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refusal_gives_the_true_reason(name):
    with pytest.raises(UnsupportedModelError, match=REASONS[name]):
        CausalLM(tiny_model(name))


@pytest.mark.parametrize("name", sorted(set(REFUSED) - {"falcon-alibi"}))
def test_what_has_no_name_on_the_list_is_refused_all_the_same(name, monkeypatch):
    """Names only save reading the weights: structure and the probe find out by themselves."""
    monkeypatch.setattr(support, "_BY_NAME", {})
    with pytest.raises(
        UnsupportedModelError, match="before the first layer" if name in ("gpt2", "opt") else ""
    ):
        CausalLM(tiny_model(name))


def test_a_tower_for_images_is_no_reason():
    for model_type in ("llava", "qwen2_vl", "qwen3_vl", "gemma3", "mistral3", "llama4"):
        check_supported(AutoConfig.for_model(model_type))


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        *(("t5", "encoder-decoder"), ("bart", "encoder-decoder")),
        ("florence2", "encoder-decoder"),
        ("qwen3_5", "running state.*linear_attention"),
        *(("recurrent_gemma", "running state"), ("mamba2", "running state")),
    ],
)
def test_a_config_is_enough_where_it_shows(model_type, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        check_supported(AutoConfig.for_model(model_type))


def test_prompts_that_attend_in_both_directions_are_refused(monkeypatch):
    """PaliGemma's, of text alone, too."""
    tower = {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
        "projection_dim": 64,
    }
    own = {"hidden_size": 64, "text_config": {"model_type": "gemma"}, "vision_config": tower}
    monkeypatch.setitem(REFUSED, "paligemma", own)
    with pytest.raises(UnsupportedModelError, match="passes is_causal=False to its attention"):
        CausalLM(tiny_model("paligemma"))


class _Attention(torch.nn.Module):
    """Put in place of a module: what it returns is changed after it."""

    def __init__(self, inner: torch.nn.Module, change: Any) -> None:
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.change(self.inner(*args, **kwargs))


@pytest.mark.parametrize(
    ("name", "reason"), [("k_proj", "keys of layer 2"), ("v_proj", "layer 2 .*both depend")]
)
def test_keys_and_values_that_mix_neighbours_are_refused(name, reason):
    """A convolution over the tokens before: each row's keys depend on more than its own hidden state."""
    model = tiny_model()
    attention = model.model.layers[2].self_attn
    setattr(
        attention,
        name,
        _Attention(getattr(attention, name), lambda out: out + 0.3 * out.roll(1, dims=1)),
    )
    with pytest.raises(UnsupportedModelError, match=reason):
        CausalLM(model)


def _copy_shared(attention: torch.nn.Module, _: Any, kwargs: dict[str, Any]) -> Any:
    """Give a module copies of the keys and values that it shares."""
    shared = kwargs["shared_kv_states"]
    for name, pair in list(shared.items()):
        shared[name] = tuple(side.clone() for side in pair)
    return None


def test_keys_that_a_layer_shares_must_be_those_that_are_kept():
    model = tiny_model("gemma4_text")
    model.model.layers[5].self_attn.register_forward_pre_hook(_copy_shared, with_kwargs=True)
    with pytest.raises(UnsupportedModelError, match=r"layer 5 .*that no layer keeps"):
        CausalLM(model)


def test_layers_that_share_keys_must_share_their_window(monkeypatch):
    monkeypatch.setitem(TINY, "alike", {**TINY["gemma4_text"], "global_head_dim": 16})
    monkeypatch.setitem(TINY["alike"], "model_type", "gemma4_text")
    model = tiny_model("alike")
    model.model.layers[4].self_attn.layer_type = "full_attention"
    model.model.layers[4].self_attn.kv_shared_layer_index = 3
    with pytest.raises(UnsupportedModelError, match=r"layers 3, 4, 5 .*different windows"):
        CausalLM(model)


def test_layers_that_keep_keys_are_numbered_from_zero():
    model = tiny_model()
    for layer in model.model.layers:
        layer.self_attn.layer_idx += 1
    with pytest.raises(UnsupportedModelError, match=r"\[1, 2, 3, 4\]; kvrag needs 0 to 3"):
        CausalLM(model)


def test_layers_that_keep_no_state_are_not_said_to_keep_one():
    model = tiny_model()
    model.model.layers[1].self_attn = None
    with pytest.raises(UnsupportedModelError, match=r"LlamaDecoderLayer\): kvrag moves the keys"):
        CausalLM(model)


def test_angles_that_depend_on_the_length_are_refused_whatever_their_name():
    model = tiny_model()
    rotary = model.model.rotary_emb
    plain = rotary.forward
    rotary.forward = lambda x, position_ids: plain(
        x, position_ids * (1.0 + position_ids.max() / 1e4)
    )
    with pytest.raises(UnsupportedModelError, match="change with the prompt's length"):
        CausalLM(model)


@pytest.mark.parametrize("option", [{"position_bias": torch.zeros(1)}, {"is_causal": False}])
def test_an_option_of_attention_that_is_not_understood_is_refused(option):
    """Dropping it silently could be a wrong answer."""
    model = tiny_model()
    attention = model.model.layers[0].self_attn
    plain = attention.forward
    attention.forward = lambda *args, **kwargs: plain(*args, **kwargs, **option)
    with pytest.raises(UnsupportedModelError, match=next(iter(option))):
        CausalLM(model)


def test_a_model_whose_forward_fails_is_refused():
    model = tiny_model()
    model.model.layers[0].self_attn.forward = lambda *_, **__: 1 / 0
    with pytest.raises(UnsupportedModelError, match="ZeroDivisionError"):
        CausalLM(model)


@pytest.mark.parametrize(
    ("options", "visible", "reach"),
    [
        ({}, lambda q, k: k <= q, EVERYTHING),
        # A window that the model doesn't apply, and one that it applies without saying so.
        ({"sliding_window": 50}, lambda q, k: k <= q, EVERYTHING),
        ({}, lambda q, k: (k <= q) & (k > q - 50), Reach(window=50)),
        (
            {"attention_chunk_size": 64},
            lambda q, k: (k <= q) & (k // 64 == q // 64),
            Reach(chunk=64),
        ),
        ({}, lambda q, k: k >= 0, None),  # sees the future
        ({}, lambda q, k: (k <= q) & (k % 2 == q % 2), None),  # strided
        # A window with first tokens.
        ({"sliding_window": 50}, lambda q, k: (k <= q) & ((k > q - 50) | (k < 4)), None),
    ],
)
def test_a_mask_is_read_from_its_function_or_refused(options, visible, reach):
    config = tiny_model().config
    for name, value in options.items():
        setattr(config, name, value)
    far = config.max_position_embeddings - 1
    found = read_mask(lambda _b, _h, q, k: visible(q, k), config, far, torch.device("cpu"))
    assert found == reach


def test_a_mask_that_is_not_understood_refuses_the_model(monkeypatch):
    monkeypatch.setattr("kvrag.model.traits.read_mask", lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="mask that is neither causal"):
        CausalLM(tiny_model())
