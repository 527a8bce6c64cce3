"""What the tests of protected stores share."""

import importlib.util

import pytest
from kvrag.store.keys import Keys
from kvrag.store.objects import place_of

from kvrag.config import StoreConfig
from kvrag.identity.fingerprint import chunk_key
from kvrag.testing.chunks import make_identity

needs_cryptography = pytest.mark.skipif(
    importlib.util.find_spec("cryptography") is None, reason="cryptography is not installed"
)

SECRET, MAC, CIPHER = (bytes([number]) * 16 + bytes(range(16)) for number in (1, 2, 3))
"""Keys of the tests; every one of their halves can be searched for."""

OPTIONS = {
    "secret": {"namespace_secret": lambda: SECRET},
    "mac": {"mac_key": lambda: MAC},
    "cipher": {"encryption_key": lambda: CIPHER},
    "mac and cipher": {"mac_key": lambda: MAC, "encryption_key": lambda: CIPHER},
    "all": {"namespace_secret": lambda: SECRET, "mac_key": lambda: MAC, "encryption_key": lambda: CIPHER},
}

WITH_CIPHER = [pytest.param(name, marks=needs_cryptography) for name in ("cipher", "mac and cipher", "all")]
EVERY = ["secret", "mac", *WITH_CIPHER]
PROVING = ["mac", *WITH_CIPHER]
"""Kinds of protection that an attacker can't write under."""


def config_of(kind, **options):
    """Config with a kind of protection; ``"plain"`` is none."""
    return StoreConfig(min_free_bytes=0, **OPTIONS.get(kind, {}), **options)


def names_of(kind):
    """How namespaces and texts are called with a kind of protection."""
    return Keys.of(config_of(kind)).names


def identity_of(kind, number=0, *, tokens=3, namespace="default"):
    """Identity of a small chunk as a store with this protection calls it."""
    return make_identity(number, namespace=names_of(kind).namespace(namespace), tokens=tokens)


def path_of(root, identity):
    """Place of a chunk's file."""
    return root.joinpath(*place_of(chunk_key(identity)))
