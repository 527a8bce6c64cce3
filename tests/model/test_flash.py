"""kvrag's attention under transformers' own ``generate``: what torch's attention gives, and a reason where it can't."""

import copy
import sys
from typing import Any

import pytest
import torch
from kit import noted
from transformers import DynamicCache, PreTrainedModel, StaticCache

import kvrag_kernels
from kvrag import (
    InputError,
    UnsupportedModelError,
    flash,
    flash_attention_tier,
    install_flash_attention,
    uninstall_flash_attention,
)
from kvrag.model.lock import text_config, text_model_of
from kvrag.model.rows import EVERYTHING, Reach
from kvrag.testing.models import TINY, tiny_model


def asks_for_attention(name: str) -> bool:
    """Whether a modelling module uses transformers' attention functions; GPT-J's and CodeGen's do from 5.24 on."""
    return hasattr(sys.modules[type(tiny_model(name)).__module__], "ALL_ATTENTION_FUNCTIONS")


OWN = ("bloom", "codegen", "falcon", "falcon-multi-head", "falcon-new", "gptj", "mpt")
DENSE = tuple(name for name in OWN if not asks_for_attention(name))
"""Attention that takes a mask and nothing else."""

SERVED = sorted(set(TINY) - set(DENSE))


def ids_of(rows: int, length: int = 90) -> torch.Tensor:
    return torch.randint(5, 200, (rows, length), generator=torch.Generator().manual_seed(3))


def padded(side: str) -> dict[str, torch.Tensor]:
    """Three prompts of different lengths, the shorter ones padded."""
    ids, mask = ids_of(3), torch.ones(3, 90, dtype=torch.int64)
    for row, missing in ((1, 13), (2, 60)):
        where = slice(0, missing) if side == "left" else slice(90 - missing, 90)
        ids[row, where], mask[row, where] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def logits_of(model: PreTrainedModel, inputs: dict[str, Any]) -> torch.Tensor:
    mask = inputs.get("attention_mask")
    positions = {} if mask is None else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    logits = model(**inputs, **positions).logits
    return logits if mask is None else logits[mask.bool()]


@pytest.mark.parametrize("name", SERVED)
def test_logits_are_those_of_torch(name):
    model = text_model_of(tiny_model(name))
    cases: list[dict[str, Any]] = [{"input_ids": ids_of(1)}, {"input_ids": ids_of(2, 7)}]
    if "llama4" not in name:
        cases += [padded("left"), padded("right")]
    want = [logits_of(model, case) for case in cases]
    assert install_flash_attention(model) == text_config(model).num_hidden_layers
    for case, theirs in zip(cases, want, strict=True):
        torch.testing.assert_close(logits_of(model, case), theirs, atol=2e-4, rtol=1e-4)
    uninstall_flash_attention(model)
    assert torch.equal(logits_of(model, cases[0]), want[0])


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral", "gpt_oss", "gemma4_text"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_writes_the_same_text(name, cache):
    model = tiny_model(name).eval()
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    options["cache_implementation"] = "static" if cache == "static" else None
    inputs = padded("left")
    want = model.generate(**inputs, **options)
    install_flash_attention(model)
    assert torch.equal(model.generate(**inputs, **options), want)


def test_the_kernels_package_computes_it(monkeypatch):
    model = tiny_model("mistral").eval()
    install_flash_attention(model)
    calls, plans = (
        noted(monkeypatch, kvrag_kernels, name) for name in ("ragged_attention", "ragged_plan")
    )
    logits_of(model, {"input_ids": ids_of(1)})
    assert len(calls) == model.config.num_hidden_layers
    assert len(plans) == 1, "layers alike share their limits"


def test_installing_twice_is_installing_once():
    model = tiny_model().eval()
    before = model.config._attn_implementation
    assert install_flash_attention(model) == install_flash_attention(model)
    uninstall_flash_attention(model)
    assert model.config._attn_implementation == before
    uninstall_flash_attention(model)
    assert model.config._attn_implementation == before
    assert all(m not in flash._reaches for m in model.modules())


def test_an_engine_and_the_installed_attention_get_along(engine_of):
    model = tiny_model()
    engine = engine_of(model)
    want = engine.generate("What is said?", max_new_tokens=4).text
    install_flash_attention(model)
    assert engine.generate("What is said?", max_new_tokens=4).text == want
    assert model.config._attn_implementation == flash.NAME


@pytest.mark.parametrize("name", DENSE)
def test_attention_that_cannot_be_replaced_is_refused(name):
    model = tiny_model(name).eval()
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match="asks for no attention function"):
        install_flash_attention(model)
    assert model.config._attn_implementation == before


def test_what_it_cannot_compute_is_refused_by_name():
    model = tiny_model("mistral").eval()
    install_flash_attention(model)
    ids = ids_of(1)
    with pytest.raises(InputError, match="no gradient"):
        model(input_ids=ids)
    holes = torch.ones_like(ids)
    holes[0, 20:30] = 0
    with torch.no_grad():
        with pytest.raises(InputError, match="padding between real tokens"):
            model(input_ids=ids, attention_mask=holes)
        with pytest.raises(InputError, match="got a 4-D mask"):
            model(input_ids=ids, attention_mask=torch.zeros(1, 1, 90, 90))
        packed = torch.cat([torch.arange(50), torch.arange(40)])[None]
        with pytest.raises(InputError, match="packed sequences"):
            model(input_ids=ids, position_ids=packed, use_cache=False)


def test_a_copy_of_a_model_is_told_from_a_strange_mask():
    model = tiny_model("mistral").eval()
    install_flash_attention(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        with pytest.raises(InputError, match="not installed in the model of"):
            twin(input_ids=ids_of(1))
        install_flash_attention(twin)
        want = model(input_ids=ids_of(1)).logits
        torch.testing.assert_close(twin(input_ids=ids_of(1)).logits, want)
        uninstall_flash_attention(twin)
        assert twin.config._attn_implementation == "sdpa"
        torch.testing.assert_close(twin(input_ids=ids_of(1)).logits, want)


def test_chunked_attention_is_served_without_padding_alone():
    model = tiny_model("llama4_text").eval()
    want = logits_of(model, {"input_ids": ids_of(1)})
    install_flash_attention(model)
    torch.testing.assert_close(
        logits_of(model, {"input_ids": ids_of(1)}), want, atol=2e-4, rtol=1e-4
    )
    with pytest.raises(InputError, match="chunked attention"):
        logits_of(model, padded("left"))


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_a_prompt_in_pieces_is_the_whole_prompt(kind):
    """A second forward sees the first one's keys: rows don't begin at 0, and a sliding cache has dropped some keys."""
    model = tiny_model("mistral").eval()
    ids = ids_of(1)
    want = logits_of(model, {"input_ids": ids})
    install_flash_attention(model)
    cache = kind(config=model.config, **({"max_cache_len": 96} if kind is StaticCache else {}))
    with torch.no_grad():
        parts = [
            model(input_ids=part, past_key_values=cache).logits
            for part in ids.split([50, 1, 39], dim=1)
        ]
    torch.testing.assert_close(torch.cat(parts, dim=1), want, atol=2e-4, rtol=1e-4)


def test_a_wrong_window_is_noticed():
    model = tiny_model("mistral").eval()
    install_flash_attention(model)
    for wrong in (Reach(window=20), EVERYTHING):
        flash._reaches.update(dict.fromkeys(list(flash._reaches), wrong))
        with pytest.raises(InputError, match="not causal attention with this layer's window"):
            logits_of(model, {"input_ids": ids_of(1)})


def test_the_tier_is_that_of_the_device():
    assert flash_attention_tier(tiny_model()) == "torch"
    if not torch.cuda.is_available():
        assert flash_attention_tier() == "torch"


@torch.inference_mode()
def test_an_images_rows_that_see_each_other_are_refused():
    """Wherever they stand: the model's mask is else looked at in a few rows."""
    model = tiny_model("gemma3")
    install_flash_attention(model)
    ids = torch.arange(30, 131)[None]
    kinds = torch.zeros_like(ids)
    model(ids, token_type_ids=kinds)
    kinds[:, 28:48] = 1
    with pytest.raises(InputError, match="see later rows"):
        model(ids, token_type_ids=kinds)


@pytest.mark.parametrize("name", ["gemma4_text", "gemma4-key-values"])
def test_a_tier_is_that_of_all_head_dims(name):
    assert flash_attention_tier(tiny_model(name)) == "torch"
