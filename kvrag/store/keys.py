"""Keys: read once when a store is opened, and kept in memory only. None is used as it is: each purpose has its own, derived from it.

With no key at all, names are plain digests, and nothing here costs anything.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
from dataclasses import dataclass, field, replace
from typing import NoReturn

from kvrag.config import KeySource, StoreConfig
from kvrag.errors import ConfigError
from kvrag.identity.fingerprint import FORMAT_VERSION, canonical, namespace_digest, text_digest
from kvrag.types import TextEntry

MIN_KEY_BYTES = 32
"""Shorter keys are refused: the names that they protect could be guessed."""

HEX = re.compile(r"(?:[0-9a-fA-F]{2})+")


def derive(key: bytes, purpose: str, *, salt: bytes = b"") -> bytes:
    """Derive 32 bytes for one purpose: HKDF-SHA256 (RFC 5869) with one block of output.

    Parameters
    ----------
    key
        Key material.
    purpose
        What the result is for; with the version of the format, the ``info`` of the RFC.
    salt
        May be public.
    """
    extracted = hmac.digest(salt or bytes(hashlib.sha256().digest_size), key, "sha256")
    return hmac.digest(extracted, f"kvrag/{FORMAT_VERSION}/{purpose}".encode() + b"\x01", "sha256")


def read_key(source: KeySource, option: str) -> bytes:
    """Ask a source for its key.

    Raises
    ------
    ConfigError
        If it has none, or one that is no key, or fails. What it has, or says, is not repeated.
    """
    where = f"StoreConfig.{option}"
    remedy = f"give at least {MIN_KEY_BYTES} random bytes"
    if isinstance(source, str):
        name = source.removeprefix("env:")
        where, remedy = f"the environment variable {name} ({where})", "set it to the output of: openssl rand -hex 32"
        key = _decoded(os.environ.get(name, ""))
    else:
        try:
            key = source()
        except Exception as error:  # it is the user's; its message may hold anything
            raise ConfigError(f"the function of {where} raises {type(error).__name__}; {remedy}") from error
    if not isinstance(key, bytes) or not key:
        raise ConfigError(f"{where} gives no key; {remedy}")
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(f"{where} gives a key of {len(key)} bytes, which can be guessed; {remedy}")
    return key


def _decoded(text: str) -> bytes | None:
    text = "".join(text.split())
    if HEX.fullmatch(text):
        return bytes.fromhex(text)
    try:
        return base64.b64decode(text.translate({ord("-"): "+", ord("_"): "/"}) + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class Naming:
    """How namespaces and texts are called in a store.

    Parameters
    ----------
    address
        Key of the namespaces' digests, derived from all keys of the store: what was written with other keys has other names, so files
        of different keys never take each other's place. ``None``: plain digests.
    text
        Key of the texts' digests and anchors, derived from the namespace secret; ``None``: plain ones.
    """

    address: bytes | None = field(default=None, repr=False)
    text: bytes | None = field(default=None, repr=False)

    def namespace(self, name: str) -> str:
        """Digest of a namespace's name, ``sha256:...`` or ``hmac-sha256:...``."""
        if self.address is None:
            return namespace_digest(name)
        return "hmac-sha256:" + hmac.digest(self.address, name.encode(), "sha256").hex()

    def digest(self, text: str) -> str:
        """Digest of a stripped chunk text, 64 hex digits; raises ``UnicodeEncodeError``."""
        return self._keyed(text_digest(text))

    def hide(self, entry: TextEntry) -> TextEntry:
        """Turn a text's entry to what is stored of it."""
        return self._masked(replace(entry, digest=self._keyed(entry.digest)))

    def reveal(self, entry: TextEntry) -> TextEntry:
        """Turn what is stored to what the scanner needs; its digest is that of :meth:`digest`."""
        return self._masked(entry)

    mask, unmask = hide, reveal

    def __reduce__(self) -> NoReturn:
        """Keys leave the process in no form."""
        raise ConfigError("the keys of a store can't be pickled; open the store again where they are needed")

    def _keyed(self, digest: str) -> str:
        return digest if self.text is None else hmac.digest(self.text, b"digest " + digest.encode(), "sha256").hex()

    def _masked(self, entry: TextEntry) -> TextEntry:
        """Mask the anchors, or unmask them, with a pad of this text alone: they hash few characters, which could be guessed."""
        if self.text is None:
            return entry
        pad = hmac.digest(self.text, b"anchors " + entry.digest.encode(), "sha256")
        head, tail = int.from_bytes(pad[:8], "little"), int.from_bytes(pad[8:16], "little")
        return replace(entry, head=entry.head ^ head, tail=entry.tail ^ tail)


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a store, or none.

    Parameters
    ----------
    names
        How namespaces and texts are called.
    mac, cipher
        Keys of the MAC and of the encryption; ``None``: not used.
    """

    names: Naming = field(default_factory=Naming)
    mac: bytes | None = field(default=None, repr=False)
    cipher: bytes | None = field(default=None, repr=False)

    @classmethod
    def of(cls, config: StoreConfig) -> Keys:
        """Read the keys that a config names.

        Raises
        ------
        ConfigError
            If one can't be had.
        """
        if config.encryption_key is None:
            return cls()
        key = read_key(config.encryption_key, "encryption_key")
        names = Naming(derive(canonical({"encryption_key": key}), "addresses"), derive(key, "texts"))
        return cls(names, None, derive(key, "cipher"))

    def __reduce__(self) -> NoReturn:
        """Keys leave the process in no form."""
        raise ConfigError("the keys of a store can't be pickled; open the store again where they are needed")


def key_id(key: bytes) -> str:
    """Public name of a key, 16 hex digits: it tells which key a file is of, and nothing about the key."""
    return derive(key, "key id")[:8].hex()
