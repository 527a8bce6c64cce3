"""Requests that decode at the same time share forwards, and get what each gets alone."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from texts import make_chunks

from kvrag.generate import sequence
from kvrag.model import steps
from kvrag.testing.models import TINY
from kvrag.together import Together

CHUNKS = make_chunks(5, words=42)
PROMPTS = [f"{' '.join(CHUNKS[i:] + CHUNKS[:i])} Who reads {i}?" for i in range(5)] + ["Who?", "word " * 40]


@pytest.fixture
def abreast(monkeypatch):
    """Let so many requests begin to decode at the same time, and count what their forwards compute."""
    real, sizes = sequence.decode, []

    def install(parties):
        barrier = threading.Barrier(parties)
        work = steps.Extension._next_rows

        def counted(self, rows):
            sizes.append(len(rows))
            return work(self, rows)

        def decode(*args, **options):
            barrier.wait(60)
            return real(*args, **options)

        monkeypatch.setattr(steps.Extension, "_next_rows", counted)
        monkeypatch.setattr(sequence, "decode", decode)
        return sizes

    return install


@pytest.mark.parametrize("name", TINY)
def test_answers_are_those_of_requests_alone(engine_of, abreast, name):
    engine = engine_of(name)
    engine.precompute(CHUNKS)
    options = {"max_new_tokens": 12, "mode": "stitch"}
    alone = [engine.generate(prompt, **options).token_ids for prompt in PROMPTS]
    sizes = abreast(len(PROMPTS))
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = [r.token_ids for r in pool.map(lambda prompt: engine.generate(prompt, **options), PROMPTS)]
    assert together == alone
    if engine.loaded.lm.can_share_forwards:
        assert max(sizes) > 3
        assert sum(sizes) == sum(len(ids) - 1 for ids in alone)
    else:
        assert not sizes


def test_sampling_with_a_seed_is_the_same_in_company(engine_of, abreast):
    engine = engine_of("llama")
    options = [{"max_new_tokens": 10, "temperature": 1.0, "seed": seed} for seed in range(6)]
    alone = [engine.generate(PROMPTS[0], **each).token_ids for each in options]
    abreast(len(options))
    with ThreadPoolExecutor(len(options)) as pool:
        assert [r.token_ids for r in pool.map(lambda each: engine.generate(PROMPTS[0], **each), options)] == alone


def test_one_request_that_fails_takes_no_other_along(engine_of, abreast, monkeypatch):
    engine = engine_of("llama")
    want = [engine.generate(prompt, max_new_tokens=8).token_ids for prompt in PROMPTS[:3]]
    abreast(3)
    real = engine.loaded.lm._run

    def run(ids, forward, logits):
        if ids.shape[1] > 1 and len(getattr(forward, "requests", ())) > 1:
            raise RuntimeError("no room for so many")
        return real(ids, forward, logits)

    monkeypatch.setattr(engine.loaded.lm, "_run", run)
    with ThreadPoolExecutor(3) as pool:
        got = [r.token_ids for r in pool.map(lambda prompt: engine.generate(prompt, max_new_tokens=8), PROMPTS[:3])]
    assert got == want


class TestTogether:
    def test_everybody_gets_their_own(self):
        sizes = []

        def work(items):
            sizes.append(len(items))
            time.sleep(0.002)
            return [item * 10 for item in items]

        together = Together(limit=3)
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(lambda i: together.do(i, work), range(200))) == [i * 10 for i in range(200)]
        assert max(sizes) == 3
        assert sum(sizes) == 200

    def test_an_error_is_that_of_its_item(self):
        together = Together(limit=8)

        def outcome(item):
            try:
                return together.do(item, lambda items: [1 // item for item in items])
            except ZeroDivisionError:
                return "failed"

        with ThreadPoolExecutor(8) as pool:
            assert (
                list(pool.map(outcome, [1, 0, 1, 0, 1, 1, 0, 1] * 5))
                == [1, "failed", 1, "failed", 1, 1, "failed", 1] * 5
            )

    def test_an_interrupted_leader_leaves_the_others_to_another(self):
        begun, release, calls = threading.Event(), threading.Event(), []

        def work(items):
            calls.append(list(items))
            if len(calls) == 1:
                begun.set()
                release.wait(10)
                raise KeyboardInterrupt
            return items

        together = Together(limit=8)
        together._usual = 1

        def lead():
            with pytest.raises(KeyboardInterrupt):
                together.do("mine", work)

        leader = threading.Thread(target=lead)
        leader.start()
        assert begun.wait(10)
        with ThreadPoolExecutor(2) as pool:
            others = [pool.submit(together.do, name, work) for name in "ab"]
            while len(together._wishes) < 2:
                time.sleep(0.001)
            release.set()
            assert [other.result(10) for other in others] == ["a", "b"]
        leader.join()
        assert not together._wishes
        assert not together._is_busy

    def test_one_alone_waits_for_nobody(self):
        together = Together(limit=8)
        assert [together.do(i, list) for i in range(5)] == list(range(5))
        assert together._usual == 1
