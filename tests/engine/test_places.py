"""Paths are resolved once: a later change of the working directory changes no place, and ~ is the home."""

import os
import pickle

import pytest

from kvrag.adapters import ModelSource
from kvrag.cache import VARIABLE, cache_dir
from kvrag.config.address import check_kv_dir, local, place
from kvrag_ray.config import ServingConfig


@pytest.fixture
def two(tmp_path, monkeypatch):
    """Two directories, of which the first is the working directory."""
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    monkeypatch.chdir(one)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "model").mkdir(parents=True)
    (one / "model").mkdir()
    return one, other


@pytest.mark.parametrize(
    "resolve", [check_kv_dir, place, lambda path: ServingConfig(model="m", kv_dir=path).kv_dir]
)
def test_directories_of_kv_are_resolved_once(two, tmp_path, resolve):
    assert resolve("./kv") == resolve("kv") == str(two[0] / "kv")
    assert resolve("~/kv") == str(tmp_path / "home" / "kv")
    assert resolve("redis://host:1/0") == "redis://host:1/0"


def test_models_are_resolved_once_and_hub_ids_stay(two, tmp_path):
    source = ModelSource("./model", tokenizer="~/model")
    os.chdir(two[1])
    assert source.model == str(two[0] / "model")
    assert source.tokenizer == str(tmp_path / "home" / "model")
    assert local("owner/name") == "owner/name"


def test_the_cache_of_the_user_stays_where_it_was(two, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "cache-of-this-test")
    first = cache_dir()
    os.chdir(two[1])
    assert cache_dir() == first == two[0] / "cache-of-this-test"
    monkeypatch.setenv(VARIABLE, "~/cache")
    assert cache_dir() == tmp_path / "home" / "cache"


def test_langchain_models_fix_their_places(two):
    from langchain_kvrag import ChatKVRag

    llm = ChatKVRag(model="./model", kv_dir="kv")
    os.chdir(two[1])
    assert (llm.model, llm.kv_dir) == (str(two[0] / "model"), str(two[0] / "kv"))


def test_llama_index_models_and_tables_fix_their_places(two):
    from llama_index.llms.kvrag import KVRagLLM
    from llama_index.vector_stores.kvrag.refs import RefTable

    llm = KVRagLLM(model="./model", kv_dir="kv")
    table = RefTable("kv")
    os.chdir(two[1])
    assert (llm.model, llm.kv_dir) == (str(two[0] / "model"), str(two[0] / "kv"))
    assert pickle.loads(pickle.dumps(table))._path == table._path
