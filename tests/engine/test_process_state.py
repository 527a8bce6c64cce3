"""Values of a process belong to a model or a tokenizer, and go with it."""

import gc
import os
import weakref

import pytest

from kvrag.runtime import Forking, Runtime, at_fork, snapshot


class Owner:
    pass


class Slotted:
    __slots__ = ()


def test_a_value_is_made_once_and_goes_with_its_owner():
    runtime, owner = Runtime(), Owner()
    assert runtime.of(owner, dict) is runtime.of(owner, dict)
    assert runtime.of(owner, list) is not runtime.of(Owner(), list)
    del owner
    gc.collect()
    assert runtime._values == {}


def test_an_owner_that_can_not_be_followed_leaves_nothing_behind():
    runtime, owner = Runtime(), Slotted()
    for _ in range(2):
        with pytest.raises(TypeError, match="weak reference"):
            runtime.of(owner, dict)
    assert runtime._values == {}


class Growing(weakref.WeakSet):
    """A set to which another thread adds while it is looked at for the first time."""

    late: Owner | None = None

    def __iter__(self):
        for thing in super().__iter__():
            if self.late is None:
                self.late = Owner()
                self.add(self.late)
            yield thing


def test_what_concerns_all_reaches_all_though_a_thread_adds_more():
    owners = [Owner(), Owner()]
    things = Growing(owners)
    assert set(snapshot(things)) == {*owners, things.late}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_calls_what_it_concerns():
    called = []

    class Told(Forking):
        def before_fork(self):
            called.append("before")

        def after_fork(self, *, in_child):
            called.append(in_child)

    told = Told()
    at_fork(told)
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
    else:
        os._exit(called != ["before", True])
    assert called == ["before", False]
