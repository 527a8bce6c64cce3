"""Where weights come from: hashed by content, remembered by path, size, times and inode, and hashed again when in doubt."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import raising

from kvrag import KVRagEngine
from kvrag.cache import VARIABLE, cache_dir
from kvrag.identity import weights
from kvrag.identity.weights import files_digest, source_identity
from kvrag.model.load import load
from kvrag.model.source import ModelSource
from kvrag.testing.models import save_tiny_model, tiny_model

SIZE = 2**20 + 5


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The folder of remembered digests, in a cache directory of this test; files need no age to be remembered."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(weights, "_RACE_NS", -(10**12))
    return tmp_path / "cache" / "file-digests"


@pytest.fixture
def reads(monkeypatch):
    """Names of the files whose content is read."""
    seen: list[str] = []
    real = weights.hashlib.file_digest

    def counting(stream, name):
        seen.append(Path(stream.name).name)
        return real(stream, name)

    monkeypatch.setattr(weights.hashlib, "file_digest", counting)
    return seen


def make_file(path: Path, fill: bytes = b"a", *, size: int = SIZE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(fill * size)
    return path


def test_a_large_file_is_hashed_once(tmp_path, reads):
    file = make_file(tmp_path / "m" / "model.safetensors")
    assert files_digest([file]) == files_digest([file])
    assert reads == ["model.safetensors"]


@pytest.mark.parametrize("change", ["content", "size", "mtime", "inode"])
def test_a_changed_file_is_hashed_again(change, tmp_path, reads):
    file = make_file(tmp_path / "m" / "model.safetensors")
    before, status = files_digest([file]), file.stat()
    if change == "content":  # same size, and the time set back: only the inode's own time tells
        file.write_bytes(b"b" * SIZE)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    elif change == "size":
        file.write_bytes(b"a" * (SIZE + 1))
    elif change == "mtime":
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns - 10**12))
    else:
        os.replace(make_file(tmp_path / "other", b"c"), file)
    assert (files_digest([file]) == before) is (change == "mtime")
    assert len(reads) == 2


@pytest.mark.parametrize("case", ["changed while read", "changed a moment ago", "small"])
def test_what_may_change_unseen_and_what_is_small_is_not_remembered(
    case, tmp_path, cache, monkeypatch
):
    file = make_file(tmp_path / "model.safetensors", size=1 if case == "small" else SIZE)
    if (
        case == "changed a moment ago"
    ):  # a second change within one tick of the clock would leave no trace
        monkeypatch.setattr(weights, "_RACE_NS", 2 * 10**9)
    elif case == "changed while read":
        real = weights.hashlib.file_digest
        monkeypatch.setattr(
            weights.hashlib, "file_digest", lambda *args: (os.utime(file), real(*args))[1]
        )
    files_digest([file])
    assert not cache.exists()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\x00\xff", b"not a digest", b"0" * 63, b"0" * 65, b"0" * 64 + b"\n"]
)
def test_a_damaged_entry_is_computed_again(content, tmp_path, cache, reads):
    file = make_file(tmp_path / "model.safetensors")
    expected = files_digest([file])
    (entry,) = cache.iterdir()
    entry.write_bytes(content)
    assert files_digest([file]) == files_digest([file]) == expected
    assert len(reads) == 2, "hashed again once, and remembered"


def test_the_cache_is_private(tmp_path, cache):
    for i in range(3):
        files_digest([make_file(tmp_path / f"{i}.safetensors")])
    kept = list(cache.iterdir())
    assert len(kept) == 3
    assert {stat.S_IMODE(file.stat().st_mode) for file in kept} == {0o600}
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (cache, cache.parent)} == {0o700}


def test_without_a_place_for_the_cache_files_are_hashed_each_time(tmp_path, monkeypatch, reads):
    monkeypatch.setenv(VARIABLE, str(make_file(tmp_path / "in the way", size=1) / "cache"))
    file = make_file(tmp_path / "model.safetensors")
    assert files_digest([file]) == files_digest([file])
    assert len(reads) == 2


def test_a_full_disk_leaves_nothing_behind(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(weights.os, "replace", raising(OSError, 28, "No space left on device"))
    assert files_digest([make_file(tmp_path / "model.safetensors")])
    assert list(cache.iterdir()) == []


def test_the_cache_follows_the_users_conventions(monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "kvrag"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == Path.home() / ".cache" / "kvrag"


def test_no_home_is_no_fault(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(
        weights.Path, "home", raising(RuntimeError, "Could not determine home directory.")
    )
    engine = KVRagEngine.from_pretrained(save_tiny_model(tmp_path / "model"))
    assert engine.generate("Who?", max_new_tokens=1).token_ids, (
        "the proof was made, and kept for this process"
    )
    assert cache_dir().stat().st_mode & 0o777 == 0o700


# -- sources -----------------------------------------------------------------------------------------------------------------


def of(path: Path | str, commit: str | None = None, **options: Any) -> str | None:
    return source_identity(str(path), commit=commit, options=options)


def test_path_and_names_of_files_do_not_count(tmp_path):
    make_file(tmp_path / "a" / "model.safetensors")
    make_file(tmp_path / "b" / "deeper" / "weights.safetensors")
    assert of(tmp_path / "a") == of(tmp_path / "b" / "deeper")
    make_file(tmp_path / "c" / "model.safetensors", b"c")
    assert of(tmp_path / "c") != of(tmp_path / "a")


def test_every_shard_and_how_they_go_together_count(tmp_path):
    def shards(name, *fills, index="{}"):
        for i, fill in enumerate(fills):
            make_file(tmp_path / name / f"model-{i}.safetensors", fill)
        (tmp_path / name / "model.safetensors.index.json").write_text(index)
        return of(tmp_path / name)

    found = [
        shards("a", b"1", b"2"),
        shards("b", b"1", b"3"),
        shards("c", b"1"),
        shards("d", b"1", b"2", index='{"weight_map": {}}'),
    ]
    assert len(set(found)) == 4


def test_the_same_weights_in_other_shards_are_another_model(tmp_path):
    """Files are hashed, not what is in them: reading every tensor of every format by itself would buy little."""
    from kvrag.testing.tokenizers import tiny_tokenizer

    prints = []
    for name, size in (("whole", "1GB"), ("split", "200KB")):
        tiny_model().save_pretrained(tmp_path / name, max_shard_size=size)
        tiny_tokenizer().save_pretrained(tmp_path / name)
        prints.append(load(ModelSource(tmp_path / name)).fingerprint)
    assert len(list((tmp_path / "split").glob("*.safetensors"))) > 1
    assert prints[0] != prints[1]


def test_a_hub_model_is_known_by_its_commit_and_what_is_taken_from_it():
    found = [
        of("org/model", "c1"),
        of("org/model", "c2"),
        of("org/model", "c1", subfolder="a"),
        of("org/model", "c1", variant="fp16"),
        of("org/model", "c1", use_safetensors=False),
    ]
    assert len(set(found)) == 5
    assert (
        of("other-name/model", "c1", token="secret", device_map="cpu", subfolder=None) == found[0]
    )


def test_what_is_not_known_well_enough_is_hashed_in_memory(tmp_path):
    assert of("org/model") is None
    assert of("org/model", "c1", state_dict=object()) is None
    assert of("org/model", "c1", state_dict={"w": torch.zeros(1)}) is None
    (tmp_path / "empty").mkdir()
    assert of(tmp_path / "empty") is None


def test_subfolders_hold_different_models(tmp_path):
    for name, seed in (("a", 0), ("b", 1)):
        save_tiny_model(tmp_path / name, seed=seed)
    prints = [
        load(ModelSource(tmp_path, hf_kwargs={"subfolder": name})).fingerprint
        for name in ("a", "b")
    ]
    assert prints[0] != prints[1]


def test_a_model_whose_origin_tells_too_little_is_hashed_in_memory(tiny_dir, monkeypatch):
    import kvrag.model.load

    known = load(ModelSource(tiny_dir, revision="x")).fingerprint
    monkeypatch.setattr(kvrag.model.load, "source_identity", lambda *_, **__: None)
    found = load(ModelSource(tiny_dir, revision="y")).fingerprint
    assert found != known
    assert found == load(ModelSource(tiny_dir, revision="z")).fingerprint
