"""Helpers take up jobs beside their callers, who need none of them."""

import os
import threading
import weakref

import pytest
from kvrag.store.helpers import Helpers
from processes import ended_in_time

from kvrag.store import helpers


def test_a_job_runs_in_another_thread_which_stays():
    pool, threads = Helpers(1), []
    for _ in range(3):
        ran = threading.Event()

        def job(ran=ran):
            threads.append(threading.current_thread())
            ran.set()

        with pool.help(job):
            assert ran.wait(30)
    assert len(set(threads)) == 1
    assert threads[0].daemon
    assert threads[0] is not threading.main_thread()


def test_the_end_waits_for_a_job_that_was_begun():
    pool, began, go_on, over = Helpers(1), threading.Event(), threading.Event(), []

    def job():
        began.set()
        go_on.wait(30)
        over.append(True)

    with pool.help(job):
        assert began.wait(30)
        threading.Timer(0.05, go_on.set).start()
    assert over == [True]


def test_a_job_that_nobody_has_begun_never_runs():
    pool, go_on, ran = Helpers(1), threading.Event(), []
    began = threading.Event()

    def hang():
        began.set()
        go_on.wait(30)

    with pool.help(hang):
        assert began.wait(30)
        with pool.help(lambda: ran.append(1)):  # the only thread is busy
            pass
        go_on.set()
    done = threading.Event()
    with pool.help(done.set):
        assert done.wait(30)
    assert ran == []


class Chunk:
    """Something large that a job uses."""

    def work(self):
        raise AssertionError("nobody has time for it")


def test_what_waits_behind_a_read_that_hangs_keeps_no_memory():
    pool, go_on, began = Helpers(1), threading.Event(), threading.Event()

    def hang():
        began.set()
        go_on.wait(30)

    with pool.help(hang):
        assert began.wait(30)
        chunks = []
        for _ in range(3 * helpers.MOST_WAITING):
            chunk = Chunk()
            chunks.append(weakref.ref(chunk))
            with pool.help(chunk.work):
                del chunk
        assert [chunk() for chunk in chunks if chunk() is not None] == []
        assert pool._jobs.qsize() <= helpers.MOST_WAITING
        go_on.set()
    done = threading.Event()
    with pool.help(done.set):
        assert done.wait(30)


def test_a_forked_child_does_not_wait_for_its_parents_helper():
    pool, go_on, began = Helpers(1), threading.Event(), threading.Event()

    def hang():
        began.set()
        go_on.wait(30)

    help_ = pool.help(hang)
    assert began.wait(30)
    child = os.fork()
    if not child:
        help_.__exit__()
        os._exit(0)
    assert ended_in_time(child) == 0
    go_on.set()
    help_.__exit__()


def test_with_no_helper_nothing_is_awaited():
    with Helpers(0).help(lambda: pytest.fail("nobody is there")):
        pass


def test_without_threads_the_caller_is_alone_and_asks_again(monkeypatch):
    pool = Helpers(2)

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pool.help(lambda: pytest.fail("nobody is there")):
            pass
    ran = threading.Event()
    with pool.help(ran.set):
        assert ran.wait(30)


def test_a_job_that_raises_ends_nobodys_help(caplog):
    pool, ran = Helpers(1), threading.Event()
    began = threading.Event()

    def broken():
        began.set()
        raise ValueError("a fault of the job")

    with pool.help(broken):
        assert began.wait(30)
    with pool.help(ran.set):
        assert ran.wait(30)
    assert "a fault of the job" in caplog.text


def test_a_forked_child_has_helpers_of_its_own():
    pool, ran = Helpers(1), threading.Event()
    with pool.help(ran.set):
        assert ran.wait(30)
    child = os.fork()
    if not child:
        again = threading.Event()
        with pool.help(again.set):
            os._exit(0 if again.wait(30) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(("processors", "count"), [(1, 0), (2, 1), (4, 3), (64, helpers.MOST)])
def test_one_processor_stays_with_the_caller(monkeypatch, processors, count):
    monkeypatch.setattr(helpers.os, "sched_getaffinity", lambda _: set(range(processors)))
    assert Helpers().count == count
    monkeypatch.delattr(helpers.os, "sched_getaffinity")
    monkeypatch.setattr(helpers.os, "cpu_count", lambda: processors)
    assert Helpers().count == count
