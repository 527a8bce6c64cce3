"""Log-probabilities, penalties and biases of an answer's tokens."""

import math

import pytest
import torch

from kvrag import ConfigError
from kvrag.config import SamplingConfig
from kvrag.generate.defaults import Penalties
from kvrag.generate.logprobs import Delta

PROMPT = "One two three"


def test_they_are_of_the_models_own_logits(engine):
    got = engine.generate(
        PROMPT, max_new_tokens=6, temperature=1.5, seed=3, repetition_penalty=1.3, logprobs=3
    )
    scored = engine.score(PROMPT, got.token_ids)
    want = torch.log_softmax(scored.logits, dim=-1)
    assert [each.token_id for each in got.logprobs] == got.token_ids
    for row, each in zip(want, got.logprobs, strict=True):
        assert each.logprob == pytest.approx(float(row[each.token_id]), abs=1e-4)
        assert [token for token, _ in each.top] == row.topk(3).indices.tolist()
        assert [value for _, value in each.top] == pytest.approx(
            row.topk(3).values.tolist(), abs=1e-4
        )


def test_without_asking_there_are_none_and_the_answer_is_the_same(engine):
    plain = engine.generate(PROMPT, max_new_tokens=6)
    told = engine.generate(PROMPT, max_new_tokens=6, logprobs=0)
    assert plain.logprobs is None
    assert plain.token_ids == told.token_ids
    assert all(each.top == () and each.logprob <= 0 for each in told.logprobs)
    with engine.stream(PROMPT, max_new_tokens=6) as stream:
        assert {type(piece) for piece in stream} == {str}


def test_a_stream_tells_each_once_and_in_order(engine):
    with engine.stream(PROMPT, max_new_tokens=20, logprobs=1, temperature=1.0, seed=5) as stream:
        pieces = list(stream)
    told = [each for piece in pieces for each in piece.logprobs]
    assert all(isinstance(piece, Delta) for piece in pieces)
    assert tuple(told) == stream.result.logprobs[: len(told)]
    assert len(pieces) > 3
    assert all(piece.logprobs for piece in pieces)


def test_penalties_count_the_answer_alone_and_presence_counts_once():
    """OpenAI's formula: ``logit - count * frequency - (count > 0) * presence``."""
    config = SamplingConfig(frequency_penalty=0.5, presence_penalty=1.0)
    # Three of the prompt, three of the answer.
    ids, logits = (torch.tensor([[5, 5, 7, 7, 7, 9]]), torch.zeros(1, 12))
    found = Penalties(config, num_prompt=3)(ids, logits)[0]
    assert {token: value for token, value in enumerate(found.tolist()) if value} == {
        7: -2.0,
        9: -1.5,
    }


@pytest.mark.parametrize(
    "options", [{"frequency_penalty": 1.5}, {"presence_penalty": 1.5}, {"logit_bias": {7: 3.5}}]
)
def test_penalties_and_biases_have_openais_formula(engine, options):
    """Greedy: each token is the largest of the logits that a full prefill gives, changed by hand."""
    ids = engine.generate(PROMPT, max_new_tokens=12, **options).token_ids
    logits = engine.score(PROMPT, ids).logits
    for at, token in enumerate(ids):
        counts = torch.bincount(
            torch.tensor(ids[:at], dtype=torch.long), minlength=logits.shape[-1]
        )
        changed = logits[at] - options.get("frequency_penalty", 0) * counts
        changed -= options.get("presence_penalty", 0) * (counts > 0)
        changed[7] += options.get("logit_bias", {}).get(7, 0)
        assert token == int(changed.argmax())
    assert ids != engine.generate(PROMPT, max_new_tokens=12).token_ids


def test_a_bias_forbids_and_forces(engine):
    first = engine.generate(PROMPT, max_new_tokens=1).token_ids[0]
    assert (
        first not in engine.generate(PROMPT, max_new_tokens=5, logit_bias={first: -100}).token_ids
    )
    assert engine.generate(PROMPT, max_new_tokens=5, logit_bias={9: 100}).token_ids == [9] * 5


@pytest.mark.parametrize(
    "options",
    [
        {"frequency_penalty": 2.5},
        {"presence_penalty": math.nan},
        {"logit_bias": {5: 101}},
        {"logit_bias": {-1: 1}},
        {"logit_bias": {10**7: 1}},
        {"logprobs": 21},
        {"logprobs": True},
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(engine, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        engine.generate(PROMPT, max_new_tokens=2, **options)
