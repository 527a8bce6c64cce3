"""Options that are misspelt; sizes with units; paths where there is nothing."""

import dataclasses

import pytest

from kvrag import (
    ConfigError,
    KVRagEngine,
    ModelError,
    RepairConfig,
    Retention,
    SamplingConfig,
    StoreConfig,
)
from kvrag.config import as_config, unknown_option
from kvrag.config.spelling import parse_bytes
from kvrag_server.config import ServerConfig

CONFIGS = (RepairConfig, StoreConfig, SamplingConfig, Retention)


@pytest.mark.parametrize(
    ("config", "name", "meant"),
    [
        (RepairConfig, "recompute_ration", "recompute_ratio"),
        (SamplingConfig, "max_tokn", "max_new_tokens"),
        (SamplingConfig, "temprature", "temperature"),
        (StoreConfig, "ram_byte", "ram_bytes"),
        (Retention, "prio", "priority"),
    ],
)
def test_the_option_that_was_meant_is_named(config, name, meant):
    for make in (
        lambda: config(**{name: 1}),
        lambda: dataclasses.replace(config(), **{name: 1}),
        lambda: as_config(config, {name: 1}, option="it"),
    ):
        with pytest.raises(
            ConfigError, match=f"{config.__name__} has no option '{name}'; did you mean '{meant}'"
        ):
            make()


@pytest.mark.parametrize(
    ("config", "name", "place"),
    [
        (StoreConfig, "kv_dir", "kv_dir=... to the engine"),
        (StoreConfig, "recompute_ratio", "repair=RepairConfig(recompute_ratio=...)"),
        (RepairConfig, "disk_bytes", "store_config=StoreConfig(disk_bytes=...)"),
        (RepairConfig, "max_new_tokens", "generate(..., max_new_tokens=...)"),
        (SamplingConfig, "priority", "retention=Retention(priority=...)"),
    ],
)
def test_an_option_of_another_config_is_sent_there(config, name, place):
    with pytest.raises(ConfigError, match="has no option") as refused:
        config(**{name: 1})
    assert str(refused.value).endswith(f"pass {place}")


def test_without_a_name_like_it_all_options_are_listed():
    known = {field.name for config in CONFIGS for field in dataclasses.fields(config)}
    assert "known options: " in str(unknown_option("zzz", known, of="x"))


@pytest.mark.parametrize("name", ["kv_dirr", "recompute_ratio", "strategy"])
def test_an_engine_refuses_other_names_before_it_looks_for_a_model(name):
    for make in (KVRagEngine.from_pretrained, KVRagEngine.get):
        with pytest.raises(ConfigError, match=f"has no option '{name}'"):
            make("./nowhere", **{name: "x"})


def test_a_dict_with_odd_keys_is_refused_in_a_sentence():
    with pytest.raises(ConfigError, match="RepairConfig has no option '1'"):
        as_config(RepairConfig, {1: 2}, option="repair")


# -- sizes -----------------------------------------------------------------------------------------------------------------------


SIZES = [field.name for field in dataclasses.fields(StoreConfig) if field.name.endswith("_bytes")]


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 * 2**30), ("50MB", 50 * 10**6), ("1.5 kb", 1500), ("7", 7), (" 1T ", 10**12)],
)
def test_every_size_takes_a_unit(name, text, size):
    made = StoreConfig(**{name: text})
    assert getattr(made, name) == size
    assert made == StoreConfig(**{name: size})
    assert as_config(StoreConfig, {name: text}, option="store_config") == made


def test_the_servers_size_takes_a_unit_too():
    assert ServerConfig(max_body_bytes="8MiB").max_body_bytes == 8 * 2**20
    with pytest.raises(ConfigError, match="no size"):
        ServerConfig(max_body_bytes="large")
    assert parse_bytes(5) == 5


# -- paths of models -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("./models/qwen", "the directory './models/qwen' of the model does not exist"),
        ("/x/y.gguf", "the GGUF file '/x/y.gguf' of the model does not exist"),
        ("C:\\models\\qwen", "models.*of the model does not exist"),
        ("~/models/qwen", "the directory '.*/models/qwen' of the model does not exist"),
        ("a/b/c", "the directory 'a/b/c' of the model does not exist"),
        ("", "the directory '' of the model does not exist"),
    ],
)
def test_a_path_where_nothing_is_says_so(path, words, tiny_dir):
    for make in (KVRagEngine.from_pretrained, KVRagEngine.get):
        with pytest.raises(ModelError, match=words) as refused:
            make(path)
        assert "hub that can be reached" not in str(refused.value)
    with pytest.raises(
        ModelError, match=words.replace("model does", "tokenizer does").replace("of the model", "")
    ):
        KVRagEngine.from_pretrained(tiny_dir, tokenizer=path)


def test_a_path_where_something_else_is_says_what(tmp_path):
    (tmp_path / "notes.txt").write_text("a note")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tiny.gguf").write_bytes(b"")
    cases = {
        tmp_path / "notes.txt": "is a file; pass the directory",
        tmp_path: "holds no config.json, so it is no model; it holds notes.txt, weights",
        tmp_path / "weights": r"name the file: .*tiny\.gguf",
    }
    for path, words in cases.items():
        with pytest.raises(ModelError, match=words):
            KVRagEngine.from_pretrained(path)


def test_a_name_of_the_hub_is_left_to_the_hub():
    with pytest.raises(ModelError, match="no such directory here, and no such model of the hub"):
        KVRagEngine.from_pretrained("nobody/no-such-model")
