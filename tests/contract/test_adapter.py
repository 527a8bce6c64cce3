"""What an adapter can count on, shown by a small one over ``kvrag`` and ``kvrag.adapters`` alone.

To test an adapter of your own, copy this file and put your classes in the place of ``Model`` and ``Shelf``: it needs pytest and kvrag.
"""

import ast
from pathlib import Path
from typing import Any, ClassVar

import pytest

import kvrag.adapters
from kvrag import ConfigError, Explanation, GenerationResult, InputError, KVRagEngine
from kvrag.adapters import DocumentKV, EngineFields, RemoteHost
from kvrag.testing.models import save_tiny_model

TEXTS = {
    "a": "The archive of the harbour is in the old customs house, and Mara keeps its only copper key.",
    "b": "Every ledger of the mill was bound in green cloth, and the last of them was lost in a flood.",
    "c": "Two ferries cross the sound in winter, one in the morning, and one when the lamps are lit.",
}
OTHER = (
    "The archive was moved to the town hall in spring, and its key is kept by the night watchman."
)


class Model(EngineFields):
    """A model of a framework that calls the bound of an answer ``most``."""

    aliases: ClassVar[dict[str, str]] = {"max_new_tokens": "most"}
    most: int = 4

    @property
    def engine(self) -> KVRagEngine:
        return self.open_engine(prefix=self.prefix)

    def answer(self, prompt: str, **options: Any) -> GenerationResult:
        asked = {**self.request_options(), "max_new_tokens": self.most, **options}
        self.check_call(asked)
        return self.engine.generate(prompt, **asked)

    def _explained(self, prompt: Any, options: dict[str, Any]) -> Explanation:
        given = {name: value for name, value in options.items() if value is not None}
        return self.engine.explain(prompt, **given)


class Shelf:
    """A vector store of a framework that keeps the KV of its documents in step."""

    def __init__(self, llm: Any, **options: Any) -> None:
        self.kv = DocumentKV(llm, **options)
        self.held = dict[str, str]()

    def add(self, documents: dict[Any, str]) -> None:
        named = {DocumentKV.id_text(name): text for name, text in documents.items()}
        self.kv.delete(self.kv.changed(named.items()))
        self.kv.precompute(list(named.values()), ids=list(named))
        self.held |= named

    def remove(self, *names: str) -> None:
        self.kv.delete(names)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def llm(model_dir, tmp_path):
    made = Model(model=model_dir, kv_dir=tmp_path / "kv", prefix="Read.\n", prove="off")
    yield made
    made.engine.close()


def hits(llm: Any, text: str, **options: Any) -> int:
    return llm.explain(f"Read.\n{text}\n\nWho?", **options).hits


# -- models ------------------------------------------------------------------------------------------


def test_options_are_fields_and_reach_the_engine(llm, model_dir, tmp_path):
    assert llm.engine is llm.engine
    assert llm.engine.kv_dir == str(tmp_path / "kv")
    assert llm.engine_options()["namespace"] == "default"
    assert Model(model=model_dir, temperature=0.5).request_options()["temperature"] == 0.5
    assert llm.source.name == model_dir


def test_answers_take_the_options_of_a_call(llm):
    assert len(llm.answer("Who?").token_ids) <= 4
    assert len(llm.answer("Who?", max_new_tokens=2).token_ids) <= 2
    assert llm.answer("Who?", mode="full").exactness == "full"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temprature": 0.5}, "did you mean 'temperature'"),
        ({"max_new_tokenz": 3}, "did you mean 'most'"),
        ({"kv_dir": "elsewhere"}, "is no option of a call; pass Model"),
        ({"mode": "fast"}, "mode is 'fast'"),
        ({"top_p": 2.0}, "Model.top_p"),
    ],
)
def test_a_wrong_option_of_a_call_is_answered_in_words(llm, options, said):
    with pytest.raises(ConfigError, match=said):
        llm.answer("Who?", **options)


def test_unknown_options_of_a_model_are_named(model_dir):
    (fault,) = Model.unknown_options(["model", "most", "watermark"])
    assert "Model has no option 'watermark'" in str(fault)
    with pytest.raises(ConfigError, match="did you mean 'device'"):
        Model.unknown_options(["devise"])
    with pytest.raises(ConfigError, match="pass it to the store"):
        Model.unknown_options(["encryption_key"])
    with pytest.raises(ConfigError, match=r"no_such|did you mean"):
        Model(model=model_dir).explain("Who?", namspace="x")


def test_the_window_is_known_before_the_model_is_loaded(llm):
    assert llm.source.window() == llm.engine.loaded.lm.context_window
    assert Model(model="no/model").source.window() == 0


# -- documents ---------------------------------------------------------------------------------------


def test_documents_have_kv_while_they_are_held(llm):
    shelf = Shelf(llm, collection="shelf")
    shelf.add(TEXTS)
    assert [hits(llm, text) for text in TEXTS.values()] == [1, 1, 1]
    assert llm.engine.document_ids(collection="shelf") == ["shelf/a", "shelf/b", "shelf/c"]
    shelf.remove("b")
    assert [hits(llm, text) for text in TEXTS.values()] == [1, 0, 1]


def test_a_replaced_document_loses_the_kv_of_its_former_text(llm):
    shelf = Shelf(llm)
    shelf.add(TEXTS)
    assert shelf.kv.changed(TEXTS.items()) == []
    shelf.add({"a": OTHER})
    assert hits(llm, OTHER) == 1
    assert hits(llm, TEXTS["a"]) == 0


def test_namespaces_and_collections_are_apart(llm):
    tenant = Shelf(llm, namespace="tenant", collection="one")
    tenant.add({"a": TEXTS["a"]})
    assert hits(llm, TEXTS["a"]) == 0
    assert hits(llm, TEXTS["a"], namespace="tenant") == 1
    keys = {
        DocumentKV(llm, **where).space for where in ({}, {"namespace": "t"}, {"collection": "t"})
    }
    assert len(keys) == 3


def test_a_prefetch_never_raises(llm):
    shelf = Shelf(llm)
    shelf.add(TEXTS)
    shelf.kv.prefetch(list(TEXTS.values()))
    shelf.kv.prefetch([object()])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"collection": "/"}, InputError),
        ({"collection": 3}, InputError),
        ({"show_progress": "yes"}, ConfigError),
    ],
)
def test_wrong_options_are_refused_at_once(llm, options, error):
    with pytest.raises(error):
        DocumentKV(**{"llm": llm, **options})
    DocumentKV(None)  # a model may come later


def test_an_llm_is_opened_and_checked_when_it_is_needed():
    kv = DocumentKV(object())
    with pytest.raises(ConfigError, match="of type object"):
        _ = kv.host


def test_ids_are_text():
    assert [DocumentKV.id_text(name) for name in ("a", 7)] == ["a", "7"]
    with pytest.raises(InputError, match="pass a string"):
        DocumentKV.id_text(None)


def test_a_remote_host_stands_in_the_place_of_an_engine():
    host = Remote()
    shelf = Shelf(host)
    shelf.add(TEXTS)
    shelf.remove("a")
    assert host.asked == ["precompute", "delete a"]
    assert shelf.kv.host is host
    with pytest.raises(ConfigError, match="a server reads KV when the prompt arrives"):
        _ = shelf.kv.engine
    with pytest.raises(ConfigError, match="no namespaces"):
        DocumentKV(host, namespace="x")


class Remote(RemoteHost):
    """A holder of KV that keeps what it is asked for."""

    base_url = "http://remote"

    def __init__(self) -> None:
        self.asked = list[str]()

    def precompute(self, texts: Any, **options: Any) -> Any:
        self.asked.append("precompute")
        return kvrag.PrecomputeReport(len(texts), 0, [], 0, 0.0)

    def delete(self, ids: Any = None, **_: Any) -> int:
        self.asked += [f"delete {name}" for name in ids]
        return len(ids)

    def document_ids(self, **_: Any) -> list[str]:
        return []

    def check_options(self, **options: object) -> None:
        if options.get("namespace") is not None:
            raise ConfigError("the remote host has no namespaces; leave namespace out")


# -- names -------------------------------------------------------------------------------------------


def test_this_file_needs_no_other_names():
    modules = {
        node.module
        for node in ast.walk(ast.parse(Path(__file__).read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvrag")
    }
    assert modules == {"kvrag", "kvrag.adapters", "kvrag.testing.models"}
    assert all(hasattr(kvrag.adapters, name) for name in kvrag.adapters.__all__)
