"""Addresses of shared stores, whose passwords are shown nowhere."""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "***"
_USERINFO = re.compile(r"(?<=://)([^\s:@/]*)(:?)[^\s\"']*@")  # in a sentence
_WHOLE_USERINFO = re.compile(
    r"(?<=://)([^:@/]*)(:?).*@", re.DOTALL
)  # in an address: a password may hold anything
_QUERY = re.compile(r"(?<==)[^&\s\"'#]+")


class Address(str):
    """An address as text without its password, which :meth:`revealed` has.

    It is equal to, and hashed as, the whole address, so two passwords are two addresses. Whatever prints, logs or writes it has the text.
    """

    __slots__ = ("_whole",)
    _whole: str

    def __new__(cls, whole: str) -> Address:
        """Take an address with its password; one that is an :class:`Address` already stays as it is."""
        if isinstance(whole, Address):
            return whole
        made = super().__new__(cls, _without_query(_WHOLE_USERINFO.sub(_hide, whole)))
        made._whole = whole
        return made

    def revealed(self) -> str:
        """Return the whole address, to connect with."""
        return self._whole

    def __eq__(self, other: object) -> bool:
        return self._whole == (other._whole if isinstance(other, Address) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._whole)

    def __reduce_ex__(self, _: Any) -> tuple[type[Address], tuple[str]]:
        """Keep the password where processes of one application exchange addresses."""
        return Address, (self._whole,)


def address(value: Any) -> Any:
    """Return a text that is an address as an :class:`Address`; all else, such as a path, as it is."""
    return Address(value) if isinstance(value, str) and "://" in value else value


def revealed(value: str) -> str:
    """Return a whole address, or a path, which has nothing to hide."""
    return value.revealed() if isinstance(value, Address) else value


def shown(value: object) -> str:
    """Return the repr of a value for a message, without the passwords of addresses in it."""
    return redacted(repr(address(value)))


def redacted(text: str) -> str:
    """Return a text without the passwords of addresses in it: before the ``@``, and the values behind a ``?``."""
    return _without_query(_USERINFO.sub(_hide, text))


def _hide(found: re.Match[str]) -> str:
    user, has_password = found[1], found[2]
    return f"{user}:{HIDDEN}@" if has_password else f"{HIDDEN}@"


def _without_query(text: str) -> str:
    head, mark, query = text.partition("?")
    return f"{head}{mark}{_QUERY.sub(HIDDEN, query)}" if "://" in head else text
