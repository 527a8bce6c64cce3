"""Addresses of shared stores that never show their passwords."""

from __future__ import annotations

import os
import re
import socket
from typing import Any
from urllib.parse import urlsplit

from kvrag.errors import ConfigError
from kvrag.runtime import POOL
from kvrag.types import StrPath

HIDDEN = "***"
_USERINFO = re.compile(r"(?<=://)([^\s:@/]*)(:?)[^\s\"']*@")  # in a sentence
# In an address: a password may hold any character.
_WHOLE_USERINFO = re.compile(r"(?<=://)([^:@/]*)(:?).*@", re.DOTALL)
_QUERY = re.compile(r"(?<==)[^&\s\"'#]+")


class Address(str):
    """An address that reads as text without its password; :meth:`revealed` returns the whole.

    It compares and hashes as the whole address, so addresses with different passwords differ.
    Printing, logging or writing it shows only the text without the password.
    """

    __slots__ = ("_whole",)
    _whole: str

    def __new__(cls, whole: str) -> Address:
        """Create from an address with its password; an :class:`Address` is returned unchanged."""
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
        """Keep the password, so that processes of an application can exchange addresses."""
        return Address, (self._whole,)


def address(value: Any) -> Any:
    """Return a string with ``://`` as an :class:`Address`; return any other value unchanged."""
    if isinstance(value, str) and "://" in value:
        return Address(value)
    return value


def revealed(value: str) -> str:
    """Return an address with its password; return a plain string, such as a path, unchanged."""
    if isinstance(value, Address):
        return value.revealed()
    return value


def shown(value: object) -> str:
    """Return the repr of a value for a message, without the passwords of addresses in it."""
    return redacted(repr(address(value)))


def redacted(text: str) -> str:
    """Return a text without the passwords of the addresses in it.

    These are the passwords before ``@``, and the values behind ``?``.
    """
    return _without_query(_USERINFO.sub(_hide, text))


def _hide(found: re.Match[str]) -> str:
    user = found[1]
    has_password = found[2]
    if has_password:
        return f"{user}:{HIDDEN}@"
    return f"{HIDDEN}@"


def _without_query(text: str) -> str:
    head, mark, query = text.partition("?")
    if "://" in head:
        return f"{head}{mark}{_QUERY.sub(HIDDEN, query)}"
    return text


def check_kv_dir(kv_dir: object) -> str | None:
    """Check ``kv_dir`` and return an absolute path, a shared store's :class:`Address`, or ``None``.

    Raises :class:`ConfigError` for anything else.
    """
    if not isinstance(kv_dir, (str, os.PathLike, type(None))) or "\0" in str(kv_dir):
        raise ConfigError(f"kv_dir is {shown(kv_dir)}; pass the path of a directory")
    if kv_dir is None or (isinstance(kv_dir, str) and "://" in kv_dir):
        return kv_dir and Address(kv_dir)
    return absolute(kv_dir)


def absolute(path: StrPath) -> str:
    """Return the absolute path that a path names now; ``~`` is the home directory."""
    return os.path.abspath(os.path.expanduser(path))


def place(value: Any) -> Any:
    """Return a path as an absolute path, so that a change of directory does not change its place.

    An address of a shared store becomes an :class:`Address`; any other value is unchanged.
    """
    if isinstance(value, (str, os.PathLike)) and "://" not in str(value) and "\0" not in str(value):
        return absolute(value)
    return address(value)


def local(value: Any) -> Any:
    """Return the name of an existing file or directory as an absolute path, as :func:`place` does.

    Any other value, such as a hub id, is unchanged.
    """
    is_name = isinstance(value, (str, os.PathLike))
    if is_name and (str(value).startswith("~") or os.path.exists(value)):
        return absolute(value)
    return value


def answers(url: str, wait_s: float) -> bool:
    """Whether a server takes connections at the address of a web site, within some seconds.

    The look-up of its name and all its addresses share this time.
    """
    site = urlsplit(url)
    try:
        place = site.hostname or "", site.port or (80 if site.scheme == "http" else 443)
        POOL.submit(lambda: socket.create_connection(place, timeout=wait_s)).result(wait_s).close()
    except (OSError, RuntimeError):  # RuntimeError: no thread can be started
        return False
    return True
