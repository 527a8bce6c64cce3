"""Requests run as long as their KV has room, in order of arrival; none is lost, and none waits for ever."""

import random
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest
from texts import make_chunks

from kvrag.generate import pipeline, scheduler
from kvrag.generate.scheduler import Scheduler, kv_bytes, scheduler_of
from kvrag.model.plain import PlainLM

CHUNKS = make_chunks(3, words=42)


def settled(room, running, waiting):
    for _ in range(2000):
        if room.load[:2] == (running, waiting):
            return True
        time.sleep(0.005)
    return False


def test_what_runs_never_needs_more_than_there_is():
    room, most, lock, draw = Scheduler(4, 100), [], threading.Lock(), random.Random(1)
    taken = []

    def run(size):
        with room.reservation(size):
            with lock:
                taken.append(size)
                most.append((sum(taken), len(taken)))
            time.sleep(0.001)
            with lock:
                taken.remove(size)
        return size

    sizes = [draw.randint(1, 140) for _ in range(200)]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(run, sizes)) == sizes
    assert all(total <= 100 or count == 1 for total, count in most)
    assert max(count for _, count in most) in (2, 3, 4)
    assert any(total > 100 for total, _ in most), "one that is too large for all runs alone"
    assert room.load == (0, 0, 0)


def test_a_large_request_is_not_overtaken_for_ever():
    room, order = Scheduler(8, 100), []

    def run(name, size):
        with room.reservation(size):
            order.append(name)

    with ThreadPoolExecutor(8) as pool:
        with room.reservation(60):
            works = [pool.submit(run, "large", 90)]
            assert settled(room, 1, 1)
            works += [pool.submit(run, name, 10) for name in "abc"]  # they would fit
            assert settled(room, 1, 4)
            assert order == []
        assert all(work.result(10) is None for work in works)
    assert order[0] == "large"


def test_who_is_cancelled_gives_up_and_lets_the_next_one_in():
    room, cancel, order = Scheduler(1, 100), threading.Event(), []

    def run(name, cancel=None):
        with room.reservation(1, cancel):
            order.append(name)

    with ThreadPoolExecutor(2) as pool:
        with room.reservation(1):
            first = pool.submit(run, "first", cancel)
            assert settled(room, 1, 1)
            second = pool.submit(run, "second")
            assert settled(room, 1, 2)
            cancel.set()
            with pytest.raises(CancelledError):
                first.result(10)
        assert second.result(10) is None
    assert order == ["second"]


def test_a_request_reserves_its_prompt_and_its_answer(engine_of, monkeypatch):
    engine, seen = engine_of("llama"), []
    real = Scheduler.reservation

    def reservation(self, num_bytes, cancel=None, **options):
        seen.append(num_bytes)
        return real(self, num_bytes, cancel, **options)

    monkeypatch.setattr(Scheduler, "reservation", reservation)
    result = engine.generate("Who keeps the lamp?", max_new_tokens=5)
    assert seen == [(result.prompt_tokens + 5) * engine.loaded.lm.kv_bytes_per_token]


def test_requests_that_do_not_fit_together_are_all_answered(engine_of, monkeypatch):
    """With room for one at a time, with reuse, as with room for all."""
    engine = engine_of("llama")
    engine.precompute(CHUNKS)
    prompts = [f"{CHUNKS[i % 3]}\n\n{CHUNKS[(i + 1) % 3]}\n\nWho reads {i}?" for i in range(12)]
    alone = [engine.generate(prompt, max_new_tokens=6).token_ids for prompt in prompts]
    room = Scheduler(64, 1)
    monkeypatch.setattr(scheduler, "scheduler_of", lambda _: room)
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda prompt: engine.generate(prompt, max_new_tokens=6), prompts))
    assert [answer.token_ids for answer in answers] == alone
    assert any("wait" in answer.timings_ms for answer in answers)
    assert room.load == (0, 0, 0)


def test_the_engine_says_what_runs(engine_of):
    engine = engine_of("llama")
    assert engine.load == (0, 0, 0), "before the model is loaded"
    stream = engine.stream("Who?", max_new_tokens=200)
    next(stream)
    load = engine.stats()["load"]
    assert load["running"] == 1
    assert load["kv_bytes"] >= 200 * engine.loaded.lm.kv_bytes_per_token
    stream.close()
    assert settled(scheduler_of(engine.loaded), 0, 0)


def test_a_request_that_fails_gives_its_room_back(engine_of, monkeypatch):
    engine, room = engine_of("llama"), Scheduler(1, 1)
    monkeypatch.setattr(scheduler, "scheduler_of", lambda _: room)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "prefill", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.generate("Who?")
    assert engine.generate("Who?", max_new_tokens=2).token_ids
    assert room.load == (0, 0, 0)


def test_engines_of_a_device_share_its_memory(engine_of):
    one, other = engine_of("llama"), engine_of("qwen2")
    assert scheduler_of(one.loaded) is scheduler_of(other.loaded)
    assert 0 < scheduler_of(one.loaded).max_bytes < scheduler.host_memory()


def test_what_a_plain_models_cache_takes_is_guessed(engine_of, monkeypatch):
    engine = engine_of("llama")
    assert kv_bytes(engine.loaded, 100) == 100 * engine.loaded.lm.kv_bytes_per_token
    monkeypatch.setattr(engine.loaded.lm, "kv_bytes_per_token", PlainLM.kv_bytes_per_token)
    assert kv_bytes(engine.loaded, 100) * 8 <= scheduler_of(engine.loaded).max_bytes


def test_the_weights_of_every_model_take_room(engine_of, monkeypatch):
    for name in (
        "_weights",
        "_schedulers",
    ):  # of other tests' models some may be collected meanwhile
        monkeypatch.setattr(scheduler, name, type(getattr(scheduler, name))())
    one = engine_of("llama", seed=3)
    before = scheduler_of(one.loaded).max_bytes
    other = engine_of("qwen2", seed=3)
    footprint = other.loaded.lm.model.get_memory_footprint()
    assert scheduler_of(other.loaded).max_bytes == pytest.approx(
        before - scheduler.SHARE * footprint, abs=2
    )
