"""Exact FAISS store with LangChain's contract: idempotent upserts, deletion by id, no pickles."""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore
from langchain_core.vectorstores.utils import maximal_marginal_relevance

from kvrag import ConfigError, InputError, StoreError, StoreFormatError, require
from kvrag.adapters import unknown_option

Metric = Literal["l2", "ip"]
FORMAT = 1
_INDEX_FILE = "index.faiss"
_ROWS_FILE = "documents.json"


class FaissStore(VectorStore):
    """Documents and their vectors in a flat FAISS index, searched exactly.

    Documents are copied in and out. ``metric`` is ``"l2"`` (squared Euclidean distance, smaller is
    nearer) or ``"ip"`` (inner product, larger is nearer). Searches take ``filter``: a predicate of
    the metadata, or values that the metadata must have; a list allows any of its values.
    """

    def __init__(self, embedding: Embeddings, *, metric: Metric = "l2") -> None:
        if metric not in ("l2", "ip"):
            raise ConfigError(f"metric is {metric!r}; it must be 'l2' or 'ip'")
        self._faiss: Any = require(
            "faiss", extra="langchain", purpose="the vector store of langchain_kvrag"
        )
        self._embedding = embedding
        self._metric = metric
        self._lock = threading.RLock()
        self._index: Any = None  # made with the first vectors, which determine the dimension
        self._documents = dict[int, Document]()
        self._numbers = dict[str, int]()
        self._next = 0

    def __copy__(self, memo: object = None) -> Self:
        """Return the store itself: a copy has the same KV."""
        return self

    __deepcopy__ = __copy__

    def __getstate__(self) -> NoReturn:
        raise ConfigError("the own FAISS index can't be pickled; use save_local and load_local")

    @property
    def embeddings(self) -> Embeddings:
        return self._embedding

    @classmethod
    def from_texts(
        cls, texts: list[str], embedding: Embeddings, metadatas: Any = None, **kwargs: Any
    ) -> Self:
        store = cls(embedding)
        store.add_texts(texts, metadatas, **kwargs)
        return store

    def add_documents(self, documents: list[Document], *, ids: Any = None, **_: Any) -> list[str]:
        given = [document.id for document in documents] if ids is None else list(ids)
        if len(given) != len(documents):
            raise InputError(
                f"{len(documents)} documents came with {len(given)} ids; pass one id per document, "
                "or none"
            )
        if not documents:
            return []
        names = [
            str(name or d.id or uuid.uuid4()) for name, d in zip(given, documents, strict=True)
        ]
        vectors = np.array(
            self._embedding.embed_documents([document.page_content for document in documents])
        )
        rows = {name: row for row, name in enumerate(names)}  # of equal ids, the last stays
        with self._lock:
            self._check_dimension(vectors.shape[1])
            self._remove(rows)
            self._index.add_with_ids(vectors[[*rows.values()]], self._next + np.arange(len(rows)))
            for name, row in rows.items():
                self._documents[self._next] = documents[row].model_copy(
                    update={"id": name}, deep=True
                )
                self._numbers[name] = self._next
                self._next += 1
        return names

    def delete(self, ids: list[str] | None = None, **_: Any) -> bool:
        if ids is None:
            raise InputError(
                "No ids provided to delete; to empty the store, pass those of kv_documents()"
            )
        with self._lock:
            self._remove(ids)
        return True

    def _remove(self, ids: Iterable[str]) -> None:
        gone = [self._numbers.pop(name) for name in ids if name in self._numbers]
        if gone:
            self._index.remove_ids(np.array(gone))
        for number in gone:
            del self._documents[number]

    def _check_dimension(self, num: int) -> None:
        """Make the index at first use; refuse another model's vectors before anything changes."""
        if self._index is None:
            if self._metric == "l2":
                metric = self._faiss.METRIC_L2
            else:
                metric = self._faiss.METRIC_INNER_PRODUCT
            self._index = self._faiss.index_factory(num, "IDMap2,Flat", metric)
        if num != self._index.d:
            raise InputError(
                f"the embedding model gives vectors of {num} dimensions, and the index has "
                f"{self._index.d}; use the embedding model that the index was built with, or build "
                "the index again"
            )

    def documents(self) -> list[Document]:
        """Return all documents, in order of insertion."""
        return self.get_by_ids(list(self._numbers))

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        with self._lock:
            found = [self._documents[self._numbers[name]] for name in ids if name in self._numbers]
            return [document.model_copy(deep=True) for document in found]

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        return self.similarity_search_by_vector(self._embedding.embed_query(query), k, **kwargs)

    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, **kwargs: Any
    ) -> list[Document]:
        return [document for document, *_ in self._nearest(embedding, k, **kwargs)]

    def similarity_search_with_score(
        self, query: str, k: int = 4, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        return [
            found[:2] for found in self._nearest(self._embedding.embed_query(query), k, **kwargs)
        ]

    def max_marginal_relevance_search(
        self, query: str, *args: Any, **kwargs: Any
    ) -> list[Document]:
        return self.max_marginal_relevance_search_by_vector(
            self._embedding.embed_query(query), *args, **kwargs
        )

    def max_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        **kwargs: Any,
    ) -> list[Document]:
        near = self._nearest(embedding, fetch_k, **kwargs)
        return [
            near[i][0]
            for i in maximal_marginal_relevance(
                np.array(embedding), [vector for *_, vector in near], lambda_mult, k
            )
        ]

    def _nearest(
        self,
        embedding: list[float],
        k: int,
        *,
        filter: Any = None,
        score_threshold: float | None = None,
        fetch_k: int | None = None,
        lambda_mult: float | None = None,
        **unknown: Any,
    ) -> list[tuple[Document, float, list[float]]]:
        """Return documents, scores and vectors.

        Filtering happens inside the search, so ``k`` documents are found where ``k`` exist.
        ``score_threshold`` is in the metric's own units: the largest distance, or the smallest
        product. ``fetch_k`` and ``lambda_mult``, which retrievers pass to every kind of search,
        have no effect on an exact search.
        """
        for name in unknown:
            raise unknown_option(
                name, ("k", "filter", "score_threshold", "fetch_k", "lambda_mult"), of="the search"
            )
        with self._lock:
            documents = {
                n: d
                for n, d in self._documents.items()
                if filter is None or _matches(d.metadata, filter)
            }
            if k < 1 or not documents:
                return []
            self._check_dimension(len(embedding))
            if filter:
                params = self._faiss.SearchParameters(
                    sel=self._faiss.IDSelectorBatch(list(documents))
                )
            else:
                params = None
            found = self._index.search_and_reconstruct(
                np.array([embedding]), min(k, len(documents)), params=params
            )
            near = [
                (documents[n].model_copy(deep=True), score, vector)
                for score, n, vector in zip(*(part[0].tolist() for part in found), strict=True)
                if n >= 0
            ]
        if score_threshold is None:
            return near
        sign = 1 if self._metric == "l2" else -1
        return [each for each in near if sign * each[1] <= sign * score_threshold]

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        if self._metric == "l2":
            return lambda distance: 1.0 / (1.0 + distance)
        return lambda product: min(1.0, max(0.0, (1.0 + product) / 2.0))

    # -- files -------------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the index and the documents to a folder.

        Raises ``InputError`` for metadata that JSON can't hold.
        """
        with self._lock:
            try:
                text = json.dumps(
                    {
                        "format": FORMAT,
                        "metric": self._metric,
                        "next": self._next,
                        "documents": [
                            {
                                "number": number,
                                "id": d.id,
                                "text": d.page_content,
                                "metadata": d.metadata,
                            }
                            for number, d in self._documents.items()
                        ],
                    },
                    ensure_ascii=False,
                )
            except (TypeError, ValueError) as error:
                raise InputError(
                    f"a document's metadata can't be written as JSON ({error}); keep plain values "
                    "in it"
                ) from error
            if self._index is None:
                index = b""
            else:
                index = self._faiss.serialize_index(self._index).tobytes()
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, data in (
            (_INDEX_FILE, index),
            (_ROWS_FILE, text.encode("utf-8", "surrogatepass")),
        ):
            part = Path(folder, f"{name}.{uuid.uuid4().hex}.part")
            try:
                part.write_bytes(data)
                part.replace(Path(folder, name))  # atomic: a crash leaves the old file
            finally:
                part.unlink(missing_ok=True)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], embedding: Embeddings) -> Self:
        """Read the files of :meth:`save`.

        Raises ``StoreError`` if the files are missing, damaged, or of two different saves.
        """
        try:
            head = json.loads(Path(folder, _ROWS_FILE).read_bytes())
            data = np.frombuffer(Path(folder, _INDEX_FILE).read_bytes(), dtype=np.uint8)
            if head["format"] > FORMAT:
                raise StoreFormatError(
                    f"{os.fspath(folder)!r} was saved by a newer kvrag (format {head['format']}); "
                    "update kvrag"
                )
            store = cls(embedding, metric=head["metric"])
            store._index = store._faiss.deserialize_index(data) if data.size else None
            store._next = int(head["next"])
            for row in head["documents"]:
                store._documents[row["number"]] = Document(
                    id=row["id"], page_content=row["text"], metadata=row["metadata"]
                )
                store._numbers[row["id"]] = row["number"]
            known = store._faiss.vector_to_array(store._index.id_map).tolist() if data.size else []
            if sorted(known) != sorted(store._documents):
                raise ValueError(f"{_INDEX_FILE} and {_ROWS_FILE} don't belong together")
        except StoreFormatError:
            raise
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise StoreError(
                f"{os.fspath(folder)!r} holds no usable vector store ({error!r}); save it again"
            ) from error
        return store


def _matches(metadata: dict[str, Any], where: Any) -> bool:
    if callable(where):
        return bool(where(metadata))
    for name, wanted in where.items():
        if name.startswith("$") or isinstance(wanted, dict):
            raise ConfigError(
                f"the filter holds {name!r}: {wanted!r}; operators are not known here, pass "
                "values, lists of them, or a function of the metadata"
            )
        if metadata.get(name) not in (
            wanted if isinstance(wanted, (list, tuple, set)) else [wanted]
        ):
            return False
    return True
