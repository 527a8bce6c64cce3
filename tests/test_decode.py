"""Text that grows: whole characters only, stop strings never shown, sampling by transformers' own processors."""

from typing import Any

import pytest
import torch

from kvrag.config import SamplingConfig
from kvrag.generate.sampling import Sampler, TextStream, eos_token_ids
from kvrag.prompt.template import PromptEncoder

TEXT = "The keeper – Émile – wrote: 日本語, 🗝️🇪🇺 and “quotes”. STOP here and go on"


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
            not any(shown.endswith(part) for part in ("S", "ST", "STO")) or shown.endswith(("a STO", "b STO")) is False
        )


def test_an_incomplete_character_at_the_end_is_shown_as_such(tokenizer):
    encoder = PromptEncoder(tokenizer)
    ids = encoder.live_ids("🗝")[:-1]
    stream = TextStream(encoder.decode)
    assert [stream.push(i) for i in ids] == [""] * len(ids)
    assert "\ufffd" in stream.finish()


def test_greedy_takes_the_best_and_a_penalty_moves_on():
    logits = torch.tensor([0.0, 3.0, 2.9])
    greedy = Sampler(SamplingConfig(), [])
    assert [greedy.next(logits) for _ in range(3)] == [1, 1, 1]
    penalised = Sampler(SamplingConfig(repetition_penalty=1.5), [])
    assert [penalised.next(logits) for _ in range(2)] == [1, 2]
    assert Sampler(SamplingConfig(), [1], repetition_penalty=1.5).next(logits) == 2


def test_sampling_respects_top_k_and_seed():
    logits = torch.tensor([1.0, 2.0, 3.0, 0.0])
    config = SamplingConfig(temperature=5.0, top_k=2, seed=7)
    draws = [Sampler(config, []).next(logits) for _ in range(3)]
    assert len(set(draws)) == 1
    sampler = Sampler(config, [])
    assert {sampler.next(logits) for _ in range(50)} == {1, 2}


def test_eos_ids_come_from_the_generation_config_or_the_tokenizer():
    class Config:
        eos_token_id: Any = None

    class Tokenizer:
        eos_token_id = 9

    assert eos_token_ids(Config(), Tokenizer()) == {9}
    Config.eos_token_id = 4
    assert eos_token_ids(Config(), Tokenizer()) == {4}
    Config.eos_token_id = [4, 5]
    assert eos_token_ids(Config(), Tokenizer()) == {4, 5}
