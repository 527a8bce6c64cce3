"""Keys: what is taken for one, what is derived from it, and that none gets out."""

import base64
import copy
import functools
import pickle
import traceback

import pytest
from kvrag.store.keys import Keys, Naming, derive, key_id, read_key

from kvrag.config import KEY_OPTIONS, StoreConfig
from kvrag.errors import ConfigError
from kvrag.identity.fingerprint import namespace_digest, text_digest
from kvrag.prompt.spans import text_entry

KEY = bytes(range(32))
OTHER = bytes(range(1, 33))
TEXT = "The quick brown fox jumps over the lazy dog, twice a day."


def test_derived_keys_are_those_of_the_rfc():
    """Golden values: a change of one is a change of the format. RFC 5869 defines them; the next test computes them by a library."""
    assert derive(KEY, "mac").hex() == "9d69b9735abb8d5e5e36fd36c233f71d93ff0786af8e8d12970eb72a6242be72"
    assert derive(KEY, "blob x", salt=OTHER).hex() == "298206a114ec3b3c0027d8d95c04119ebea4e803b361714c8be678939b79f793"
    assert key_id(KEY) == "7919c80be9fd203b"


@pytest.mark.parametrize("salt", [b"", OTHER])
def test_derivation_is_hkdf(salt):
    hashes = pytest.importorskip("cryptography.hazmat.primitives.hashes")
    hkdf = pytest.importorskip("cryptography.hazmat.primitives.kdf.hkdf")
    theirs = hkdf.HKDF(hashes.SHA256(), 32, salt or None, b"kvrag/3/mac").derive(KEY)
    assert derive(KEY, "mac", salt=salt) == theirs


def test_each_purpose_and_each_key_gives_another_key():
    found = {derive(key, purpose, salt=salt) for key in (KEY, OTHER) for purpose in ("a", "b") for salt in (b"", KEY)}
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
    assert read_key("env:KVRAG_TEST_KEY", "mac_key") in (KEY, b"\xff" * 32)


@pytest.mark.parametrize(
    ("text", "fault"),
    [(None, "gives no key"), ("", "gives no key"), ("pass word!", "gives no key"), ("ab" * 31, "31 bytes")],
)
def test_a_variable_without_a_key_is_named_and_its_value_is_not(monkeypatch, text, fault):
    monkeypatch.delenv("KVRAG_TEST_KEY", raising=False)
    if text is not None:
        monkeypatch.setenv("KVRAG_TEST_KEY", text)
    with pytest.raises(ConfigError, match=f"KVRAG_TEST_KEY.*mac_key.*{fault}.*openssl rand -hex 32") as caught:
        read_key("env:KVRAG_TEST_KEY", "mac_key")
    assert not text or text not in str(caught.value)


@pytest.mark.parametrize("key", [None, "x" * 32, b"", b"short"])
def test_a_function_must_return_a_key(key):
    with pytest.raises(ConfigError, match="encryption_key gives"):
        read_key(lambda: key, "encryption_key")


@pytest.mark.parametrize("option", KEY_OPTIONS)
def test_a_function_that_raises_is_named_and_what_it_says_is_not(option):
    def broken():
        raise ZeroDivisionError(KEY.hex())

    with pytest.raises(ConfigError, match=f"StoreConfig.{option} raises ZeroDivisionError") as caught:
        Keys.of(StoreConfig(**{option: broken}))
    assert KEY.hex() not in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("option", KEY_OPTIONS)
@pytest.mark.parametrize("value", [KEY, KEY.hex(), "env:", 7])
def test_a_key_itself_is_refused_and_not_repeated(option, value):
    with pytest.raises(ConfigError, match=f"{option} is of type {type(value).__name__}.*'env:NAME'") as caught:
        StoreConfig(**{option: value})
    assert KEY.hex() not in str(caught.value)
    assert repr(KEY) not in str(caught.value)


@pytest.mark.parametrize("option", KEY_OPTIONS)
def test_configs_with_keys_are_neither_shown_nor_pickled(option):
    config = StoreConfig(**{option: functools.partial(bytes, KEY)})
    assert repr(KEY) not in repr(config)
    with pytest.raises(ConfigError, match=f"{option} is a function can't be pickled; use 'env:NAME'"):
        pickle.dumps(config)
    assert copy.deepcopy(config) is copy.copy(config) is config
    by_name = StoreConfig(**{option: "env:KVRAG_TEST_KEY"})
    assert pickle.loads(pickle.dumps(by_name)) == by_name != StoreConfig()


def test_keys_are_neither_shown_nor_pickled():
    keys = Keys.of(StoreConfig(**{option: lambda: KEY for option in KEY_OPTIONS}))
    shown = repr(keys) + repr(keys.names)
    for key in (keys.mac, keys.cipher, keys.names.address, keys.names.text):
        assert key is not None
        assert repr(key) not in shown
        assert key != KEY
    for value in (keys, keys.names):
        with pytest.raises(ConfigError, match="can't be pickled"):
            pickle.dumps(value)


def test_an_exception_of_the_function_shows_no_key():
    """A traceback shows lines of code and no values; this pins that nothing of ours adds any."""

    def vault():
        key = KEY
        raise OSError("the vault is closed") if key else None

    with pytest.raises(ConfigError, match=r"StoreConfig\.mac_key raises OSError") as caught:
        Keys.of(StoreConfig(mac_key=vault))
    shown = "".join(traceback.format_exception(caught.value))
    assert "the vault is closed" in shown
    assert repr(KEY) not in shown


def test_without_keys_names_are_plain_digests():
    names = Keys.of(StoreConfig()).names
    entry = text_entry(TEXT)
    assert names == Naming()
    assert names.namespace("x") == namespace_digest("x")
    assert names.digest(TEXT) == text_digest(TEXT) == entry.digest
    assert names.hide(entry) == names.reveal(entry) == entry


def test_every_set_of_keys_calls_namespaces_otherwise():
    configs = [
        StoreConfig(
            **{option: functools.partial(bytes, key) for option, key in zip(KEY_OPTIONS, keys, strict=True) if key}
        )
        for keys in ((a, b, c) for a in (None, KEY, OTHER) for b in (None, KEY, OTHER) for c in (None, KEY, OTHER))
    ]
    found = {Keys.of(config).names.namespace(name) for config in configs for name in ("default", "other")}
    assert len(found) == 2 * 27


def test_texts_are_hidden_by_the_namespace_secret_alone():
    entry = text_entry(TEXT)
    secret = Keys.of(StoreConfig(namespace_secret=lambda: KEY)).names
    hidden = secret.hide(entry)
    assert not {hidden.digest, hidden.head, hidden.tail} & {entry.digest, entry.head, entry.tail}
    assert secret.reveal(hidden).digest == secret.digest(TEXT) == hidden.digest
    assert (secret.reveal(hidden).head, secret.reveal(hidden).tail) == (entry.head, entry.tail)
    other = Keys.of(StoreConfig(namespace_secret=lambda: OTHER)).names
    assert other.hide(entry) != hidden
    assert other.reveal(hidden).head != entry.head
    assert Keys.of(StoreConfig(mac_key=lambda: KEY)).names.hide(entry) == entry


def test_anchors_of_texts_that_begin_alike_are_hidden_differently():
    """Otherwise the same beginning could be seen in two documents."""
    names = Keys.of(StoreConfig(namespace_secret=lambda: KEY)).names
    a, b = (names.hide(text_entry(TEXT + end)) for end in ("", " And then once more."))
    assert text_entry(TEXT).head == text_entry(TEXT + " And then once more.").head
    assert a.head != b.head
