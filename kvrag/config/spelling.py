"""Spelling of options: sizes with units, and suggestions for typos."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from kvrag.errors import ConfigError

NOTHING: Mapping[str, str] = MappingProxyType({})
# How to pass options, by name; the module of the configs fills it.
PLACES: dict[str, str] = {}


def parse_bytes(value: object) -> object:
    """Read a size: ``"50MB"`` is 50·10^6 bytes, ``"2GiB"`` 2·2^30.

    A value that is not a string is returned unchanged.

    Raises
    ------
    ConfigError
        If a string is not a size.
    """
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", value.strip(), re.IGNORECASE)
    if found is None:
        raise ConfigError(
            f"{value!r} is no size; write bytes, or a number with a unit, as 50MB or 2GiB"
        )
    base = 1024 if found[3] else 1000
    return int(float(found[1]) * base ** " KMGT".index(found[2].upper() or " "))


def respelt(message: str, names: Mapping[str, str]) -> str:
    """Return a message with the names of another interface; ``names`` are by kvrag's own."""
    for name, other in names.items():
        # Whole words; a name that ends with a dot ends there.
        message = re.sub(rf"\b{re.escape(name)}(?!(?<=\w)\w)", other, message)
    return message


def unknown_option(
    name: str,
    known: Iterable[str],
    *,
    of: str,
    aliases: Mapping[str, str] = NOTHING,
) -> ConfigError:
    """Build the error for an unknown option, with a suggestion.

    Parameters
    ----------
    name, known, of
        The unknown name; the existing names, the likeliest first; their function or config.
    aliases
        Names that the options have, too.
    """
    known = list(known)
    place = PLACES.get(name, "")
    if place and f"{of}(" not in place:
        hint = f"pass {place}"
    elif near := difflib.get_close_matches(name, [*known, *aliases], n=1):
        hint = f"did you mean {aliases.get(near[0], near[0])!r}?"
    else:
        hint = f"known options: {', '.join(sorted(known))}"
    return ConfigError(f"{of} has no option {name!r}; {hint}")
