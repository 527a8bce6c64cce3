"""AES-256-GCM by ``cryptography``, from one buffer to another, so that layers are not copied once more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvrag.errors import require

NAME = "AES-256-GCM"
TAG_BYTES, NONCE_BYTES = 16, 12


def check() -> None:
    """Raise :class:`~kvrag.errors.MissingDependencyError` if ``cryptography`` is not installed."""
    require("cryptography.hazmat.primitives.ciphers", extra="crypto", purpose="encryption of the KV store")


def encrypt(key: bytes, place: int, views: Sequence[memoryview], bound: bytes) -> tuple[list[memoryview], bytes]:
    """Encrypt some bytes as one.

    Parameters
    ----------
    key
        32 bytes.
    place
        The nonce, as a number; must never come twice with one key.
    views
        The bytes.
    bound
        What else must be the same when they are decrypted.

    Returns
    -------
    list of memoryview, bytes
        As many bytes in as many parts, and the tag.
    """
    encryptor = _cipher(key, place).encryptor()
    encryptor.authenticate_additional_data(bound)
    parts = []
    for view in views:
        part = memoryview(bytearray(len(view)))
        encryptor.update_into(view, part)
        parts.append(part)
    encryptor.finalize()
    return parts, encryptor.tag


def decrypt(key: bytes, place: int, data: memoryview, tag: bytes, bound: bytes, out: memoryview) -> bool:
    """Decrypt to ``out``, and return whether the tag is right; otherwise ``out`` means nothing."""
    from cryptography.exceptions import InvalidTag

    decryptor = _cipher(key, place, tag).decryptor()
    decryptor.authenticate_additional_data(bound)
    decryptor.update_into(data, out)
    try:
        decryptor.finalize()
    except InvalidTag:
        return False
    return True


def _cipher(key: bytes, place: int, tag: bytes | None = None) -> Any:
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    nonce = place.to_bytes(NONCE_BYTES, "big")
    return Cipher(algorithms.AES(key), modes.GCM(nonce, tag, min_tag_length=TAG_BYTES))
