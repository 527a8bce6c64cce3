"""What the demo asks of a framework: index chunks, then answer questions from the chunks retrieved."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvrag.cli.documents import DocumentChunk
from kvrag.config import StoreConfig
from kvrag.engine import KVRagEngine
from kvrag.types import PrecomputeReport

SYSTEM = "Answer the question with words from the documents."
HUMAN = "{context}\n\n{question}"
"""The chunks stand before the question: what stands before them is the same for every question, and so is their KV."""

STORE = StoreConfig(ram_bytes=0)
"""No memory tier: every chunk of the demo is read from the disk, as in a process that has just started."""


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """What a pipeline is built from.

    Parameters
    ----------
    model
        Hub id, directory or GGUF file.
    embeddings
        Directory of a sentence-transformers model.
    kv_dir
        Where KV is kept.
    top_k
        Chunks per question.
    options
        Further options of :meth:`kvrag.KVRagEngine.from_pretrained` (device, dtype, namespace, repair).
    """

    model: str
    embeddings: str
    kv_dir: Path
    top_k: int
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, its prompt as chat messages, and how it was made: fields of :class:`kvrag.GenerationResult`."""

    text: str
    prompt: list[dict[str, str]]
    cached_tokens: int
    repaired_tokens: int
    computed_tokens: int
    exactness: str
    ttft_ms: float
    load_ms: float

    @property
    def loaded_tokens(self) -> int:
        """Tokens whose KV was read from the store."""
        return self.cached_tokens + self.repaired_tokens

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.cached_tokens + self.repaired_tokens + self.computed_tokens


class Pipeline(Protocol):
    """A RAG application in one framework."""

    name: str
    engine: KVRagEngine

    def index(self, chunks: Sequence[DocumentChunk]) -> PrecomputeReport:
        """Embed the chunks, and keep their KV."""
        ...

    def ask(self, question: str, *, max_new_tokens: int) -> Answer:
        """Retrieve chunks and answer from them."""
        ...


def join_chunks(nearest_first: Sequence[str]) -> str:
    """Put the best match last, next to the question: a small model reads best what is near, with reuse and without."""
    return "\n\n".join(reversed(nearest_first))


def answer_of(text: str, prompt: Sequence[Mapping[str, Any]], made: Mapping[str, Any]) -> Answer:
    """Build an answer from the accounting that kvrag's framework classes put beside it.

    Parameters
    ----------
    text
        The answer.
    prompt
        Chat messages.
    made
        The ``"kvrag"`` entry of a response's metadata, with the reason for which the answer ended.
    """
    return Answer(
        text=whole_words(text, is_cut=made["finish_reason"] == "length"),
        prompt=[
            {"role": str(message["role"]), "content": str(message["content"])} for message in prompt
        ],
        cached_tokens=made["cached_tokens"],
        repaired_tokens=made["repaired_tokens"],
        computed_tokens=made["computed_tokens"],
        exactness=made["exactness"],
        ttft_ms=made["ttft_ms"],
        load_ms=made["timings_ms"].get("load", 0.0),
    )


def whole_words(text: str, *, is_cut: bool) -> str:
    """End an answer that ran into the limit of tokens behind its last whole sentence, else behind its last word that is surely whole."""
    text = " ".join(text.split())
    if not is_cut:
        return text
    sentences = re.match(r".*[.!?](?= )", text)
    return f"{sentences[0] if sentences else text.rpartition(' ')[0].rstrip(',;:')} …"


def prompt_ids(engine: KVRagEngine, prompt: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the token ids of a prompt, put together from the spans that the engine sees in it.

    Segments are tokenised one by one, so tokenising the rendered text at once could give others near the seams.
    """
    encoder = engine.loaded.encoder
    ids: list[int] = []
    for index, span in enumerate(engine.explain(prompt).spans):
        is_chunk = span.kind == "chunk"
        ids += (
            encoder.chunk_ids(span.text)
            if is_chunk
            else encoder.live_ids(span.text, at_start=index == 0)
        )
    return ids
