"""Endless chats: a window that slides equals StreamingLLM's semantics, is off by default, and says what left."""

import asyncio
import importlib
import json
import sys
import threading
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
import torch
from kit import at_once, lm_of, settle
from texts import make_chunks
from transformers import DynamicCache

from kvrag import ConfigError, ContextLengthError, KVRagEngine, RepairConfig
from kvrag.blend.repair import REREAD
from kvrag.blend.slide import BLOCKS, SINKS, SlidingWindow, cannot_slide
from kvrag.model import CausalLM
from kvrag.model.rows import Rows
from kvrag.testing.models import tiny_model
from kvrag.testing.tokenizers import tiny_tokenizer

WINDOW = 64
BLOCK = (WINDOW - SINKS) // BLOCKS
_ARCHITECTURES = """
llama qwen2 qwen3 mistral gemma gemma2 phi gpt_neox cohere glm deepseek_v3 minicpm3
"""
ARCHITECTURES = _ARCHITECTURES.split()
HANDLERS = {"gpt_neox": "gpt_neox", "phi": "model"}


def ids_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(5, 250, (count,), generator=torch.Generator().manual_seed(seed))


class Reference:
    """StreamingLLM on plain transformers: its cache is cut, and what stays is turned back by the model's own rotation."""

    def __init__(self, name: str) -> None:
        self.model, self.cache, self.length = lm_of(name).model, DynamicCache(), 0
        self.module = importlib.import_module(type(self.model).__module__)
        self.rotary_emb = getattr(self.model, HANDLERS.get(name, "model")).rotary_emb

    @torch.inference_mode()
    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        found = []
        while len(ids):
            if self.length == WINDOW:
                self.evict()
            piece, ids = ids.split([room := min(WINDOW - self.length, len(ids)), len(ids) - room])
            at = torch.arange(self.length, self.length + len(piece))[None]
            found.append(
                self.model(piece[None], position_ids=at, past_key_values=self.cache).logits[0]
            )
            self.length += len(piece)
        return torch.cat(found)

    def evict(self) -> None:
        for layer in self.cache.layers:
            keys, values = layer.keys, layer.values
            is_latent = hasattr(self.model.config, "kv_lora_rank")  # its rotary key comes second
            if is_latent:
                keys, values = values, keys
            # A turn by a negative angle: no way back and forth.
            cos, sin = self.rotary_emb(keys, torch.tensor([[-BLOCK]]))
            rest = keys[:, :, SINKS + BLOCK :]
            # Its attention hands over only what turns.
            is_sliced = self.model.config.model_type == "phi"
            part = rest[..., : cos.shape[-1]] if is_sliced else rest
            turned = self.module.apply_rotary_pos_emb(part, part, cos, sin)[1]
            turned = torch.cat([turned, rest[..., turned.shape[-1] :]], dim=-1)
            kept = [
                torch.cat([keys[:, :, :SINKS], turned], dim=2),
                torch.cat([values[:, :, :SINKS], values[:, :, SINKS + BLOCK :]], dim=2),
            ]
            layer.keys, layer.values = reversed(kept) if is_latent else kept
        self.length -= BLOCK


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_sliding_window_equals_streaming_llm(name):
    lm, ids = lm_of(name), ids_of(230)
    window, reference = SlidingWindow(lm, lm.buffer(WINDOW)), Reference(name)
    pieces = (50, 1, 40, 1, 1, 30, 1, 90, *[1] * 16)  # prompts in pieces, and tokens one by one
    for piece in ids.split(pieces):
        torch.testing.assert_close(window(piece), reference(piece), atol=2e-4, rtol=1e-3)
    assert window.evicted_tokens == 12 * BLOCK
    prefilled = SlidingWindow(lm, lm.buffer(WINDOW)).prefill(ids)
    torch.testing.assert_close(prefilled, Reference(name)(ids)[-1], atol=2e-4, rtol=1e-3)


def test_layers_without_positions_and_of_two_kinds_slide_too():
    for name in ("smollm3", "gemma3_text", "llama-yarn", "gpt_oss"):
        lm, ids = lm_of(name), ids_of(WINDOW)
        window = SlidingWindow(lm, kv := lm.buffer(WINDOW))
        window(ids)
        before, tables = [(k.clone(), v.clone()) for k, v in kv.layers], lm.rotary(WINDOW)
        window(ids[:1])
        for (old_keys, old_values), (keys, values), table in zip(
            before, kv.layers, tables, strict=True
        ):
            old, new = slice(SINKS + BLOCK, WINDOW), slice(SINKS, WINDOW - BLOCK)
            wanted = table.rotate(table.unrotate(old_keys[0, :, old], old), new)
            torch.testing.assert_close(keys[0, :, new], wanted)
            assert torch.equal(values[0, :, new], old_values[0, :, old])
            assert torch.equal(keys[0, :, :SINKS], old_keys[0, :, :SINKS])


def test_keys_that_were_turned_again_and_again_stay_near_those_that_were_not():
    lm = CausalLM(tiny_model("llama", dtype=torch.bfloat16))
    window = SlidingWindow(lm, kv := lm.buffer(WINDOW))
    window(ids_of(WINDOW))
    free = [
        t.unrotate(k[0].float(), slice(0, WINDOW))
        for (k, _), t in zip(kv.layers, lm.rotary(WINDOW), strict=True)
    ]
    for _ in range(BLOCKS - 1):  # as long as a row can stay
        window._evict()
    left = window._length
    for (keys, _), table, before in zip(kv.layers, lm.rotary(WINDOW), free, strict=True):
        wanted = table.rotate(before[:, WINDOW - (left - SINKS) :], slice(SINKS, left))
        error = (keys[0, :, SINKS:left].float() - wanted).norm() / wanted.norm()
        once = (wanted.bfloat16().float() - wanted).norm() / wanted.norm()
        assert error < 3 * once, "a rounding per move, of which there are three at most"


# -- the engine ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_window(monkeypatch):
    """An engine whose model has a context window of 128 tokens."""
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    model.config.max_position_embeddings = 128
    with_engine = KVRagEngine.from_pretrained(
        model, tokenizer=tiny_tokenizer(), prove="off", context=None
    )
    yield with_engine
    with_engine.close()


LONG = (
    "The keeper of the ledger walks to the harbour at dawn, and counts the ships that came by night. "
    * 6
)
SHORT = "Who keeps the ledger?"
SLIDE = {"max_context": "slide"}


def test_it_is_off_by_default(small_window):
    for prompt, options in (
        (LONG, {}),
        (SHORT, {"max_new_tokens": 200}),
        (LONG, {"max_context": "raise"}),
    ):
        with pytest.raises(ContextLengthError, match="context window of 128; retrieve"):
            small_window.generate(prompt, **options)
    with pytest.raises(ConfigError, match="max_context is 'roll'; it must be 'raise' or 'slide'"):
        small_window.generate(SHORT, max_context="roll")


def test_nothing_changes_while_all_fits(small_window):
    plain = small_window.generate(SHORT, max_new_tokens=20)
    slid = small_window.generate(SHORT, max_new_tokens=20, **SLIDE)
    assert slid.token_ids == plain.token_ids
    fields = ("exactness", "fallback_reason", "evicted_tokens", "computed_tokens")
    assert [getattr(slid, name) for name in fields] == [getattr(plain, name) for name in fields]
    assert (plain.exactness, plain.evicted_tokens) == ("full", 0)


def reference_answer(engine: KVRagEngine, prompt_ids: list[int], count: int) -> list[int]:
    lm = engine.loaded.lm
    window, ids = SlidingWindow(lm, lm.buffer(128)), torch.tensor(prompt_ids)
    found = [int(window.prefill(ids).argmax())]
    while len(found) < count:
        found.append(int(window(torch.tensor(found[-1:]))[0].argmax()))
    return found


def test_a_long_prompt_is_answered_and_labelled(small_window):
    result = small_window.generate(LONG, max_new_tokens=60, **SLIDE)
    assert result.prompt_tokens > 128
    assert result.token_ids == reference_answer(small_window, result.prompt_ids, 60)
    assert result.exactness == "repaired", "approximate, though nothing stored was used"
    assert result.computed_tokens == result.prompt_tokens
    block, rows = (128 - SINKS) // BLOCKS, result.prompt_tokens + 59
    assert result.evicted_tokens == -(-(rows - 128) // block) * block
    assert sum(count for _, count in result.sources) == result.prompt_tokens
    assert (
        f"exceed the context window of 128; {result.evicted_tokens} of the oldest tokens left"
        in result.fallback_reason
    )
    assert small_window.prefill(LONG, **SLIDE).evicted_tokens > 0
    assert small_window.explain(LONG, **SLIDE).mode == "full"


def test_an_answer_outgrows_a_prompt_that_was_reused(small_window):
    chunk = make_chunks(1, words=15)[0]
    small_window.precompute([chunk])
    prompt = f"{small_window.prefix_text}{chunk}\n\nWho?"
    fits = small_window.generate(
        prompt, mode="stitch", max_new_tokens=4, repair=RepairConfig(strategy="none")
    )
    slid = small_window.generate(
        prompt, mode="stitch", max_new_tokens=200, repair=RepairConfig(strategy="none"), **SLIDE
    )
    assert fits.exactness == "exact"
    assert slid.cached_tokens == fits.cached_tokens > 0
    assert slid.token_ids[:4] == fits.token_ids
    assert slid.token_ids == reference_answer(small_window, slid.prompt_ids, 200)
    assert (slid.exactness, slid.evicted_tokens > 0) == ("repaired", True)
    assert (
        slid.fallback_reason
        == f"{slid.evicted_tokens} of the oldest tokens left the context window"
    )
    early = small_window.generate(
        prompt, mode="stitch", max_new_tokens=200, stop_token_ids=slid.token_ids[:1], **SLIDE
    )
    assert (early.exactness, early.evicted_tokens) == ("exact", 0), (
        "it could have slid, and did not"
    )


def test_a_continuation_is_scored_in_the_window(small_window):
    ids = ids_of(300).tolist()
    score = small_window.score(SHORT, ids, **SLIDE)
    lm = small_window.loaded.lm
    window = SlidingWindow(lm, lm.buffer(128))
    logits = window(torch.tensor(score.prompt_ids + ids[:-1]))[len(score.prompt_ids) - 1 :]
    torch.testing.assert_close(score.logits, logits, atol=1e-3, rtol=1e-3)
    assert score.evicted_tokens == window.evicted_tokens > 0


def test_streams_slide_and_can_be_cancelled(small_window):
    whole = small_window.generate(LONG, max_new_tokens=150, **SLIDE)
    with small_window.stream(LONG, max_new_tokens=150, **SLIDE) as stream:
        assert "".join(stream) == whole.text
    assert stream.result.evicted_tokens == whole.evicted_tokens
    with small_window.stream(LONG, max_new_tokens=10**6, **SLIDE) as endless:
        next(iter(endless))
    settle()  # leaving it ends the decoding
    assert (
        asyncio.run(small_window.agenerate(LONG, max_new_tokens=30, **SLIDE)).token_ids
        == whole.token_ids[:30]
    )


def test_a_long_prefill_is_cancelled_between_pieces(small_window):
    lm, cancel = small_window.loaded.lm, threading.Event()
    cancel.set()
    with pytest.raises(CancelledError):
        SlidingWindow(lm, lm.buffer(128)).prefill(ids_of(400), cancel)


def test_requests_that_slide_run_beside_others(small_window):
    prompts, found = [LONG, SHORT, LONG[40:], SHORT + " Why?"], {}
    alone = [small_window.generate(p, max_new_tokens=120, **SLIDE).token_ids for p in prompts]
    asks = [
        lambda p=p: found.update(
            {p: small_window.generate(p, max_new_tokens=120, **SLIDE).token_ids}
        )
        for p in prompts
    ]
    at_once(*asks)
    assert [found[p] for p in prompts] == alone


def test_a_chat_of_fifty_turns_goes_on_in_flat_memory(small_window, monkeypatch):
    capacities, buffer = [], CausalLM.buffer
    monkeypatch.setattr(
        CausalLM,
        "buffer",
        lambda lm, capacity, **options: (
            capacities.append(capacity) or buffer(lm, capacity, **options)
        ),
    )
    messages, text = [], ""
    for turn in range(50):
        text += f"user: question {turn}?\nassistant: "
        result = small_window.generate(text, max_new_tokens=12, **SLIDE)
        text += result.text + "\n"
        messages.append(result)
    assert messages[-1].prompt_tokens > 4 * 128
    assert max(capacities) < 128 + REREAD
    assert messages[-1].evicted_tokens >= messages[-1].prompt_tokens - 128


@pytest.mark.parametrize(
    ("name", "why"),
    [("gpt2", "learned embedding"), ("phi3-longrope", "RoPE scaling changes beyond")],
)
def test_models_whose_keys_cannot_be_moved_say_so(name, why):
    model = tiny_model(name)
    engine = KVRagEngine.from_pretrained(model, tokenizer=tiny_tokenizer(), prove="off")
    window = engine.loaded.lm.context_window
    with pytest.raises(ContextLengthError, match=rf"can't slide \(.*{why}"):
        engine.generate(SHORT, max_new_tokens=window, **SLIDE)
    assert cannot_slide(lm_of("llama")) is None


def test_the_benchmark_scores_the_same_tokens_by_every_method(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    bench, lm, ids = importlib.import_module("bench_slide"), lm_of("llama"), ids_of(200)
    rows = {name: bench.measure(lm, ids, 64, name) for name in bench.METHODS}
    assert {row["scored_tokens"] for row in rows.values()} == {200 - 64 - 1}
    assert [row["evicted_tokens"] > 0 for row in rows.values()] == [True, True, False, False]
    found, _ = bench.truncate(lm, ids[:81], 64, 48)
    logits, _ = lm.forward(ids[16:80], Rows.span(0, 64), lm.buffer(64), logits=16)
    torch.testing.assert_close(found[0], bench.losses(logits[0], ids[65:81]))
    monkeypatch.setattr(
        bench,
        "eval_data",
        lambda: [{"ctxs": [{"text": text} for text in make_chunks(4, words=60)]}],
    )
    monkeypatch.setattr(
        bench,
        "small_engine",
        lambda _: KVRagEngine.from_pretrained(lm.model, tokenizer=tiny_tokenizer()),
    )
    monkeypatch.setattr(
        sys, "argv", ["bench_slide", "--tokens", "150", "--window", "64", "--out", str(tmp_path)]
    )
    bench.main()
    assert (
        json.loads((tmp_path / "slide.json").read_text())["methods"].keys() == bench.METHODS.keys()
    )


def test_rows_that_moved_are_no_history(small_window):
    small_window.history_bytes = 1 << 26
    first = small_window.generate(LONG[:100], max_new_tokens=120, **SLIDE)
    assert first.prompt_tokens < 128, "a longer prompt never looks for histories"
    assert first.evicted_tokens > 0
    again = small_window.generate(LONG[:100], max_new_tokens=120, **SLIDE)
    assert again.history_tokens == 0
    assert again.token_ids == first.token_ids, (
        "KV in the window is not that of the prompt's rows any more"
    )
