"""Text that grows: whole characters only, stop strings never shown, sampling by transformers' own processors."""

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest
import torch
from kit import lm_of, scripted
from starlette.testclient import TestClient
from tokenizers_kit import tiny_sentencepiece_tokenizer

from kvrag import KVRagEngine
from kvrag.config import SamplingConfig
from kvrag.errors import ConfigError
from kvrag.generate.defaults import processors_of
from kvrag.generate.sampling import Sampler, TextStream
from kvrag.prompt.template import PromptEncoder
from kvrag.testing.models import tiny_model
from kvrag_server import ServerConfig, create_app

TEXT = "The keeper – Émile – wrote: 日本語, 🗝️🇪🇺 and “quotes”. STOP here and go on"


def sampler_of(config: SamplingConfig, ids: Sequence[int] = ()) -> Sampler:
    return Sampler(config, ids, processors_of(lm_of().model, config, ids, max_new_tokens=64))


def push_all(text: str, tokenizer: Any, stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    encoder = PromptEncoder(tokenizer)
    stream = TextStream(encoder.decode, stop)
    deltas = []
    for token in encoder.live_ids(text):
        deltas.append(stream.push(token))
        if stream.is_stopped:
            break
    return [*deltas, stream.finish()], stream


def test_deltas_join_to_the_text_and_never_hold_half_a_character(tokenizer):
    deltas, _ = push_all(TEXT, tokenizer)
    assert "".join(deltas) == TEXT
    assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("stop", ["STOP", " STOP here", "\u201d. S", "🇪🇺", "go on", "T"])
def test_a_stop_string_is_never_shown_even_across_tokens(stop, tokenizer):
    deltas, stream = push_all(TEXT, tokenizer, (stop, "never"))
    assert stream.is_stopped
    assert "".join(deltas) == TEXT[: TEXT.index(stop)]


def test_what_looks_like_a_stop_string_is_held_back_then_shown(tokenizer):
    deltas, stream = push_all("a STO b STOO", tokenizer, ("STOP",))
    assert "".join(deltas) == "a STO b STOO"
    assert not stream.is_stopped
    shown = ""
    for delta in deltas[:-1]:
        shown += delta
        assert (
            not any(shown.endswith(part) for part in ("S", "ST", "STO"))
            or shown.endswith(("a STO", "b STO")) is False
        )


def test_an_incomplete_character_at_the_end_is_shown_as_such(tokenizer):
    encoder = PromptEncoder(tokenizer)
    ids = encoder.live_ids("🗝")[:-1]
    stream = TextStream(encoder.decode)
    assert [stream.push(i) for i in ids] == [""] * len(ids)
    assert "\ufffd" in stream.finish()


@pytest.mark.parametrize("prepend", ["normalizer", "first", "never"])
def test_a_text_that_is_continued_keeps_the_first_space(monkeypatch, prepend):
    tokenizer, more = tiny_sentencepiece_tokenizer(prepend), " the reader of words."
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    engine = KVRagEngine.from_pretrained(
        tiny_model(), tokenizer=tokenizer, prove="off", context=None
    )
    begun = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "It is"}]
    with closing(engine), TestClient(create_app(engine, ServerConfig(model_name="m"))) as http:
        scripted(monkeypatch, engine, more)
        for prompt in ("It is", ["It is"], engine.encoder.live_ids("It is"), begun):
            options = {"max_new_tokens": 60, "continue_final_message": prompt is begun}
            result = engine.generate(prompt, **options)
            assert result.text == "".join(engine.stream(prompt, **options)) == more
        body = {"model": "m", "prompt": "It is", "max_tokens": 60, "echo": True}
        told = http.post("http://localhost/v1/completions", json=body).json()
        assert told["choices"][0]["text"] == "It is" + more


def test_greedy_takes_the_best_and_a_penalty_moves_on():
    logits = torch.tensor([0.0, 3.0, 2.9])
    greedy = sampler_of(SamplingConfig())
    assert [greedy.next(logits) for _ in range(3)] == [1, 1, 1]
    penalised = sampler_of(SamplingConfig(repetition_penalty=1.5))
    assert [penalised.next(logits) for _ in range(2)] == [1, 2]
    assert sampler_of(SamplingConfig(repetition_penalty=1.5), [1]).next(logits) == 2


def test_sampling_respects_top_k_and_seed():
    logits = torch.tensor([1.0, 2.0, 3.0, 0.0])
    config = SamplingConfig(temperature=5.0, top_k=2, seed=7)
    draws = [sampler_of(config).next(logits) for _ in range(3)]
    assert len(set(draws)) == 1
    sampler = sampler_of(config)
    assert {sampler.next(logits) for _ in range(50)} == {1, 2}


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-42, 1e-8, 0.00099])
def test_a_temperature_near_zero_is_greedy(temperature):
    sampler = sampler_of(SamplingConfig(temperature=temperature))
    assert [sampler.next(torch.tensor([0.0, 1e-4, 2e-4])) for _ in range(20)] == [2] * 20


def test_no_stop_tokens_may_be_said_as_none():
    assert SamplingConfig(stop_token_ids=None) == SamplingConfig()


@pytest.mark.parametrize(
    "off", [{"top_k": 0}, {"top_k": -1}, {"top_p": 1.0}, {"top_p": 1}, {"min_p": 0.0}, {}]
)
def test_filters_at_their_neutral_values_are_off(off):
    sampler = sampler_of(SamplingConfig(temperature=5.0, seed=1, **off))
    assert {sampler.next(torch.tensor([1.0, 2.0, 3.0, 0.0])) for _ in range(100)} == {0, 1, 2, 3}


def test_min_p_drops_what_is_much_less_likely_than_the_best():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    sampler = sampler_of(SamplingConfig(temperature=1.0, min_p=0.4, seed=1))
    assert {sampler.next(logits) for _ in range(100)} == {0, 1}


def test_a_seed_is_any_that_torch_takes_and_minus_one_draws_one():
    logits = torch.zeros(1000)
    for seed in (0, 2**63, 2**64 - 1):
        config = SamplingConfig(temperature=1.0, seed=seed)
        assert sampler_of(config).next(logits) == sampler_of(config).next(logits)
    for seed in (None, -1):
        config = SamplingConfig(temperature=1.0, seed=seed)
        assert len({sampler_of(config).next(logits) for _ in range(5)}) > 1


@pytest.mark.parametrize("seed", [2**64, -2, 1.5, True, "7"])
def test_a_seed_that_no_generator_takes_is_refused_in_a_sentence(seed):
    with pytest.raises(
        ConfigError,
        match=r"SamplingConfig.seed is .*whole number from 0 to 2\*\*64 - 1, or None or -1",
    ):
        SamplingConfig(seed=seed)
