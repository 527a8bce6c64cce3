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
from collections.abc import Callable, Mapping
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

NAMED: dict[type, Mapping[str, Any]] = {}
"""Configs that have names, by their class; the module of the configs fills it."""


@dataclass_transform(frozen_default=True, field_specifiers=(Field,))
def config_class(cls: type[T], *, kw_only: bool = False) -> type[T]:
    """Make a frozen, hashable pydantic dataclass that raises :class:`ConfigError`.

    Field docstrings become descriptions.
    """
    options = ConfigDict(extra="forbid", use_attribute_docstrings=True)
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


def fault_of(cls: Any, error: ValidationError, given: Mapping[str, Any]) -> ConfigError:
    """Turn the first fault that pydantic found into a ``ConfigError`` that names class and option.

    A field without ``repr`` may hold a secret: its value is not repeated.
    """
    faults = error.errors(include_url=False)
    fault = faults[0]
    declared = cls.__pydantic_fields__
    known = [*declared]
    where: Any = (*fault["loc"], "")[0]
    name = str(dict(enumerate(known)).get(where, where))  # a positional value has its index
    owner = _declaring(cls, name).__name__
    of = f"{owner}.{name}"
    cause = fault.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        is_whole = not name or str(cause).startswith(owner)
        return cause if is_whole else ConfigError(f"{of}: {cause}")
    if fault["type"] == "unexpected_keyword_argument":
        return unknown_option(name, known, of=owner)
    if name not in known:
        return ConfigError(f"{owner}: {fault['msg']}")
    messages = [each["msg"] for each in faults if each["loc"][:1] == fault["loc"][:1]]
    wanted = ", or ".join(dict.fromkeys(messages))
    wanted = wanted.replace("Input", "it").replace("Value error, ", "")
    if not declared[name].repr:
        return ConfigError(f"{of}: {wanted}")
    return ConfigError(f"{of} {_held(fault['input'], given.get(name))}; {wanted}")


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


_SELF = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)


def parameters_of(
    source: Callable[P, Any],
) -> Callable[[Callable[..., T]], Callable[Concatenate[Any, P], T]]:
    """Give a method that takes ``**options`` the parameters of a class of options.

    Editors, type checkers and ``inspect`` show them.
    """
    options: Any = source
    hints = get_type_hints(options) or get_type_hints(options.__init__)
    parameters = inspect.signature(options).parameters.values()
    shown = [each.replace(annotation=hints[each.name]) for each in parameters]

    def decorate(method: Callable[..., T]) -> Callable[Concatenate[Any, P], T]:
        own: Any = method
        result = own.__annotations__["return"]
        own.__signature__ = inspect.Signature([_SELF, *shown], return_annotation=result)
        own.__annotations__ = {**hints, "return": result}
        return cast("Callable[Concatenate[Any, P], T]", own)

    return decorate
