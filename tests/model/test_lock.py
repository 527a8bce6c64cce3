"""Requests share a model: decode steps are one forward, long forwards give way to them, and each gets what it gets alone."""

import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from texts import make_chunks

from kvrag.model import CausalLM, lock
from kvrag.model.forward import Forward, running
from kvrag.model.lock import WAITED, Clock, ModelLock
from kvrag.model.rows import Rows
from kvrag.testing.models import TINY

CHUNKS = make_chunks(5, words=42)
PROMPTS = [f"{' '.join(CHUNKS[i:] + CHUNKS[:i])} Who reads {i}?" for i in range(3)] + [
    "Who?",
    "word " * 40,
]
IDS, MANY = torch.arange(5, 45), 60


@pytest.mark.parametrize("name", TINY)
def test_answers_are_those_of_requests_alone(engine_of, abreast, name):
    engine = engine_of(name)
    engine.precompute(CHUNKS)
    options = {"max_new_tokens": 8, "mode": "stitch"}
    alone = [engine.generate(prompt, **options).token_ids for prompt in PROMPTS]
    sizes = abreast(len(PROMPTS))
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = [
            r.token_ids
            for r in pool.map(lambda prompt: engine.generate(prompt, **options), PROMPTS)
        ]
    assert together == alone
    assert sum(sizes) == sum(len(ids) - 1 for ids in alone)
    assert max(sizes) > 3 if engine.loaded.lm.can_share_forwards else max(sizes) == 1


def test_sampling_with_a_seed_is_the_same_in_company(engine_of, abreast):
    engine = engine_of("llama")
    options = [{"max_new_tokens": 10, "temperature": 1.0, "seed": seed} for seed in range(6)]
    alone = [engine.generate(PROMPTS[0], **each).token_ids for each in options]
    abreast(len(options))
    with ThreadPoolExecutor(len(options)) as pool:
        assert [
            r.token_ids for r in pool.map(lambda each: engine.generate(PROMPTS[0], **each), options)
        ] == alone


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
        got = [
            r.token_ids
            for r in pool.map(lambda prompt: engine.generate(prompt, max_new_tokens=8), PROMPTS[:3])
        ]
    assert got == want


@pytest.fixture
def eager(monkeypatch):
    """Let forwards give way in every layer, and count how often they do."""
    serve_, update_, nested = ModelLock._serve, Forward.update, []

    def serve(self):
        nested.append(running() is not None)
        serve_(self)

    def update(self, *args, **options):
        # Tiny models have done their layers before another thread gets the interpreter.
        for _ in range(50):
            if self._lock is not None and not self._lock.pending and not self._lock.is_stepping:
                time.sleep(1e-4)
        return update_(self, *args, **options)

    monkeypatch.setattr(ModelLock, "_serve", serve)
    monkeypatch.setattr(Forward, "update", update)
    monkeypatch.setattr(lock, "SLICE_S", 0.0)
    monkeypatch.setattr(lock, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    return nested


@pytest.mark.parametrize("name", TINY)
def test_a_forward_that_gives_way_computes_what_it_computes_alone(engine_of, eager, tmp_path, name):
    """A prompt is repaired and a chunk precomputed, while another request decodes between their layers."""
    engine, other = engine_of(name), engine_of(name, kv_dir=tmp_path / "other")
    for each in (engine, other):
        each.precompute(CHUNKS[:4])
    alone = [other.prefill(PROMPTS[0], mode="stitch").logits]
    other.precompute(CHUNKS[4:])
    alone.append(other.prefill(PROMPTS[0], mode="stitch", repair={"strategy": "none"}).logits)
    lm, begun, stop = engine.loaded.lm, threading.Event(), threading.Event()

    def decoded(is_over):
        kv, steps = lm.buffer(40 + MANY), []
        lm.forward(IDS, Rows.span(0, 40), kv)
        while not is_over(len(steps)):
            if len(steps) % MANY == 0:  # from the beginning, again and again
                extend = lm.extension(kv, 40)
            steps.append(extend(torch.tensor([50 + len(steps) % MANY])))
            begun.set()
        return torch.cat(steps)

    expected = decoded(lambda count: count == MANY)
    begun.clear(), eager.clear()
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(decoded, lambda _: stop.is_set())
        assert begun.wait(60)
        for _ in range(50):  # a busy machine may not run the other thread between two layers
            engine.prefill(PROMPTS[0], mode="stitch")
            if any(eager):
                break
        company = [engine.prefill(PROMPTS[0], mode="stitch").logits]
        engine.precompute(CHUNKS[4:])
        company.append(
            engine.prefill(PROMPTS[0], mode="stitch", repair={"strategy": "none"}).logits
        )
        stop.set()
        steps = beside.result(60)
    assert all(torch.equal(a, b) for a, b in zip(alone, company, strict=True))
    assert torch.equal(steps, expected.repeat(len(steps) // MANY + 1, 1)[: len(steps)])
    assert any(eager)


class TestModelTurns:
    def test_everybody_gets_their_own(self):
        sizes, shared = [], ModelLock()

        def work(items):
            sizes.append(len(items))
            time.sleep(0.002)
            return [item * 10 for item in items]

        with ThreadPoolExecutor(8) as pool:
            steps = pool.map(lambda i: shared.step(i, work, limit=3), range(200))
            assert list(steps) == [i * 10 for i in range(200)]
        assert max(sizes) == 3
        assert sum(sizes) == 200

    def test_an_error_is_that_of_its_step(self):
        shared = ModelLock()

        def work(items):
            return [1 // item for item in items]

        def outcome(item):
            try:
                return shared.step(item, work, limit=8)
            except ZeroDivisionError:
                return "failed"

        items = [1, 0, 1, 0, 1, 1, 0, 1] * 5
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(outcome, items)) == [item or "failed" for item in items]

    def test_steps_of_different_work_are_not_mixed(self):
        shared = ModelLock()

        def double(items):
            return [2 * item for item in items]

        def negate(items):
            return [-item for item in items]

        with ThreadPoolExecutor(8) as pool:
            steps = pool.map(
                lambda i: shared.step(i, double if i % 2 else negate, limit=8), range(100)
            )
            assert list(steps) == [2 * i if i % 2 else -i for i in range(100)]

    def test_who_has_the_model_does_its_own_steps(self):
        shared = ModelLock()
        with shared:
            assert shared.step(3, lambda items: [2 * item for item in items], limit=8) == 6
        assert shared._holder is None

    def test_the_model_is_handed_on_in_order_of_arrival(self):
        shared, order = ModelLock(), []

        def take(name):
            with shared, shared:
                order.append(name)

        threads = [threading.Thread(target=take, args=(name,)) for name in "abcd"]
        with shared:
            for i, thread in enumerate(threads):
                thread.start()
                while len(shared._queue) <= i:
                    time.sleep(0.001)
        for thread in threads:
            thread.join(10)
        assert order == list("abcd")
        assert shared._holder is None

    def test_an_interrupted_thread_leaves_the_others_to_another(self):
        begun, release, calls, shared = threading.Event(), threading.Event(), [], ModelLock()

        def work(items):
            calls.append(list(items))
            if len(calls) == 1:
                begun.set()
                release.wait(10)
                raise KeyboardInterrupt
            return items

        def lead():
            with pytest.raises(KeyboardInterrupt):
                shared.step("mine", work, limit=8)

        leader = threading.Thread(target=lead)
        leader.start()
        assert begun.wait(10)
        with ThreadPoolExecutor(2) as pool:
            others = [pool.submit(shared.step, name, work, limit=8) for name in "ab"]
            while len(shared.pending) < 3:
                time.sleep(0.001)
            release.set()
            assert [other.result(10) for other in others] == ["a", "b"]
        leader.join()
        assert not shared.pending
        assert shared._holder is None

    def test_steps_are_not_put_off_by_those_who_want_the_model_for_themselves(self):
        """Short works in a row never give way, so that they are done again and again; a step comes between all the same."""
        shared, stop, steps = ModelLock(), threading.Event(), []

        def work():
            while not stop.is_set():
                with shared:
                    time.sleep(0.01)

        with ThreadPoolExecutor(3) as pool:
            works = [pool.submit(work) for _ in range(3)]
            steps = [shared.step(i, list, limit=8) for i in range(5)]
            stop.set()
        assert steps == list(range(5))
        assert all(work.result() is None for work in works)

    @pytest.mark.parametrize(
        ("stage", "want"), [("repair", {"repair": 250, "wait": 500}), ("decode", {"decode": 750})]
    )
    def test_what_is_spent_on_others_is_counted(self, monkeypatch, stage, want):
        """By who computes for them, and by who waits, though not in its answer."""
        now, shared = [10.0], ModelLock()
        monkeypatch.setattr(lock, "time", SimpleNamespace(perf_counter=lambda: now[0]))

        def work(items):
            now[0] += 0.25
            return items

        def ask():
            with clock.stage(stage):
                return shared.step(1, work, limit=8)

        clock = Clock()
        with ThreadPoolExecutor(1) as pool:
            before = WAITED.seconds
            with shared:
                step = pool.submit(ask)
                while not shared.pending:
                    time.sleep(0.001)
                now[0] += 0.5
                shared.give_way()
                assert step.result(10) == 1
        assert WAITED.seconds - before == 0.25
        assert clock.timings_ms == want

    @pytest.mark.parametrize(("num_prompts", "slice_s"), [(1, 0.2), (3, 0.6), (9, 1.0)])
    def test_a_forward_runs_longer_while_more_prompts_wait(self, monkeypatch, num_prompts, slice_s):
        now = [10.0]
        monkeypatch.setattr(lock, "time", SimpleNamespace(perf_counter=lambda: now[0]))
        shared = ModelLock()
        shared.num_prompts = num_prompts

        def work(items):
            now[0] += 0.2
            return items

        def asked():
            step = pool.submit(shared.step, 1, work, limit=1)
            while not shared.pending:
                time.sleep(0.001)
            shared.give_way()
            return step

        with ThreadPoolExecutor(1) as pool, shared:
            assert asked().result(10) == 1
            now[0] += slice_s - 0.01
            second = asked()
            assert shared.pending
            now[0] += 0.02
            shared.give_way()
            assert second.result(10) == 1

    @pytest.mark.parametrize("want", ["acquire", "step"])
    @pytest.mark.parametrize("is_free", [True, False])
    def test_an_interrupt_leaves_the_model_to_others(self, want, is_free):
        """It may come when the thread is in the queue, or has the model, and has not yet heard of it."""

        class Interrupted:
            def __init__(self, lock):
                self.lock = lock

            def __enter__(self):
                return self.lock.__enter__()

            def __exit__(self, *error):
                self.lock.__exit__(*error)
                shared._guard = self.lock
                raise KeyboardInterrupt

        shared = ModelLock()
        with ThreadPoolExecutor(1) as pool:
            if not is_free:
                pool.submit(shared.acquire).result(10)
            shared._guard = Interrupted(shared._guard)
            with pytest.raises(KeyboardInterrupt):
                shared.acquire() if want == "acquire" else shared.step(1, list, limit=8)
            assert not shared._queue
            assert not shared.pending
            if not is_free:
                pool.submit(shared.release).result(10)
            assert shared._holder is None

    def test_steps_that_are_not_shared_do_not_wait_for_each_other(self, monkeypatch):
        shared = ModelLock()
        monkeypatch.setattr(shared, "_gather", lambda: pytest.fail("it waits"))
        assert shared.step(7, list, limit=1) == 7

    def test_a_shared_step_that_failed_holds_nothing_when_it_is_done_again(self):
        kept, shared = [], ModelLock()

        def work(items):
            if len(items) > 1:
                large = torch.zeros(3)
                kept.append(weakref.ref(large))
                raise RuntimeError("out of memory")
            assert kept[0]() is None
            return items

        with ThreadPoolExecutor(2) as pool, shared:
            steps = [pool.submit(shared.step, i, work, limit=8) for i in range(2)]
            while len(shared.pending) < 2:
                time.sleep(0.001)
            shared.give_way()
            assert [step.result(10) for step in steps] == [0, 1]


def test_who_left_while_waiting_for_the_model_computes_nothing(engine_of, monkeypatch):
    engine = engine_of()
    engine.precompute(CHUNKS)
    monkeypatch.setattr(CausalLM, "forward", lambda *_, **__: pytest.fail("it computes"))
    model_lock = engine.loaded.lm.lock
    for mode in ("full", "stitch"):
        with model_lock:
            stream = engine.stream(PROMPTS[0], mode=mode)
            while not model_lock._queue:
                time.sleep(0.001)
            stream.cancel()
        assert list(stream) == []
        with pytest.raises(RuntimeError, match="left or cancelled before its end"):
            _ = stream.result
