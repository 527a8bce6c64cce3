"""fsck, gc, copies and the commands, on protected stores, with their keys and without."""

import json
import logging
import shutil

import pytest
from protected import (
    CIPHER,
    EVERY,
    MAC,
    PROVING,
    SECRET,
    WITH_CIPHER,
    config_of,
    identity_of,
    names_of,
    needs_cryptography,
    path_of,
)
from typer.testing import CliRunner

from kvrag.cli.app import app
from kvrag.config import StoreConfig
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.store import DiskStore, fsck
from kvrag.testing.chunks import make_kv, make_text, same_bits

COUNT = 4


def fill(root, kind, namespace="default"):
    """Store a few chunks, one document each, and return their identities."""
    store = DiskStore(root, config_of(kind))
    mine = [identity_of(kind, number, namespace=namespace) for number in range(COUNT)]
    for number, me in enumerate(mine):
        text = names_of(kind).hide(make_text(f"text {number}"))
        store.put(me, make_kv(identity_of("plain", number)), text=text, doc_id=f"doc {number}")
    store.close()
    return mine


def flip(path, place):
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)


def checked(root, kind, **options):
    store = DiskStore(root, config_of(kind))
    report = fsck.fsck(store, **options)
    store.close()
    return report


@pytest.mark.parametrize("kind", EVERY)
def test_fsck_proves_a_store_with_its_keys(root, kind):
    mine = fill(root, kind)
    report = checked(root, kind, verify_data=True)
    assert (report.ok, report.checked, report.verified, report.foreign) == (True, COUNT, COUNT, 0)
    flip(path_of(root, mine[1]), -1)
    flip(path_of(root, mine[2]), 200)
    found = dict(checked(root, kind, verify_data=True).rejected)
    assert set(found) == {chunk_key(mine[1]), chunk_key(mine[2])}


@pytest.mark.parametrize("kind", PROVING)
def test_fsck_without_the_keys_finds_damage_and_leaves_the_rest(root, kind):
    mine = fill(root, kind)
    report = checked(root, "plain", verify_data=True)
    assert (report.ok, report.checked, report.foreign) == (True, 0, COUNT)
    flip(path_of(root, mine[1]), -1)
    flip(path_of(root, mine[2]), 200)
    path_of(root, mine[3]).write_bytes(path_of(root, mine[3]).read_bytes()[:-1])
    assert checked(root, "plain").foreign == 2  # the data was not looked at
    report = checked(root, "plain", verify_data=True)
    assert report.rejected == [(chunk_key(mine[1]), "its data is damaged")]
    assert report.foreign == 1
    store = DiskStore(root, config_of(kind))
    assert same_bits(store.get(mine[0]), make_kv(identity_of("plain")))
    store.close()


@pytest.mark.parametrize("kind", PROVING)
@pytest.mark.parametrize(
    "fields", [{}, {"layer.000": {"data_offsets": [5, 2]}}, {"layer.9": {"data_offsets": [0, 2]}}, {"x": 1}]
)
def test_fsck_without_the_keys_refuses_any_header(root, kind, fields):
    from kvrag.store.header import frame
    from kvrag.store.places import dump

    mine = fill(root, kind)
    store = DiskStore(root)
    raw = path_of(root, mine[0]).read_bytes()
    marks = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
    marks = {name: value for name, value in marks.items() if name not in ("header_digest", "header_mac")}
    path_of(root, mine[0]).write_bytes(frame(marks, dump(fields)) if fields else b"\0" * 8)
    report = fsck.fsck(store, verify_data=True)
    store.close()
    assert [key for key, _ in report.rejected] == [chunk_key(mine[0])]


@pytest.mark.parametrize("kind", PROVING)
def test_gc_leaves_what_is_of_other_keys_unless_it_is_asked(root, kind):
    mine = fill(root, kind)
    old = fill(root, "plain")
    store = DiskStore(root, config_of(kind))
    report = fsck.gc(store)
    assert (report.foreign, report.references, report.other_versions) == (0, 0, 0)
    assert path_of(root, old[0]).exists()
    report = fsck.gc(store, with_foreign=True)
    has_own_index = store.keys.cipher is not None
    assert report.foreign == (
        2 * COUNT if has_own_index else COUNT
    )  # plain references are of every store without encryption
    assert not path_of(root, old[0]).exists()
    assert (root / "index").exists() != has_own_index
    assert same_bits(store.get(mine[0]), make_kv(identity_of("plain")))
    assert sorted(store.index.documents(mine[0].namespace)) == [f"doc {number}" for number in range(COUNT)]
    store.close()


@pytest.mark.parametrize("kind", PROVING)
def test_gc_without_the_keys_destroys_nothing(root, kind):
    mine = fill(root, kind)
    store = DiskStore(root, config_of("plain"))
    fsck.gc(store)
    store.close()
    shutil.rmtree(next(root.glob("index*")))
    store = DiskStore(root, config_of(kind))
    assert all(store.get(me) for me in mine)
    assert sorted(store.index.documents(mine[0].namespace)) == [f"doc {number}" for number in range(COUNT)]
    store.close()


@needs_cryptography
def test_gc_removes_damaged_references_of_an_encrypted_store(root):
    fill(root, "cipher")
    files = sorted((root / "references").rglob("*.json"))
    flip(files[0], len(files[0].read_bytes()) // 2)
    files[1].write_bytes(b"{}")
    store = DiskStore(root, config_of("cipher"))
    assert fsck.gc(store).references == 2
    store.close()


@pytest.mark.parametrize("kind", EVERY)
def test_a_copy_with_the_same_keys_is_whole(root, tmp_path, kind):
    mine = fill(root, kind)
    source, target = DiskStore(root, config_of(kind)), DiskStore(tmp_path / "copy", config_of(kind))
    assert fsck.copy(source, target) == (COUNT, 0, 0)
    assert fsck.copy(source, target) == (0, COUNT, 0)
    assert same_bits(target.get(mine[2]), make_kv(identity_of("plain", 2)))
    assert target.index.document_keys(mine[2].namespace, "doc 2") == [chunk_key(mine[2])]
    source.close()
    target.close()


@pytest.mark.parametrize(
    ("old", "new"), [("plain", "mac"), ("mac", "plain"), pytest.param("cipher", "mac", marks=needs_cryptography)]
)
def test_a_copy_with_other_keys_is_called_otherwise(root, tmp_path, old, new):
    fill(root, old)
    fill(root, old, namespace="other")
    source, target = DiskStore(root, config_of(old)), DiskStore(tmp_path / "copy", config_of(new))
    assert fsck.copy(source, target, namespaces=["default"]) == (COUNT, 0, COUNT)
    me = identity_of(new, 2)
    assert same_bits(target.get(me), make_kv(identity_of("plain", 2)))
    assert target.index.document_keys(me.namespace, "doc 2") == [chunk_key(me)]
    assert target.get(identity_of(new, 2, namespace="other")) is None
    source.close()
    target.close()


def test_texts_are_not_copied_to_another_namespace_secret(root, tmp_path):
    source, target = DiskStore(root), DiskStore(tmp_path / "copy", config_of("secret"))
    with pytest.raises(StoreError, match=r"different namespace secrets.*precompute again"):
        fsck.copy(source, target, namespaces=["default"])
    source.close()
    target.close()


@needs_cryptography
def test_each_encryption_key_has_an_index_of_its_own(root):
    """An index that can't be read counts as damaged, and would be made anew at every change of the key."""
    fill(root, "cipher")
    fill(root, "plain")
    other = StoreConfig(encryption_key=lambda: SECRET, min_free_bytes=0)
    DiskStore(root, other).close()
    assert len(list(root.glob("index*"))) == 3
    assert list(root.glob("*.damaged")) == []
    for config, chunks in ((config_of("cipher"), COUNT), (config_of("plain"), COUNT), (other, 0)):
        store = DiskStore(root, config)
        assert store.stats()["disk"].chunks == chunks
        store.close()


def test_a_store_says_once_that_it_holds_what_is_not_its(root, caplog):
    fill(root, "mac")
    with caplog.at_level(logging.WARNING):
        DiskStore(root, config_of("plain")).close()
    assert [m for m in caplog.messages if m.startswith("4 chunk(s) in") and "left alone" in m] == caplog.messages


# -- commands ------------------------------------------------------------------------------------------------------------


def run(*args, code=0):
    result = CliRunner().invoke(app, list(map(str, args)))
    assert result.exit_code == code, result.output
    return json.loads(result.stdout) if "--json" in args and code == 0 else result.output


@pytest.fixture
def keys(monkeypatch):
    """Sets the keys of a kind of protection in the environment, as the commands take them."""

    def set_keys(kind):
        for name, key in (("NAMESPACE_SECRET", SECRET), ("MAC_KEY", MAC), ("ENCRYPTION_KEY", CIPHER)):
            option = name.lower()
            is_given = getattr(config_of(kind), option) is not None
            if is_given:
                monkeypatch.setenv(f"KVRAG_{name}", key.hex())
            else:
                monkeypatch.delenv(f"KVRAG_{name}", raising=False)

    return set_keys


@pytest.mark.parametrize("kind", EVERY)
def test_commands_take_keys_from_the_environment(root, tmp_path, keys, kind):
    fill(root, kind)
    keys("plain")
    assert "not known here" in run("rm", "--document", "doc 1", "--kv-dir", root, code=1)
    keys(kind)
    assert run("fsck", "--verify-data", "--json", "--kv-dir", root)["verified"] == COUNT
    [group] = run("stats", "--json", "--kv-dir", root)["groups"]
    assert (group["chunks"], group["namespace"][:12]) == (COUNT, "hmac-sha256:")
    assert run("export", tmp_path / "copy", "--document", "doc 2", "--json", "--kv-dir", root)["copied"] == 1
    assert run("rm", "--document", "doc 1", "--json", "--kv-dir", root)["erased_chunks"] == {"doc 1": 1}
    assert run("import", tmp_path / "copy", "--json", "--kv-dir", root)["there_already"] == 1
    assert run("gc", "--json", "--kv-dir", root)["foreign"] == 0


@pytest.mark.parametrize("kind", ["mac", pytest.param("cipher", marks=needs_cryptography)])
def test_a_plain_store_is_taken_over_and_given_away(root, tmp_path, keys, kind):
    fill(tmp_path / "old", "plain")
    keys(kind)
    assert run("import", tmp_path / "old", "--plain", "--json", "--kv-dir", root)["copied"] == COUNT
    store = DiskStore(root, config_of(kind))
    assert same_bits(store.get(identity_of(kind, 3)), make_kv(identity_of("plain", 3)))
    store.close()
    assert run("export", tmp_path / "new", "--plain", "--json", "--kv-dir", root)["copied"] == COUNT
    store = DiskStore(tmp_path / "new")
    assert same_bits(store.get(identity_of("plain", 3)), make_kv(identity_of("plain", 3)))
    store.close()


def test_gc_of_foreign_chunks_by_command(root, keys):
    fill(root, "plain")
    keys("mac")
    assert run("gc", "--json", "--kv-dir", root)["foreign"] == 0
    assert run("gc", "--foreign", "--json", "--kv-dir", root)["foreign"] == COUNT


@pytest.mark.parametrize("kind", WITH_CIPHER)
def test_a_wrong_variable_is_a_sentence_without_its_value(root, keys, monkeypatch, kind):
    fill(root, kind)
    keys(kind)
    monkeypatch.setenv("KVRAG_ENCRYPTION_KEY", "correct horse")
    said = run("stats", "--kv-dir", root, code=2)
    assert "KVRAG_ENCRYPTION_KEY" in said
    assert "horse" not in said


def test_the_commands_know_every_key_of_the_config():
    from kvrag.cli.keys import VARIABLES

    config = StoreConfig(**{option: f"env:{name}" for option, name in VARIABLES.items()})
    assert config.encryption_key == "env:KVRAG_ENCRYPTION_KEY"


def test_a_tool_opens_the_index_of_its_keys_whatever_others_left(root, monkeypatch):
    """A plain store was here before, with another kind of index: it says nothing about the one of these keys."""
    DiskStore(root, StoreConfig(index="sqlite")).close()
    monkeypatch.setenv("KVRAG_ENCRYPTION_KEY", "ab" * 32)
    run("gc", "--kv-dir", root)
    assert sorted(str(path.relative_to(root)) for path in root.glob("index*/*.db"))[1:] == ["index/rows.db"]
    assert len(list(root.glob("index-*/cache.db"))) == 1
