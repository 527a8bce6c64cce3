"""GGUF files are parsed once per load; on request, their dequantised weights are kept for the next start."""

import errno
import json
import os
import runpy
import shutil
import threading
import weakref
from pathlib import Path

import pytest
import torch
from kit import raising
from typer.testing import CliRunner

import kvrag.model.gguf.kept
import kvrag.model.load
from kvrag import ConfigError, KVRagEngine, ModelError
from kvrag.cli.app import app
from kvrag.model.gguf.parsing import parsed_once
from kvrag.model.load import load
from kvrag.model.source import ModelSource
from kvrag.progress import Progress
from kvrag.testing.models import tiny_model
from kvrag.testing.tokenizers import tiny_tokenizer

gguf = pytest.importorskip("gguf")
WRITER = Path(__file__).parents[2] / "benchmarks" / "gguf_file.py"
pytestmark = pytest.mark.skipif(
    not WRITER.is_file(), reason="the benchmarks are not here: run from a checkout"
)

CHUNK = "The keeper brings the box to the table by the window, and the reader asks for a key. " * 2
PROMPT = [{"role": "user", "content": f"{CHUNK}\n\nWho brings the box?"}]


def written(path: Path, *, seed: int = 0) -> Path:
    """Write a tiny model and its tokenizer as a GGUF file."""
    write_gguf = runpy.run_path(str(WRITER))["write_gguf"]
    model, tokenizer = tiny_model("qwen2", seed=seed), tiny_tokenizer(add_bos=False)
    tensors = ((name, tensor.numpy()) for name, tensor in model.state_dict().items())
    if model.config.tie_word_embeddings:
        tensors = ((name, values) for name, values in tensors if name != "lm_head.weight")
    about = json.loads(tokenizer.backend_tokenizer.to_str())
    config = {**model.config.to_dict(), "bos_token_id": 1, "eos_token_id": 2}
    write_gguf(path, config, about, tensors, chat_template=tokenizer.chat_template)
    return path


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("KVRAG_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "models").mkdir()
    return written(tmp_path / "models" / "tiny.gguf")


@pytest.fixture
def parses(monkeypatch) -> list[weakref.ref]:
    """Files parsed from now on, as references to what was parsed."""
    found: list[weakref.ref] = []
    real = gguf.GGUFReader._build_fields

    def noting(self, *args):
        found.append(weakref.ref(self.fields))
        return real(self, *args)

    monkeypatch.setattr(gguf.GGUFReader, "_build_fields", noting)
    return found


def started(file: Path, **options) -> KVRagEngine:
    """An engine of a start of its own: nothing is shared with other engines of this process."""
    kvrag.model.load._loaded.clear()
    engine = KVRagEngine.from_pretrained(file, **options)
    assert engine.loaded.encoder
    return engine


def kept(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "cache" / "weights"
    return sorted(folder.iterdir()) if folder.exists() else []


def logits(engine: KVRagEngine) -> torch.Tensor:
    return engine.prefill(PROMPT, mode="full").logits


# -- parsed once ---------------------------------------------------------------------------------


def test_a_load_parses_the_file_once_and_frees_what_it_parsed(file, parses):
    begin, names = gguf.GGUFReader.__init__, gguf.get_tensor_name_map
    engine = started(file)
    assert len(parses) == 1
    assert parses[0]() is None
    assert (gguf.GGUFReader.__init__, gguf.get_tensor_name_map) == (begin, names)
    own = tiny_model("qwen2")
    ids = torch.tensor([engine.tokenizer(CHUNK)["input_ids"]])
    with torch.no_grad():
        assert torch.equal(engine.loaded.lm.model(ids).logits, own(ids).logits)
    assert engine.tokenizer(CHUNK)["input_ids"] == tiny_tokenizer(add_bos=False)(CHUNK)["input_ids"]


def test_a_failed_load_leaves_no_trace(file, monkeypatch):
    begin = gguf.GGUFReader.__init__
    monkeypatch.setattr(kvrag.model.load, "_load_weights", raising(MemoryError))
    with pytest.raises(MemoryError):
        load(ModelSource(file))
    assert gguf.GGUFReader.__init__ is begin


def test_readers_of_other_threads_and_other_readers_parse_as_ever(file, parses):
    class Own(gguf.GGUFReader):
        pass

    found = []
    with parsed_once(file):
        first, second = gguf.GGUFReader(file), gguf.GGUFReader(file)
        assert second.fields is first.fields
        thread = threading.Thread(target=lambda: found.append(gguf.GGUFReader(file)))
        thread.start()
        thread.join()
        found += [Own(file), gguf.GGUFReader(file, "c")]
    assert isinstance(first, gguf.GGUFReader)
    assert len(parses) == 4
    for other in found:
        assert type(other.data).__name__ == "memmap"
        assert [tensor.name for tensor in other.tensors] == [t.name for t in first.tensors]


def test_what_is_parsed_is_what_gguf_parses(file):
    plain = gguf.GGUFReader(file)
    with parsed_once(file):
        once = gguf.GGUFReader(file)
    assert once.data.tobytes() == plain.data.tobytes()
    assert [f.contents() for f in once.fields.values()] == [
        f.contents() for f in plain.fields.values()
    ]


def test_loads_at_once_share_nothing(file, tmp_path, parses):
    others = [file, written(tmp_path / "models" / "other.gguf", seed=1)]
    found: dict[Path, torch.Tensor] = {}
    threads = [
        threading.Thread(target=lambda f=f: found.update({f: logits(started(f))})) for f in others
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(parses) == 2
    assert not torch.equal(*found.values())


def test_estimate_parses_once_whatever_it_reads(file, tmp_path, parses, monkeypatch):
    monkeypatch.setattr("kvrag.cli.estimate.prefill_tokens_per_s", lambda _: 100.0)
    (tmp_path / "text.md").write_text(CHUNK)
    options = ["--corpus", str(tmp_path / "text.md"), "--measure", "--kv-dir", str(tmp_path / "kv")]
    kvrag.model.load._loaded.clear()
    done = CliRunner().invoke(app, ["estimate", str(file), *options])
    assert done.exit_code == 0, done.output
    assert len(parses) == 1
    assert gguf.GGUFReader.__init__.__qualname__.startswith("GGUFReader")


# -- kept weights --------------------------------------------------------------------------------


def test_kept_weights_are_the_same_model(file, tmp_path, parses):
    plain = started(file)
    assert kept(tmp_path) == []
    first = started(file, cache_weights=True, kv_dir=tmp_path / "kv")
    (folder,) = kept(tmp_path)
    assert folder.stat().st_mode & 0o77 == 0
    first.precompute([CHUNK])
    del parses[:]
    second = started(file, cache_weights=True, kv_dir=tmp_path / "kv")
    assert parses == []
    assert second.loaded.fingerprint == first.loaded.fingerprint == plain.loaded.fingerprint
    assert torch.equal(logits(second), logits(plain))
    assert second.precompute([CHUNK]).skipped == 1
    assert second.generate(PROMPT, mode="stitch", max_new_tokens=1).cached_tokens
    texts = ("Ünï\n\n  <|im_end|> 12345", CHUNK)
    for name in ("chat_template", "eos_token_id", "bos_token_id", "pad_token_id"):
        assert getattr(second.tokenizer, name) == getattr(plain.tokenizer, name)
    for text in texts:
        ids = plain.tokenizer(text)["input_ids"]
        assert second.tokenizer(text)["input_ids"] == ids
        assert second.tokenizer.decode(ids) == plain.tokenizer.decode(ids)
    own = first.loaded.lm.model.generation_config.to_diff_dict()
    assert second.loaded.lm.model.generation_config.to_diff_dict() == own


def test_every_long_step_shows_its_progress(file, monkeypatch):
    shown = []

    class Shown(Progress):
        def __init__(self, what, *args, **options):
            shown.append(what)
            super().__init__(what, *args, **options)

    for module in (kvrag.model.load, kvrag.model.gguf.kept):
        monkeypatch.setattr(module, "Progress", Shown)
    for _ in range(2):
        started(file, cache_weights=True, prove="off")
    assert shown == [
        "parsing tiny.gguf",
        "dequantising tiny.gguf",
        "identifying the weights of tiny.gguf",
        "writing the dequantised weights of tiny.gguf",
        "loading the kept weights of tiny.gguf",
        "identifying the weights of tiny.gguf",
    ]


def test_kept_weights_are_used_on_request_alone(file, tmp_path, parses):
    started(file, cache_weights=True)
    started(file)
    assert len(parses) == 2


def _flip(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.seek(-100, os.SEEK_END)
        stream.write(b"\1\2\3\4")


def _cut(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 10_000)


def _rewrite(folder: Path) -> None:
    about = json.loads((folder / "kept.json").read_text())
    about["model"]["rope"] = "{}"
    (folder / "kept.json").write_text(json.dumps(about))


DAMAGE = {
    "flipped": _flip,
    "cut": _cut,
    "another model": _rewrite,
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "no account": lambda folder: (folder / "kept.json").unlink(),
    "half an account": lambda folder: os.truncate(folder / "kept.json", 40),
    "an empty account": lambda folder: (folder / "kept.json").write_text("{}"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_costs_time_alone(damage, file, tmp_path, parses, caplog):
    first = started(file, cache_weights=True)
    (folder,) = kept(tmp_path)
    DAMAGE[damage](folder)
    second = started(file, cache_weights=True)
    assert len(parses) == 2
    assert damage == "no account" or "the kept weights of tiny.gguf can't be used" in caplog.text
    assert second.loaded.fingerprint == first.loaded.fingerprint
    assert torch.equal(logits(second), logits(first))
    third = started(file, cache_weights=True)
    assert len(parses) == 2
    assert torch.equal(logits(third), logits(first))


@pytest.mark.parametrize("step", ["write", "rename"])
def test_a_full_disk_keeps_nothing_and_stops_nothing(step, file, tmp_path, monkeypatch, caplog):
    full = raising(OSError, errno.ENOSPC, os.strerror(errno.ENOSPC))

    def half(_, path, **__):
        Path(path).write_bytes(b"half")
        full()

    with monkeypatch.context() as patch:
        if step == "write":
            patch.setattr("safetensors.torch.save_model", half)
        else:
            patch.setattr(Path, "rename", full)
        engine = started(file, cache_weights=True)
    assert "are not kept (OSError: [Errno 28] No space left on device)" in caplog.text
    assert kept(tmp_path) == []
    assert engine.generate(PROMPT, max_new_tokens=1).text
    started(file, cache_weights=True)
    assert len(kept(tmp_path)) == 1


def test_what_reads_back_as_another_model_is_not_kept(file, tmp_path, monkeypatch, caplog):
    real = kvrag.model.gguf.kept._model_in

    def changed(*args):
        model = real(*args)
        with torch.no_grad():
            model.get_input_embeddings().weight[0, 0] += 1
        return model

    monkeypatch.setattr("kvrag.model.gguf.kept._model_in", changed)
    started(file, cache_weights=True)
    assert "weights change when they are written and read" in caplog.text
    assert kept(tmp_path) == []


def test_a_changed_file_replaces_what_was_kept_of_it(file, tmp_path, parses):
    first = started(file, cache_weights=True)
    copy = Path(shutil.copy(file, tmp_path / "models" / "copy.gguf"))
    written(file, seed=1)
    second = started(file, cache_weights=True)
    assert len(parses) == 2
    assert len(kept(tmp_path)) == 1
    assert second.loaded.fingerprint != first.loaded.fingerprint
    assert started(copy, cache_weights=True).loaded.fingerprint == first.loaded.fingerprint
    assert len(kept(tmp_path)) == 2


def test_dtypes_are_kept_apart(file, tmp_path):
    half = started(file, cache_weights=True, dtype="bfloat16")
    full = started(file, cache_weights=True)
    assert len(kept(tmp_path)) == 2
    again = started(file, cache_weights=True, dtype="bfloat16")
    assert again.loaded.lm.dtype == half.loaded.lm.dtype == torch.bfloat16
    assert again.loaded.fingerprint == half.loaded.fingerprint != full.loaded.fingerprint


def test_a_tokenizer_of_ones_own_stays_ones_own(file, tmp_path):
    own = tiny_tokenizer()
    for _ in range(2):
        engine = started(file, cache_weights=True, tokenizer=own)
        assert engine.tokenizer is own
    assert engine.loaded.fingerprint == started(file, tokenizer=own).loaded.fingerprint
    assert engine.loaded.fingerprint != started(file, cache_weights=True).loaded.fingerprint


# -- the option ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "words"), [(1, "cache_weights is 1; pass True or False")])
def test_the_option_is_a_switch(value, words, file):
    with pytest.raises(ConfigError, match=words):
        started(file, cache_weights=value)


def test_the_option_is_refused_where_nothing_is_dequantised(tiny_dir, tokenizer):
    for model in (tiny_dir, tiny_model()):
        with pytest.raises(ConfigError, match=r"weights of a \.gguf file, and .* is none"):
            load(ModelSource(model, tokenizer, cache_weights=True))


@pytest.mark.parametrize("how", ["flag", "environment"])
@pytest.mark.parametrize(
    "command",
    [
        ["ask", "Who?", "--max-new-tokens", "1"],
        ["verify"],
        ["estimate", "--measure"],
    ],
    ids=lambda command: command[0],
)
def test_commands_take_the_option(how, command, file, tmp_path, monkeypatch):
    monkeypatch.setattr("kvrag.cli.estimate.prefill_tokens_per_s", lambda _: 100.0)
    monkeypatch.setenv("KVRAG_MODEL", str(file))
    if how == "flag":
        command = [*command, "--cache-weights"]
    else:
        monkeypatch.setenv("KVRAG_CACHE_WEIGHTS", "1")
    monkeypatch.chdir(tmp_path)
    kvrag.model.load._loaded.clear()
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert len(kept(tmp_path)) == 1


def test_both_frameworks_take_the_option(file, tmp_path):
    chat = pytest.importorskip("langchain_kvrag").ChatKVRag(model=str(file), cache_weights=True)
    index = pytest.importorskip("llama_index.llms.kvrag").KVRagLLM(
        model=str(file), cache_weights=True
    )
    assert chat.engine.source.cache_weights
    assert index.engine.source.cache_weights


def test_directories_of_others_stay(file, tmp_path):
    """A user may keep models of their own beside the kept ones."""
    own = kvrag.cache.cache_dir() / "weights" / "my-llama"
    own.mkdir(parents=True)
    (own / "model.safetensors").write_bytes(b"mine")
    other = own.with_name("work.tmp")
    other.mkdir()
    os.utime(other, (0, 0))
    load(ModelSource(file, cache_weights=True, prove="off"))
    assert (own / "model.safetensors").read_bytes() == b"mine"
    assert other.is_dir()


def test_files_beside_that_cannot_be_read_cost_time_alone(file):
    (file.parent / "x.json").mkdir()
    (file.parent / "gone.json").symlink_to("nowhere")
    load(ModelSource(file, cache_weights=True, prove="off"))


def test_a_file_cut_short_is_an_error_in_a_sentence(file):
    whole = file.read_bytes()
    for size in (10, 40, 300, len(whole) // 2):
        file.write_bytes(whole[:size])
        with pytest.raises(ModelError, match="damaged"):
            load(ModelSource(file, prove="off"))
