"""A model that was handed in stays its owner's: in threads that are not kvrag's, its own attention runs, and hooks leave it alone."""

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kvrag.model import CausalLM
from kvrag.model.forward import Forward
from kvrag.model.proof import prove
from kvrag.model.rows import Rows
from kvrag.precompute.encode import encode_chunks, encode_prefix
from kvrag.testing.models import tiny_model

IDS = torch.randint(5, 200, (1, 70), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones_like(IDS).index_fill(1, torch.arange(9), 0)


@contextmanager
def paused_at(
    owner: Any, name: str, call: int = 3
) -> Iterator[Callable[[Callable[[], Any]], None]]:
    """Stop the first thread that makes this call for that time, until the test has done something else."""
    real, there, go_on, calls = getattr(owner, name), threading.Event(), threading.Event(), [0]

    def waiting(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            there.set()
            assert go_on.wait(60)
        return real(*args, **options)

    def run(action: Callable[[], Any]) -> None:
        thread = threading.Thread(target=action)
        thread.start()
        assert there.wait(60)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, waiting)
        yield run
        go_on.set()


def own_logits(model: Any) -> list[torch.Tensor]:
    with torch.inference_mode():
        masks = (None, torch.ones_like(IDS), PADDED)
        return [model(IDS, attention_mask=mask).logits for mask in masks]


@pytest.mark.parametrize(
    ("name", "attention"),
    [(name, attention) for name in ("llama", "mistral") for attention in ("sdpa", "eager")]
    + [(name, "eager") for name in ("gemma2", "gpt_oss", "bloom", "gptj")],
)
def test_a_users_thread_gets_the_models_own_attention_during_a_forward(name, attention):
    model = tiny_model(name)
    model.config._attn_implementation = attention
    lm, expected = CausalLM(model), own_logits(model)
    alone, _ = lm.forward(IDS[0], Rows.span(0, 70), lm.buffer(70), logits=5)
    found: list[torch.Tensor] = []
    done = threading.Event()

    def ours():
        found.append(lm.forward(IDS[0], Rows.span(0, 70), lm.buffer(70), logits=5)[0])
        done.set()

    with paused_at(Forward, "update") as run:
        run(ours)
        for one, other in zip(own_logits(model), expected, strict=True):
            assert torch.equal(one, other)
    assert done.wait(60)
    assert torch.equal(found[0], alone)
    assert model.config._attn_implementation == attention


def test_a_forward_that_began_before_goes_on_with_its_own_attention():
    model = tiny_model("mistral")
    lm, expected = CausalLM(model), own_logits(model)
    found: list[list[torch.Tensor]] = []
    done = threading.Event()
    layer = model.model.layers[1].mlp
    with paused_at(layer, "forward", call=1) as run:
        run(lambda: (found.append(own_logits(model)), done.set()))

        def go_on(_, *others):
            assert not done.is_set()

        lm.forward(IDS[0], Rows.span(0, 70), lm.buffer(70), logits=5, before_write=go_on)
    assert done.wait(60)
    assert all(torch.equal(one, other) for one, other in zip(found[0], expected, strict=True))


def test_what_a_users_thread_computes_is_not_captured():
    model = tiny_model()
    lm = CausalLM(model)
    prefix, _ = encode_prefix(lm, [7, 8, 9])
    chunk = IDS[0, :30].tolist()
    expected = encode_chunks(lm, prefix, [chunk])[0]
    found: list[Any] = []
    with paused_at(Forward, "update", call=4) as run:
        run(lambda: found.append(encode_chunks(lm, prefix, [chunk])[0]))
        own_logits(model)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(60)
    for one, other in zip(found[0].layers, expected.layers, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)


@pytest.mark.parametrize("step", [CausalLM, lambda model: prove(CausalLM(model))])
def test_a_users_thread_is_left_alone_while_a_model_is_looked_at_and_proven(step):
    model = tiny_model("gemma2")
    model.config._attn_implementation = "eager"
    expected, stop, wrong, runs = own_logits(model), threading.Event(), [0], [0]

    def use():
        while not stop.is_set():
            wrong[0] += any(
                not torch.equal(a, b) for a, b in zip(own_logits(model), expected, strict=True)
            )
            runs[0] += 1

    thread = threading.Thread(target=use)
    thread.start()
    until = time.monotonic() + 60
    # Until both have run beside each other several times, however slow the machine is.
    for steps in itertools.count(1):
        step(model)
        if (steps >= 3 and runs[0] >= 3) or time.monotonic() > until:
            break
    stop.set()
    thread.join(60)
    assert runs[0] >= 3
    assert wrong[0] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_in_a_forked_process_the_models_own_attention_runs():
    model = tiny_model()
    lm, expected = CausalLM(model), own_logits(model)
    with paused_at(Forward, "update") as run:
        run(lambda: lm.forward(IDS[0], Rows.span(0, 70), lm.buffer(70), logits=5))
        child = os.fork()
        if child == 0:
            status = 3
            try:
                own = zip(own_logits(model), expected, strict=True)
                status = 0 if all(torch.equal(a, b) for a, b in own) else 1
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
