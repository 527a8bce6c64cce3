"""Options of remote models, cached answers, thoughts in a history, and vector stores of other packages."""

import warnings
from types import SimpleNamespace

import pytest
from kit import Forwards, kept
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AIMessage
from langchain_core.vectorstores import InMemoryVectorStore

from kvrag import StoreConfig
from kvrag.testing.models import save_tiny_model
from langchain_kvrag import ChatKVRag, KVRagLLM, KVRagVectorStore


@pytest.mark.parametrize("cls", [ChatKVRag, KVRagLLM])
def test_standard_parameters_that_ask_for_nothing_in_process_are_taken_without_a_word(cls, options):
    given = {
        "max_retries": 2,
        "api_key": "secret",
        "timeout": 60,
        "stop": [],
        "temperature": 0,
        "n": 1,
        "stream_usage": True,
    }
    inherited = {
        "cache": False,
        "callbacks": [],
        "tags": ["a"],
        "metadata": {"b": 1},
        "verbose": False,
    }
    if cls is ChatKVRag:
        inherited |= {"rate_limiter": None, "disable_streaming": False}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = cls(**options, **given, **inherited)
        expected = cls(**options).invoke("Who?")
    assert made.invoke("Who?", max_retries=3, api_key="secret") == expected or cls is ChatKVRag
    assert "secret" not in f"{made!r} {made.model_dump()} {made._identifying_params}"


@pytest.mark.parametrize("cls", [ChatKVRag, KVRagLLM])
def test_none_is_what_was_not_given(cls, options):
    defaults = cls(**options)
    # No context is a choice.
    names = cls.model_fields.keys() - {"model", "kv_dir", "max_tokens", "context"}
    assert cls(**options, **dict.fromkeys(names)).model_dump() == defaults.model_dump()


@pytest.mark.parametrize("name", ["model", "model_name", "model_id"])
@pytest.mark.parametrize("cls", [ChatKVRag, KVRagLLM])
def test_a_call_names_another_model_by_any_name(cls, name, options, tmp_path):
    place = save_tiny_model(tmp_path / "other", seed=1)
    template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    (tmp_path / "other" / "chat_template.jinja").write_text(template)
    asked = cls(**options)
    other = cls(**{**options, "model": str(place)})
    answers = [
        model.generate_prompt([*map(model._convert_input, ("Who?", [("human", "Who?")]))], **call)
        for model, call in ((asked, {name: str(place)}), (other, {}))
    ]
    first, second = ([each[0].text for each in answer.generations] for answer in answers)
    assert first == second
    assert answers[0].llm_output["model_name"] == other.model_name


@pytest.mark.parametrize("cls", [ChatKVRag, KVRagLLM])
def test_a_time_limit_ends_an_answer(cls, options, monkeypatch):
    model = cls(**{**options, "max_tokens": 400})
    model.invoke("Who?", max_tokens=1)  # loads it
    forwards = Forwards(monkeypatch, seconds=0.02)
    for ask in (model.invoke, lambda prompt, **given: list(model.stream(prompt, **given))):
        with pytest.raises(TimeoutError, match=r"longer than timeout=0.1 s"):
            ask("Who?", timeout=0.1)
        with pytest.raises(TimeoutError, match=r"longer than timeout=0.1 s"):
            ask("Who?", request_timeout=0.1)
    assert 2 <= forwards.settled() < 400
    assert cls(**options, timeout=600).invoke("Who?")


async def test_a_time_limit_ends_an_answer_in_an_event_loop(options, monkeypatch):
    model = ChatKVRag(**{**options, "max_tokens": 400, "timeout": 0.1})
    model.engine.loaded  # noqa: B018
    forwards = Forwards(monkeypatch, seconds=0.02)
    with pytest.raises(TimeoutError, match=r"longer than timeout=0.1 s"):
        await model.ainvoke("Who?")
    with pytest.raises(TimeoutError, match=r"longer than timeout=0.1 s"):
        _ = [chunk async for chunk in model.astream("Who?")]
    assert forwards.settled() < 400


def test_the_response_cache_tells_stores_apart(options, tmp_path):
    """An answer from rounded KV, or from another directory's, is not that of an exact engine."""
    cache, rounded = InMemoryCache(), StoreConfig(kv_dtype="int8", encryption_key=lambda: b"k" * 32)
    others = (
        {"kv_dir": str(tmp_path / "b")},
        {"store_config": StoreConfig(kv_dtype="int8")},
        {"context": None},
    )
    keys = [
        str(ChatKVRag(**{**options, **other}, cache=cache)._identifying_params)
        for other in ({}, *others)
    ]
    assert len(set(keys)) == 4
    secret = ChatKVRag(**options, store_config=rounded)._identifying_params["store_config"]
    assert "encryption_key" not in secret
    heard = [StoreConfig(on_event=lambda event: None) for _ in range(2)]
    first, second = (ChatKVRag(**options, store_config=each)._identifying_params for each in heard)
    assert first == second, "who listens changes no answer"


def test_string_prompts_have_no_chat_head(llm, chat, chunks):
    llm.precompute_kv(chunks[:1])
    result = llm.generate([f"{chunks[0]}\n\nWho?"]).generations[0][0].generation_info["kvrag"]
    assert (llm.engine.prefix_text, result["exactness"]) == ("", "exact")
    assert chat.engine.prefix_text


def test_thoughts_of_earlier_turns_are_left_out(chat):
    thought = AIMessage(
        [{"type": "reasoning", "reasoning": "Hm."}, {"type": "text", "text": "The keeper."}]
    )
    said = AIMessage([{"type": "text", "text": "The keeper."}])
    rest = ("human", "Who?"), ("human", "Sure?")
    shown = [chat.explain([rest[0], message, rest[1]]).spans for message in (thought, said)]
    assert shown[0] == shown[1]


class ChromaLike(InMemoryVectorStore):
    """Lists and deletes as ``langchain_chroma.Chroma`` does; its ``store`` is none of ``InMemoryVectorStore``'s."""

    def __init__(self, embedding):
        super().__init__(embedding)
        self._rows, self.store = self.store, {}
        self.store = None

    def add_documents(self, documents, **options):
        self.store = self._rows
        names = super().add_documents(documents, **options)
        self.store = None
        return names

    def get(self, ids=None, include=None):
        assert include == ["documents"]
        rows = [row for name, row in self._rows.items() if ids is None or name in ids]
        return {
            "ids": [row["id"] for row in rows],
            "documents": [row["text"] for row in rows],
            "metadatas": None,
        }

    def delete(self, ids=None, where=None):
        for name, row in list(self._rows.items()):
            if name in (ids or ()) or (where and where.items() <= row["metadata"].items()):
                del self._rows[name]


class QdrantLike(ChromaLike):
    """Lists as ``langchain_qdrant.QdrantVectorStore`` does, page by page; what it gets by id has no id."""

    content_payload_key, collection_name, get = "text", "notes", None

    @property
    def client(self):
        return SimpleNamespace(scroll=self._scroll)

    def _scroll(self, collection_name, *, limit, offset, with_payload):
        rows = list(self._rows.values())[offset or 0 :][:1]
        after = (offset or 0) + 1
        points = [SimpleNamespace(id=row["id"], payload={"text": row["text"]}) for row in rows]
        return points, after if after < len(self._rows) else None


@pytest.mark.parametrize("kind", [ChromaLike, QdrantLike])
def test_stores_of_other_packages_are_listed_and_their_deletions_followed(
    chat, embedding, chunks, kind
):
    inner = kind(embedding)
    inner.add_texts(chunks[:3], [{"of": "x"}, {"of": "y"}, {"of": "y"}], ids=["a", "b", "c"])
    assert chat.precompute_kv(inner).stored == 3
    store = KVRagVectorStore(inner, llm=chat)
    store.delete(where={"of": "x"})
    assert (kept(chat, chunks), chat.engine.document_ids()) == ([1, 2], ["b", "c"])
    inner.delete(["b"])
    assert chat.sync_kv(store).removed == 1
    assert kept(chat, chunks) == [2]
