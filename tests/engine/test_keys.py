"""Keys: what is taken for one, what is derived from it, and that none gets out."""

import base64
import copy
import functools
import importlib.util
import pickle
import traceback

import pytest
from pydantic import TypeAdapter
from pydantic_core import PydanticSerializationError

from kvrag.config import StoreConfig
from kvrag.errors import ConfigError
from kvrag.identity.fingerprint import namespace_digest
from kvrag.kv.crypto import derive, key_id, read_key
from kvrag.store import Keys

needs_cryptography = pytest.mark.skipif(
    importlib.util.find_spec("cryptography") is None, reason="cryptography is not installed"
)
KEY = bytes(range(32))
OTHER = bytes(range(1, 33))


@needs_cryptography
def test_derived_keys_are_those_of_the_rfc():
    """Golden values, computed by HMAC as RFC 5869 defines them: a change of one is a change of the format."""
    assert (
        derive(KEY, "cipher").hex()
        == "393dc1e87848668d6f7579717a64d7e52a900940a4844bb89c06721206ff69a1"
    )
    assert (
        derive(KEY, "addresses").hex()
        == "b2d7fe5d919d4c597a7dbad91e55fde4d9762ee6e0dd1495ea437863749522c2"
    )
    assert (
        derive(KEY, "blob x", salt=OTHER).hex()
        == "aa3cc9a8954cd10004405971b6ad0b03ccb6a40748dd9ea5ebc6551426bed79d"
    )
    assert key_id(KEY) == "23d5402fd68d4496"


@needs_cryptography
def test_each_purpose_and_each_key_gives_another_key():
    found = {
        derive(key, purpose, salt=salt)
        for key in (KEY, OTHER)
        for purpose in ("a", "b")
        for salt in (b"", KEY)
    }
    assert len(found) == 8
    assert KEY not in found


@pytest.mark.parametrize(
    "text",
    [
        KEY.hex(),
        KEY.hex().upper() + "\n",
        base64.b64encode(KEY).decode(),
        base64.urlsafe_b64encode(b"\xff" * 32).decode().rstrip("="),
    ],
)
def test_a_variable_holds_hex_or_base64(monkeypatch, text):
    monkeypatch.setenv("KVRAG_TEST_KEY", text)
    assert read_key("env:KVRAG_TEST_KEY") in (KEY, b"\xff" * 32)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (None, "gives no key"),
        ("", "gives no key"),
        ("pass word!", "gives no key"),
        ("ab" * 31, "31 bytes"),
    ],
)
def test_a_variable_without_a_key_is_named_and_its_value_is_not(monkeypatch, text, fault):
    monkeypatch.delenv("KVRAG_TEST_KEY", raising=False)
    if text is not None:
        monkeypatch.setenv("KVRAG_TEST_KEY", text)
    with pytest.raises(
        ConfigError, match=f"KVRAG_TEST_KEY.*encryption_key.*{fault}.*openssl rand -hex 32"
    ) as caught:
        read_key("env:KVRAG_TEST_KEY")
    assert not text or text not in str(caught.value)


@pytest.mark.parametrize("key", [None, "x" * 32, b"", b"short"])
def test_a_function_must_return_a_key(key):
    with pytest.raises(ConfigError, match="encryption_key gives"):
        read_key(lambda: key)


def test_a_function_that_raises_is_named_and_what_it_says_is_not():
    def broken():
        raise ZeroDivisionError(KEY.hex())

    with pytest.raises(
        ConfigError, match=r"StoreConfig\.encryption_key raises ZeroDivisionError"
    ) as caught:
        Keys.of(StoreConfig(encryption_key=broken))
    assert KEY.hex() not in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("value", [KEY, KEY.hex(), "env:", 7])
def test_a_key_itself_is_refused_and_not_repeated(value):
    with pytest.raises(
        ConfigError, match=f"encryption_key is of type {type(value).__name__}.*'env:NAME'"
    ) as caught:
        StoreConfig(encryption_key=value)
    shown = "".join(traceback.format_exception(caught.value))
    assert KEY.hex() not in shown
    assert repr(KEY) not in shown


def test_configs_with_keys_are_neither_shown_nor_pickled():
    config = StoreConfig(encryption_key=functools.partial(bytes, KEY))
    assert repr(KEY) not in repr(config)
    with pytest.raises(
        ConfigError, match="encryption_key is a function can't be pickled; use 'env:NAME'"
    ):
        pickle.dumps(config)
    with pytest.raises(PydanticSerializationError) as caught:
        TypeAdapter(StoreConfig).dump_json(config)
    assert repr(KEY) not in str(caught.value)
    assert copy.deepcopy(config) is copy.copy(config) is config
    by_name = StoreConfig(encryption_key="env:KVRAG_TEST_KEY")
    assert pickle.loads(pickle.dumps(by_name)) == by_name != StoreConfig()


def test_keys_are_neither_shown_nor_pickled():
    keys = Keys.of(StoreConfig(encryption_key=lambda: KEY))
    shown = repr(keys)
    for key in (keys.cipher, keys.address):
        assert key is not None
        assert repr(key) not in shown
        assert key != KEY
    with pytest.raises(ConfigError, match="can't be pickled"):
        pickle.dumps(keys)


def test_without_a_key_names_are_plain_digests():
    names = Keys.of(StoreConfig())
    assert names == Keys()
    assert names.namespace("x") == namespace_digest("x")


def test_every_key_calls_namespaces_otherwise():
    configs = [
        StoreConfig(encryption_key=key and functools.partial(bytes, key))
        for key in (None, KEY, OTHER)
    ]
    found = {Keys.of(config).namespace(name) for config in configs for name in ("default", "other")}
    assert len(found) == 6
