"""What the package xxhash gives to kvrag, from hashlib: for ``make gpu-check`` on a machine without network that lacks it.

The digests are others and slower to make, so a store that is written with it can be read with it alone; nothing but a check's own
temporary store ever is.
"""

from __future__ import annotations

import hashlib
from typing import Any


def xxh3_128(data: Any = b"") -> hashlib.blake2b:
    """Return a hash object of 128 bits."""
    return hashlib.blake2b(data, digest_size=16)


def xxh3_128_digest(data: Any) -> bytes:
    """Return a digest of 128 bits."""
    return xxh3_128(data).digest()


def xxh3_128_hexdigest(data: Any) -> str:
    """Return a digest of 128 bits in hex."""
    return xxh3_128(data).hexdigest()
