"""How commands are called and what they write: the model first, one name for one thing, on every kind of terminal, faults in sentences."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit import all_answers_are_right
from texts import make_chunks
from typer.testing import CliRunner

import kvrag.cli.app
from kvrag.cli.app import app
from kvrag.cli.options import EngineGroup
from kvrag.errors import InputError
from kvrag.model import load as load_module

CHUNKS = make_chunks(3, words=30, seed=7)
SIGNS = "Käse – “so” × ± · … ‖ 漢字 🙂 \u2063"


@pytest.fixture
def place(tmp_path, monkeypatch, tiny_dir):
    """A directory to run commands in, with notes to precompute and a prompt."""
    monkeypatch.chdir(tmp_path)
    all_answers_are_right(monkeypatch)
    for name in ("KVRAG_MODEL", "KVRAG_KV_DIR", "KVRAG_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "notes.md").write_text("\n\n".join([*CHUNKS, f"{SIGNS} {CHUNKS[0]}"]), "utf-8")
    (tmp_path / "prompt.json").write_text(
        json.dumps([{"role": "user", "content": f"{CHUNKS[0]}\n\nWho?"}])
    )
    (tmp_path / "prompts.jsonl").write_text(json.dumps(f"{CHUNKS[1]}\n{CHUNKS[0]} Who?"))
    return tmp_path


def run(*args, **options):
    return CliRunner().invoke(app, [str(arg) for arg in args], **options)


# -- MODEL -----------------------------------------------------------------------------------------------------------------------

FORMS = {
    "precompute": ["notes.md"],
    "ask": ["Who?", "--max-new-tokens", "1"],
    "ask --prompt-file prompt.json": ["--max-new-tokens", "1"],
    "explain": ["prompt.json"],
    "verify": ["prompts.jsonl", "--max-new-tokens", "1", "--strategy", "all"],
    "estimate": [],
    "calibrate --corpus notes.md --chunk-tokens 40 --no-keep --prompts 2 --chunks 2": [
        "--chat-template-kwargs",
        "{}",
    ],
}
"""Commands that take a model, and what follows it."""


@pytest.mark.parametrize(
    "how", ["first", "option", "short", "environment", "both", "over the environment"]
)
@pytest.mark.parametrize("command", FORMS)
def test_a_model_comes_first_or_is_named(command, how, place, tiny_dir, monkeypatch):
    run("precompute", tiny_dir, "notes.md")
    command, *flags = command.split()
    args = [*FORMS[" ".join([command, *flags])], *flags]
    if how in ("first", "both", "over the environment"):
        args = [tiny_dir, *args]
    if how in ("environment", "both", "over the environment"):
        monkeypatch.setenv(
            "KVRAG_MODEL", "./nowhere" if how == "over the environment" else tiny_dir
        )
    if how in ("option", "short"):
        args += ["--model" if how == "option" else "-m", tiny_dir]
    done = run(command, *args, "--json")
    assert done.exit_code in ((0, 1) if command in ("verify", "calibrate") else (0,)), done.output
    assert json.loads(done.stdout), "not refused"


def test_verify_takes_a_model_alone_and_prompts(place, tiny_dir, monkeypatch):
    assert "proof" in json.loads(run("verify", tiny_dir, "--json").stdout)
    assert "rows" in json.loads(run("verify", tiny_dir, "prompts.jsonl", "--json").stdout)
    monkeypatch.setenv("KVRAG_MODEL", tiny_dir)
    assert "proof" in json.loads(run("verify", "--json").stdout)
    assert "rows" in json.loads(run("verify", "prompts.jsonl", "--json").stdout)


class Context:
    info_name = "precompute"

    def __init__(self, source):
        self.source = source

    def get_parameter_source(self, _):
        return type("Source", (), {"name": self.source})


@pytest.mark.parametrize(
    ("words", "source", "most", "model", "rest"),
    [
        (["owner/name", "docs"], None, None, "owner/name", ["docs"]),
        (["owner/name", "docs"], "ENVIRONMENT", None, "owner/name", ["docs"]),
        (["docs", "more"], "ENVIRONMENT", None, "named", ["docs", "more"]),
        (["docs/a.md"], "ENVIRONMENT", None, "named", ["docs/a.md"]),
        (["owner/name", "docs"], "COMMANDLINE", None, "named", ["owner/name", "docs"]),
        (["question"], "ENVIRONMENT", 1, "named", ["question"]),
        (["owner/name"], "ENVIRONMENT", 1, "named", ["owner/name"]),
        (["m", "question"], "ENVIRONMENT", 1, "m", ["question"]),
        (["m"], "ENVIRONMENT", 0, "m", []),
        (["m"], None, 1, "m", []),
        (None, "ENVIRONMENT", None, "named", []),
    ],
)
def test_which_argument_is_the_model(words, source, most, model, rest, place):
    (place / "docs").mkdir()
    engine = EngineGroup() if source is None else EngineGroup(model="named")
    assert engine.name_model(Context(source), words, most=most) == rest
    assert engine["model"] == model


def test_a_model_that_is_missing_is_asked_for(place):
    for words, said in (
        (["notes.md"], "'notes.md' is no model"),
        ([], "pass a model, as in: kvrag precompute MODEL"),
    ):
        with pytest.raises(InputError, match=said):
            EngineGroup().name_model(Context(None), words, most=None)
    assert "pass a model and a question" in run("ask", "Who?").stderr


# -- one name for one thing ------------------------------------------------------------------------------------------------------


def test_other_names_of_options_are_understood(place, tiny_dir):
    args = ["ask", tiny_dir, "Who?", "-c", "notes.md", "--json"]
    told = [
        json.loads(run(*args, *options).stdout)["token_ids"]
        for options in (["--max-new-tokens", "2"], ["--max-tokens", "2"], ["--max-tokens=2"])
    ]
    assert told[0] == told[1] == told[2]
    assert len(told[0]) <= 2
    refused = run("ask", tiny_dir, "Who?", "--ratio", "7")
    assert "--recompute-ratio is 7" in refused.stderr
    for command in ("ask", "explain", "verify"):
        helped = run(command, "--help", env={"COLUMNS": "200"}).stdout
        assert "--recompute-ratio" in helped
        assert "MODEL" in helped
    assert "too many" in run("ask", tiny_dir, "a", "--", "--ratio").stderr, (
        "behind -- nothing is an option"
    )


# -- every kind of terminal ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "ascii:strict"])
def test_commands_write_to_terminals_of_any_encoding(place, tiny_dir, encoding):
    env = {
        **os.environ,
        "PYTHONIOENCODING": encoding,
        "LANG": "C",
        "PYTHONUTF8": "0",
        "KVRAG_KV_DIR": "kv",
    }
    script = """
import sys
from kvrag.cli import app
from kvrag.cli.output import write_anything
write_anything()
for line in sys.argv[1:]:
    try:
        app.app(line.split("|"), standalone_mode=False)
    except SystemExit:
        pass
"""
    lines = [
        f"precompute|{tiny_dir}|notes.md",
        f"ask|{tiny_dir}|{SIGNS}|-c|notes.md|--max-new-tokens|2",
        f"ask|{tiny_dir}|{SIGNS}|--max-new-tokens|2|--json",
        f"explain|{tiny_dir}|{SIGNS}|-c|notes.md",
        f"explain|{tiny_dir}|{SIGNS}|-c|notes.md|--json",
        f"verify|{tiny_dir}|prompts.jsonl|--max-new-tokens|1",
        f"estimate|{tiny_dir}",
        "estimate|llama-3.1-8b|--chunks|9",
        "stats",
        "documents",
        "fsck",
        "gc",
        f"rm|--document|{SIGNS}",
        "ask|--help",
        "stats|--kv-dir|nowhere-Käse",
    ]
    done = subprocess.run(
        [sys.executable, "-c", script, *lines], env=env, cwd=place, capture_output=True, timeout=300
    )
    assert b"UnicodeEncodeError" not in done.stderr, done.stderr.decode("utf-8", "replace")[-2000:]
    assert b"Traceback" not in done.stderr, done.stderr.decode("utf-8", "replace")[-2000:]
    name = encoding.partition(":")[0]
    done.stdout.decode(name)
    shown = done.stderr.decode(name)
    assert "How the answer was made" in shown
    assert (
        b"layers ? 2 KV heads" in done.stdout
        if name == "ascii"
        else "layers × 2 KV heads" in done.stdout.decode(name)
    )


def test_files_of_windows_editors_and_input_of_any_terminal_are_read(place, tiny_dir):
    content = json.dumps([{"role": "user", "content": "Käse?"}], ensure_ascii=False)
    (place / "marked.json").write_text(content, "utf-8-sig")
    spans = json.loads(run("explain", tiny_dir, "marked.json", "--json").stdout)["spans"]
    assert spans[-1]["text"].count("Käse?") == 1
    assert "role" not in "".join(span["text"] for span in spans)
    piped = json.loads(run("explain", tiny_dir, "--json", input=content.encode()).stdout)
    assert piped["spans"] == spans
    assert (
        "standard input is not UTF-8 text"
        in run("explain", tiny_dir, input="Käse".encode("latin-1")).stderr
    )


# -- faults ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        ["precompute", "MODEL", "locked"],
        ["ask", "MODEL", "--prompt-file", "folder"],
        ["ask", "MODEL", "Who?", "-c", "gone.md"],
        ["explain", "MODEL", "folder"],
        ["verify", "MODEL", "folder.jsonl"],
        ["calibrate", "MODEL", "--corpus", "gone"],
        ["precompute", "MODEL", "notes.md", "--kv-dir", "notes.md"],
        ["precompute", "MODEL", "notes.md", "--kv-dir", "notes.md/kv"],
        ["export", "notes.md/x", "--kv-dir", "kv"],
        ["import", "gone", "--kv-dir", "kv"],
        ["import", "folder", "--kv-dir", "kv"],
        ["precompute", "MODEL", "notes.md", "--kv-dir", "gopher://host"],
    ],
    ids=lambda args: " ".join(args),
)
def test_a_fault_of_the_input_is_a_sentence(args, place, tiny_dir):
    (place / "folder").mkdir()
    (place / "folder.jsonl").mkdir()
    run("precompute", tiny_dir, "notes.md", "--kv-dir", "kv")
    done = run(*[tiny_dir if arg == "MODEL" else arg for arg in args])
    assert done.exit_code in (1, 2)
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.stderr.strip().splitlines()[-1].startswith("kvrag: ")


@pytest.mark.parametrize(
    ("given", "said"),
    [("{", "is no JSON"), ("[1]", "is [1]; pass a dict"), ('{"tools": []}', "holds 'tools'")],
)
def test_a_fault_of_template_variables_is_the_one_that_is_said(given, said, place, tiny_dir):
    done = run("ask", tiny_dir, "Who?", "--chat-template-kwargs", given)
    assert said in done.stderr
    assert ("no JSON" in done.stderr) is (given == "{")


def test_a_fault_of_the_system_names_the_file(place, monkeypatch):
    def fail(*_, **__):
        raise PermissionError(13, "Permission denied", str(Path("kv") / "lock"))

    monkeypatch.setattr("kvrag.cli.store._check_is_store", fail)
    done = run("stats")
    assert done.exit_code == 2
    assert done.stderr.startswith(
        "kvrag: 'kv/lock': Permission denied; check the path and its rights"
    )
    assert isinstance(run("--debug", "stats").exception, PermissionError)


def test_the_program_prepares_its_output(monkeypatch):
    called = []
    monkeypatch.setattr(kvrag.cli.app, "write_anything", lambda: called.append("prepared"))
    monkeypatch.setattr(kvrag.cli.app, "app", lambda: called.append("run"))
    kvrag.cli.app.main()
    assert called == ["prepared", "run"]


@pytest.mark.parametrize("command", ["ask", "explain", "verify"])
def test_a_mode_that_is_none_is_refused_before_a_model_is_looked_for(command):
    found = CliRunner().invoke(app, [command, "no/such/model", "Who?", "--mode", "stich"])
    assert found.exit_code == 2
    assert "kvrag: mode is 'stich'; it must be one of auto" in " ".join(found.output.split())
    assert "does not exist" not in found.output


BAD_OPTIONS = [
    ["ask", "Who?", "--temperature", "-1"],
    ["ask", "Who?", "--temperature", "nan"],
    ["ask", "Who?", "--recompute-ratio", "7"],
    ["ask", "Who?", "--strategy", "qury"],
    ["ask", "Who?", "--repair", "fst"],
    ["ask", "Who?", "--dtype", "floaty"],
    ["ask", "Who?", "--prefix", "a", "--system", "b"],
    ["ask", "Who?", "-c", "gone.md"],
    ["precompute", "notes.md", "--kv-dtype", "int3"],
    ["precompute", "notes.md", "--chunk-context", "default:some"],
    ["calibrate", "--corpus", "notes.md", "--prompts", "2"],
    ["serve", "--port", "70000"],
    ["serve", "--cors-origin", "nowhere"],
    ["serve", "--device", "cuda:99"],
]


@pytest.mark.parametrize("args", BAD_OPTIONS, ids=" ".join)
def test_a_bad_option_is_refused_before_the_weights_load(args, place, tiny_dir, monkeypatch):
    loaded = []
    monkeypatch.setattr(load_module, "_load_weights", loaded.append)
    command, *rest = args
    assert CliRunner().invoke(app, [command, tiny_dir, *rest]).exit_code == 2
    assert not loaded
