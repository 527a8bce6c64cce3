"""What tests share: models that are only looked at, functions that fail, calls that are noted, threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from kvrag.model import CausalLM
from kvrag.testing.models import tiny_model


@cache
def lm_of(name: str = "llama") -> CausalLM:
    """A tiny model that nobody changes, made once."""
    return CausalLM(tiny_model(name))


def raising(kind: type[Exception], *words: object) -> Callable[..., Any]:
    """Return a function that takes anything and raises this error."""

    def fail(*_: Any, **__: Any) -> Any:
        raise kind(*words)

    return fail


def noted(patch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """Note what a function returns, at each of its calls from now on."""
    returned: list[Any] = []
    real = getattr(owner, name)

    def noting(*args: Any, **options: Any) -> Any:
        returned.append(real(*args, **options))
        return returned[-1]

    patch.setattr(owner, name, noting)
    return returned


def at_once(*actions: Callable[[], object]) -> None:
    """Run actions in threads of their own until all are over."""
    threads = [threading.Thread(target=action) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
