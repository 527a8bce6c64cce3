"""GGUF files are parsed once per load, and can be saved as a folder that loads sooner."""

import json
import runpy
import threading
import weakref
from pathlib import Path

import pytest
import torch
from kit import raising
from typer.testing import CliRunner

import kvrag.model.load
from kvrag import KVRagEngine, ModelError
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


def written(path: Path, *, seed: int = 0, lacks: str = "nothing") -> Path:
    """Write a tiny model and its tokenizer as a GGUF file."""
    write_gguf = runpy.run_path(str(WRITER))["write_gguf"]
    model, tokenizer = tiny_model("qwen2", seed=seed), tiny_tokenizer(add_bos=False)
    out = ("lm_head.weight", lacks) if model.config.tie_word_embeddings else (lacks,)
    state = model.state_dict().items()
    tensors = ((n, tensor.numpy()) for n, tensor in state if not any(part in n for part in out))
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
    kvrag.model.load.LOADED.clear()
    engine = KVRagEngine.from_pretrained(file, **options)
    assert engine.loaded.encoder
    return engine


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
    (tmp_path / "text.md").write_text(CHUNK)
    options = ["--corpus", str(tmp_path / "text.md")]
    kvrag.model.load.LOADED.clear()
    done = CliRunner().invoke(app, ["estimate", str(file), *options])
    assert done.exit_code == 0, done.output
    assert len(parses) == 1
    assert gguf.GGUFReader.__init__.__qualname__.startswith("GGUFReader")


def test_every_long_step_shows_its_progress(file, monkeypatch):
    shown = []

    class Shown(Progress):
        def __init__(self, what, *args, **options):
            shown.append(what)
            super().__init__(what, *args, **options)

    monkeypatch.setattr(kvrag.model.load, "Progress", Shown)
    started(file, prove="off")
    assert shown == [
        "parsing tiny.gguf",
        "loading tiny.gguf",
        "identifying the weights of tiny.gguf",
    ]


def test_the_documented_folder_is_the_same_model(file, tmp_path, monkeypatch, parses):
    page = (WRITER.parents[1] / "docs" / "how-to" / "engine.md").read_text()
    section = page.partition("## Models in GGUF files")[2]
    monkeypatch.chdir(tmp_path)
    file = file.rename(file.with_name("qwen2.5-3b-q4_k_m.gguf"))
    exec(section.split("```")[1], {})
    plain = started(file)
    del parses[:]
    saved = started(tmp_path / "models" / "qwen2.5-3b")
    assert parses == []
    assert torch.equal(logits(saved), logits(plain))
    assert saved.tokenizer.chat_template == plain.tokenizer.chat_template
    assert saved.tokenizer(CHUNK)["input_ids"] == plain.tokenizer(CHUNK)["input_ids"]


def test_a_file_cut_short_is_an_error_in_a_sentence(file):
    whole = file.read_bytes()
    for size in (10, 40, 300, len(whole) // 2):
        file.write_bytes(whole[:size])
        with pytest.raises(ModelError, match="damaged"):
            load(ModelSource(file, prove="off"))
    with pytest.raises(ModelError, match=r"lack weights, such as model\.layers\.1\."):
        load(ModelSource(written(file, lacks="layers.1."), prove="off"))
