"""An exact FAISS store that keeps LangChain's contract: idempotent upserts, deletion by id, files without pickles."""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore
from langchain_core.vectorstores.utils import maximal_marginal_relevance

from kvrag.errors import ConfigError, InputError, StoreError, StoreFormatError, require

Metric = Literal["l2", "ip"]
Filter = Callable[[dict[str, Any]], bool] | dict[str, Any]
"""A predicate of the metadata, or values that it must have; a list of values means any of them."""

FORMAT = 1
_INDEX_FILE, _ROWS_FILE = "index.faiss", "documents.json"


class FaissStore(VectorStore):
    """Documents and their vectors in a flat FAISS index, searched exactly.

    Parameters
    ----------
    embedding
        Embeds texts and queries.
    metric
        ``"l2"`` (squared Euclidean distance, smaller is nearer) or ``"ip"`` (inner product, larger is nearer).

    Raises
    ------
    MissingDependencyError
        If FAISS is not installed.
    """

    def __init__(self, embedding: Embeddings, *, metric: Metric = "l2") -> None:
        if metric not in ("l2", "ip"):
            raise ConfigError(f"metric is {metric!r}; it must be 'l2' or 'ip'")
        self._faiss: Any = require("faiss", extra="langchain", purpose="the vector store of langchain_kvrag")
        self._embedding, self._metric = embedding, metric
        self._index: Any = None  # made with the first vectors, which bring the dimension
        self._documents: dict[int, Document] = {}
        self._numbers: dict[str, int] = {}
        self._next = 0
        self._lock = threading.RLock()

    @property
    def embeddings(self) -> Embeddings:
        """The embedding model."""
        return self._embedding

    def documents(self) -> list[Document]:
        """Return all documents, in the order in which they came."""
        with self._lock:
            return [_copy(document) for document in self._documents.values()]

    # -- changes -------------------------------------------------------------------------------------------------------

    def add_documents(
        self, documents: list[Document], *, ids: Sequence[str | None] | None = None, **_: Any
    ) -> list[str]:
        """Insert documents, replacing those with the same id; returns the ids."""
        given = [document.id for document in documents] if ids is None else list(ids)
        if len(given) != len(documents):
            raise InputError(
                f"{len(documents)} documents came with {len(given)} ids; pass one id per document, or none"
            )
        names = [
            given_id or document.id or str(uuid.uuid4()) for given_id, document in zip(given, documents, strict=True)
        ]
        if not documents:
            return []
        vectors = _matrix(self._embedding.embed_documents([document.page_content for document in documents]))
        rows = {name: row for row, name in enumerate(names)}  # of equal ids, the last one stays
        with self._lock:
            self._check_dimension(vectors)
            self._remove(rows)
            numbers = np.arange(self._next, self._next + len(rows), dtype=np.int64)
            self._next += len(rows)
            self._index.add_with_ids(vectors[list(rows.values())], numbers)
            for number, (name, row) in zip(numbers.tolist(), rows.items(), strict=True):
                self._documents[number] = _copy(documents[row], name)
                self._numbers[name] = number
        return names

    def delete(self, ids: list[str] | None = None, **_: Any) -> bool:
        """Delete documents, all of them for ``None``; ids that are not there are fine."""
        with self._lock:
            self._remove(list(self._numbers) if ids is None else ids)
        return True

    def _remove(self, ids: Iterable[str]) -> None:
        gone = [self._numbers.pop(name) for name in ids if name in self._numbers]
        for number in gone:
            del self._documents[number]
        if gone:
            self._index.remove_ids(np.array(gone, dtype=np.int64))

    def _check_dimension(self, vectors: np.ndarray[Any, Any]) -> None:
        """Make the index at first use; refuse vectors of another model before anything is changed."""
        if self._index is None:
            flat = self._faiss.IndexFlatL2 if self._metric == "l2" else self._faiss.IndexFlatIP
            self._index = self._faiss.IndexIDMap2(flat(vectors.shape[1]))
        if vectors.shape[1] != self._index.d:
            raise InputError(
                f"the embedding model gives vectors of {vectors.shape[1]} dimensions the index has {self._index.d}; "
                "use the embedding model that the index was built with, or build the index again"
            )

    # -- reads ---------------------------------------------------------------------------------------------------------

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return the documents with these ids, as far as they are there, in this order."""
        with self._lock:
            return [_copy(self._documents[self._numbers[name]]) for name in ids if name in self._numbers]

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        """Return the ``k`` nearest documents; ``filter`` restricts the search (:data:`Filter`)."""
        return self.similarity_search_by_vector(self._embedding.embed_query(query), k, **kwargs)

    def similarity_search_by_vector(self, embedding: list[float], k: int = 4, **kwargs: Any) -> list[Document]:
        """As :meth:`similarity_search`, for a vector."""
        return [_copy(self._documents[n]) for n, _ in self._nearest(embedding, k, kwargs.get("filter"))]

    def similarity_search_with_score(self, query: str, k: int = 4, **kwargs: Any) -> list[tuple[Document, float]]:
        """As :meth:`similarity_search`, with the metric's value."""
        found = self._nearest(self._embedding.embed_query(query), k, kwargs.get("filter"))
        return [(_copy(self._documents[n]), score) for n, score in found]

    def max_marginal_relevance_search(
        self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        """Return ``k`` of the ``fetch_k`` nearest documents that are near and differ from each other."""
        vector = self._embedding.embed_query(query)
        return self.max_marginal_relevance_search_by_vector(vector, k, fetch_k, lambda_mult, **kwargs)

    def max_marginal_relevance_search_by_vector(
        self, embedding: list[float], k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        """As :meth:`max_marginal_relevance_search`, for a vector."""
        with self._lock:
            near = [n for n, _ in self._nearest(embedding, fetch_k, kwargs.get("filter"))]
            vectors = [self._index.reconstruct(n) for n in near]
            chosen = maximal_marginal_relevance(_matrix([embedding])[0], vectors, lambda_mult, k) if near else []
            return [_copy(self._documents[near[i]]) for i in chosen]

    def _nearest(self, embedding: Sequence[float], k: int, where: Filter | None) -> list[tuple[int, float]]:
        """Return ``(number, score)``; filtered inside the search, so that ``k`` are found where ``k`` exist."""
        with self._lock:
            room, params = len(self._documents), None
            if where is not None:
                numbers = [n for n, document in self._documents.items() if _matches(document.metadata, where)]
                room, params = len(numbers), self._faiss.SearchParameters(sel=self._faiss.IDSelectorBatch(numbers))
            if k < 1 or not room:
                return []
            query = _matrix([embedding])
            self._check_dimension(query)
            scores, found = self._index.search(query, min(k, room), params=params)
            return [(n, float(score)) for n, score in zip(found[0].tolist(), scores[0], strict=True) if n >= 0]

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        if self._metric == "l2":
            return lambda distance: 1.0 / (1.0 + distance)
        return lambda product: min(1.0, max(0.0, (1.0 + product) / 2.0))

    # -- files ---------------------------------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the index and the documents to a folder."""
        path = Path(folder)
        with self._lock:
            rows = [
                {"number": n, "id": d.id, "text": d.page_content, "metadata": d.metadata}
                for n, d in self._documents.items()
            ]
            head = {"format": FORMAT, "metric": self._metric, "next": self._next, "documents": rows}
            try:
                text = json.dumps(head, ensure_ascii=False)
            except (TypeError, ValueError) as error:
                raise InputError(
                    f"a document's metadata can't be written as JSON ({error}); keep plain values in it"
                ) from error
            index = b"" if self._index is None else self._faiss.serialize_index(self._index).tobytes()
        path.mkdir(parents=True, exist_ok=True)
        _replace(path / _INDEX_FILE, index)
        _replace(path / _ROWS_FILE, text.encode())

    @classmethod
    def load(cls, folder: str | os.PathLike[str], embedding: Embeddings) -> Self:
        """Read what :meth:`save` wrote.

        Raises
        ------
        StoreError
            If the files are not there, damaged, or of two different saves.
        """
        path = Path(folder)
        try:
            head = json.loads((path / _ROWS_FILE).read_bytes())
            data = np.frombuffer((path / _INDEX_FILE).read_bytes(), dtype=np.uint8)
            if head["format"] > FORMAT:
                raise StoreFormatError(
                    f"{str(path)!r} was saved by a newer kvrag (format {head['format']}); update kvrag"
                )
            store = cls(embedding, metric=head["metric"])
            store._restore(head, data)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            if isinstance(error, StoreFormatError):
                raise
            raise StoreError(f"{str(path)!r} holds no usable vector store ({error!r}); save it again") from error
        return store

    def _restore(self, head: dict[str, Any], data: np.ndarray[Any, Any]) -> None:
        self._index = self._faiss.deserialize_index(data) if data.size else None
        self._next = int(head["next"])
        for row in head["documents"]:
            document = Document(id=row["id"], page_content=row["text"], metadata=row["metadata"])
            self._documents[row["number"]] = document
            self._numbers[row["id"]] = row["number"]
        known = set() if self._index is None else set(self._faiss.vector_to_array(self._index.id_map).tolist())
        if known != set(self._documents):
            raise ValueError(f"{_INDEX_FILE} and {_ROWS_FILE} don't belong together")

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Build a store from texts."""
        store = cls(embedding, **kwargs)
        store.add_texts(texts, metadatas, ids=ids)
        return store


def _matrix(vectors: Sequence[Sequence[float]]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(vectors, dtype=np.float32)


def _copy(document: Document, name: str | None = None) -> Document:
    """Copy a document, so that a change of what was given or returned does not reach the store."""
    return document.model_copy(update={"id": name or document.id}, deep=True)


def _matches(metadata: dict[str, Any], where: Filter) -> bool:
    if callable(where):
        return bool(where(metadata))
    for name, wanted in where.items():
        if name.startswith("$") or isinstance(wanted, dict):
            raise ConfigError(
                f"the filter holds {name!r}: {wanted!r}; operators are not known here, pass values, lists of them, or "
                "a function of the metadata"
            )
        if metadata.get(name) not in (wanted if isinstance(wanted, (list, tuple, set)) else [wanted]):
            return False
    return True


def _replace(path: Path, data: bytes) -> None:
    """Write a file in one step: a crash leaves the old one."""
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
