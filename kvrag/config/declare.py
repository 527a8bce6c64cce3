"""Declaring options: configs, wrong values in words, and signatures of methods that take options.

::

    config_class: fields ──▶ a frozen class that checks its values ──▶ parameters_of: signatures,
                                        │ fault_of                     for editors, type checkers
                                        ▼                              and ``inspect``
                              ConfigError: option, value, range
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import (
    Any,
    Concatenate,
    ParamSpec,
    TypeVar,
    cast,
    dataclass_transform,
    get_type_hints,
)

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from kvrag.config.address import shown
from kvrag.config.spelling import unknown_option
from kvrag.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")

# Configs that have names, by their class; the module of the configs fills it.
NAMED: dict[type, Mapping[str, Any]] = {}


@dataclass_transform(frozen_default=True, field_specifiers=(Field,))
def config_class(cls: type[T], *, kw_only: bool = False) -> type[T]:
    """Make a frozen, hashable pydantic dataclass that raises :class:`ConfigError`.

    Field docstrings become descriptions.
    """
    options = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, arbitrary_types_allowed=True
    )
    made: Any = dataclass(frozen=True, kw_only=kw_only, config=options)(cls)
    validate = made.__init__

    @functools.wraps(validate)
    def init(self: T, *values: Any, **options: Any) -> None:
        try:
            validate(self, *values, **options)
        except ValidationError as error:
            named = dict(zip(names_of(made), values, strict=False))
            raise fault_of(made, error, named | options) from None

    made.__init__ = init
    return cast("type[T]", made)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
def options_class(cls: type[T]) -> type[T]:
    """Make a config whose values are passed by name."""
    return config_class(cls, kw_only=True)


def names_of(cls: Any) -> list[str]:
    """Return the names of a config's options."""
    return [f.name for f in fields(cls)]


def first_fault(errors: Sequence[Any], value: Any) -> tuple[list[str], Any, str]:
    """Return the first of pydantic's faults of a value, such as a body, or options by name.

    Returns its place in the value, pydantic's description of it, and the demand in words. Where a
    field accepts values of several types, pydantic reports an error for every type. The error
    deepest in the value is the relevant error.
    """
    places = [_place(error, value) for error in errors]
    ranks = [
        (place[:1] == places[0][:1], len(place), not error["type"].endswith("_type"))
        for place, error in zip(places, errors, strict=True)
    ]
    first = ranks.index(max(ranks))
    said = [
        str(error["msg"]).removeprefix("Value error, ")
        for error, rank in zip(errors, ranks, strict=True)
        if rank == ranks[first]
    ]
    demand = said[0]
    if found := _DEMAND.match(demand):
        wanted = dict.fromkeys(_DEMAND.sub("", message) for message in said)
        demand = f"it should {found[1]} {' or '.join(wanted)}"
    return places[first], errors[first], demand


def _place(error: Any, value: Any) -> list[str]:
    """Return the path to a fault in a value, without pydantic's names for the types of a union."""
    place = []
    for part in error["loc"]:
        if isinstance(value, Mapping | list):
            with suppress(LookupError, TypeError):
                value = value[part]
                place.append(str(part))
    if error["type"] == "missing":
        place += map(str, error["loc"][-1:])
    return place


# Parts of pydantic's messages that are not the demand itself.
_DEMAND = re.compile(r"^\w+ should (be|have) | after validation(?=,)")


def fault_of(cls: Any, error: ValidationError, given: Mapping[str, Any]) -> ConfigError:
    """Turn the first fault that pydantic found into a ``ConfigError`` that names class and option.

    A field without ``repr`` may hold a secret: its value is not repeated.
    """
    _, fault, demand = first_fault(error.errors(include_url=False), given)
    declared = cls.__pydantic_fields__
    known = [*declared]
    where = (*fault["loc"], "")[0]
    name = str(dict(enumerate(known)).get(where, where))  # a positional value has its index
    owner = _declaring(cls, name).__name__
    # A private class stands for a function or a component, whose option has the same name.
    of = name if owner.startswith("_") else f"{owner}.{name}"
    cause = fault.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        is_whole = not name or str(cause).startswith(owner)
        return cause if is_whole else ConfigError(f"{of}: {cause}")
    if fault["type"] == "unexpected_keyword_argument":
        return unknown_option(name, known, of=owner)
    if name not in known:
        return ConfigError(f"{owner}: {fault['msg']}")
    if not declared[name].repr:
        return ConfigError(f"{of}: {demand}")
    return ConfigError(f"{of} {_held(fault['input'], given.get(name))}; {demand}")


def _declaring(cls: Any, name: str) -> Any:
    """Return the config that declares an option: a config, or the config that it extends."""
    bases = [base for base in cls.__mro__ if is_dataclass(base)]
    return next((base for base in bases if name in base.__annotations__), cls)


def _held(part: Any, value: Any) -> str:
    """Say which value a field has, or which part of it is at fault."""
    if part is not value and isinstance(value, Mapping | list | tuple | set):
        return f"holds {shown(part)}"
    return f"is {shown(value)}"


def as_config(cls: type[T], value: Any, *, option: str) -> T | None:
    """Return a config for a config, a mapping of its options, or a name in :data:`NAMED`.

    ``None`` is returned unchanged. Raises :class:`ConfigError` for any other value.
    """
    if value is None or isinstance(value, cls):
        return value
    if isinstance(value, Mapping):
        try:
            return cls(**{str(name): each for name, each in value.items()})
        except TypeError as error:  # a name that Python itself takes, such as "self"
            raise ConfigError(f"{option}: {error}; pass options of kvrag.{cls.__name__}") from None
    named = NAMED.get(cls, {})
    if isinstance(value, str) and value in named:
        return cast("T | None", named[value])
    choices = [f"a kvrag.{cls.__name__}", "a dict of its options", *map(repr, named)]
    raise ConfigError(
        f"{option} is {shown(value)}; pass {', '.join(choices[:-1])} or {choices[-1]}"
    )


def option_field(cls: Any, name: str) -> tuple[Any, FieldInfo]:
    """Return the type, without its range, and the field of a config's option."""
    return get_type_hints(cls)[name], cls.__pydantic_fields__[name]


def checks_names(function: Callable[P, T], unshown: Sequence[str] = ()) -> Callable[P, T]:
    """Make a function or method raise :class:`ConfigError` on an unknown keyword.

    The error suggests the nearest name. Names that are ``unshown``, and fields that a subclass of a
    pydantic model adds, are known, too.
    """
    first, *known = inspect.signature(function).parameters

    @functools.wraps(function)
    def run(*values: P.args, **options: P.kwargs) -> T:
        owner: Any = type(values[0]) if first == "self" else function
        taken = {first, *known, *unshown, *getattr(owner, "model_fields", ())}
        for name in options:
            if name not in taken:
                raise unknown_option(name, known, of=owner.__name__)
        return function(*values, **options)

    return run


_SELF = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)


def parameters_of(
    source: Callable[P, Any],
) -> Callable[[Callable[..., T]], Callable[Concatenate[Any, P], T]]:
    """Give a method that takes ``**options`` the parameters of a class of options.

    Editors, type checkers and ``inspect`` show them. Other names raise :class:`ConfigError`, unless
    the method takes them itself, the class takes any name, or the method is a coroutine.
    """
    return functools.partial(_with_parameters, source, [_SELF])


def parameters_of_function(
    source: Callable[P, Any],
) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """Give a function the parameters of a class of options, as :func:`parameters_of`."""
    return functools.partial(_with_parameters, source, [])


def _with_parameters(options: Any, first: list[inspect.Parameter], function: Any) -> Any:
    hints = get_type_hints(options) or get_type_hints(options.__init__)
    parameters = inspect.signature(options).parameters.values()
    own = inspect.signature(function).parameters
    unshown = [each.name for each in own.values() if each.kind != inspect.Parameter.VAR_KEYWORD]
    shown = [*first, *(each.replace(annotation=hints[each.name]) for each in parameters)]
    result = function.__annotations__["return"]
    function.__signature__ = inspect.Signature(shown, return_annotation=result)
    function.__annotations__ = {**hints, "return": result}
    takes_any = shown[-1].kind == inspect.Parameter.VAR_KEYWORD
    if takes_any or inspect.iscoroutinefunction(function):
        return function
    return checks_names(function, unshown)
