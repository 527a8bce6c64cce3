"""Index time: texts → token ids → key → KV → store, in batches, skipping what is there, so that a killed run is simply run again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from typing import Protocol

from tqdm.auto import tqdm

from kvrag.blend.quantise import pack
from kvrag.errors import StoreError, is_out_of_memory
from kvrag.identity.fingerprint import chunk_key, ids_digest
from kvrag.model.kv import KVBuffer
from kvrag.model.load import LoadedModel
from kvrag.precompute.encode import encode_chunks, encode_prefix
from kvrag.prompt.spans import text_entry
from kvrag.store import Naming, Retention, StoreStats, TieredStore
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, KVDtype, PrecomputeReport, TextEntry

logger = logging.getLogger(__name__)


class ChunkSink(Protocol):
    """What a precompute needs of a :class:`~kvrag.store.TieredStore`."""

    def put(
        self,
        identity: ChunkIdentity,
        kv: ChunkKV,
        *,
        text: TextEntry | None,
        doc_id: str | None = None,
        retention: Retention | None = None,
    ) -> int:
        """Store a chunk."""

    def link(self, identity: ChunkIdentity, *, text: TextEntry | None, doc_id: str | None) -> bool:
        """Add a reference to a chunk that is stored already; return whether it is."""

    def known(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """Return those keys whose chunks are stored."""

    def retention(self, key: ChunkKey) -> Retention | None:
        """Return a chunk's retention."""

    def retain(self, keys: Iterable[ChunkKey], retention: Retention) -> int:
        """Update the retention of stored chunks."""

    def stats(self) -> dict[str, StoreStats]:
        """Return the statistics of each tier by name."""


def too_small(tiers: Mapping[str, StoreStats]) -> str:
    """Say which tier was too small for chunks that were stored and evicted again, and what to do."""
    if "disk" not in tiers:
        return "memory is too small; raise StoreConfig.ram_bytes or ram_fraction, or pass kv_dir"
    return "the disk's budget is too small; raise StoreConfig.disk_bytes or disk_fraction, lower min_free_bytes, or free space there"


PREFIX_PRIORITY = 85
"""Priority of a prefix's KV: it is small, and every prompt begins with it."""


@dataclass(frozen=True, slots=True)
class Job:
    """One distinct chunk to store, and the documents that refer to it."""

    doc_ids: tuple[str | None, ...]
    entry: TextEntry | None
    identity: ChunkIdentity

    @property
    def label(self) -> str:
        """How reports call it."""
        return next((i for i in self.doc_ids if i is not None), self.entry.digest[:12] if self.entry else "prefix")


def replaced_ids(store: TieredStore, items: Sequence[tuple[str | None, str]], namespace: str, names: Naming) -> list[str]:
    """Return the ids that name another text now than the store remembers: the KV of a text that is gone must not outlive it."""
    replaced = []
    for name, text in items:
        held = store.catalog.document_texts(namespace, name) if name is not None else []
        entry = stored_entry(text, names) if held else None
        if name is not None and held and held != [entry.digest if entry else None]:
            replaced.append(name)
    return replaced


def precompute_texts(
    loaded: LoadedModel,
    store: ChunkSink,
    items: Sequence[tuple[str | None, str]],
    *,
    prefix: str,
    namespace: str,
    names: Naming,
    batch_size: int,
    min_chunk_tokens: int,
    show_progress: bool,
    before_batch: Callable[[], None] | None = None,
    kv_dtype: KVDtype = "auto",
    retention: Retention | None = None,
) -> PrecomputeReport:
    """Store the KV of the prefix and of every text that has none yet.

    Parameters
    ----------
    loaded
        Model and tokenizer.
    store
        Where to.
    items
        ``(id or None, stripped text)``.
    prefix
        Text that the chunks are encoded behind.
    namespace
        Digest of the namespace.
    names
        How texts are called in the store.
    batch_size
        Chunks per forward; halved when memory runs out.
    min_chunk_tokens
        Shorter texts are skipped.
    show_progress
        Show a progress bar.
    before_batch
        Called before each forward; what it raises ends the run.
    kv_dtype
        How the KV is kept.
    retention
        How much the chunks are worth keeping, those too that are stored already; ``None``: the default, and those keep theirs. The prefix,
        which every prompt has, is worth :data:`PREFIX_PRIORITY` at least. Where it gives no cost, that is measured: each forward's time,
        split among its chunks by their tokens.
    """
    start = time.perf_counter()
    prefix_ids = loaded.encoder.live_ids(prefix, at_start=True)
    model = loaded.fingerprint
    jobs = _jobs(loaded, items, ChunkIdentity(model, namespace, ids_digest(prefix_ids), (), kv_dtype), names)
    room = loaded.reusable.reuse_window - len(prefix_ids)
    run = _Run(loaded, store, model, tuple(prefix_ids), namespace, kv_dtype, retention)
    todo: list[Job] = []
    for job in jobs:
        length = len(job.identity.token_ids)
        if length < min_chunk_tokens or job.entry is None:
            logger.info("chunk %s has %d tokens and stays live text", job.label, length)
            run.skipped += 1
        elif length >= room:
            run.fail(
                job,
                f"{length} tokens behind a prefix of {len(prefix_ids)} exceed the context window that reuse holds for",
            )
        elif run.link(job):
            run.skipped += 1
        else:
            todo.append(job)
    run.retain()
    todo.sort(key=lambda job: len(job.identity.token_ids))  # neighbours of similar length pad least
    with tqdm(total=len(jobs), initial=len(jobs) - len(todo), disable=not show_progress, unit="chunk") as bar:
        for batch in _batches(todo, batch_size):
            if before_batch is not None:
                before_batch()
            run.store_batch(batch)
            bar.update(len(batch))
    run.recount()
    return PrecomputeReport(run.stored, run.skipped, run.failed, run.stored_bytes, time.perf_counter() - start)


def stored_entry(text: str, names: Naming) -> TextEntry | None:
    """Describe a chunk's text as the store keeps it; ``None`` where it is too short to be found."""
    entry = text_entry(text)
    return None if entry is None else names.mask(entry)


def _jobs(
    loaded: LoadedModel, items: Sequence[tuple[str | None, str]], common: ChunkIdentity, names: Naming
) -> list[Job]:
    """Merge equal texts: one job per text, with all ids that name it; ``common`` is what all identities share."""
    named: dict[str, list[str | None]] = {}
    for name, text in items:
        named.setdefault(text, []).append(name)
    return [
        Job(
            tuple(dict.fromkeys(ids)),
            stored_entry(text, names),
            replace(common, token_ids=loaded.encoder.chunk_ids(text)),
        )
        for text, ids in named.items()
    ]


def _batches(jobs: list[Job], size: int) -> Iterator[list[Job]]:
    for start in range(0, len(jobs), size):
        yield jobs[start : start + size]


class _Run:
    """State of one precompute: the prefix's buffer and the report in the making."""

    def __init__(
        self,
        loaded: LoadedModel,
        store: ChunkSink,
        model: str,
        prefix_ids: tuple[int, ...],
        namespace: str,
        kv_dtype: KVDtype,
        retention: Retention | None,
    ) -> None:
        self._retention = retention
        self._kv_dtype: KVDtype = kv_dtype
        self._loaded, self._store, self._model = loaded, store, model
        self._prefix_ids = prefix_ids
        self._prefix: KVBuffer | None = None
        self._prefix_identity = ChunkIdentity(model, namespace, ids_digest(()), prefix_ids, kv_dtype)
        self._prefix_retention = Retention(max(PREFIX_PRIORITY, retention.priority if retention else 0))
        self._linked: list[ChunkKey] = []
        self.stored = self.skipped = self.stored_bytes = 0
        self._done: list[Job] = []
        self.failed: list[tuple[str, str]] = []

    def fail(self, job: Job, reason: str) -> None:
        """Note that a chunk has no KV now; at query time it is computed."""
        logger.warning("chunk %s was not stored: %s", job.label, reason)
        self.failed.append((job.label, reason))

    def link(self, job: Job) -> bool:
        """Add references to a chunk that is stored already."""
        is_there = all(self._store.link(job.identity, text=job.entry, doc_id=doc_id) for doc_id in job.doc_ids)
        if is_there:
            self._linked.append(chunk_key(job.identity))
        return is_there

    def retain(self) -> None:
        """Give what was stored already the retention of this run, if it was told one; the prefix never gets less than it has.

        A store that can't be changed now keeps what it was told before: that is no reason to compute nothing.
        """
        if self._retention is None:
            return
        key = chunk_key(self._prefix_identity)
        try:
            if self._linked:
                self._store.retain(self._linked, self._retention)
            held = self._store.retention(key) or Retention()
            if (wanted := self._prefix_retention).priority > held.priority and self._store.known([key]):
                self._store.retain([key], wanted)
        except StoreError as error:
            logger.warning("what is stored already keeps its priority: %s", error)

    def store_batch(self, jobs: list[Job]) -> None:
        """Encode and store some chunks; what fails is reported, and the rest goes on."""
        kvs, spent_ms, reason = self._encode(jobs)
        if self._loaded.fingerprint != self._model:  # after the forward: its KV may be of another adapter than its key
            for job in jobs:
                self.fail(job, "the model's adapters or weights changed while it was computed; precompute again")
            return
        tokens = sum(len(job.identity.token_ids) for job in jobs)
        for job, kv in zip(jobs, kvs, strict=False):
            self._put(job, kv, cost_ms=spent_ms * len(job.identity.token_ids) / tokens)
        if kvs:
            return
        if len(jobs) == 1:
            self.fail(jobs[0], f"out of memory ({reason})")
            return
        half = len(jobs) // 2
        self.store_batch(jobs[:half])
        self.store_batch(jobs[half:])

    def _encode(self, jobs: list[Job]) -> tuple[list[ChunkKV], float, str]:
        """Encode some chunks, in so many ms, or say that memory ran out; an exception that is kept would keep its tensors alive."""
        try:
            prefix = self._encode_prefix()
            start = time.perf_counter()
            kvs = encode_chunks(self._loaded.reusable, prefix, [job.identity.token_ids for job in jobs])
            return kvs, _ms_since(start), ""  # they are on the host, so nothing is still being computed
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return [], 0.0, str(error)

    def recount(self) -> None:
        """Report what has been pushed out again for want of room."""
        known = self._store.known([chunk_key(job.identity) for job in self._done])
        for job in self._done:
            if chunk_key(job.identity) not in known:
                self.stored -= 1
                self.fail(job, f"pushed out again by later chunks: {too_small(self._store.stats())}")

    def _put(self, job: Job, kv: ChunkKV, *, cost_ms: float) -> None:
        retention = self._retention or Retention()
        if retention.cost_ms is None:
            retention = replace(retention, cost_ms=cost_ms)
        try:
            kv = pack(kv, self._kv_dtype)
            for doc_id in job.doc_ids:
                self.stored_bytes += self._store.put(
                    job.identity, kv, text=job.entry, doc_id=doc_id, retention=retention
                )
            self.stored += 1
            self._done.append(job)
        except StoreError as error:
            self.fail(job, str(error))

    def _encode_prefix(self) -> KVBuffer:
        """Run the prefix once per precompute, and store its KV: prompts that start with it reuse it exactly."""
        if self._prefix is None:
            start = time.perf_counter()
            self._prefix, kv = encode_prefix(self._loaded.reusable, self._prefix_ids)
            cost_ms = _ms_since(start)
            if kv is not None and self._loaded.fingerprint == self._model:
                try:
                    self.stored_bytes += self._store.put(
                        self._prefix_identity,
                        pack(kv, self._kv_dtype),
                        text=None,
                        retention=replace(self._prefix_retention, cost_ms=cost_ms),
                    )
                except StoreError as error:
                    logger.warning("the prefix's KV was not stored: %s", error)
        return self._prefix


def _ms_since(start: float) -> float:
    return 1e3 * (time.perf_counter() - start)
