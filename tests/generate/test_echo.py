"""Log-probabilities of a prompt's own tokens."""

import math
import threading
from concurrent.futures import CancelledError

import pytest
import torch
from kit import request_of

from kvrag import ConfigError, ContextLengthError
from kvrag.generate import logprobs
from kvrag.model.lock import Clock

TEXT = "The keeper of the lamp counts the ships that come by night, and writes each of them down."
CHAT = [{"role": "user", "content": TEXT}]


def expected(engine, ids):
    """What transformers gives to each token behind those before it, in float32."""
    with torch.no_grad():
        logits = engine.loaded.lm.model(torch.tensor([ids])).logits[0].float()
    values = torch.log_softmax(logits, dim=-1)
    return [float(values[at, token]) for at, token in enumerate(ids[1:])], values


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "bloom", "qwen2"])
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_each_token_has_the_models_own_value_however_it_is_sliced(
    engine_of, name, size, monkeypatch
):
    engine = engine_of(name)
    monkeypatch.setattr(logprobs, "SLICE_BYTES", 4 * size * engine.loaded.lm.vocab_size)
    result = engine.generate(TEXT, max_new_tokens=3, logprobs=2, prompt_logprobs=2)
    ids = list(result.prompt_ids)
    want, values = expected(engine, ids)
    first, *rest = result.prompt_logprobs
    assert math.isnan(first.logprob)
    assert [each.token_id for each in result.prompt_logprobs] == ids
    assert [each.logprob for each in rest] == pytest.approx(want, abs=1e-4)
    for at, each in enumerate(rest):
        assert [value for _, value in each.top] == pytest.approx(
            values[at].topk(2).values.tolist(), abs=1e-4
        )
    plain = engine.generate(TEXT, max_new_tokens=3, logprobs=2)
    assert result.text == plain.text
    assert [each.logprob for each in result.logprobs] == pytest.approx(
        [each.logprob for each in plain.logprobs], abs=1e-4
    )
    assert (result.prompt_tokens, result.computed_tokens, result.cached_tokens) == (
        len(ids),
        len(ids),
        0,
    )
    assert (result.exactness, plain.prompt_logprobs) == ("full", None)


def test_prompts_of_every_form_have_them(engine):
    ids = engine.generate(CHAT, max_new_tokens=1).prompt_ids
    of_chat = engine.generate(CHAT, max_new_tokens=1, prompt_logprobs=0).prompt_logprobs
    of_ids = engine.generate(list(ids), max_new_tokens=1, prompt_logprobs=0).prompt_logprobs
    assert [each.token_id for each in of_chat] == list(ids)
    assert [each.logprob for each in of_chat[1:]] == pytest.approx(
        [each.logprob for each in of_ids[1:]], abs=1e-4
    )
    assert (
        len(engine.generate([int(ids[0])], max_new_tokens=1, prompt_logprobs=0).prompt_logprobs)
        == 1
    )


def test_what_does_not_fit_or_is_no_number_is_refused(engine):
    for max_context in ("raise", "slide"):
        with pytest.raises(ContextLengthError, match=r"the prompt has \d{4,} tokens"):
            engine.generate("word " * 5000, prompt_logprobs=0, max_context=max_context)
    with pytest.raises(ConfigError, match="prompt_logprobs"):
        engine.generate(TEXT, prompt_logprobs=99)


def test_leaving_ends_the_reading(engine, monkeypatch):
    monkeypatch.setattr(logprobs, "SLICE_BYTES", 1)
    gone = threading.Event()
    gone.set()
    with (
        engine._answering.prefilled(request_of(engine, "One"), max_new_tokens=9, clock=Clock()) as (
            _,
            done,
        ),
        pytest.raises(CancelledError),
    ):
        logprobs.read_on(done, [1, 2], 0, gone)
