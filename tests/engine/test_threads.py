"""The threads of the package: kept, never waited behind, new after a fork; and budgets of time over what they do."""

import gc
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from kit import raising
from texts import make_chunks

from kvrag import runtime as threads
from kvrag.config import StoreConfig
from kvrag.runtime import MAX_IDLE, Deadline, Pool
from kvrag.store import open_store

WAIT_S = 60.0


@pytest.fixture
def pool(monkeypatch):
    """The shared pool of a process that has done nothing yet."""
    monkeypatch.setattr(threads, "POOL", Pool("kvrag"))
    return threads.POOL


@pytest.fixture
def started(monkeypatch, pool):
    """Names of the threads that were started."""
    names: list[str] = []
    real = threading.Thread.start
    monkeypatch.setattr(
        threading.Thread, "start", lambda thread: (names.append(thread.name), real(thread))[1]
    )
    return names


# -- pools -----------------------------------------------------------------------------------------------------------------


def test_one_thread_does_one_thing_after_the_other(started):
    for number in range(20):
        assert Deadline(WAIT_S).ask(lambda number=number: number, None, what="it") == number
        assert Deadline(WAIT_S).ask(lambda: 1 / 0, -1, what="it") == -1
    assert started == ["kvrag"]


def test_nobody_waits_behind_what_hangs(started, go_on):
    assert Deadline(0.05).ask(lambda: go_on.wait(WAIT_S), "late", what="it") == "late"
    for _ in range(5):
        assert Deadline(WAIT_S).ask(lambda: 2, 0, what="it") == 2
    assert started == ["kvrag"] * 2


@pytest.mark.parametrize("has_threads", [True, False])
def test_work_is_done_while_results_are_used(has_threads):
    """And in order, whoever does it: where no thread can be had, who waits for a result."""
    pool, begun = Pool("kvrag"), [threading.Event() for _ in range(3)]
    if not has_threads:
        pool.end()  # it takes no more jobs
    results = pool.ahead(lambda number: (begun[number].set(), number)[1], range(3))
    assert begun[2].wait(WAIT_S if has_threads else 0) == has_threads
    assert list(results) == [0, 1, 2]


def test_who_waits_for_work_helps(pool, go_on):
    """The thread that began the first item hangs: all others are done by the one that asks for it."""
    doers, entered = {}, threading.Event()

    def work(number):
        doers[number] = threading.current_thread()
        if doers[number] is not threading.main_thread():
            entered.set()
            assert go_on.wait(WAIT_S)
        elif number == 3:
            go_on.set()
        return number

    results = pool.ahead(work, range(4))
    assert entered.wait(WAIT_S)
    assert list(results) == [0, 1, 2, 3]
    assert [number for number, doer in doers.items() if doer is threading.main_thread()] == [
        1,
        2,
        3,
    ]


def test_a_fault_of_work_done_ahead_is_raised_in_its_place_and_ends_it(pool):
    done = []

    def work(number):
        done.append(number)
        return 1 // (number - 1)

    results = pool.ahead(work, range(100_000))
    assert next(results) == -1
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert list(results) == []
    assert len(done) < 100_000


def test_no_more_threads_stay_than_are_of_use(pool, started):
    together = threading.Barrier(3 * MAX_IDLE)
    futures = [pool.submit(lambda: together.wait(WAIT_S)) for _ in range(3 * MAX_IDLE)]
    assert sorted(future.result(WAIT_S) for future in futures) == list(range(3 * MAX_IDLE))
    assert len(started) == 3 * MAX_IDLE
    for thread in list(pool._threads)[: 2 * MAX_IDLE]:
        thread.join(0.2)
    assert len(pool._threads) == MAX_IDLE
    assert pool.submit(lambda: 1).result(WAIT_S) == 1
    assert len(started) == 3 * MAX_IDLE


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs Linux's list of open files")
def test_threads_that_end_leave_no_connection_open(pool, tmp_path):
    """One that is left to the garbage collector stays open for a long time: under load there were hundreds."""
    store, count = open_store(tmp_path / "kv", StoreConfig(min_free_bytes=0)), 20
    everyone = threading.Barrier(count)

    def look():
        store.catalog.documents("default")
        everyone.wait(60)

    def connections():
        found = 0
        for each in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # the listing's own
                name = os.readlink(each)
                found += name.startswith(str(tmp_path)) and name.endswith("-wal")
        return found

    gc.disable()
    try:
        for future in [pool.submit(look) for _ in range(count)]:
            future.result(60)
        end = time.monotonic() + WAIT_S
        while (left := connections()) > MAX_IDLE + 1 and time.monotonic() < end:
            time.sleep(0.05)
        assert 0 < left <= MAX_IDLE + 1
    finally:
        gc.enable()
        store.close()


def test_a_limited_pool_keeps_the_rest_waiting_and_they_can_be_cancelled(go_on):
    pool = Pool("two", max_threads=2)
    begun = threading.Semaphore(0)

    def hang():
        begun.release()
        return go_on.wait(WAIT_S)

    busy = [pool.submit(hang) for _ in range(2)]
    assert all(begun.acquire(timeout=WAIT_S) for _ in range(2))
    waiting, dropped = (
        pool.submit(lambda: threading.current_thread().name),
        pool.submit(lambda: pytest.fail("it ran")),
    )
    assert dropped.cancel()
    assert not waiting.done()
    go_on.set()
    assert [waiting.result(WAIT_S), *(future.result(WAIT_S) for future in busy)] == [
        "two",
        True,
        True,
    ]
    assert dropped.cancelled()
    assert len(pool._threads) == 2


def test_a_thread_that_waits_holds_nothing_of_the_last_action(pool):
    class Chunk:
        pass

    chunk = Chunk()
    held = weakref.ref(chunk)
    pool.submit(lambda chunk=chunk: None).result(WAIT_S)
    del chunk
    assert pool.submit(lambda: 1).result(WAIT_S) == 1
    assert held() is None


def test_a_thread_that_cannot_be_started_is_an_error_and_nothing_waits(pool, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", raising(RuntimeError, "can't start new thread"))
        with pytest.raises(RuntimeError, match="can't start"):
            pool.submit(lambda: pytest.fail("it ran"))
    assert pool.submit(lambda: 2).result(WAIT_S) == 2


def test_without_threads_the_answer_is_computed(engine_of, pool, monkeypatch):
    engine, chunk = engine_of(), make_chunks(1, words=30, seed=5)[0]
    engine.precompute([chunk])
    question = [{"role": "user", "content": f"{chunk}\n\nWho?"}]
    with monkeypatch.context() as patch:
        patch.setattr(pool, "_is_over", True)
        result = engine.prefill(question)
    assert result.exactness == "full"
    assert (
        result.fallback_reason == "the store could not be asked (the interpreter is about to exit)"
    )
    assert engine.prefill(question).exactness != "full"


@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_child_has_threads_of_its_own(pool, go_on):
    inside = threading.Event()
    pool.submit(lambda: (inside.set(), go_on.wait(WAIT_S)))
    assert inside.wait(WAIT_S)
    pid = os.fork()
    if not pid:
        os._exit(Deadline(20.0).ask(lambda: 1, 0, what="it") != 1)
    assert os.waitpid(pid, 0)[1] == 0


AT_EXIT = """
import sys, threading, time
from kvrag import runtime as threads
threads.EXIT_WAIT_S = float(sys.argv[2])
pool, begun, cancel = threads.Pool("one", 1), threading.Event(), threading.Event()
def polite():
    begun.set(); cancel.wait(60); print("polite", flush=True)
def leaving():
    begun.set()
    try:
        while True: time.sleep(0.01); threads.leave_at_exit()
    finally: print("left", flush=True)
def hung():
    begun.set(); time.sleep(60); print("hung", flush=True)
pool.submit(globals()[sys.argv[1]], cancel=cancel)
waiting = pool.submit(lambda: print("ran", flush=True))
begun.wait(60)
"""


@pytest.mark.parametrize(
    ("what", "wait_s", "said"),
    [("polite", 60, "polite\n"), ("leaving", 60, "left\n"), ("hung", 0.5, "")],
)
def test_at_exit_what_runs_is_cancelled_and_joined_within_a_bound(what, wait_s, said):
    script = [sys.executable, "-c", AT_EXIT, what, str(wait_s)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")


def test_work_goes_on_while_the_interpreter_runs_and_in_the_main_thread(pool):
    assert pool.submit(threads.leave_at_exit).result(WAIT_S) is None
    threads.EXITING.set()
    try:
        threads.leave_at_exit()
        with pytest.raises(SystemExit):
            pool.submit(threads.leave_at_exit).result(WAIT_S)
    finally:
        threads.EXITING.clear()


# -- deadlines -------------------------------------------------------------------------------------------------------------


def test_only_waiting_counts(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(threads, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    budget = Deadline(200.0)

    def takes(seconds):
        clock[0] += seconds
        return 1

    takes(50.0)
    assert budget.ask(lambda: 1, 0, what="it") == 1
    assert budget.left_s == 200.0
    assert budget.ask(lambda: takes(5.0), 0, what="it") == 1
    assert (budget.left_s, budget.fault) == (195.0, None)


def test_a_late_answer_spends_the_budget_and_a_failure_does_not(go_on, caplog):
    caplog.set_level(logging.WARNING)
    late = Deadline(0.1)
    assert late.ask(lambda: go_on.wait(20), "default", what="the index") == "default"
    assert (late.fault, late.left_s) == ("the store did not answer within 0.1 s", 0)
    assert late.ask(lambda: pytest.fail("it was asked"), "default", what="it") == "default"
    broken = Deadline(10)
    assert broken.ask(lambda: 1 / 0, 7, what="it") == 7
    assert (broken.fault, broken.left_s > 0) == ("the store failed (division by zero)", True)
    assert broken.ask(lambda: 1, 7, what="it") == 7
    assert Deadline(10).ask(sys.exit, "gone", what="it") == "gone"
    assert "the index did not answer within 0.1 s; computing instead" in caplog.text
    assert Deadline(1e300).ask(lambda: 1, 0, what="it") == 1, "longer than threads can wait"


def test_results_that_are_there_count_even_where_no_time_is_left():
    done, cancelled = Future[int](), Future[int]()
    done.set_result(3)
    cancelled.cancel()
    budget = Deadline(0)
    assert budget.result(done, 0, what="it") == 3
    assert budget.fault is None
    assert budget.result(cancelled, 0, what="it") == 0
    assert str(budget.fault).startswith("the store failed")
    assert budget.result(done, 0, what="it") == 3
