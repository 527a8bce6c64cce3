"""After any sequence of changes through a vector store of either framework, the KV is that of the documents that it holds."""

import asyncio
import enum
import itertools
import tempfile
import uuid
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from texts import make_chunks

from kvrag import InputError, KVRagEngine, delete_kv, precompute_kv, sync_kv
from kvrag.identity.fingerprint import text_digest

pytest.importorskip("langchain_kvrag")
pytest.importorskip("llama_index.vector_stores.kvrag")

from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters, SimpleVectorStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore
from llama_index_kit import Listing

import langchain_kvrag
from llama_index.vector_stores.kvrag import KVRagVectorStore

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

LONG = make_chunks(4, words=42)
NOTED = "a text that is short, but not at all"  # known to the scanner; no KV
TINY = "short"  # nor known
TEXTS = [*LONG, NOTED, TINY]
IDS = [str(uuid.uuid5(uuid.NAMESPACE_OID, name)) for name in "abcd"]  # Qdrant takes no other ones
DOCUMENTS = ["one", "two", None]
COLOURS = ["red", "blue"]
NUMBER = itertools.count()

Item = tuple[str, str, str | None, str]
"""Id, text, document, colour."""


@pytest.fixture(scope="module")
def engine(tiny_dir):
    engine = KVRagEngine.from_pretrained(tiny_dir, context=None)
    yield engine
    engine.close()


# -- what is wrapped -----------------------------------------------------------------------------------------------------


def chroma_collection() -> Any:
    client = pytest.importorskip("chromadb").EphemeralClient()
    return client.create_collection(f"kvrag-{uuid.uuid4().hex}")


class LangChain:
    """A store of LangChain, and what it holds, asked behind the wrapper's back."""

    embedding = DeterministicFakeEmbedding(size=6)

    def __init__(self, kind: str, engine: KVRagEngine, namespace: str) -> None:
        self.kind = kind
        self.options: dict[str, Any] = {"llm": engine, "namespace": namespace, "on_error": "raise"}
        self.store = langchain_kvrag.KVRagVectorStore(
            **({"embedding": self.embedding} if kind == "own" else {"inner": self.inner()}),
            **self.options,
        )

    def inner(self) -> VectorStore:
        if self.kind == "memory":
            return InMemoryVectorStore(self.embedding)
        if self.kind == "chroma":
            module = pytest.importorskip("langchain_chroma")
            return module.Chroma(f"kvrag-{uuid.uuid4().hex}", self.embedding)
        module, client = (
            pytest.importorskip("langchain_qdrant"),
            pytest.importorskip("qdrant_client"),
        )
        made, models = client.QdrantClient(":memory:"), client.models
        made.create_collection(
            "kvrag", models.VectorParams(size=6, distance=models.Distance.COSINE)
        )
        return module.QdrantVectorStore(made, "kvrag", self.embedding)

    def documents(self, items: Sequence[Item]) -> list[Document]:
        return [
            Document(text, id=name, metadata={"colour": colour}) for name, text, _, colour in items
        ]

    def add(self, items: Sequence[Item]) -> None:
        self.store.add_documents(self.documents(items))

    async def aadd(self, items: Sequence[Item]) -> None:
        await self.store.aadd_documents(self.documents(items))

    def fill(self, items: Sequence[Item]) -> None:
        self.store.inner.add_documents(self.documents(items))

    def delete(self, ids: Any) -> None:
        self.store.delete(ids)

    async def adelete(self, ids: Any) -> None:
        await self.store.adelete(ids)

    def delete_document(self, document: str | None) -> None:
        self.store.delete()

    def delete_colour(self, colour: str) -> None:
        if self.kind == "chroma":
            self.store.delete(where={"colour": colour})

    def clear(self) -> None:
        self.store.delete([document.id for document in self.store.kv_documents()])

    def reload(self, folder: Path) -> None:
        if self.kind == "own":
            self.store.save_local(folder)
            self.store = langchain_kvrag.KVRagVectorStore.load_local(
                folder, self.embedding, **self.options
            )
            return
        inner = self.store.inner
        if self.kind == "memory":
            self.store.dump(str(folder / "store.json"))
            inner = InMemoryVectorStore.load(str(folder / "store.json"), self.embedding)
        self.store = langchain_kvrag.KVRagVectorStore(inner, **self.options)

    def held(self) -> dict[str, str]:
        inner: Any = self.store.inner
        if self.kind == "own":
            return {str(d.id): d.page_content for d in inner.documents()}
        if self.kind == "memory":
            return {name: row["text"] for name, row in inner.store.items()}
        if self.kind == "chroma":
            rows = inner.get()
            return dict(zip(rows["ids"], rows["documents"], strict=True))
        points, _ = inner.client.scroll(inner.collection_name, limit=1000, with_payload=True)
        return {str(point.id): point.payload["page_content"] for point in points}


class Mute(Listing):
    """A store that can't be asked, and does what it is told."""

    def get_nodes(self, node_ids: Any = None, filters: Any = None) -> list[Any]:
        raise NotImplementedError

    def delete(self, ref_doc_id: str, **_: Any) -> None:
        for gone in [
            node for node in self.rows.values() if node.ref_doc_id == ref_doc_id is not None
        ]:
            del self.rows[gone.node_id]

    def delete_nodes(self, node_ids: Any = None, filters: Any = None, **_: Any) -> None:
        for name in node_ids or ():
            self.rows.pop(name, None)


class LlamaIndex:
    """As :class:`LangChain`, of LlamaIndex; a new wrapper knows nothing of what came before."""

    def __init__(self, kind: str, engine: KVRagEngine, namespace: str) -> None:
        self.kind = kind
        self.options: dict[str, Any] = {"llm": engine, "namespace": namespace, "on_error": "raise"}
        self.texts: dict[str, str] = {}  # the default store keeps none
        self.store = KVRagVectorStore(self.inner(), **self.options)

    def inner(self) -> BasePydanticVectorStore:
        if self.kind == "simple":
            return SimpleVectorStore()
        if self.kind == "chroma":
            module = pytest.importorskip("llama_index.vector_stores.chroma")
            return module.ChromaVectorStore(chroma_collection=chroma_collection())
        return Listing() if self.kind == "listing" else Mute()

    def nodes(self, items: Sequence[Item]) -> list[TextNode]:
        found = []
        for name, text, document, colour in items:
            links = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=document)} if document else {}
            made = TextNode(
                text=text,
                id_=name,
                relationships=links,
                metadata={"colour": colour},
                embedding=[0.1] * 6,
            )
            found.append(made)
        self.texts |= {name: text for name, text, *_ in items}
        return found

    def add(self, items: Sequence[Item]) -> None:
        self.store.add(self.nodes(items))

    async def aadd(self, items: Sequence[Item]) -> None:
        await self.store.async_add(self.nodes(items))

    def fill(self, items: Sequence[Item]) -> None:
        self.store.inner.add(self.nodes(items))

    def delete(self, ids: Any) -> None:
        self.store.delete_nodes(ids)

    async def adelete(self, ids: Any) -> None:
        await self.store.adelete_nodes(ids)

    def delete_document(self, document: str | None) -> None:
        self.store.delete(document)  # type: ignore[arg-type]

    def delete_colour(self, colour: str) -> None:
        if self.kind != "mute":  # whose KV stays, and a warning says so
            self.store.delete_nodes(
                filters=MetadataFilters(filters=[MetadataFilter(key="colour", value=colour)])
            )

    def clear(self) -> None:
        self.store.clear()

    def reload(self, folder: Path) -> None:
        inner = self.store.inner
        if self.kind == "simple":
            self.store.persist(str(folder / "store.json"))
            inner = SimpleVectorStore.from_persist_path(str(folder / "store.json"))
        if self.kind != "mute":  # whose nodes nobody knows then
            self.store = KVRagVectorStore(inner, **self.options)

    def held(self) -> dict[str, str]:
        inner: Any = self.store.inner
        if self.kind == "simple":
            return {name: self.texts[name] for name in inner.data.embedding_dict}
        if self.kind == "chroma":
            rows = inner.client.get()
            return dict(zip(rows["ids"], rows["documents"], strict=True))
        return {name: node.text for name, node in inner.rows.items()}


STORES: dict[str, tuple[type[LangChain] | type[LlamaIndex], str]] = {
    "LangChain, own FAISS": (LangChain, "own"),
    "LangChain, InMemoryVectorStore": (LangChain, "memory"),
    "LangChain, Chroma": (LangChain, "chroma"),
    "LangChain, Qdrant": (LangChain, "qdrant"),
    "LlamaIndex, SimpleVectorStore": (LlamaIndex, "simple"),
    "LlamaIndex, Chroma": (LlamaIndex, "chroma"),
    "LlamaIndex, one that lists": (LlamaIndex, "listing"),
    "LlamaIndex, one that can't": (LlamaIndex, "mute"),
}


def make(name: str, engine: KVRagEngine) -> Any:
    cls, kind = STORES[name]
    return cls(kind, engine, f"{name} {next(NUMBER)}")


def check_in_step(side: Any) -> None:
    """Compare the KV of a namespace with the documents that the wrapped store holds."""
    engine, namespace = side.options["llm"], side.options["namespace"]
    catalog, space = engine.store.catalog, engine.store.names.namespace(namespace)
    held = side.held()
    known = {name: text for name, text in held.items() if text != TINY}
    assert engine.document_ids(namespace=namespace) == sorted(known)
    assert {name: catalog.document_texts(space, name) for name in known} == {
        name: [text_digest(text)] for name, text in known.items()
    }
    for text in LONG:
        assert bool(catalog.text_keys(space, text_digest(text))) == (text in held.values())


# -- any sequence --------------------------------------------------------------------------------------------------------

ids = st.sampled_from(IDS)
items = st.lists(
    st.tuples(ids, st.sampled_from(TEXTS), st.sampled_from(DOCUMENTS), st.sampled_from(COLOURS)),
    min_size=1,
    max_size=3,
    unique_by=lambda item: item[0],
)


class Changes(RuleBasedStateMachine):
    """Documents that come and go in every way that stores offer; what a store refuses, it refuses."""

    def __init__(self, side: Any) -> None:
        super().__init__()
        self.side = side

    def do(
        self,
        action: Callable[..., None],
        *args: Any,
        then: Callable[..., Coroutine[Any, Any, None]] | None,
    ) -> None:
        with suppress(Exception):
            if then is None:
                action(*args)
            else:
                asyncio.run(then(*args))

    @rule(items=items, is_async=st.booleans())
    def add(self, items: Sequence[Item], is_async: bool) -> None:
        self.do(self.side.add, items, then=self.side.aadd if is_async else None)

    @rule(items=items)
    def fill_before(self, items: Sequence[Item]) -> None:
        """Fill the store without its wrapper, and precompute what was in it before."""
        new = [item for item in items if item[0] not in self.side.held()]
        if not new or self.side.kind == "mute":
            return
        self.side.fill(new)
        llm, namespace = self.side.options["llm"], self.side.options["namespace"]
        precompute_kv(
            [text for _, text, *_ in new], ids=[i for i, *_ in new], llm=llm, namespace=namespace
        )

    @rule(chosen=st.lists(ids, max_size=2, unique=True), is_async=st.booleans())
    def delete_by_id(self, chosen: list[str], is_async: bool) -> None:
        self.do(self.side.delete, chosen, then=self.side.adelete if is_async else None)

    @rule(name=ids)
    def delete_by_a_string(self, name: str) -> None:
        self.do(self.side.delete, name, then=None)

    @rule(is_async=st.booleans())
    def delete_by_none(self, is_async: bool) -> None:
        self.do(self.side.delete, None, then=self.side.adelete if is_async else None)

    @rule(document=st.sampled_from([*DOCUMENTS, "None", "red", *IDS]))
    def delete_by_document(self, document: str | None) -> None:
        self.do(self.side.delete_document, document, then=None)

    @rule(colour=st.sampled_from(COLOURS))
    def delete_by_filter(self, colour: str) -> None:
        self.do(self.side.delete_colour, colour, then=None)

    @rule()
    def clear(self) -> None:
        self.do(self.side.clear, then=None)

    @rule()
    def reload(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.side.reload(Path(folder))

    @invariant()
    def kv_is_that_of_the_documents(self) -> None:
        check_in_step(self.side)


@pytest.mark.parametrize("examples", [6, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", STORES)
def test_kv_is_that_of_the_documents_after_any_changes(name, examples, engine):
    run_state_machine_as_test(
        lambda: Changes(make(name, engine)),
        settings=settings(
            max_examples=examples,
            stateful_step_count=20,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


# -- what was reported ---------------------------------------------------------------------------------------------------


def filled(name: str, engine: KVRagEngine) -> Any:
    """Return a store of four documents with KV: two of one parent, and two without."""
    side = make(name, engine)
    parents = ["one", "one", None, None]
    side.add([(i, text, parent, "red") for i, text, parent in zip(IDS, LONG, parents, strict=True)])
    check_in_step(side)
    assert len(side.held()) == 4
    return side


@pytest.mark.parametrize("name", [name for name, (cls, _) in STORES.items() if cls is LlamaIndex])
@pytest.mark.parametrize("document", [None, "None", "", IDS[2], "unknown"])
def test_deleting_by_a_parent_that_is_none_erases_what_the_store_deletes(name, document, engine):
    side = filled(name, engine)
    with suppress(ValueError):  # Chroma refuses None
        side.delete_document(document)
    check_in_step(side)


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize("chosen", [None, [], ["unknown"], IDS[0], IDS[:2], tuple(IDS[:2])])
def test_deleting_by_anything_erases_what_the_store_deletes(name, chosen, engine):
    side = filled(name, engine)
    with suppress(Exception):
        side.delete(chosen)
    check_in_step(side)
    if chosen and "unknown" not in chosen:
        assert len(side.held()) == (3 if isinstance(chosen, str) else 2)


def test_a_store_that_was_filled_before_its_wrapping_erases_by_document(engine):
    side = make("LlamaIndex, Chroma", engine)
    given = [(i, text, "one", "red") for i, text in zip(IDS, LONG, strict=True)]
    side.fill(given)
    precompute_kv(side.nodes(given), llm=engine, namespace=side.options["namespace"])
    check_in_step(side)
    side.delete_document("one")
    assert side.held() == {}
    check_in_step(side)


def test_a_string_is_one_id_and_one_text(engine):
    side = make("LangChain, own FAISS", engine)
    side.store.add_texts(LONG[:3], ids=["1", "2", "12"])
    assert [document.id for document in side.store.get_by_ids("12")] == ["12"]
    side.store.delete("12")
    assert sorted(side.held()) == ["1", "2"]
    check_in_step(side)
    side.store.add_texts(LONG[2], ids="12")
    assert side.held()["12"] == LONG[2]
    side.store.add_documents([Document(LONG[0])], ids="12")
    assert side.held()["12"] == LONG[0]
    asyncio.run(side.store.aadd_documents([Document(LONG[2])], ids="12"))
    assert side.held()["12"] == LONG[2]
    assert asyncio.run(side.store.aget_by_ids("12"))[0].page_content == LONG[2]
    asyncio.run(side.store.adelete("12"))
    asyncio.run(side.store.aadd_texts(LONG[3], ids="3"))
    assert sorted(side.held()) == ["1", "2", "3"]
    check_in_step(side)


def test_a_deletion_without_ids_is_refused_and_texts_are_not_dropped(engine):
    side = filled("LangChain, own FAISS", engine)
    with pytest.raises(InputError, match="No ids provided to delete"):
        side.store.delete()
    assert len(side.held()) == 4
    check_in_step(side)
    with pytest.raises(InputError, match="2 texts came with 1 ids"):
        side.store.add_texts(LONG[:2], ids=["a"])
    side.store.add_texts((text for text in LONG[:2]), ids=(name for name in ("x", "y")))  # type: ignore[arg-type]
    assert {"x", "y"} <= set(side.held())
    check_in_step(side)


class Refusing(InMemoryVectorStore):
    """A store that deletes nothing, in one of the ways that stores have."""

    how = "returns"

    def delete(self, ids: Any = None, **_: Any) -> Any:
        if self.how == "raises":
            raise PermissionError("the store is read-only")
        return {"returns": False, "returns None": None, "says it did": True}[self.how]


@pytest.mark.parametrize("how", ["raises", "returns", "returns None", "says it did"])
def test_what_the_store_does_not_delete_keeps_its_kv(how, engine):
    side = make("LangChain, InMemoryVectorStore", engine)
    inner = Refusing(side.embedding)
    inner.how = how
    side.store = langchain_kvrag.KVRagVectorStore(inner, **side.options)
    side.add([(IDS[0], LONG[0], None, "red")])
    with suppress(PermissionError):
        side.store.delete([IDS[0]])
    assert side.held() == {IDS[0]: LONG[0]}
    check_in_step(side)


class Unlisted(InMemoryVectorStore):
    """A store that can neither be listed nor asked by id."""

    @property
    def store(self) -> dict[str, Any]:
        raise AttributeError("store")

    @store.setter
    def store(self, rows: dict[str, Any]) -> None:
        self.rows = rows

    def add_documents(self, documents: list[Document], **_: Any) -> list[str]:
        self.rows.update({str(document.id): document for document in documents})
        return [str(document.id) for document in documents]

    def delete(self, ids: Any = None, **_: Any) -> Any:
        for name in ids or list(self.rows):
            self.rows.pop(name, None)
        return True

    def get_by_ids(self, ids: Any, /) -> list[Document]:
        raise NotImplementedError


def test_a_store_that_can_not_be_asked_is_believed_of_ids_and_else_told_of_once(engine, recwarn):
    side = make("LangChain, InMemoryVectorStore", engine)
    namespace = side.options["namespace"]
    store = langchain_kvrag.KVRagVectorStore(Unlisted(side.embedding), **side.options)
    store.add_documents(
        side.documents([(i, text, None, "red") for i, text in zip(IDS, LONG, strict=True)])
    )
    store.delete(IDS[:1])
    assert engine.document_ids(namespace=namespace) == sorted(IDS[1:])
    for _ in range(2):
        store.delete()
    told = [str(warned.message) for warned in recwarn if "Unlisted" in str(warned.message)]
    assert len(told) == 1
    assert "can't list its documents, so the KV of those that were deleted stays" in told[0]
    assert engine.document_ids(namespace=namespace) == sorted(IDS[1:])


def test_hooks_take_a_string_for_one_and_drop_no_item(engine):
    options: dict[str, Any] = {"llm": engine, "namespace": "hooks"}
    precompute_kv(LONG[:3], ids=["1", "2", "12"], **options)
    assert delete_kv("12", **options) == 1
    assert engine.document_ids(namespace="hooks") == ["1", "2"]
    precompute_kv(LONG[2], ids="12", **options)
    assert engine.document_ids(namespace="hooks") == ["1", "12", "2"]
    assert delete_kv((name for name in ("1", "2")), **options) == 2
    with pytest.raises(InputError, match="1 of 2 items have no id"):
        delete_kv([Document(LONG[0], id="12"), Document(LONG[1])], **options)
    assert engine.document_ids(namespace="hooks") == ["12"]
    for nothing in (None, 12):
        with pytest.raises(InputError, match="can't list its documents"):
            delete_kv(nothing, **options)
    report = sync_kv((Document(text, id=str(n)) for n, text in enumerate(LONG[:2])), **options)
    assert (report.added, report.removed) == (2, 1)
    assert engine.document_ids(namespace="hooks") == ["0", "1"]
    red = enum.Enum("Colour", {"RED": "red"}, type=str).RED  # shown as Colour.RED
    assert sync_kv(LONG[:1], ids=[red], **options).removed == 2
    assert engine.document_ids(namespace="hooks") == ["red"]
    with pytest.raises(InputError, match=r"is a mapping; pass a list of texts with ids="):
        precompute_kv({"id": LONG[0]}, **options)
