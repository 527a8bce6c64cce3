"""Passwords of shared stores are shown nowhere: not in what is printed, logged, raised or written down."""

import copy
import io
import json
import logging
import pickle
import traceback
from contextlib import closing
from dataclasses import asdict, replace

import pytest
from typer.testing import CliRunner

from kvrag import ConfigError, KVRagEngine, KVRagError, StoreConfig
from kvrag.cli.app import app
from kvrag.config.address import Address, redacted, revealed
from kvrag.store import open_store
from kvrag_ray import ServingConfig

SECRET = "s3cr3t"
ADDRESSES = [
    f"redis://user:{SECRET}@127.0.0.1:1/0",
    f"redis://:{SECRET}@127.0.0.1:1",
    f"rediss://user:{SECRET}%2F@127.0.0.1:1/0",
    f"redis://user:a@{SECRET}/#b c@127.0.0.1:1/0",
    f"redis://127.0.0.1:1?password={SECRET}",
    f"s3://KEY:{SECRET}@bucket/prefix",
    f"https://{SECRET}@127.0.0.1:1/kv",
    f"gopher://user:{SECRET}@host/kv",
    f"postgresql://user:{SECRET}@127.0.0.1:1/kv",
]


@pytest.fixture(autouse=True)
def logged():
    """Everything that is logged, debug lines too; checked when the test ends."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield stream
    root.removeHandler(handler)
    root.setLevel(level)
    assert SECRET not in stream.getvalue()


def raised(error: BaseException) -> str:
    """Return the whole traceback, causes included, without the lines of source code."""
    found = traceback.TracebackException.from_exception(error)
    return "\n".join(line for line in found.format() if not line.lstrip().startswith("File"))


@pytest.mark.parametrize("whole", ADDRESSES)
def test_an_address_shows_no_password_and_keeps_it(whole):
    hidden = Address(whole)
    for shown in (str(hidden), repr(hidden), f"{hidden}", json.dumps({"a": hidden}), hidden + ""):
        assert SECRET not in shown
    assert "127.0.0.1" in hidden or "bucket" in hidden or "host" in hidden
    for same in (pickle.loads(pickle.dumps(hidden)), copy.deepcopy(hidden), Address(hidden)):
        assert (same, revealed(same), hash(same)) == (hidden, whole, hash(whole))
    assert hidden == whole
    assert hidden != whole.replace(SECRET, "other")
    assert SECRET not in redacted(f"connecting to {hidden} failed")


@pytest.mark.parametrize("whole", ADDRESSES)
def test_a_config_shows_no_password_and_keeps_it(whole):
    config = StoreConfig(shared=whole, catalog=whole)
    for same in (
        config,
        replace(config, ram_bytes=1),
        pickle.loads(pickle.dumps(config)),
        StoreConfig(**asdict(config)),
    ):
        assert revealed(same.shared) == revealed(same.catalog) == whole
        assert SECRET not in f"{same} {same!r} {json.dumps(asdict(same))}"
    serving = ServingConfig(model="m", kv_dir=whole, store={"shared": whole})
    for same in (serving, pickle.loads(pickle.dumps(serving))):
        assert SECRET not in repr(same)
        assert revealed(asdict(same)["kv_dir"]) == revealed(same.store["shared"]) == whole


@pytest.mark.parametrize("whole", ADDRESSES)
def test_a_store_that_cannot_be_opened_or_asked_shows_no_password(whole, tmp_path):
    with pytest.raises(ConfigError, match="pass a kvrag") as refused:
        KVRagEngine.from_pretrained("./nowhere", store_config=whole)
    assert SECRET not in str(refused.value)
    for where, config in (
        (whole, StoreConfig()),
        (tmp_path / "copies", StoreConfig(shared=whole)),
        (f"file://{tmp_path}/bucket", StoreConfig(catalog=whole)),
    ):
        with (
            pytest.raises((KVRagError, OSError)) as failed,
            closing(open_store(where, config)) as store,
        ):
            _ = store.listed(), store.catalog.totals(), store.clear()
        assert SECRET not in raised(failed.value)


@pytest.mark.parametrize("whole", ADDRESSES[:2])
def test_an_engine_and_its_answers_show_no_password(whole, tiny_dir):
    pytest.importorskip("redis")
    with closing(KVRagEngine.from_pretrained(tiny_dir, kv_dir=whole)) as engine:
        result = engine.generate("Who?", max_new_tokens=1)
        shown = f"{engine!r} {engine.kv_dir} {engine.stats()} {result!r} {vars(engine)} {engine.explain('Who?')}"
    assert SECRET not in shown
    assert "redis://" in shown


@pytest.mark.parametrize("whole", ADDRESSES[:3])
def test_the_adapters_show_no_password(whole):
    chat = pytest.importorskip("langchain_kvrag").ChatKVRag(
        model="./m", kv_dir=whole, store_config={"shared": whole}
    )
    dumpd = pytest.importorskip("langchain_core.load").dumpd
    shown = f"{chat!r} {chat} {dumpd(chat)} {chat.model_dump_json(exclude={'model'})} {chat._identifying_params}"
    assert SECRET not in f"{shown} {chat._get_ls_params()} {chat.lc_attributes}"
    assert revealed(chat.kv_dir) == revealed(chat.model_copy(deep=True).kv_dir) == whole


@pytest.mark.parametrize("whole", ADDRESSES[:3])
def test_llama_indexs_serialised_form_shows_no_password_and_says_so(whole):
    llm = pytest.importorskip("llama_index.llms.kvrag").KVRagLLM(
        model="./m", kv_dir=whole, store_config={"shared": whole}
    )
    assert SECRET not in f"{llm!r} {llm} {llm.to_json()} {llm.to_dict()} {llm.model_dump_json()}"
    with pytest.raises(KVRagError, match="was left out where this address was written down"):
        open_store(type(llm).from_dict(llm.to_dict()).kv_dir, StoreConfig())


@pytest.mark.parametrize("where", ["option", "environment"])
@pytest.mark.parametrize(
    "command",
    [
        ["stats"],
        ["documents"],
        ["fsck"],
        ["gc"],
        ["rm", "--document", "a"],
        ["rm", "--all"],
        ["export", "x"],
        ["--debug", "stats"],
    ],
)
def test_commands_show_no_password(command, where, monkeypatch, tmp_path):
    pytest.importorskip("redis")
    monkeypatch.chdir(tmp_path)
    whole = ADDRESSES[0]
    if where == "environment":
        monkeypatch.setenv("KVRAG_KV_DIR", whole)
        monkeypatch.setenv("KVRAG_CATALOG", whole)
    named = ["--kv-dir", whole] if where == "option" else []
    done = CliRunner().invoke(app, [*command, *named])
    assert SECRET not in done.output
    assert done.exception is None or SECRET not in raised(done.exception)
    assert SECRET not in CliRunner().invoke(app, [*command[-1:], "--help"]).output
