"""fsck, gc, rm, export and import, as functions and as commands."""

import errno
import json
import os
from dataclasses import astuple

import pytest
from kvrag.store.index_kinds import FILES
from kvrag.store.objects import place_of
from typer.testing import CliRunner

from kvrag.cli.app import app
from kvrag.config import StoreConfig
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import FORMAT_VERSION, chunk_key
from kvrag.store import DiskStore, Retention, fsck, usage
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text, same_bits

CHUNKS = [make_identity(number) for number in range(12)]
SIZE = make_kv(CHUNKS[0]).num_bytes


@pytest.fixture(params=["diskcache", "sqlite"])
def config(request):
    return StoreConfig(index=request.param, min_free_bytes=0)


@pytest.fixture
def filled(root, config):
    store = DiskStore(root, config)
    for number, chunk in enumerate(CHUNKS):
        store.put(chunk, make_kv(chunk), text=make_text(str(number)), doc_id=f"doc {number}")
    store.put(CHUNKS[0], make_kv(CHUNKS[0]), text=make_text("again"), doc_id="second")
    yield store
    store.close()


def path_of(root, number):
    return root.joinpath(*place_of(chunk_key(CHUNKS[number])))


def flip(path, place):
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)


def run(*args, code=0, stderr=False):
    result = CliRunner().invoke(app, list(map(str, args)))
    assert result.exit_code == code, result.output
    return result.stderr if stderr else result.stdout


def test_a_sound_store_is_ok(filled):
    report = fsck.fsck(filled, verify_data=True)
    assert (report.ok, report.checked, report.verified) == (True, 12, 12)


def test_damage_of_headers_is_found_at_once_and_of_data_when_asked(filled, root):
    flip(path_of(root, 1), 100)
    flip(path_of(root, 2), -1)
    report = fsck.fsck(filled)
    assert [key for key, _ in report.rejected] == [chunk_key(CHUNKS[1])]
    assert report.verified == 0
    report = fsck.fsck(filled, verify_data=True)
    assert report.rejected == [(chunk_key(CHUNKS[2]), "its data is damaged")]
    assert fsck.fsck(filled, verify_data=True).ok
    assert not filled.contains(chunk_key(CHUNKS[2]))
    assert filled.index.get(chunk_key(CHUNKS[2])) is None
    assert len(os.listdir(root / "quarantine")) == 2


def test_nothing_is_mended(filled, root):
    """A file of another length is put away, not noted with its new length."""
    os.truncate(path_of(root, 3), path_of(root, 3).stat().st_size - 1)
    assert fsck.fsck(filled).rejected == [(chunk_key(CHUNKS[3]), "it has the wrong length")]


def test_samples_are_everything_once(filled):
    keys = sorted(filled.files())
    parts = [fsck.sample(keys, part, 3) for part in (1, 2, 3)]
    assert sorted(key for part in parts for key in part) == keys
    assert fsck.fsck(filled, parts[0]).verified == len(parts[0])
    for bad in ((0, 3), (4, 3)):
        with pytest.raises(StoreError, match="sample"):
            fsck.sample(keys, *bad)


def test_rows_without_files_are_dropped(filled, root):
    path_of(root, 4).unlink()
    assert fsck.fsck(filled).unknown_rows == 1
    assert filled.stats()["disk"].chunks == 11


def test_gc_removes_what_nobody_needs(filled, root):
    flip(path_of(root, 1), -1)
    filled.get(CHUNKS[1])
    (root / "quarantine" / "folder").mkdir()
    (root / "quarantine" / "folder" / "file").write_text("x")
    other = path_of(root, 2).read_bytes().replace(f'"version":"{FORMAT_VERSION}"'.encode(), b'"version":"1"')
    stray = root / "objects" / "aa" / ("a" * 64 + ".safetensors")
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(other)
    reference = next((root / "references").rglob("*.json"))
    (reference.parent / (reference.name[:2] + "0" * 62 + ".json")).write_text("{}")
    (root / "index.damaged").mkdir()
    report = fsck.gc(filled)
    assert (report.quarantined, report.other_versions, report.references) == (2, 1, 1)
    assert os.listdir(root / "quarantine") == []
    assert not stray.exists()
    assert not (root / "index.damaged").exists()
    assert fsck.fsck(filled, verify_data=True).ok
    assert filled.stats()["disk"].chunks == 11


def test_copies_hold_the_same(filled, tmp_path, root, config):
    flip(path_of(root, 5), -1)
    other = DiskStore(tmp_path / "copy", config)
    assert fsck.copy(filled, other) == (11, 0, 1)
    assert fsck.copy(filled, other, filled.index.document_keys(NAMESPACE, "second")) == (0, 1, 0)
    assert set(other.index.documents(NAMESPACE)) == {*(f"doc {n}" for n in range(12) if n != 5), "second"}
    assert all(same_bits(other.get(chunk), make_kv(chunk)) for n, chunk in enumerate(CHUNKS) if n != 5)
    assert other.forget(NAMESPACE, "doc 0") == 0
    assert other.forget(NAMESPACE, "second") == 1
    other.close()


def test_copies_keep_priority_duration_and_cost(filled, tmp_path, config, monkeypatch):
    now = usage.since_boot()
    clock = [now]
    monkeypatch.setattr(usage, "since_boot", lambda: clock[0])
    keys = [chunk_key(chunk) for chunk in CHUNKS[:4]]
    filled.retain(keys[:1], Retention(90, duration_s=1000, cost_ms=12.5))
    filled.retain(keys[1:2], Retention(90, duration_s=10))
    filled.retain(keys[2:3], Retention(20))
    clock[0] = now + 400
    other = DiskStore(tmp_path / "copy", config)
    assert fsck.copy(filled, other, keys) == (4, 0, 0)
    assert [other.priority(key) for key in keys] == [90, 35, 20, 35]
    assert astuple(other.rows.retention(keys[0])) == (90, pytest.approx(600), 12.5)
    assert other.rows.retention(keys[1]) is other.rows.retention(keys[3]) is None
    clock[0] = now + 1001
    assert [other.priority(key) for key in keys] == [35, 35, 20, 35]
    other.retain(keys[2:3], Retention(70))
    assert fsck.copy(filled, other, keys) == (0, 4, 0)
    assert other.priority(keys[2]) == 70, "what is there keeps its own"
    other.close()


def test_a_copy_is_announced_as_an_import(filled, tmp_path):
    events = []
    other = DiskStore(tmp_path / "copy", StoreConfig(on_event=events.append, min_free_bytes=0))
    fsck.copy(filled, other)
    other.put(make_identity(77), make_kv(make_identity(77)), text=None)
    other.close()
    assert [event.reason for event in events] == ["import"] * 12 + ["put"]


def test_the_command_line_checks_and_cleans(filled, root):
    filled.close()
    kind = [file for file in FILES.values() if (root / "index" / file).exists()]
    assert json.loads(run("fsck", "--kv-dir", root, "--verify-data", "--json"))["verified"] == 12
    assert json.loads(run("fsck", "--kv-dir", root, "--sample", "1/1", "--json"))["verified"] == 12
    assert "checked" in run("fsck", "--kv-dir", root)
    flip(path_of(root, 1), -1)
    assert "damaged" in run("fsck", "--kv-dir", root, "--verify-data", code=1)
    run("fsck", "--kv-dir", root, "--sample", "one", code=2)
    assert json.loads(run("gc", "--kv-dir", root, "--json"))["quarantined"] == 1
    assert "evicted" in run("gc", "--kv-dir", root, "--disk-bytes", 4 * SIZE)
    assert json.loads(run("stats", "--kv-dir", root, "--json"))["tiers"]["disk"]["chunks"] == 4
    assert [file for file in FILES.values() if (root / "index" / file).exists()] == kind


def test_the_command_line_erases_documents(run_store):
    out = json.loads(run("rm", "--kv-dir", run_store, "--document", "doc 0", "--document", "nobody", "--json"))
    assert out == {"erased_chunks": {"doc 0": 0, "nobody": 0}, "unknown": ["nobody"]}
    run("rm", "--kv-dir", run_store, code=2)
    assert "1 chunk" in run("rm", "--kv-dir", run_store, "--document", "second")
    assert "not known" in run("rm", "--kv-dir", run_store, "--document", "second", code=1)
    run("rm", "--kv-dir", run_store, "--document", "doc 1", "--namespace", "other", code=1)


@pytest.fixture
def run_store(filled, root):
    filled.close()
    return root


def test_the_command_line_exports_and_imports(run_store, tmp_path, config):
    out = json.loads(run("export", tmp_path / "part", "--kv-dir", run_store, "--document", "doc 3", "--json"))
    assert out == {"copied": 1, "there_already": 0, "unreadable": 0, "unknown": []}
    kept = DiskStore(run_store, config)
    kept.retain([chunk_key(CHUNKS[3])], Retention(90))
    kept.close()
    run("export", tmp_path / "all", "--kv-dir", run_store)
    run("import", tmp_path / "all", "--kv-dir", tmp_path / "taken over")
    shipped = DiskStore(tmp_path / "taken over", StoreConfig(read_only=True))
    assert (shipped.priority(chunk_key(CHUNKS[3])), shipped.priority(chunk_key(CHUNKS[4]))) == (90, 35)
    shipped.close()
    shipped = DiskStore(tmp_path / "all", StoreConfig(read_only=True))
    assert all(same_bits(shipped.get(chunk), make_kv(chunk)) for chunk in CHUNKS)
    shipped.close()
    assert json.loads(run("import", tmp_path / "part", "--kv-dir", tmp_path / "new", "--json"))["copied"] == 1
    path = (tmp_path / "all").joinpath(*place_of(chunk_key(CHUNKS[1])))
    flip(path, -1)
    raw = path.read_bytes()
    out = json.loads(run("import", tmp_path / "all", "--kv-dir", tmp_path / "new", "--json", code=1))
    assert out == {"copied": 10, "there_already": 1, "unreadable": 1}
    assert path.read_bytes() == raw, "the source is not changed"


def test_an_export_of_unknown_documents_is_refused(run_store, tmp_path):
    said = run("export", tmp_path / "part", "--kv-dir", run_store, "--document", "nope", code=1, stderr=True)
    assert "'nope'" in said
    assert "no such document is in the namespace 'default'" in said
    assert not (tmp_path / "part").exists()
    options = ("--document", "nope", "--document", "doc 3", "--document", "nor this")
    assert "no such documents are" in run(
        "export", tmp_path / "part", "--kv-dir", run_store, *options, code=1, stderr=True
    )
    out = json.loads(run("export", tmp_path / "again", "--kv-dir", run_store, *options, "--json", code=1))
    assert out == {"copied": 1, "there_already": 0, "unreadable": 0, "unknown": ["nope", "nor this"]}


def test_cleaning_where_nothing_can_be_written_says_so(run_store, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("kvrag.store.draft.Draft.__init__", refuse)
    said = run("gc", "--kv-dir", run_store, code=1, stderr=True)
    assert "nothing was removed" in said
    assert "reading only; make its directory writable" in said


def test_an_import_keeps_to_the_limits(run_store, tmp_path):
    run("import", run_store, "--kv-dir", tmp_path / "new", "--disk-bytes", 4 * SIZE, "--min-free-bytes", 0)
    assert 1 <= json.loads(run("stats", "--kv-dir", tmp_path / "new", "--json"))["tiers"]["disk"]["chunks"] <= 4


@pytest.mark.parametrize("command", [["fsck"], ["gc"], ["rm", "--document", "x"], ["export", "target"]])
def test_what_is_no_store_is_not_made_one(tmp_path, command):
    run(*command, "--kv-dir", tmp_path / "nowhere", code=2)
    run("import", tmp_path / "nowhere", "--kv-dir", tmp_path / "new", code=2)
    assert os.listdir(tmp_path) == []
