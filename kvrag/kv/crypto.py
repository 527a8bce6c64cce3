"""Encryption keys of a store.

The store's key is read once, when the store is opened, kept in memory only, and never used
directly. Derived keys serve a single purpose: names of namespaces and files (HMAC), rows of the
catalog (AES-SIV) and blobs (AES-256-GCM). Without a key, names are plain digests, and nothing here
costs anything.
"""

from __future__ import annotations

import base64
import hmac
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from kvrag.config import StoreConfig
from kvrag.errors import ConfigError, require
from kvrag.identity.fingerprint import FORMAT_VERSION, namespace_digest
from kvrag.kv.buffers import BUFFERS

MIN_KEY_BYTES = 32  # shorter keys are refused: they could be guessed
TAG_BYTES = 16
NONCE_BYTES = 12


def derive(key: bytes, purpose: str, *, salt: bytes = b"") -> bytes:
    """Derive 32 bytes for a purpose: HKDF-SHA256 (RFC 5869). ``salt`` may be public."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    info = f"kvrag/{FORMAT_VERSION}/{purpose}".encode()
    return bytes(HKDF(SHA256(), 32, salt or None, info).derive(key))


def key_id(key: bytes) -> str:
    """Return the public name of a key, 16 hex digits; it reveals nothing about the key."""
    return derive(key, "key id")[:8].hex()


def read_key(source: Callable[[], bytes] | str) -> bytes:
    """Return the key from a function or from ``"env:NAME"``.

    Raises ``ConfigError``, without quoting the key, if it is missing or too short.
    """
    where = "StoreConfig.encryption_key"
    remedy = f"give at least {MIN_KEY_BYTES} random bytes"
    if isinstance(source, str):
        name = source.removeprefix("env:")
        where = f"the environment variable {name} ({where})"
        remedy = "set it to the output of: openssl rand -hex 32"
        key = _decoded(os.environ.get(name, ""))
    else:
        try:
            key = source()
        except Exception as error:  # the user's own code; its message may hold anything
            raise ConfigError(
                f"the function of {where} raises {type(error).__name__}; {remedy}"
            ) from error
    if not isinstance(key, bytes) or len(key) < MIN_KEY_BYTES:
        if isinstance(key, bytes) and key:
            what = f"a key of {len(key)} bytes, which can be guessed"
        else:
            what = "no key"
        raise ConfigError(f"{where} gives {what}; {remedy}")
    return key


def _decoded(text: str) -> bytes:
    """Decode hex, or base64 of either alphabet; empty if the text is neither."""
    text = "".join(text.split())
    with suppress(ValueError):
        return bytes.fromhex(text)
    with suppress(ValueError):
        return base64.b64decode(
            text.replace("-", "+").replace("_", "/") + "=" * (-len(text) % 4), validate=True
        )
    return b""


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys derived from a store's encryption key, if any, and the digests of namespaces.

    ``address`` is the key of the namespaces' digests, and so of all file names; ``cipher`` is the
    key of blobs and rows.
    """

    address: bytes | None = field(default=None, repr=False)
    cipher: bytes | None = field(default=None, repr=False)

    @classmethod
    def of(cls, config: StoreConfig) -> Keys:
        """Read the key of a config and derive keys from it.

        Raises ``ConfigError`` if there is no valid key, and ``MissingDependencyError`` without
        ``cryptography``.
        """
        if config.encryption_key is None:
            return cls()
        key = read_key(config.encryption_key)
        require(
            "cryptography.hazmat.primitives.ciphers",
            extra="crypto",
            purpose="encryption of the KV store",
        )
        return cls(derive(key, "addresses"), derive(key, "cipher"))

    @property
    def id(self) -> str:
        """Public name of the key; empty without a key."""
        if self.cipher is None:
            return ""
        return key_id(self.cipher)

    def namespace(self, name: str) -> str:
        """Return the digest of a namespace's name, ``sha256:...`` or ``hmac-sha256:...``."""
        if self.address is None:
            return namespace_digest(name)
        return "hmac-sha256:" + hmac.digest(self.address, name.encode(), "sha256").hex()

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled."""
        raise ConfigError(
            "the keys of a store can't be pickled; open the store again where they are needed"
        )


def encrypt(key: bytes, nonce: int, views: Iterable[memoryview]) -> tuple[list[memoryview], bytes]:
    """Encrypt views as a single message; return parts of the same sizes, and the tag.

    A key must not be used twice with the same nonce.
    """
    encryptor = _cipher(key, nonce).encryptor()
    parts = []
    for view in views:
        parts.append(np.empty(len(view), np.uint8).data)
        encryptor.update_into(view, parts[-1])
    encryptor.finalize()
    return parts, encryptor.tag


def decrypt(key: bytes, nonce: int, data: memoryview, tag: bytes) -> memoryview | None:
    """Decrypt bytes; return ``None`` if the tag is wrong."""
    from cryptography.exceptions import InvalidTag

    decryptor = _cipher(key, nonce, tag).decryptor()
    out = BUFFERS.take(len(data))
    decryptor.update_into(data, out)
    # GCM decrypts before it has seen the tag, so nothing is returned until it has.
    with suppress(InvalidTag):
        decryptor.finalize()
        return out
    return None


def _cipher(key: bytes, nonce: int, tag: bytes | None = None) -> Any:
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    return Cipher(
        algorithms.AES(key),
        modes.GCM(nonce.to_bytes(NONCE_BYTES, "big"), tag, min_tag_length=TAG_BYTES),
    )


class RowCipher:
    """Encrypt names and values of the catalog with AES-SIV.

    Equal names give equal bytes, so rows are found by their encrypted names. A value is bound to
    the name of its row: a value that was moved to another row counts as absent.
    """

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESSIV

        # AES-SIV takes two keys in one: of its MAC, and of its cipher.
        self._siv = AESSIV(derive(key, "rows 1") + derive(key, "rows 2"))

    def seal(self, text: str, bound: str) -> str:
        """Encrypt a text; return base64."""
        return base64.urlsafe_b64encode(self._siv.encrypt(text.encode(), [bound.encode()])).decode()

    def open(self, sealed: str, bound: str) -> str | None:
        """Decrypt a text; ``None`` if it has another key or is bound to another name."""
        from cryptography.exceptions import InvalidTag

        try:
            return str(
                self._siv.decrypt(
                    base64.b64decode(sealed.encode("ascii"), altchars=b"-_", validate=True),
                    [bound.encode()],
                ).decode()
            )
        except (InvalidTag, ValueError):
            return None
