"""The facade: what users and adapters call. It does no tensor maths; it is long because it is the public surface, documented."""

from __future__ import annotations

import inspect
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from kvrag.blend.prefill import too_long_to_reuse
from kvrag.blend.quantise import convert
from kvrag.config import RepairConfig, SamplingConfig, StoreConfig, check_mode
from kvrag.errors import ConfigError, InputError
from kvrag.generate.sequence import Answering, Request, accounting
from kvrag.generate.stats import EngineStats
from kvrag.generate.streams import AsyncTokenStream, Emit, Produce, TokenStream
from kvrag.misplaced import refuse_misplaced
from kvrag.model.load import LoadedModel, check_source, load
from kvrag.model.plain import PlainLM
from kvrag.model.source import ModelSource
from kvrag.precompute.documents import items_in, keys_of, named
from kvrag.precompute.items import check_batch_size, check_items, pair_up
from kvrag.precompute.on_miss import EVERYWHERE, WriteBack, erasures_of
from kvrag.precompute.quantise_check import Gate
from kvrag.precompute.run import precompute_texts, replaced_ids
from kvrag.prompt.explain import explain_plan, explain_refusal
from kvrag.prompt.prefix import Prefix, prefix_text
from kvrag.prompt.template import Prompt
from kvrag.store import Prefetch, Retention, check_retention, members, on_accelerator, open_store
from kvrag.types import (
    Chunk,
    ChunkIdentity,
    ChunkKey,
    Explanation,
    GenerationResult,
    Mode,
    PrecomputeReport,
    PrefillResult,
    Prove,
    ScoreResult,
    VerifyReport,
)
from kvrag.verify import verify_prompts


class KVRagEngine:
    r"""Prefills chunks once, reuses their KV in any order, and says for every answer how it was made.

    Build one with :meth:`from_pretrained`, or share one per process with :meth:`get`. Weights are loaded at first use. All methods may
    be called from several threads; requests take turns forward by forward.

    Examples
    --------
    >>> engine = KVRagEngine.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct", kv_dir="./kv")  # doctest: +SKIP
    >>> engine.precompute(chunks)  # doctest: +SKIP
    >>> engine.generate([{"role": "user", "content": f"{chunks[3]}\n\n{chunks[1]}\n\nWho?"}]).text  # doctest: +SKIP
    """

    _shared: dict[tuple[object, ...], KVRagEngine] = {}  # noqa: RUF012 - the process-wide registry of get()
    _shared_lock = threading.Lock()

    def __init__(
        self,
        source: ModelSource,
        *,
        kv_dir: str | os.PathLike[str] | None = None,
        prefix: Prefix | None = None,
        repair: RepairConfig | None = None,
        namespace: str = "default",
        store_config: StoreConfig | None = None,
    ) -> None:
        _check_namespace(namespace)
        if not isinstance(store_config, (StoreConfig, type(None))):
            raise ConfigError(f"store_config is {store_config!r}; pass a kvrag.StoreConfig")
        if not isinstance(kv_dir, (str, os.PathLike, type(None))) or "\0" in str(kv_dir):
            raise ConfigError(f"kv_dir is {kv_dir!r}; pass the path of a directory")
        check_source(source)
        self.source, self.namespace = source, namespace
        self.kv_dir = None if kv_dir is None else os.path.abspath(kv_dir)
        self.repair = _check_repair(repair) or RepairConfig()
        self.store_config = store_config or StoreConfig()
        self.store = open_store(kv_dir, self.store_config, convert=convert)
        self.names = self.store.names
        self._erasures = erasures_of(self.kv_dir)
        self._gate = Gate(self.store_config.read_dtype)
        self._prefix, self._prefix_text = prefix, cast("str | None", None)
        self._prefix_texts: dict[str, dict[str, None]] = {}
        self._stats = EngineStats()
        self._lock = threading.RLock()
        self._loaded: LoadedModel | None = None
        self._query_side: Answering | None = None

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str] | PreTrainedModel,
        *,
        tokenizer: Any = None,
        kv_dir: str | os.PathLike[str] | None = None,
        prefix: Prefix | None = None,
        repair: RepairConfig | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        namespace: str = "default",
        revision: str | None = None,
        store_config: StoreConfig | None = None,
        prove: Prove = "auto",
        extra_keys: Mapping[str, str] | None = None,
        **hf_kwargs: Any,
    ) -> KVRagEngine:
        """Describe an engine; weights are loaded at first use, and shared by all engines of this process with the same source.

        Parameters
        ----------
        model
            Hub id, local directory, ``.gguf`` file, or a loaded ``PreTrainedModel`` (then ``tokenizer`` is needed).
        tokenizer
            A tokenizer, its id or directory; default: the model's.
        kv_dir
            Directory of the KV store; default: chunks are kept in memory only.
        prefix
            What stands before the first chunk in your prompts: text, chat messages, a prompt template, or a
            :class:`~kvrag.prompt.prefix.TemplatePrefix`. Default: the head of the model's chat template.
        repair
            How stitched KV is repaired.
        device
            ``"cpu"``, ``"cuda"``, ...; default: CUDA if there is one.
        dtype
            ``"auto"``: float32 on CPU, else the checkpoint's.
        namespace
            Isolation: chunks of one namespace are never found from another. See SECURITY.md for the keys of a ``store_config``.
        revision
            Hub revision.
        store_config
            Budgets, limits and keys of the store.
        prove
            ``"auto"``: prove on the loaded model that reuse is exact where it says so (a moment, kept on disk); a model that it can't be
            proven for answers by full prefill, and every result says why. ``"off"``: look at the model's structure only.
        extra_keys
            Names and values of your own: KV is shared only where they are equal.
        **hf_kwargs
            For ``AutoModelForCausalLM.from_pretrained``; a model that is loaded already takes none.

        Raises
        ------
        ModelError
            If the model can't be found or is no causal LM.
        ConfigError
            If an option has an impossible value, would change nothing, or belongs in ``store_config``, or CUDA is requested and absent.
        StoreError
            If ``kv_dir`` can't be used.
        """
        given = inspect.signature(cls.from_pretrained).parameters.values()
        own = [p.name for p in given if p.kind is p.KEYWORD_ONLY]
        refuse_misplaced(hf_kwargs, own, of="KVRagEngine.from_pretrained")
        source = ModelSource(model, tokenizer, revision, dtype, device, hf_kwargs, extra_keys or {}, prove)
        return cls(source, kv_dir=kv_dir, prefix=prefix, repair=repair, namespace=namespace, store_config=store_config)

    @classmethod
    def get(cls, model: str | os.PathLike[str] | PreTrainedModel, **options: Any) -> KVRagEngine:
        """Return the process-wide engine for these arguments (those of :meth:`from_pretrained`), made on first call."""
        names = ("tokenizer", "revision", "dtype", "device", "prove", "extra_keys")
        own = ("kv_dir", "prefix", "repair", "namespace", "store_config")
        hf_kwargs = {k: v for k, v in options.items() if k not in (*names, *own)}
        refuse_misplaced(hf_kwargs, (*names, *own), of="KVRagEngine.get")
        source = ModelSource(model, **{k: options[k] for k in names if options.get(k) is not None}, hf_kwargs=hf_kwargs)
        check_source(source)
        _check_repair(options.get("repair"))
        kv_dir = None if options.get("kv_dir") is None else os.path.abspath(options["kv_dir"])
        settings = (repr(options.get("prefix")), options.get("repair"), options.get("namespace", "default"))
        extra = tuple(sorted(source.extra_keys.items()))
        key = (source.key, extra, kv_dir, *settings, options.get("store_config"))
        with cls._shared_lock:
            if key not in cls._shared:
                cls._shared[key] = cls.from_pretrained(model, **options)
            return cls._shared[key]

    # -- state that is made at first use ---------------------------------------------------------------------------------

    @property
    def loaded(self) -> LoadedModel:
        """The model and its tokenizer; loads them."""
        with self._lock:
            if self._loaded is None:
                self._loaded = load(self.source)
                below, self.store = self.store, on_accelerator(
                    self.store, self._loaded.lm.device, self.store_config, convert=convert
                )
                if self.store is below and self.store_config.gpu_dtype is not None:  # no tier that would round
                    self.store_config = replace(self.store_config, gpu_dtype=None)
                    self._gate = Gate(self.store_config.read_dtype)
            return self._loaded

    @property
    def tokenizer(self) -> Any:
        """The tokenizer."""
        return self.loaded.encoder.tokenizer

    @property
    def prefix_text(self) -> str:
        """The text that chunks are encoded behind unless :meth:`precompute` is told otherwise."""
        with self._lock:
            if self._prefix_text is None:
                self._prefix_text = prefix_text(self._prefix, self.loaded.encoder)
            return self._prefix_text

    def close(self) -> None:
        """Close the store, once what waits to be written is written, and forget the model; the engine can't be used afterwards."""
        with self._shared_lock:
            for key in [k for k, engine in self._shared.items() if engine is self]:
                del self._shared[key]
        if self._query_side is not None and self._query_side.write_back is not None:
            self._query_side.write_back.close()
        self.store.close()
        self._loaded = self._query_side = None

    # -- index time ------------------------------------------------------------------------------------------------------

    def precompute(
        self,
        texts: Sequence[str],
        *,
        ids: Sequence[str] | None = None,
        collection: str | None = None,
        prefix: Prefix | None = None,
        namespace: str | None = None,
        batch_size: int = 8,
        show_progress: bool = False,
        retention: Retention | None = None,
    ) -> PrecomputeReport:
        """Compute and store the KV of chunks; what is stored already is skipped, so a run that was killed is simply run again.

        Parameters
        ----------
        texts
            Chunk texts. White space at their ends does not count.
        ids
            Document ids, one per text; KV lives until the last document that refers to it is deleted (:meth:`delete`).
        collection
            Collection that the documents are in: they are stored, and told, as ``collection/id``.
        prefix
            What stands before the first chunk; default: the engine's.
        namespace
            Default: the engine's.
        batch_size
            Chunks per forward.
        show_progress
            Show a progress bar.
        retention
            Priority, and for how long, when room is short; of what is stored already too. Default: 35, and what is stored keeps its own.

        Raises
        ------
        InputError
            If a text is no string or empty, one id names different texts, or a document of a collection has none. Nothing has been
            stored then.
        UnsupportedModelError
            If this model's KV is not reused.
        ConfigError
            If the store rounds KV (``StoreConfig.kv_dtype``) further than this model bears.
        """
        return self.precompute_items(
            pair_up(texts, ids),
            collection=collection,
            prefix=prefix,
            namespace=namespace,
            batch_size=batch_size,
            show_progress=show_progress,
            retention=retention,
        )

    def precompute_items(
        self,
        items: Sequence[tuple[str | None, str]],
        *,
        collection: str | None = None,
        prefix: Prefix | None = None,
        namespace: str | None = None,
        batch_size: int = 8,
        show_progress: bool = False,
        retention: Retention | None = None,
    ) -> PrecomputeReport:
        """As :meth:`precompute`, for ``(id or None, text)`` pairs."""
        items = items_in(check_items(items), collection)
        check_batch_size(batch_size)
        check_retention(retention)
        space = self._namespace(namespace)
        self.loaded.reusable  # noqa: B018 - raises before anything is deleted or stored
        self._gate.admit(self.loaded)
        text = self.prefix_text if prefix is None else prefix_text(prefix, self.loaded.encoder)
        self._prefix_texts.setdefault(space, {})[text] = None
        if replaced := replaced_ids(self.store, items, space, self.names):
            self.delete(replaced, namespace=namespace)
        return precompute_texts(
            self.loaded,
            self.store,
            items,
            prefix=text,
            namespace=space,
            names=self.names,
            batch_size=batch_size,
            min_chunk_tokens=self.store_config.min_chunk_tokens,
            show_progress=show_progress,
            kv_dtype=self.store_config.kv_dtype,
            retention=retention,
        )

    def prefetch(
        self, texts: Sequence[str] = (), *, keys: Sequence[ChunkKey] = (), namespace: str | None = None
    ) -> Prefetch:
        """Begin to read chunks into memory, for a prompt that is about to come, and return while they are read.

        Each is read once, however often it is asked for; a few threads read, and no more at a time than the tier can take. What a request
        does about reads that are under way is ``StoreConfig.prefetch``.

        Parameters
        ----------
        texts
            Chunk texts, as they will stand in the prompt; the prefix is read with them.
        keys
            Keys of chunks, of this model and namespace (others are left out).
        namespace
            Default: the engine's.

        Returns
        -------
        Prefetch
            ``found`` chunks, the prefix included; ``wait()`` for the reads, or ``cancel()`` those that nobody has begun.
        """
        wanted: list[ChunkIdentity | ChunkKey] = []
        if texts:
            prompt: list[str | Chunk] = [self.prefix_text, *map(Chunk, texts)]
            wanted += self._answering.plan(self._request(prompt, "full", None, namespace)).identities
        if keys:
            owner = (self.loaded.fingerprint, self._namespace(namespace))
            records = ((key, self.store.catalog.get(key)) for key in keys)
            wanted += [key for key, record in records if record and (record.model, record.namespace) == owner]
        return self.store.prefetch(wanted)

    def flush_write_back(self, timeout_s: float | None = None) -> bool:
        """Wait until what answered prompts missed is stored (``StoreConfig(on_miss="store")``), for at most ``timeout_s`` seconds.

        Returns
        -------
        bool
            Whether nothing is left to store.
        """
        write_back = self._query_side.write_back if self._query_side is not None else None
        return write_back is None or write_back.flush(timeout_s)

    def delete(
        self, ids: Sequence[str] | None = None, *, collection: str | None = None, namespace: str | None = None
    ) -> int:
        """Delete documents: KV that no other document refers to is erased from every tier.

        Parameters
        ----------
        ids
            Ids of documents.
        collection
            Collection that they are in: with ``"manuals"``, the id ``"install"`` stands for ``"manuals/install"``. Without ``ids``, all
            documents below ``collection/``, such as ``"manuals/install"`` and ``"manuals/cars/7"``.
        namespace
            Default: the engine's.

        Returns
        -------
        int
            Number of chunks erased.

        Raises
        ------
        InputError
            If ``collection`` is no name, or an id is no string.
        """
        space = self._namespace(namespace)
        chosen = named(self.store.catalog, space, ids, collection)
        with self._erasures.erasing(
            space
        ):  # what waits to be written back was seen before, and might hold what goes now
            return sum(self.store.forget(space, doc_id) for doc_id in chosen)

    def retain(
        self,
        ids: Sequence[str] | None = None,
        *,
        keys: Sequence[ChunkKey] = (),
        collection: str | None = None,
        retention: Retention,
        namespace: str | None = None,
    ) -> int:
        """Say anew how much the KV of documents is worth keeping, in every tier that has it; where it lies stays as it is.

        Parameters
        ----------
        ids
            Ids of documents: the KV of their texts, of all models and behind all prefixes.
        keys
            Keys of chunks, of this namespace (others are left out).
        collection
            Collection that the documents are in; without ``ids``, all of it.
        retention
            Priority, and for how long from now on; a cost that it does not name stays what it was.
        namespace
            Default: the engine's.

        Returns
        -------
        int
            Number of chunks that were found.

        Raises
        ------
        InputError
            If ``collection`` is no name, or an id is no string.
        ConfigError
            If ``retention`` is none.
        StoreError
            If the store can't be written to.
        """
        check_retention(retention, is_needed=True)
        space, index = self._namespace(namespace), self.store.catalog
        chosen = keys_of(index, space, named(index, space, ids, collection), keys)
        return self.store.retain(chosen, retention)

    def clear(self, *, namespace: str | None = None) -> int:
        """Erase everything that is stored, from every tier: all documents and KV of every model and prefix, with and without ids.

        What other keys protect is left alone.

        Parameters
        ----------
        namespace
            Erase this one alone. Default: **every** namespace, and not the engine's.

        Returns
        -------
        int
            Number of chunks erased.
        """
        space = None if namespace is None else self._namespace(namespace)
        with self._erasures.erasing(EVERYWHERE if space is None else space):
            return self.store.clear(space)

    def document_ids(self, *, collection: str | None = None, namespace: str | None = None) -> list[str]:
        """Return the ids of all documents that were precomputed and not deleted, or of those below ``collection/``.

        A document is listed whether or not its KV is there now: what a budget has evicted is computed at query time, or by the next
        precompute, and deleting the document erases what is left. :meth:`explain` tells what a prompt would find.
        """
        found = self.store.catalog.documents(self._namespace(namespace))
        return found if collection is None else members(found, collection)

    # -- query time ------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 64,
        mode: Mode = "auto",
        repair: RepairConfig | None = None,
        temperature: float = 0.0,
        stop: str | Sequence[str] | None = None,
        namespace: str | None = None,
        **sampling: Any,
    ) -> GenerationResult:
        """Answer a prompt.

        Parameters
        ----------
        prompt
            Text, chat messages, or segments (``str`` and :class:`~kvrag.types.Chunk`).
        max_new_tokens
            Upper bound of answer tokens.
        mode
            ``"auto"``, ``"full"`` (no reuse), ``"prefix"`` (exact reuse of the prompt's head only), ``"stitch"``.
        repair
            Default: the engine's.
        temperature
            0 is greedy.
        stop
            Strings that end the answer.
        namespace
            Default: the engine's.
        **sampling
            ``top_p``, ``top_k``, ``repetition_penalty``, ``seed``; see :class:`~kvrag.config.SamplingConfig`.

        Raises
        ------
        InputError
            If the prompt is empty, malformed, or too long with the answer (:class:`ContextLengthError`).
        ConfigError
            If an option does not exist or has an impossible value.
        OutOfMemoryError
            If the prompt does not fit, even without reuse.
        """
        stream = self.stream(
            prompt,
            max_new_tokens=max_new_tokens,
            mode=mode,
            repair=repair,
            temperature=temperature,
            stop=stop,
            namespace=namespace,
            **sampling,
        )
        for _ in stream:
            pass
        return stream.result

    def stream(self, prompt: Prompt, **options: Any) -> TokenStream:
        """Answer a prompt piece by piece: iterate over text, then read ``.result``. Options as for :meth:`generate`."""
        return TokenStream(self._produce(prompt, **options))

    async def agenerate(self, prompt: Prompt, **options: Any) -> GenerationResult:
        """As :meth:`generate`; the event loop is not blocked, and cancelling the task stops decoding."""
        stream = self.astream(prompt, **options)
        async for _ in stream:
            pass
        return stream.result

    def astream(self, prompt: Prompt, **options: Any) -> AsyncTokenStream:
        """As :meth:`stream`, for ``async for``."""
        return AsyncTokenStream(self._produce(prompt, **options))

    def prefill(
        self,
        prompt: Prompt,
        *,
        mode: Mode = "auto",
        repair: RepairConfig | None = None,
        namespace: str | None = None,
    ) -> PrefillResult:
        """Prefill a prompt and return the logits of its first answer token, float32 ``(vocab,)`` on the CPU."""
        check_mode(mode)
        start = time.perf_counter()
        done, clock = self._answering.prefilled(
            self._request(prompt, mode, _check_repair(repair), namespace), max_new_tokens=1
        )
        result = PrefillResult(
            **accounting(done, clock),
            logits=done.logits.float().cpu(),
            ttft_ms=(time.perf_counter() - start) * 1e3,
        )
        self._stats.count(result)
        return result

    def score(
        self,
        prompt: Prompt,
        continuation: str | Sequence[int],
        *,
        mode: Mode = "auto",
        repair: RepairConfig | None = None,
        namespace: str | None = None,
    ) -> ScoreResult:
        """Score a given continuation: logits ``(T, vocab)`` that predict its tokens, and their mean loss in nats.

        Parameters
        ----------
        prompt, mode, repair, namespace
            As for :meth:`generate`.
        continuation
            Text or token ids, at least one token.
        """
        check_mode(mode)
        encoder = self.loaded.encoder
        ids = encoder.live_ids(continuation) if isinstance(continuation, str) else list(_as_ids(continuation))
        vocabulary = range(self.loaded.lm.vocab_size)
        if not ids or not all(isinstance(i, int) and i in vocabulary for i in ids):
            raise InputError(f"the continuation is {continuation!r}; pass text, or token ids below {vocabulary.stop}")
        done, clock = self._answering.prefilled(
            self._request(prompt, mode, _check_repair(repair), namespace), max_new_tokens=len(ids)
        )
        with clock.stage("score"):
            logits = [done.logits[None]]
            if len(ids) > 1:
                logits.append(done.extend(torch.tensor(ids[:-1])))
            scores = torch.cat(logits).float().cpu()
        loss = torch.nn.functional.cross_entropy(scores, torch.tensor(ids))
        result = ScoreResult(**accounting(done, clock), logits=scores, loss=float(loss), continuation_ids=ids)
        self._stats.count(result)
        return result

    # -- looking inside --------------------------------------------------------------------------------------------------

    def explain(
        self,
        prompt: Prompt,
        *,
        mode: Mode = "auto",
        repair: RepairConfig | None = None,
        namespace: str | None = None,
    ) -> Explanation:
        """Tell which spans of a prompt are known chunks, which have stored KV, and why the others don't."""
        check_mode(mode)
        request = self._request(prompt, mode, _check_repair(repair), namespace)
        plan = self._answering.plan(request)
        lm = self.loaded.lm
        if isinstance(lm, PlainLM):
            return explain_refusal(plan, lm.refusal)
        if too_long := too_long_to_reuse(lm, len(plan.token_ids) + 1):
            return explain_refusal(plan.without_reuse(too_long), too_long)
        return explain_plan(plan, mode, request.repair, num_layers=lm.num_layers)

    def verify(self, prompts: Sequence[Prompt], **options: Any) -> VerifyReport:
        """Compare reuse with full prefill on your prompts; options as for :func:`kvrag.verify.verify_prompts`."""
        return verify_prompts(self, prompts, **options)

    def stats(self) -> dict[str, Any]:
        """Return totals over requests, the size and counters of each tier of the store, and what was written back, if anything is."""
        write_back = self._query_side.write_back if self._query_side is not None else None
        extra = {} if write_back is None else {"write_back": write_back.stats()}
        return {**self._stats.snapshot(), **extra, "store": self.store.stats()}

    # -- internals -----------------------------------------------------------------------------------------------------

    def _namespace(self, namespace: str | None) -> str:
        return self.names.namespace(self.namespace if namespace is None else _check_namespace(namespace))

    @property
    def _answering(self) -> Answering:
        """The query-time half; loads the model."""
        with self._lock:
            loaded = self.loaded  # first: the gate depends on where the model is
            self._gate.admit(loaded)
            if self._query_side is None:
                config = self.store_config
                wanted = config.on_miss == "store" and not isinstance(loaded.lm, PlainLM)
                write_back = WriteBack(loaded, self.store, config, self._erasures, self.names) if wanted else None
                self._query_side = Answering(loaded, self.store, config, write_back, self.names)
            return self._query_side

    def _request(self, prompt: Prompt, mode: Mode, repair: RepairConfig | None, namespace: str | None) -> Request:
        space = self._namespace(namespace)
        prefixes = (self.prefix_text, *self._prefix_texts.get(space, ()))
        return Request(prompt, mode, repair or self.repair, space, prefixes)

    def _produce(
        self,
        prompt: Prompt,
        *,
        mode: Mode = "auto",
        repair: RepairConfig | None = None,
        namespace: str | None = None,
        stop: str | Sequence[str] | None = None,
        **sampling: Any,
    ) -> Produce:
        """Check the options now, in the caller's thread, and return the work for the request's own thread."""
        start = time.perf_counter()
        check_mode(mode)
        repair = _check_repair(repair)
        config = SamplingConfig(**{**sampling, "stop": stop})

        def produce(emit: Emit, cancel: threading.Event) -> GenerationResult:
            request = self._request(prompt, mode, repair, namespace)
            answering = self._answering
            with answering.write_back.request() if answering.write_back else nullcontext():
                result = answering.answer(request, config, start, emit, cancel)
            self._stats.count(result)
            return result

        return produce


def _as_ids(continuation: object) -> Iterable[Any]:
    if not isinstance(continuation, Iterable):
        raise InputError(f"the continuation is of type {type(continuation).__name__}; pass text or token ids")
    return continuation


def _check_namespace(namespace: object) -> str:
    if not isinstance(namespace, str) or not namespace:
        raise ConfigError(f"namespace is {namespace!r}; it must be a non-empty string")
    return namespace


def _check_repair(repair: object) -> RepairConfig | None:
    if repair is not None and not isinstance(repair, RepairConfig):
        raise ConfigError(
            f"repair is {repair!r}; pass a kvrag.RepairConfig, for example RepairConfig(recompute_ratio=0.15)"
        )
    return repair
