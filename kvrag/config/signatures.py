"""Full signatures, for editors, type checkers and ``inspect``, of functions that share options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from kvrag.config import unknown_option

P = ParamSpec("P")
T = TypeVar("T")


def checks_names(function: Callable[P, T]) -> Callable[P, T]:
    """Make a method raise :class:`ConfigError` on an unknown keyword, with the nearest name."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def run(*values: P.args, **options: P.kwargs) -> T:
        for name in options:
            if name not in known:
                raise unknown_option(name, known[1:], of=type(values[0]).__name__)
        return function(*values, **options)

    return run


def parameters_of(source: Callable[P, Any]) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """Give a function that takes ``**options`` the parameters of ``source``.

    Editors, type checkers and ``inspect`` show them.
    """

    def decorate(function: Callable[..., T]) -> Callable[P, T]:
        own: Any = function
        result = own.__annotations__["return"]
        own.__signature__ = inspect.signature(source).replace(return_annotation=result)
        own.__annotations__ = {**source.__annotations__, "return": result}
        return cast("Callable[P, T]", own)

    return decorate
