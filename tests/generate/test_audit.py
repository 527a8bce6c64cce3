"""The shadow audit: what it counts is what a full prefill says, no request waits for it, and a fault of it costs nothing."""

import gc
import logging
import random
import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from kit import raising, settle
from texts import asking, make_chunks

from kvrag import KVRagEngine, RepairConfig
from kvrag.errors import UnsupportedModelError
from kvrag.generate.audit import Audit
from kvrag.generate.scheduler import Scheduler, scheduler_of
from kvrag.metrics import kl_divergence
from kvrag.model import CausalLM
from kvrag.model.lm import LoadedModel
from kvrag.model.lock import lock_of

CHUNKS = make_chunks(4, words=30, seed=41)
ask = partial(asking, CHUNKS)
ALL = RepairConfig(recompute_ratio=0.1, audit=1.0)


PROMPTS = [ask(0, 1, 2), ask(3, 2, 1), ask(2, 0)]


@pytest.fixture
def engine(engine):
    engine.precompute(CHUNKS)
    return engine


def answer(engine, prompt, repair=ALL, mode="stitch"):
    result = engine.generate(prompt, mode=mode, repair=repair, max_new_tokens=2)
    settle()
    return result


def counted(engine):
    stats = engine.stats()["audit"]
    return stats["requests"], stats["skipped"]


def test_it_counts_how_far_reuse_is_from_a_full_prefill_of_the_same_ids(engine):
    kls, same = [], []
    for prompt in PROMPTS:
        answer(engine, prompt)
        reused, full = (
            engine.prefill(prompt, mode=mode, repair=ALL).logits for mode in ("stitch", "full")
        )
        kls.append(float(kl_divergence(full, reused)))
        same.append(bool(full.argmax() == reused.argmax()))
    stats = engine.stats()["audit"]
    assert min(kls) > 0
    assert stats["requests"] == len(PROMPTS)
    assert stats["mean_kl"] == pytest.approx(sum(kls) / len(kls), rel=1e-3)
    assert stats["max_kl"] == pytest.approx(max(kls), rel=1e-3)
    assert stats["top1"] == sum(same) / len(same)


@pytest.mark.parametrize(
    ("order", "mode", "repair"),
    [
        ((0, 1), "full", ALL),
        ((0,), "stitch", ALL),
        ((0, 1), "stitch", replace(ALL, strategy="all")),
        ((0, 1), "stitch", replace(ALL, audit=0.0)),
    ],
    ids=["full", "exact", "all rows repaired", "off"],
)
def test_only_what_was_repaired_is_audited(engine, order, mode, repair):
    answer(engine, ask(*order), repair, mode)
    assert engine.stats()["audit"] == {
        "requests": 0,
        "skipped": 0,
        "mean_kl": 0.0,
        "top1": 0.0,
        "max_kl": 0.0,
    }


def test_prompts_are_drawn_by_a_generator_with_a_fixed_seed(engine):
    draws = random.Random(0)
    expected = [draws.random() < 0.5 for _ in range(8)]
    found = []
    for number in range(8):
        before = counted(engine)[0]
        answer(engine, ask(1, 0, question=f"Who {number}?"), replace(ALL, audit=0.5))
        found.append(counted(engine)[0] > before)
    assert found == expected
    assert set(found) == {True, False}


def test_it_gives_up_within_a_layer_when_a_request_comes(engine, monkeypatch):
    looks = []
    monkeypatch.setattr(Scheduler, "is_idle", property(lambda _: looks.append(1) or len(looks) < 2))
    answer(engine, PROMPTS[0])
    assert len(looks) == 2 <= engine.loaded.lm.num_layers
    assert counted(engine) == (0, 1)


def test_it_looks_at_the_turns_that_requests_take(engine):
    """While any request of the process has one, no audit runs."""
    assert scheduler_of(engine.loaded).is_idle
    with scheduler_of(engine.loaded).reservation(0):
        answer(engine, PROMPTS[0])
        assert counted(engine) == (0, 1)
    answer(engine, PROMPTS[0])
    assert counted(engine) == (1, 1)


def test_a_failing_audit_is_logged_once_and_costs_nothing(engine, monkeypatch, caplog):
    expected = answer(engine, PROMPTS[0], replace(ALL, audit=0.0)).token_ids
    monkeypatch.setattr(Audit, "_prefilled", raising(RuntimeError, "no memory"))
    with caplog.at_level(logging.WARNING):
        assert [answer(engine, PROMPTS[0]).token_ids for _ in range(2)] == [expected] * 2
    assert counted(engine) == (0, 2)
    assert caplog.text.count("was not audited (no memory)") == 1


def test_without_a_thread_answers_come_all_the_same(engine, monkeypatch):
    monkeypatch.setattr(
        "kvrag.generate.audit.AUDITS.submit", raising(RuntimeError, "can't start new thread")
    )
    assert answer(engine, PROMPTS[0]).exactness == "repaired"
    assert counted(engine) == (0, 1)


def test_one_prompt_waits_at_most(engine, monkeypatch):
    """A queue would hold logits, and make requests of a busy hour wait for those of the hour before."""
    begun, may_end = threading.Event(), threading.Event()

    def slow(*args):
        begun.set()
        may_end.wait(10)

    monkeypatch.setattr(Audit, "_prefilled", slow)
    engine.generate(PROMPTS[0], mode="stitch", repair=ALL, max_new_tokens=1)
    assert begun.wait(10)
    engine.generate(PROMPTS[1], mode="stitch", repair=ALL, max_new_tokens=1)
    assert counted(engine) == (0, 1)
    may_end.set()


def test_an_audit_that_can_not_begin_costs_no_answer(engine, monkeypatch):
    """As where an adapter that can't be reused is added while an answer is decoded."""
    monkeypatch.setattr(
        LoadedModel, "fingerprint", property(raising(UnsupportedModelError, "an adapter"))
    )
    assert answer(engine, PROMPTS[0]).exactness == "repaired"
    assert counted(engine) == (0, 1)


def test_no_memory_is_taken_while_a_request_runs(engine, monkeypatch):
    audit, taken = Audit(), []
    monkeypatch.setattr(CausalLM, "buffer", lambda *args: taken.append(args))
    with scheduler_of(engine.loaded).reservation(0):
        assert (
            audit._prefilled(engine.loaded, torch.tensor([1, 2, 3]), scheduler_of(engine.loaded))
            is None
        )
    assert not taken


def test_an_adapter_that_is_switched_meanwhile_spoils_no_figure(engine, monkeypatch):
    prefilled = Audit._prefilled

    def switching(*args):
        full = prefilled(*args)
        monkeypatch.setattr(LoadedModel, "fingerprint", "another")
        return full

    monkeypatch.setattr(Audit, "_prefilled", switching)
    answer(engine, PROMPTS[0])
    assert counted(engine) == (0, 1)


def test_closing_ends_it_without_a_word(engine, caplog):
    audit = engine._answering.stats.audit
    with caplog.at_level(logging.WARNING):
        with lock_of(engine.loaded.lm.model):
            audit.offer(engine.loaded, *offered(engine))
            engine.close()
        settle()
    assert (audit.stats()["requests"], audit.stats()["skipped"]) == (0, 1)
    assert caplog.text == ""


def offered(engine):
    """What a request offers: here while its caller still holds the model."""
    with engine._answering.prefilled(
        engine._request(PROMPTS[0], mode="stitch"), max_new_tokens=1
    ) as (done, _):
        return done, 1.0, scheduler_of(engine.loaded)


def test_nothing_of_a_prompt_is_kept(engine, monkeypatch):
    seen, original = [], CausalLM.forward

    def forward(model, ids, *args, **options):
        if options.get("before_write") and len(ids) > 100 and not options.get("mass_rows"):
            seen.append(weakref.ref(ids))
        return original(model, ids, *args, **options)

    monkeypatch.setattr(CausalLM, "forward", forward)
    answer(engine, PROMPTS[0])
    gc.collect()
    assert counted(engine) == (1, 0)
    assert seen
    assert all(ref() is None for ref in seen)


@pytest.mark.slow
def test_a_process_that_ends_right_after_its_answer_ends_in_order(tiny_dir, tmp_path):
    code = f"""
from kvrag import KVRagEngine, RepairConfig
engine = KVRagEngine.from_pretrained({str(tiny_dir)!r}, kv_dir={str(tmp_path)!r}, repair=RepairConfig(audit=1.0))
engine.precompute({CHUNKS!r})
print(engine.generate({PROMPTS[0]!r}, mode="stitch", max_new_tokens=2).exactness)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, "Fatal" in done.stderr) == (0, "repaired\n", False), (
        done.stderr
    )


def test_one_engine_counts_its_own_answers(engine, engine_of):
    other: KVRagEngine = engine_of("llama")
    answer(engine, PROMPTS[0])
    assert (counted(engine), counted(other)) == ((1, 0), (0, 0))
