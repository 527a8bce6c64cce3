"""Sentence embeddings for retrieval, normalised: the inner product is the cosine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from kvrag.errors import require


class SentenceEmbeddings:
    """A sentence-transformers model, loaded at first use.

    Parameters
    ----------
    path
        Its directory.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def embed(self, texts: Sequence[str]) -> Any:
        """Return float32 unit vectors ``(len(texts), dims)``."""
        return self._model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)

    @cached_property
    def _model(self) -> Any:
        library = require("sentence_transformers", extra="demo", purpose="the demo's embeddings")
        return library.SentenceTransformer(self._path, device="cpu")
