"""Precompute: texts → token ids → chunk keys → KV → store, in batches.

Stored chunks are skipped, so an interrupted run can be repeated.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

from kvrag.config import Retention, StoreConfig
from kvrag.errors import InputError, StoreError, is_out_of_memory
from kvrag.identity.fingerprint import chunk_key, context_digest, ids_digest
from kvrag.kv.quantise import pack
from kvrag.model.lm import LoadedModel
from kvrag.model.rows import KVBuffer
from kvrag.precompute.documents import (
    Claims,
    Guard,
    Items,
    NewChunk,
    batches,
    evicted,
    note_deleted,
    withdraw,
)
from kvrag.precompute.encode import KeptPrefix, encode_chunks, encode_prefix
from kvrag.progress import Progress, tell_short
from kvrag.prompt.spans import ANCHOR_CHARS
from kvrag.runtime import POOL
from kvrag.store import TieredStore
from kvrag.store.base import NewKV
from kvrag.store.catalog.database import FAULTS
from kvrag.store.writing import MEANWHILE
from kvrag.types import ChunkIdentity, ChunkKV, PrecomputeReport, Reasons, TextEntry

logger = logging.getLogger(__name__)

PREFIX_PRIORITY = 85  # priority of a prefix's KV: it is small, and every prompt begins with it


class Precompute:
    """A run that stores the KV of a prefix and of texts behind it.

    Parameters
    ----------
    namespace
        Digest of the namespace.
    prefix
        Text that chunks are encoded behind.
    context
        Token ids of the context between the prefix and the chunk.
    retention
        Retention of the chunks, including chunks stored already; by default, new chunks get the
        default retention and stored chunks keep theirs. The prefix has at least priority
        :data:`PREFIX_PRIORITY`. If ``cost_ms`` is not given, it is measured: a forward's time,
        divided among its chunks in proportion to their tokens.
    guard
        Called before every forward and around every write.
    kept
        The encoded prefix of the owner's latest run. On a CPU, computing it again would take
        seconds per run, for example for every document that is added to an index.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        store: TieredStore,
        config: StoreConfig,
        namespace: str,
        prefix: str,
        context: Sequence[int] = (),
        retention: Retention | None = None,
        *,
        guard: Guard | None = None,
        kept: KeptPrefix,
    ) -> None:
        self._loaded = loaded
        self.store = store
        self._config = config
        self.guard = guard or Guard()
        self._kept = kept
        self._lm = loaded.reusable
        self._retention = retention
        self.is_asked_for = guard is None  # requested by the user, not by write-back
        self._prefix = NewChunk(
            (None,),
            None,
            ChunkIdentity(
                loaded.identity.fingerprint,
                namespace,
                ids_digest(()),
                loaded.encoder.head_ids(prefix),
                config.kv_dtype,
            ),
        )
        self._context = tuple(context)
        self._prefix_retention = Retention(
            max(PREFIX_PRIORITY, retention.priority if retention else 0)
        )
        self._prefix_kv: KVBuffer | None = None
        # Whether the store refuses chunks, and the stored bytes per token of the last chunk.
        self.is_refused = False
        self._erased = store.catalog.erased(namespace)
        self.token_bytes = 0.0
        # The batch being written, while the next batch is computed.
        self._write: Future[None] | None = None
        self._linked: list[NewChunk] = []
        self._done: list[NewChunk] = []
        # Documents that were deleted, or got another text, meanwhile, with their chunks.
        self.deleted = dict[tuple[NewChunk, str | None], None]()
        self.stored = self.skipped = self.stored_bytes = 0
        self.failed = Reasons()
        self.unstored = list[NewChunk]()
        self.short = Reasons()

    def run(
        self, items: Items, *, batch_size: int = 8, show_progress: bool | None = False
    ) -> PrecomputeReport:
        """Store the KV of the prefix and of every text that has no KV yet.

        Equal texts are computed once. ``batch_size`` is the number of chunks per forward. If memory
        runs out, a batch is halved. ``show_progress`` is ``show`` of
        :class:`~kvrag.progress.Progress`.
        """
        start = time.perf_counter()
        chunks = self._distinct(items)
        todo = [chunk for chunk in chunks if self.is_missing(chunk)]
        # Chunks of similar length in a batch need little padding.
        todo.sort(key=lambda chunk: len(chunk.identity.token_ids))
        self._retain_linked()
        # Without a chunk to compute, nothing else would store a prefix whose KV was lost.
        if (
            self._linked
            and not todo
            and self._prefix.identity.token_ids
            and not self.store.link(self._prefix.identity, text=None)
        ):
            self._encode_prefix()
        with (
            Progress(
                "computing KV",
                len(chunks),
                unit="chunks",
                done=len(chunks) - len(todo),
                show=show_progress,
            ) as progress,
            Claims(self.store.claims) as claims,
        ):
            try:
                for batch in batches(self, todo, batch_size, claims):
                    self.guard.before_forward()
                    self._store_batch(batch)
                    progress.advance(len(batch))
            finally:
                self.finish_write()
        unstored = [*self.unstored]
        self._recount(chunks)
        withdraw(self.store, unstored)
        if self.is_asked_for:
            tell_short(self.store, self.short)
        return PrecomputeReport(
            self.stored,
            self.skipped,
            self.failed,
            self.stored_bytes,
            time.perf_counter() - start,
            self.short,
        )

    def _distinct(self, items: Items) -> list[NewChunk]:
        """Return a chunk per distinct text, with all its document ids."""
        self.failed += items.faults
        named: dict[tuple[str, TextEntry | None], dict[str | None, None]] = {}
        for name, text, entry, fault in items:
            if not fault:
                named.setdefault((text, entry), {})[name] = None
        behind = replace(
            self._prefix.identity,
            prefix=ids_digest(self._prefix.identity.token_ids),
            context=context_digest(self._context),
        )
        chunks = list[NewChunk]()
        for (text, entry), ids in named.items():
            chunk = NewChunk(tuple(ids), entry, behind)
            try:
                token_ids = self._loaded.encoder.chunk_ids(text)
            except InputError as error:  # a token that the model has no embedding for
                self._fail(chunk, str(error))
            else:
                chunks.append(replace(chunk, identity=replace(behind, token_ids=token_ids)))
        return chunks

    def is_missing(self, chunk: NewChunk) -> bool:
        """Whether a chunk must be computed. If it is stored already, its documents are linked.

        Chunks that are too short, too long or refused are reported and not computed.
        """
        length = len(chunk.identity.token_ids)
        before = len(self._prefix.identity.token_ids) + len(self._context)
        least = self._config.min_chunk_tokens
        if length < least or chunk.entry is None:
            reason = f"fewer than {ANCHOR_CHARS} characters, which can't be found in a prompt"
            if length < least:
                reason = f"{length} tokens, fewer than {least} (StoreConfig.min_chunk_tokens)"
            self.short += chunk.because(reason)
            return False
        if length >= self._lm.reuse_window - before:
            self._fail(
                chunk,
                f"{length} tokens behind {before} of prefix and context exceed the context window",
            )
            return False
        with self.guard.storing():
            if not self.store.link(
                chunk.identity,
                text=chunk.entry,
                is_registered=self.guard.is_registered(chunk.entry),
            ):
                return True
        self._linked.append(chunk)
        self.skipped += 1
        return False

    def _retain_linked(self) -> None:
        """Set the retention of chunks stored already; the prefix's priority is never lowered."""
        if self._retention is None:
            return
        key = chunk_key(self._prefix.identity)
        try:
            if self._linked:
                self.store.retain(
                    [chunk_key(chunk.identity) for chunk in self._linked], self._retention
                )
            if self._prefix_retention.priority > (
                self.store.retention(key) or Retention()
            ).priority and self.store.known([key]):
                self.store.retain([key], self._prefix_retention)
        except StoreError as error:
            logger.warning("stored chunks keep their retention: %s", error)

    def _store_batch(self, chunks: list[NewChunk]) -> None:
        """Encode chunks and start writing them. Failures are reported, and the run continues."""
        kvs, ms_per_token, reason = self._encode(chunks)
        # An adapter may have been switched since the run began.
        if self._loaded.identity.fingerprint != self._prefix.identity.model:
            for chunk in chunks:
                self._fail(
                    chunk,
                    "the model's adapters or weights changed while it was computed; "
                    "precompute again",
                )
        elif kvs:
            self.finish_write()
            try:
                self._write = POOL.submit(lambda: self._put_all(chunks, kvs, ms_per_token))
            except RuntimeError:  # no thread could be started
                self._put_all(chunks, kvs, ms_per_token)
        elif len(chunks) == 1:
            self._fail(chunks[0], f"out of memory ({reason})")
        else:
            half = len(chunks) // 2
            self._store_batch(chunks[:half])
            self._store_batch(chunks[half:])

    def finish_write(self) -> None:
        """Wait for the batch that is being written; raises its exception."""
        if self._write is not None:
            self._write.result()
            self._write = None

    def _encode(self, chunks: list[NewChunk]) -> tuple[list[ChunkKV], float, str]:
        """Return the KV of chunks, the milliseconds per token, and ``""``.

        If memory runs out, return no KV and the error's message; the exception itself would keep
        tensors alive.
        """
        try:
            prefix = self._encode_prefix()
            start = time.perf_counter()
            token_ids = [chunk.identity.token_ids for chunk in chunks]
            # The KV is on the host, so the device has finished and the time is complete.
            kvs = encode_chunks(self._lm, prefix, token_ids)
            return kvs, 1e3 * (time.perf_counter() - start) / sum(map(len, token_ids)), ""
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return [], 0.0, str(error)

    def _encode_prefix(self) -> KVBuffer:
        """Encode the prefix once per run, and store its KV. Prompts that begin with it reuse it."""
        if self._prefix_kv is None:
            start = time.perf_counter()
            identity = self._prefix.identity
            behind = (identity, self._context)
            self._prefix_kv, kv = found = self._kept.get(behind) or encode_prefix(
                self._lm, identity.token_ids, self._context
            )
            if self._loaded.identity.fingerprint != identity.model:
                return self._prefix_kv
            if self._lm.device.type == "cpu":
                self._kept.clear()
                self._kept[behind] = found
            retention = replace(self._prefix_retention, cost_ms=1e3 * (time.perf_counter() - start))
            if kv is not None:
                try:
                    kv = self._new(self._prefix, kv, retention).kv
                    with self.guard.storing():
                        self.stored_bytes += self.store.put(
                            identity, kv, text=None, retention=retention
                        )
                except StoreError as error:
                    logger.warning("the prefix's KV was not stored: %s", error)
        return self._prefix_kv

    def _put_all(self, chunks: list[NewChunk], kvs: list[ChunkKV], ms_per_token: float) -> None:
        retention = self._retention or Retention()
        wanted = dict[NewChunk, NewKV]()
        with self.guard.storing():
            for chunk, kv in zip(chunks, kvs, strict=True):
                cost_ms = retention.cost_ms
                if cost_ms is None:
                    cost_ms = ms_per_token * len(chunk.identity.token_ids)
                try:
                    wanted[chunk] = self._new(chunk, kv, replace(retention, cost_ms=cost_ms))
                except StoreError as error:
                    self._fail(chunk, str(error))
            results = map(
                self._unless_erased, wanted.values(), self.store.put_all([*wanted.values()])
            )
            for chunk, written in zip(wanted, results, strict=True):
                if isinstance(written, StoreError):
                    if str(written) == MEANWHILE:
                        self.deleted |= {(chunk, name): None for name in chunk.doc_ids}
                        continue
                    # No space, or a disk failure, concerns all chunks; other errors don't.
                    self.is_refused = isinstance(written.__cause__, FAULTS)
                    self._fail(chunk, str(written))
                else:
                    self.stored += 1
                    self.stored_bytes += written
                    self._done.append(chunk)

    def _unless_erased(self, new: NewKV, written: int | StoreError) -> int | StoreError:
        """Put a chunk again whose text went with the text's last KV, but was not deleted."""
        if str(written) == MEANWHILE and self.has_erased() is False:
            [written] = self.store.put_all([new._replace(doc_ids=(None,))])
            if self.has_erased() is not False:  # between the look and the write
                self.store.delete([chunk_key(new.identity)])
                return StoreError(MEANWHILE)
        return written

    def _new(self, chunk: NewChunk, kv: ChunkKV, retention: Retention) -> NewKV:
        if self._config.kv_dtype != "auto":
            kv = pack(kv, self._config.kv_dtype)
        self.token_bytes = kv.num_bytes / len(chunk.identity.token_ids)
        return NewKV(
            chunk.identity,
            kv,
            chunk.entry,
            () if self.guard.is_registered(chunk.entry) else (None,),
            retention,
        )

    def has_erased(self) -> bool | None:
        """Whether documents may have been deleted or replaced since the run began.

        ``None`` if it is unknown now.
        """
        erased = self.store.catalog.erased(self._prefix.identity.namespace)
        return erased and erased != self._erased

    def _recount(self, chunks: Sequence[NewChunk]) -> None:
        """Report documents that were deleted meanwhile, and chunks that later chunks evicted."""
        if self.has_erased():
            note_deleted(self, chunks)
        self.failed += [(name or chunk.label, MEANWHILE) for chunk, name in self.deleted]
        gone = {chunk for chunk, _ in self.deleted}
        keys = [chunk_key(chunk.identity) for chunk in self._done]
        if len(self.store.known(keys)) == len(keys):
            return
        with suppress(StoreError):  # the rows can't be read now
            absent = self.store.catalog.absent(keys)
            for chunk in self._done:
                if chunk_key(chunk.identity) in absent:
                    self.stored -= 1
                    if chunk not in gone:
                        self._fail(chunk, evicted(self.store))

    def _fail(self, chunk: NewChunk, reason: str) -> None:
        """Report a chunk that was not stored; it is computed at query time."""
        logger.warning(
            "chunk %s (%s) was not stored: %s", chunk_key(chunk.identity)[:12], chunk.label, reason
        )
        self.failed += chunk.because(reason)
        self.unstored.append(chunk)
