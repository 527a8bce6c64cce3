"""``kvrag fsck | gc | rm | export | import | stats`` on a store: what they print, and their exit status."""

import json
import os
import re
from pathlib import Path

import pytest
from stores import (
    CHUNKS,
    KEYS,
    KVS,
    SECRETS,
    SIZE,
    config_of,
    files,
    fill,
    flip,
    needs_cryptography,
    path_of,
)
from typer.testing import CliRunner

from kvrag.cli.app import app
from kvrag.identity.fingerprint import namespace_digest
from kvrag.store import FileBlobs, Keys, Retention, open_store
from kvrag.testing.chunks import make_identity, make_kv, make_text, same_bits


def run(*args, code=0, **options):
    result = CliRunner().invoke(app, list(map(str, args)), **options)
    assert result.exit_code == code, result.output
    return json.loads(result.stdout) if "--json" in args else result.output


@pytest.fixture
def filled(opened, root):
    store = fill(opened(), *range(6))
    store.put(CHUNKS[0], KVS[0], text=make_text("again"), doc_id="second")
    theirs = make_identity(7, namespace=namespace_digest("other"))
    store.put(theirs, make_kv(theirs), text=make_text("theirs"), doc_id="theirs")
    store.close()
    return root


def count(root):
    return len(list((root / "objects").rglob("*.safetensors")))


def test_fsck_and_gc_check_and_clean(filled):
    assert run("fsck", "--kv-dir", filled, "--verify-data", "--json")["verified"] == 7
    assert run("fsck", "--kv-dir", filled, "--sample", "1/1", "--json")["verified"] == 7
    said = run("fsck", "--kv-dir", filled)
    assert "7 chunk(s): the beginning of the file is intact. --verify-data reads" in said
    assert "Nothing was found to remove." in run("gc", "--kv-dir", filled)
    flip(path_of(filled, CHUNKS[1]), -1)
    path_of(filled, CHUNKS[2]).unlink()
    said = " ".join(run("fsck", "--kv-dir", filled, "--verify-data", code=1).split())
    assert "1 chunk(s) are damaged or can't be read. Damaged ones were removed" in said
    assert f"{KEYS[1][:12]}: its data is damaged" in said
    assert "1 chunk(s) in the store's list had no file" in said
    assert not any(word in said for word in ("dormant", "unknown rows", "foreign", "rejected"))
    run("fsck", "--kv-dir", filled, "--sample", "one", code=2)
    said = " ".join(run("gc", "--kv-dir", filled, "--disk-bytes", 4 * SIZE).split())
    assert re.search(
        r": 5 chunk\(s\), [\d.]+ .+ before; 4 chunk\(s\), [\d.]+ .+ now\. 1 chunk", said
    )
    assert "beyond --disk-bytes were removed" in said
    assert run("stats", "--kv-dir", filled, "--json")["tiers"]["disk"]["chunks"] == 4


def test_gc_where_nothing_can_be_written_says_so(filled, monkeypatch):
    monkeypatch.setattr("kvrag.store.opening.prepare", lambda root, config: True)
    assert "nothing was removed" in run("gc", "--kv-dir", filled, code=1)


def test_rm_erases_documents(filled):
    out = run("rm", "--kv-dir", filled, "--document", "doc 0", "--document", "nobody", "--json")
    assert out == {"erased_chunks": {"doc 0": 0, "nobody": 0}, "unknown": ["nobody"]}
    run("rm", "--kv-dir", filled, code=2)
    assert "1 chunk" in run("rm", "--kv-dir", filled, "--document", "second")
    assert "not known" in run("rm", "--kv-dir", filled, "--document", "second", code=1)
    run("rm", "--kv-dir", filled, "--document", "doc 1", "--namespace", "other", code=1)
    assert count(filled) == 6


def test_rm_names_a_collection_without_documents(filled):
    said = run("rm", "--collection", "nothing", "--kv-dir", filled, code=1)
    assert "nothing/: is not known here" in said


def test_an_address_of_a_shared_store_is_not_taken_for_a_directory(filled, tmp_path, monkeypatch):
    pytest.importorskip("obstore", reason="obstore is not installed")
    monkeypatch.chdir(tmp_path)
    shared = f"file://{tmp_path}/bucket"
    assert "catalog" in run("export", shared, "--kv-dir", filled, code=2)
    assert "catalog" in run("import", shared, "--kv-dir", tmp_path / "new", code=2)
    assert "bucket's rules" in run("gc", "--kv-dir", shared, "--disk-bytes", 1, code=2)
    monkeypatch.setenv("KVRAG_CATALOG", "redis://127.0.0.1:1/0")
    to = ("--kv-dir", tmp_path / "new", "--shared", shared)
    assert "127.0.0.1:1" in run("import", filled, *to, code=2)
    assert not Path("file:").exists()


def test_rm_asks_before_it_erases_everything(filled):
    assert "7 chunk(s) of every namespace?" in run(
        "rm", "--all", "--kv-dir", filled, input="n\n", code=1
    )
    run("rm", "--all", "--kv-dir", filled, code=1)  # nobody to ask
    for also in (
        ["--document", "doc 1"],
        ["--collection", "c"],
        ["--namespace", "mine", "--document", "doc 1"],
    ):
        run("rm", "--all", "--yes", *also, "--kv-dir", filled, code=2)
    assert count(filled) == 7
    assert "every namespace: erased, with 7 chunk(s)" in run(
        "rm", "--all", "--kv-dir", filled, input="y\n"
    )
    assert count(filled) == 0


def test_rm_erases_one_namespace(filled):
    run("rm", "--all", "--yes", "--namespace", "unknown", "--kv-dir", filled, code=1)
    out = run("rm", "--all", "--yes", "--namespace", "other", "--kv-dir", filled, "--json")
    assert out == {"erased_chunks": 1}
    assert files(filled) == list(range(6))


def test_export_and_import(filled, tmp_path, opened, monkeypatch):
    out = run("export", tmp_path / "part", "--kv-dir", filled, "--document", "doc 3", "--json")
    assert out == {"copied": 1, "there_already": 0, "unreadable": 0, "evicted": 0, "unknown": []}
    kept = opened()
    kept.retain(KEYS[3:4], Retention(90))
    kept.close()
    with monkeypatch.context() as patch:
        patch.setattr(FileBlobs, "free_bytes", lambda _: 2**27)
        assert run("export", tmp_path / "all", "--kv-dir", filled, "--json")["copied"] == 7
    run("import", tmp_path / "all", "--kv-dir", tmp_path / "taken over")
    shipped = opened(tmp_path / "taken over", read_only=True)
    assert (shipped.retention(KEYS[3]), shipped.retention(KEYS[4])) == (Retention(90), None)
    assert all(same_bits(shipped.get(CHUNKS[number]), KVS[number]) for number in range(6))
    assert run("import", tmp_path / "part", "--kv-dir", tmp_path / "new", "--json")["copied"] == 1
    path = path_of(tmp_path / "all", CHUNKS[1])
    flip(path, -1)
    raw = path.read_bytes()
    out = run("import", tmp_path / "all", "--kv-dir", tmp_path / "new", "--json", code=1)
    assert out == {"copied": 5, "there_already": 1, "unreadable": 1, "evicted": 0}
    assert path.read_bytes() == raw, "the source is not changed"
    small = ["--kv-dir", tmp_path / "small", "--disk-bytes", 3 * SIZE, "--min-free-bytes", 0]
    assert 1 <= run("import", filled, *small, "--json")["copied"] == count(small[1]) <= 3


def test_an_export_of_unknown_documents_is_refused(filled, tmp_path):
    said = run("export", tmp_path / "part", "--kv-dir", filled, "--document", "nope", code=1)
    assert "'nope': not in the namespace 'default'" in said.replace("\n", " ")
    assert not (tmp_path / "part").exists()
    options = ("--document", "nope", "--document", "doc 3", "--document", "nor this")
    assert "'nope', 'nor this': not in" in run(
        "export", tmp_path / "part", "--kv-dir", filled, *options, code=1
    )
    assert count(tmp_path / "part") == 1


@pytest.mark.parametrize(
    "command", [["fsck"], ["gc"], ["stats"], ["rm", "--document", "x"], ["export", "target"]]
)
def test_what_is_no_store_is_not_made_one(tmp_path, command):
    run(*command, "--kv-dir", tmp_path / "nowhere", code=2)
    run("import", tmp_path / "nowhere", "--kv-dir", tmp_path / "new", code=2)
    assert os.listdir(tmp_path) == []


# -- with a key ----------------------------------------------------------------------------------------------------------


@needs_cryptography
def test_commands_take_the_key_from_the_environment(root, tmp_path, monkeypatch):
    space = Keys.of(config_of("cipher")).namespace("default")
    mine = [make_identity(number, namespace=space) for number in range(3)]
    store = open_store(root, config_of("cipher"))
    for number, identity in enumerate(mine):
        store.put(identity, make_kv(identity), text=make_text(str(number)), doc_id=f"doc {number}")
    store.close()
    assert "not known here" in run("rm", "--document", "doc 1", "--kv-dir", root, code=1)
    assert run("fsck", "--json", "--kv-dir", root)["foreign"] == 3
    monkeypatch.setenv("KVRAG_ENCRYPTION_KEY", SECRETS["cipher"].hex())
    assert run("fsck", "--verify-data", "--json", "--kv-dir", root)["verified"] == 3
    [group] = run("stats", "--json", "--kv-dir", root)["groups"]
    assert (group["chunks"], group["namespace"][:12]) == (3, "hmac-sha256:")
    at = ["--json", "--kv-dir", root]
    assert run("export", tmp_path / "copy", "--document", "doc 2", *at)["copied"] == 1
    assert run("rm", "--document", "doc 1", *at)["erased_chunks"] == {"doc 1": 1}
    assert run("import", tmp_path / "copy", "--json", "--kv-dir", root)["there_already"] == 1
    assert run("export", tmp_path / "plain", "--plain", "--json", "--kv-dir", root)["copied"] == 2
    assert run("import", tmp_path / "plain", "--plain", *at)["there_already"] == 2
    assert run("gc", "--json", "--kv-dir", root)["foreign"] == 0
    monkeypatch.delenv("KVRAG_ENCRYPTION_KEY")
    assert run("gc", "--foreign", "--json", "--kv-dir", root)["foreign"] == 2


@needs_cryptography
def test_a_wrong_variable_is_a_sentence_without_its_value(filled, monkeypatch):
    monkeypatch.setenv("KVRAG_ENCRYPTION_KEY", "correct horse")
    said = run("stats", "--kv-dir", filled, code=2)
    assert "KVRAG_ENCRYPTION_KEY" in said
    assert "horse" not in said
