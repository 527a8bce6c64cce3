"""Recorded decode steps: the same logits as steps that are launched one by one, whatever a recording reaches beyond its row."""

import pytest
import torch
from kit import lm_of

from kvrag.model import steps
from kvrag.model.lm import CausalLM
from kvrag.model.rows import KVBuffer, Rows
from kvrag.testing.models import TINY

PROMPT = torch.arange(5, 45)
ANSWER = list(range(60, 85))


def prefilled(model: CausalLM) -> KVBuffer:
    kv = model.buffer(len(PROMPT) + len(ANSWER))
    for keys, values in kv.layers:  # what memory may hold that nobody has written
        keys.fill_(torch.nan), values.fill_(torch.nan)
    model.forward(PROMPT, Rows.span(0, len(PROMPT)), kv)
    return kv


def answered(model: CausalLM) -> torch.Tensor:
    extend = model.extension(prefilled(model), len(PROMPT))
    return torch.cat([extend(torch.tensor([token])).clone() for token in ANSWER])


@pytest.fixture
def recordings(monkeypatch):
    """Count recordings; here a replay runs the step again, with the tensors that it was given when it was recorded."""
    made: list[int] = []

    def record(step):
        step()  # as before a recording
        made.append(1)
        return step

    init = steps.RecordedSteps.__init__
    monkeypatch.setattr(steps.RecordedSteps, "__init__", lambda *given: init(*given, record=record))
    monkeypatch.setattr(steps, "BUCKET", 8)
    return made


@pytest.mark.parametrize("name", sorted(TINY))
def test_recorded_steps_give_the_same_logits(name, recordings, monkeypatch):
    model = lm_of(name)
    want = answered(model)
    monkeypatch.setattr(model, "records", True)
    got = answered(model)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
    is_kept = prefilled(model).token_ids is not None  # longrope computes its prompts again
    assert len(recordings) == (0 if is_kept else 3), (
        "one for every eight of the tokens after the first four"
    )


def test_a_step_that_cannot_be_recorded_is_launched(monkeypatch, caplog):
    def refuse(step):
        raise RuntimeError("operation not permitted when stream is capturing")

    model = lm_of("llama")
    want = answered(model)
    init = steps.RecordedSteps.__init__
    monkeypatch.setattr(steps.RecordedSteps, "__init__", lambda *given: init(*given, record=refuse))
    monkeypatch.setattr(model, "records", True)
    assert torch.equal(answered(model), want)
    assert not model.records
    assert "can't be recorded (operation not permitted" in caplog.text
    assert len(caplog.records) == 1


def test_a_cpu_records_nothing():
    assert not lm_of("llama").records
