"""Options that don't exist are refused by name, with the nearest that does."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, ClassVar, Self, TypeVar

from kvrag.errors import ConfigError

T = TypeVar("T")

NEAR = 0.8
"""How like an option's name (:func:`difflib.SequenceMatcher.ratio`) a misspelt one is."""


def unknown_option(name: str, known: Iterable[str], *, of: str) -> ConfigError:
    """Build the error for an option that does not exist, with the nearest names that do."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(known)}"
    return ConfigError(f"{of} has no option {name!r}; {hint}")


class Named:
    """Base of configs: an option that doesn't exist is refused by name, with the nearest that does."""

    __slots__ = ()
    __pydantic_config__: ClassVar = {
        "extra": "forbid"
    }  # as pydantic makes a config from a dict, without asking this class

    def __new__(cls, *values: object, **options: object) -> Self:
        """Raise :class:`ConfigError` for an option that doesn't exist."""
        known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        for name in options:
            if name not in known:
                raise unknown_option(name, known, of=cls.__name__)
        return super().__new__(cls)


def from_mapping(cls: type[T], value: Any) -> Any:
    """Build a config from a mapping of options; anything else stays as it is. Raises :class:`ConfigError`."""
    return cls(**value) if isinstance(value, Mapping) else value
