"""Values of a process belong to a model or a tokenizer, and go with it."""

import gc

import pytest

from kvrag.runtime import Runtime


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
