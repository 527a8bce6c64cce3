"""The facade that users and adapters call. It is long because it documents the public surface."""

from __future__ import annotations

import inspect
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any, ClassVar, NoReturn

import torch
from transformers import PreTrainedModel

from kvrag.config import (
    Repair,
    RepairConfig,
    StoreConfig,
    as_config,
    check_namespace,
    check_template_kwargs,
    refuse_misplaced,
)
from kvrag.config.address import check_kv_dir
from kvrag.config.declare import parameters_of
from kvrag.errors import ConfigError, ModelError
from kvrag.evaluate.answers import evaluate_reuse
from kvrag.evaluate.calibrate import Profile, calibrate_repair, in_words, kept_profile
from kvrag.evaluate.verify import verify_prompts
from kvrag.generate.pipeline import QueryPipeline
from kvrag.generate.request import (
    AnswerRequest,
    EngineStats,
    Figures,
    PrefillRequest,
    Request,
    ScoreRequest,
)
from kvrag.generate.scheduler import Load, pool_stats, scheduler_of
from kvrag.generate.streams import AsyncTokenStream, Emit, Produce, TokenStream
from kvrag.identity.fingerprint import context_digest
from kvrag.model.lm import LoadedModel
from kvrag.model.load import load
from kvrag.model.lock import NOTABLE_S, Clock
from kvrag.model.source import ModelSource
from kvrag.precompute import documents
from kvrag.precompute.encode import KeptPrefix, check_context, context_ids
from kvrag.precompute.library import Library, chosen_keys
from kvrag.precompute.on_miss import WriteBack
from kvrag.precompute.quantise_check import QuantiseCheck
from kvrag.precompute.run import Precompute
from kvrag.prompt.prefix import Prefix, prefix_text
from kvrag.prompt.template import Prompt, PromptEncoder
from kvrag.runtime import own_modes
from kvrag.store import Prefetch, on_accelerator
from kvrag.types import (
    Chunk,
    ChunkIdentity,
    ChunkKey,
    Explanation,
    GenerationResult,
    PrecomputeReport,
    PrefillResult,
    Prove,
    ScoreResult,
    StrPath,
)

MAX_KEPT = 16  # engines that :meth:`KVRagEngine.get` keeps without any other reference to them

_DEFAULT = RepairConfig()

_first_process = 0  # id of the process that made the first engine


def _check_process() -> None:
    """Raise ``ModelError`` in a process that was forked after an engine was made.

    torch would wait there for its parent's threads.
    """
    global _first_process
    _first_process = _first_process or os.getpid()
    if _first_process != os.getpid():
        raise ModelError(
            "a KVRagEngine was made before this process was forked; make engines after the fork "
            "only (gunicorn: without --preload; celery: in worker_process_init), or start "
            "processes by 'spawn'"
        )


class EngineOptions:
    """Options of an engine, checked; :meth:`KVRagEngine.from_pretrained` describes them."""

    def __init__(
        self,
        model: StrPath | PreTrainedModel,
        *,
        tokenizer: Any = None,
        kv_dir: StrPath | None = None,
        prefix: Prefix | None = None,
        context: str | None = "default",
        repair: Repair = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        namespace: str = "default",
        revision: str | None = None,
        store_config: StoreConfig | Mapping[str, Any] | None = None,
        prove: Prove = "auto",
        extra_keys: Mapping[str, str] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **hf_kwargs: Any,
    ) -> None:
        refuse_misplaced(hf_kwargs, _OPTIONS, of="KVRagEngine")
        self.source = ModelSource(
            model,
            tokenizer,
            revision,
            dtype,
            device,
            hf_kwargs,
            extra_keys or {},
            prove,
        )
        self.namespace = check_namespace(namespace)
        self.kv_dir = check_kv_dir(kv_dir)
        self.prefix = prefix
        self.context = check_context(context)
        self.repair = as_config(RepairConfig, repair, option="repair")
        self.store_config = (
            as_config(StoreConfig, store_config, option="store_config") or StoreConfig()
        )
        self.chat_template_kwargs = check_template_kwargs(chat_template_kwargs)

    @property
    def key(self) -> tuple[object, ...]:
        """Key of the engine in this process."""
        return (
            self.source.key,
            tuple(sorted(self.source.extra_keys.items())),
            self.kv_dir,
            self.namespace,
            repr(self.prefix),
            self.context,
            self.repair,
            self.store_config,
            repr(sorted(self.chat_template_kwargs.items())),
        )

    def in_memory(self) -> EngineOptions:
        """Return the options of an engine on the same model that keeps its KV in memory."""
        own = copy(self)
        own.kv_dir = None
        own.namespace = "default"
        own.store_config = StoreConfig(
            kv_dtype=self.store_config.kv_dtype,
            min_chunk_tokens=self.store_config.min_chunk_tokens,
            ram_bytes=2**62,
        )
        return own


_OPTIONS = tuple(inspect.signature(EngineOptions).parameters)[1:-1]


class KVRagEngine(Library):
    r"""Prefills chunks once, reuses their KV in any order, and reports how answers were computed.

    Create an engine with :meth:`from_pretrained`, or share an engine within the process with
    :meth:`get`. Weights are loaded at first use. All methods are thread-safe; concurrent requests
    take turns forward by forward.

    Parameters of several methods:

    ``namespace``: chunks of a namespace are never found from another namespace (default: the
    engine's). ``collection``: a prefix of document ids; with ``"manuals"``, the id ``"install"``
    means ``"manuals/install"``. ``mode``, ``repair``, ``max_context``, ``tools`` and further
    options of requests: :class:`~kvrag.generate.request.ReuseOptions`. How an answer is chosen:
    :class:`~kvrag.SamplingConfig`.

    Invalid options raise :class:`ConfigError`; invalid prompts, texts and ids raise
    :class:`InputError`. Methods that change the store raise :class:`StoreError` if it can't be
    written to.

    Examples
    --------
    >>> model = "Qwen/Qwen2.5-0.5B-Instruct"
    >>> engine = KVRagEngine.from_pretrained(model, kv_dir="./kv")  # doctest: +SKIP
    >>> engine.precompute(chunks)  # doctest: +SKIP
    >>> text = f"{chunks[3]}\n\n{chunks[1]}\n\nWho?"  # doctest: +SKIP
    >>> engine.generate([{"role": "user", "content": text}]).text  # doctest: +SKIP
    """

    _shared: ClassVar[weakref.WeakValueDictionary[tuple[object, ...], KVRagEngine]] = (
        weakref.WeakValueDictionary()
    )
    _recent: ClassVar[dict[KVRagEngine, None]] = {}  # the latest engines of get(), oldest first
    _shared_lock = threading.RLock()

    history_bytes: int
    """Budget of finished requests' KV: ``StoreConfig.history_bytes``, or 0.

    All users of a shared engine share it.
    """

    def __init__(self, options: EngineOptions) -> None:
        _check_process()
        self._options = options
        self.source = options.source
        self.prefix = options.prefix
        self.context = options.context
        self.chat_template_kwargs = options.chat_template_kwargs
        self.source.check()
        super().__init__(
            options.kv_dir, namespace=options.namespace, store_config=options.store_config
        )
        # By namespace: the prefixes of past precompute calls.
        self._prefix_texts: dict[str, dict[str, None]] = {}
        self._kept_prefix: KeptPrefix = {}
        self.history_bytes = self.store_config.history_bytes or 0
        self._gate = QuantiseCheck(self.store_config.kv_dtype)
        self._stats = EngineStats()
        self._lock = threading.RLock()
        self._is_closed = False
        self._loaded: LoadedModel | None = None
        # The model's fingerprint, and the profile kept for it.
        self.profile: tuple[str, Profile | None] = ("", None)
        self._query_side: QueryPipeline | None = None
        self._write_back: WriteBack | None = None

    @classmethod
    @parameters_of(EngineOptions)
    def from_pretrained(cls, model: StrPath | PreTrainedModel, **options: Any) -> KVRagEngine:
        """Create an engine. Weights are loaded at first use.

        All engines of this process with the same source share the weights.

        Parameters
        ----------
        model
            Hub id, local directory, ``.gguf`` file, or a loaded ``PreTrainedModel`` (which needs
            ``tokenizer``).
        tokenizer
            A tokenizer, or a processor of images; its id or directory; default: the model's.
        kv_dir
            Directory of the KV store, shared by all engines that use it; default: keep chunks in
            memory only.
        prefix
            The prompt's start, up to the first chunk: text, chat messages, a prompt template, or a
            :class:`~kvrag.TemplatePrefix`. Default: the head of the model's chat template.
        context
            Text between the prefix and the chunk at index time, so that a chunk is encoded like a
            prompt's later documents: ``"default"`` (250 tokens of passages that ship with kvrag),
            ``"default:1000"`` (1,000 tokens of them), or your own text. ``None``: no context; the
            first chunk of a prompt is then exact behind its own prefix.
        repair, namespace
            Defaults of the engine's methods. Without ``repair``, the result of :meth:`calibrate`
            for the model and context is used.
        device, dtype, revision
            Default: CUDA if available, else the CPU; float32 on the CPU, else the checkpoint's
            dtype; the hub's latest revision.
        store_config
            Budgets, limits and key of the store.
        prove
            ``"auto"``: prove on the loaded model that reuse is exact (once; the proof is kept on
            disk). If the proof fails, prompts are prefilled in full, and every result gives the
            reason. ``"off"``: check the model's structure only.
        extra_keys
            Your own names and values; KV is shared only where they are equal.
        chat_template_kwargs
            Variables for the chat template, in all prompts and in the prefix. If the template
            writes the date, pin it here to keep chunks exact tomorrow.
        **hf_kwargs
            For ``AutoModelForCausalLM.from_pretrained``; not with a loaded model.

        Raises
        ------
        ModelError, StoreError
            If the model can't be found or is not a causal LM; if ``kv_dir`` can't be used.
        ConfigError
            If an option has an invalid value, has no effect, or belongs in ``store_config``, or if
            CUDA is requested and absent.
        """
        return cls(EngineOptions(model, **options))

    @classmethod
    @parameters_of(EngineOptions)
    def get(cls, model: StrPath | PreTrainedModel, **options: Any) -> KVRagEngine:
        """Return this process's shared engine for the arguments of :meth:`from_pretrained`.

        The :data:`MAX_KEPT` engines requested last stay alive without any other reference to them.
        """
        given = EngineOptions(model, **options)
        key = given.key
        with cls._shared_lock:
            engine = cls._shared.get(key)
            if not engine or engine._is_closed:
                engine = cls._shared[key] = cls(given)
            cls._recent.pop(engine, None)
            cls._recent[engine] = None
            if len(cls._recent) > MAX_KEPT:
                del cls._recent[next(iter(cls._recent))]
            return engine

    def __copy__(self, _: object = None) -> KVRagEngine:
        """Return the engine itself, so that copies of a chain share its engine."""
        return self

    __deepcopy__ = __copy__

    def __reduce__(self) -> NoReturn:
        """Refuse pickling: another process has neither the loaded weights nor the open store."""
        raise ConfigError(
            "a KVRagEngine can't be sent to another process or pickled: it holds a loaded model "
            "and an open store. Make it there: call "
            "KVRagEngine.get(...) with the same arguments in the function that runs in the "
            "process; what was precomputed is found in kv_dir"
        )

    @property
    def loaded(self) -> LoadedModel:
        """Model and tokenizer; loads them at first use."""
        _check_process()
        with self._lock:
            loaded = self._loaded
            if not loaded and not self._is_closed:
                loaded = self._loaded = load(self.source, make_encoder=PromptEncoder)
                on_accelerator(self.store, loaded.lm.device, self.store_config)
                self.repair  # noqa: B018 - reads the kept profile now, not in a request
            if not loaded or self._is_closed:  # a close does not wait for a load
                self._loaded = None
                raise ModelError(
                    "this engine is closed; make another one with KVRagEngine.from_pretrained() or "
                    "get()"
                )
            return loaded

    @property
    def repair(self) -> RepairConfig:
        """Repair of requests without ``repair``.

        The engine's own ``repair`` if given, else the repair of the model's profile
        (:meth:`calibrate`), else the default.
        """
        if self._options.repair is not None:
            return self._options.repair
        # The fingerprint changes when adapters are switched.
        if self.profile[0] != (now := self.loaded.identity.fingerprint):
            self.profile = now, kept_profile(self)
        if self.profile[1]:
            return self.profile[1].kept.repair
        return _DEFAULT

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the model."""
        return self.loaded.encoder.tokenizer

    @cached_property
    def encoder(self) -> PromptEncoder:
        """Prompt encoder with the engine's chat template variables; loads the model.

        It renders prompts and tokenises them.
        """
        encoder: PromptEncoder = self.loaded.encoder
        return encoder.with_variables(self.chat_template_kwargs)

    @cached_property
    def prefix_text(self) -> str:
        """Text that chunks are encoded behind if :meth:`precompute` is given no other prefix."""
        return prefix_text(self.prefix, self.encoder)

    @cached_property
    def context_ids(self) -> tuple[int, ...]:
        """Token ids that chunks are encoded behind, between the prefix and the chunk."""
        lm = self.loaded.lm
        if lm.refusal is not None:
            return ()
        return context_ids(self.context, self.loaded.encoder, lm.reuse_window)

    @cached_property
    def context_digest(self) -> str:
        """Digest of :attr:`context_ids`, which chunk keys hold."""
        return context_digest(self.context_ids)

    def text_of(self, prefix: Prefix | None) -> str:
        """Return the text of a prefix; ``None``: :attr:`prefix_text`."""
        return self.prefix_text if prefix is None else prefix_text(prefix, self.encoder)

    def in_memory(self) -> KVRagEngine:
        """Open an engine on the same model that keeps its KV in memory, apart from this store."""
        return type(self)(self._options.in_memory())

    @own_modes
    def warm_up(self) -> None:
        """Load the model and measure the costs of prompts on this machine, before the first prompt.

        Notes
        -----
        ``mode="auto"`` compares these costs. They are kept for later processes.
        """
        if self.loaded.lm.refusal is None:
            self._answering.costs.known()

    def close(self) -> None:
        """Close the store and release the model.

        Prompts and precompute raise :class:`ModelError` afterwards.
        """
        self._is_closed = True
        with self._shared_lock:
            self._recent.pop(self, None)
        super().close()
        self._loaded = self._query_side = self._write_back = None
        self._kept_prefix.clear()

    @own_modes
    @parameters_of(documents.IndexRequest)
    def precompute(self, texts: Sequence[str], **options: Any) -> PrecomputeReport:
        """Compute and store the KV of chunks.

        Stored chunks are skipped, so an interrupted run can be repeated. A deletion wins over all
        that began before it: the KV of documents deleted meanwhile is not kept. KV is kept until
        the last document that refers to it is deleted (:meth:`delete`).

        Options are the fields of :class:`~kvrag.config.IndexOptions`, and ``ids``: document ids,
        one per text.

        Raises
        ------
        InputError
            If a text is empty or not a string, if an id has different texts, or if a document of a
            collection has no id; nothing is stored.
        UnsupportedModelError, ConfigError
            If this model's KV can't be reused, or does not tolerate the store's rounding
            (``StoreConfig.kv_dtype``).
        StoreError
            If the documents can't be registered.
        """
        asked = documents.IndexRequest(texts=texts, **options)
        items = asked.items()
        space = self.space_of(asked.namespace)
        loaded = self.loaded
        text = self.text_of(asked.prefix)
        loaded.reusable  # noqa: B018 - raises before anything is deleted or stored
        if self._gate.kv_dtype != "auto":
            self._gate.admit(loaded)
        self._prefix_texts.setdefault(space, {})[text] = None
        documents.replace(self.store, space, items, self.erasing, is_announced=asked.announced)
        return Precompute(
            loaded,
            self.store,
            self.store_config,
            space,
            text,
            self.context_ids,
            asked.retention,
            kept=self._kept_prefix,
        ).run(items, batch_size=asked.batch_size, show_progress=asked.show_progress)

    def prefetch(
        self,
        texts: Sequence[str] = (),
        *,
        keys: Sequence[ChunkKey] = (),
        namespace: str | None = None,
    ) -> Prefetch:
        """Start reading chunks into memory for an upcoming prompt, and return at once.

        Chunks are given by their ``texts`` as in the prompt, or by ``keys`` of this model and
        namespace; other keys are ignored. With ``texts``, the prefix is read as well. The
        :class:`Prefetch` has ``found`` (the number of chunks, including the prefix), ``wait()``
        and ``cancel()``.
        """
        wanted: list[ChunkIdentity | ChunkKey] = []
        if texts:
            wanted += self._answering.plan(
                self._resolved(
                    PrefillRequest(
                        [  # type: ignore[arg-type]  # mypy takes a mixed list for list[object]
                            self.prefix_text,
                            *map(Chunk, [texts] if isinstance(texts, str) else texts),
                        ],
                        mode="full",
                        namespace=namespace,
                    )
                )
            ).identities
        if keys:
            wanted += chosen_keys(
                self.store.catalog,
                self.space_of(namespace),
                (),
                keys,
                model=self.loaded.fingerprint,
            )
        return self.store.prefetch(wanted)

    def flush_write_back(self, timeout_s: float | None = None) -> bool:
        """Wait until missed chunks are stored (``StoreConfig(on_miss="store")``).

        Return ``False`` if ``timeout_s`` seconds pass before that.
        """
        return not self._write_back or self._write_back.flush(timeout_s)

    @contextmanager
    def erasing(self, space: str | None) -> Iterator[None]:
        """Erase documents of a namespace (``None``: of all) from the KV of earlier requests, too.

        That KV is dropped last: a request may end, and be kept, while the store erases.
        """
        with super().erasing(space):
            try:
                yield
            finally:
                if self._query_side:
                    self._query_side.forget(space)

    @parameters_of(AnswerRequest)
    def generate(self, prompt: Prompt, **options: Any) -> GenerationResult:
        """Answer a prompt.

        Options are the fields of :class:`~kvrag.SamplingConfig` and of
        :class:`~kvrag.generate.request.ReuseOptions`.

        Raises
        ------
        InputError
            If the prompt is empty, malformed, or too long (:class:`ContextLengthError`).
        ConfigError
            If an option does not exist or has an invalid value.
        OutOfMemoryError
            If the prompt does not fit, even without reuse.
        """
        # Run in the caller's thread, so that Ctrl-C ends it.
        return self._produce(prompt, **options)(lambda _: None, threading.Event())

    @parameters_of(AnswerRequest)
    def stream(self, prompt: Prompt, **options: Any) -> TokenStream:
        """Stream an answer: iterate over its text, then read ``.result``.

        Options as for :meth:`generate`.
        """
        return TokenStream(self._produce(prompt, **options))

    @parameters_of(AnswerRequest)
    async def agenerate(self, prompt: Prompt, **options: Any) -> GenerationResult:
        """Answer a prompt like :meth:`generate`, without blocking the event loop.

        Cancelling the task stops decoding.
        """
        stream = AsyncTokenStream(self._produce(prompt, **options))
        async for _ in stream:
            pass
        return stream.result

    @parameters_of(AnswerRequest)
    def astream(self, prompt: Prompt, **options: Any) -> AsyncTokenStream:
        """Stream an answer like :meth:`stream`, for ``async for``."""
        return AsyncTokenStream(self._produce(prompt, **options))

    @own_modes
    @parameters_of(PrefillRequest)
    def prefill(self, prompt: Prompt, **options: Any) -> PrefillResult:
        """Prefill a prompt and return the logits of its first answer token.

        Logits are float32 ``(vocab,)`` on the CPU.
        """
        request, answering = self._prepared(
            clock := Clock(), PrefillRequest(prompt=prompt, **options)
        )
        with answering.prefilled(request, max_new_tokens=1, clock=clock) as (_, done):
            logits = done.logits.float()
        ttft_ms = (time.perf_counter() - clock.start) * 1e3
        return self._stats.count(
            PrefillResult(**done.accounting(clock), logits=logits, ttft_ms=ttft_ms)
        )

    @own_modes
    @parameters_of(ScoreRequest)
    def score(
        self, prompt: Prompt, continuation: str | Sequence[int], **options: Any
    ) -> ScoreResult:
        """Score a continuation of a prompt, given as text or token ids.

        Return the logits ``(T, vocab)`` that predict its tokens, and the tokens' mean loss in nats.
        """
        request, answering = self._prepared(
            clock := Clock(), ScoreRequest(prompt=prompt, continuation=continuation, **options)
        )
        ids = self.loaded.encoder.continuation_ids(continuation, self.loaded.lm.vocab_size)
        with (
            answering.prefilled(request, max_new_tokens=len(ids), clock=clock) as (_, done),
            clock.stage("score"),
        ):
            logits = [done.logits[None]]
            if len(ids) > 1:
                logits.append(done.extend(torch.tensor(ids[:-1])).cpu())
            scores = torch.cat(logits).float()
        loss = float(torch.nn.functional.cross_entropy(scores, torch.tensor(ids)))
        return self._stats.count(
            ScoreResult(**done.accounting(clock), logits=scores, loss=loss, continuation_ids=ids)
        )

    @parameters_of(PrefillRequest)
    def explain(self, prompt: Prompt, **options: Any) -> Explanation:
        """Report which spans of a prompt are known chunks, and which of these have stored KV.

        Spans without stored KV come with the reason.
        """
        asked = PrefillRequest(prompt=prompt, **options)
        request = self._resolved(asked)
        return replace(
            self._answering.explain(request),
            repair=in_words(
                request.repair,
                "given"
                if asked.repair_config or self._options.repair
                else self.profile[1] or "default",
            ),
        )

    verify = verify_prompts
    evaluate = evaluate_reuse
    calibrate = calibrate_repair

    def stats(self) -> dict[str, Any]:
        """Return statistics that can be written as JSON.

        They hold totals over requests, counters of the write-back (if used), the KV of earlier
        requests (if kept) and every tier, the pool of KV (if forwards are recorded), and the
        current load.
        """
        found = self._stats.snapshot() | pool_stats(self._loaded)
        if self._write_back:
            found["write_back"] = self._write_back.stats()
        if self._query_side and self._query_side.histories.max_bytes:
            found["histories"] = self._query_side.histories.stats()
        found["load"] = self.load._asdict()
        found["store"] = {name: Figures(asdict(of)) for name, of in self.store.stats().items()}
        return found

    @property
    def load(self) -> Load:
        """Running and waiting requests on the model's device, and the bytes of KV reserved."""
        if self._loaded:
            return scheduler_of(self._loaded).load
        return Load(0, 0, 0)

    @property
    def _answering(self) -> QueryPipeline:
        """Query-time half of the engine; loads the model."""
        with self._lock:
            loaded = self.loaded
            if not self._query_side:
                self._gate.admit(loaded)
                loaded = self.loaded  # unless it was closed meanwhile
                config = self.store_config
                if config.on_miss == "store" and loaded.lm.refusal is None:
                    self._write_back = WriteBack(loaded, self.store, config, self.context_ids)
                self._query_side = QueryPipeline(
                    loaded, self.store, config, self._write_back, self.context_ids, self._stats
                )
                self.resources.callback(self._query_side.close)
            self._query_side.histories.max_bytes = self.history_bytes
            return self._query_side

    def _prepared(self, clock: Clock, asked: PrefillRequest) -> tuple[Request, QueryPipeline]:
        """Resolve a request.

        The clock records the time to load the model, if it was not loaded, and to prepare.
        """
        if not self._loaded:
            with clock.stage("load_model", least_s=NOTABLE_S):
                self.loaded  # noqa: B018 - loads it
        with clock.stage("prepare", least_s=NOTABLE_S):
            return self._resolved(asked), self._answering

    def _resolved(self, asked: PrefillRequest) -> Request:
        """Fill in the engine's own options where a request gives none."""
        space = self.space if asked.namespace is None else self.space_of(asked.namespace)
        return Request(
            asked.prompt,
            asked.mode,
            asked.repair_config or self.repair,
            space,
            prefixes=(self.prefix_text, *self._prefix_texts.get(space, ())),
            form=asked.form,
            slides=asked.max_context == "slide",
            chat=asked.chat(self.chat_template_kwargs),
        )

    @parameters_of(AnswerRequest)
    def _produce(self, prompt: Prompt, **options: Any) -> Produce:
        """Check the options in the caller's thread; return the work for the request's thread."""
        clock = Clock()
        asked = AnswerRequest(prompt=prompt, **options)

        @own_modes
        def produce(emit: Emit, cancel: threading.Event) -> GenerationResult:
            clock.begin()
            request, answering = self._prepared(clock, asked)
            with answering.write_back.request() if answering.write_back else nullcontext():
                return self._stats.count(answering.answer(request, asked, clock, emit, cancel))

        return produce
