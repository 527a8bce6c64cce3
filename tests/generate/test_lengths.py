"""How long an answer may be that names no length: what the context window leaves, up to a limit, and never an error where a token fits."""

from copy import deepcopy

import pytest
import torch

from kvrag import ContextLengthError, KVRagEngine
from kvrag.config import DEFAULT_MAX_NEW_TOKENS
from kvrag.generate import scheduler
from kvrag.generate.scheduler import WORTH_REUSE, length_of
from kvrag.model.plain import PlainLM
from kvrag.testing.models import tiny_model

WINDOW = 96
LIMIT = 40


@pytest.fixture(params=["llama", "gpt2"])
def engine(request, tokenizer, monkeypatch) -> KVRagEngine:
    """An engine with a small window and a small default, of a model with reuse, and of one without."""
    monkeypatch.setattr(scheduler, "DEFAULT_MAX_NEW_TOKENS", LIMIT)
    opened = KVRagEngine.from_pretrained(deepcopy(tiny_model(request.param)), tokenizer=tokenizer)
    opened.loaded.lm.context_window = WINDOW
    if not isinstance(opened.loaded.lm, PlainLM):
        opened.loaded.lm.reuse_window = WINDOW
    return opened


def ids_of(number: int) -> list[int]:
    return torch.randint(
        5, 300, (number,), generator=torch.Generator().manual_seed(number)
    ).tolist()


@pytest.mark.parametrize(
    ("prompt", "wanted"), [(10, LIMIT), (WINDOW - LIMIT, LIMIT), (80, 16), (95, 1)]
)
def test_an_answer_takes_what_the_window_leaves_up_to_the_limit(prompt, wanted, engine):
    result = engine.generate(ids_of(prompt), logit_bias={2: -100})
    assert (len(result.token_ids), result.finish_reason) == (wanted, "length")
    stream = engine.stream(ids_of(prompt), logit_bias={2: -100}, prompt_logprobs=0)
    assert len("".join(stream)) == len(result.text)
    assert len(stream.result.token_ids) == wanted


def test_a_prompt_that_leaves_no_token_and_a_number_that_does_not_fit_are_refused(engine):
    with pytest.raises(ContextLengthError, match="has 96 tokens"):
        engine.generate(ids_of(96))
    with pytest.raises(ContextLengthError, match="may take 17"):
        engine.generate(ids_of(80), max_new_tokens=17)


@pytest.mark.parametrize(
    ("name", "value", "prompt", "wanted"),
    [("max_new_tokens", 7, 10, 7), ("max_new_tokens", 60, 80, 16), ("max_length", 30, 10, LIMIT)],
)
def test_the_models_own_limit_is_a_default_too(name, value, prompt, wanted, engine):
    setattr(engine.loaded.lm.model.generation_config, name, value)
    for given, most in (({}, wanted), ({"max_new_tokens": 3}, 3)):
        assert len(engine.generate(ids_of(prompt), logit_bias={2: -100}, **given).token_ids) == most


def test_a_window_that_slides_cuts_no_answer(engine):
    if isinstance(engine.loaded.lm, PlainLM):
        pytest.skip("it can't slide")
    got = engine.generate(ids_of(80), logit_bias={2: -100}, max_context="slide")
    assert len(got.token_ids) == LIMIT


def test_an_answer_of_no_given_length_forbids_no_reuse(engine):
    """Beyond longrope's limit no stored KV can be used: a default is cut for it, if that leaves an answer worth having."""
    lm = engine.loaded.lm
    if isinstance(lm, PlainLM):
        pytest.skip("nothing is reused")
    lm.context_window = 4096
    lm.reuse_window = 1000
    most = LIMIT
    assert length_of(lm, 1000 - most + 1, None, slides=False) == most  # nothing is left to save
    scheduler.DEFAULT_MAX_NEW_TOKENS = 900  # the fixture puts it back
    assert length_of(lm, 1000 - WORTH_REUSE, None, slides=False) == WORTH_REUSE
    assert length_of(lm, 1000 - WORTH_REUSE + 1, None, slides=False) == 900


def test_the_default_is_what_the_documentation_says():
    assert DEFAULT_MAX_NEW_TOKENS == 1024
