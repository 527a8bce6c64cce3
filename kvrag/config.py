"""Frozen configurations. A value outside its range is a :class:`~kvrag.errors.ConfigError` that names field, value and range.

Long because every field is documented where it is declared.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, get_args

from kvrag.errors import ConfigError
from kvrag.options import Named
from kvrag.types import KVDtype, Mode, Prove

T = TypeVar("T")

STRATEGIES = ("none", "all", "random", "first_k", "boundary", "hkvd", "query", "query_hkvd")
DURABILITIES = ("durable", "cache")
INDICES = ("diskcache", "sqlite")
ON_MISS = ("compute", "store")
WRITE_POLICIES = ("through", "back")
PREFETCHES = ("best_effort", "wait", "timeout")
MODES: tuple[str, ...] = get_args(Mode)
KV_DTYPES: tuple[KVDtype, ...] = get_args(KVDtype)

KEY_OPTIONS = ("namespace_secret", "mac_key", "encryption_key")
"""The keys of a :class:`StoreConfig`."""

KeySource = Callable[[], bytes] | str
"""Where a key comes from: a function that returns it, or ``"env:NAME"``. Never the key itself."""


def check_mode(mode: str) -> None:
    """Raise :class:`ConfigError` unless ``mode`` is one of :data:`MODES`."""
    if mode not in MODES:
        raise ConfigError(f"mode is {mode!r}; it must be one of {', '.join(MODES)}")


def check_prove(prove: object) -> None:
    """Raise :class:`ConfigError` unless ``prove`` is one of :data:`~kvrag.types.Prove`."""
    if prove not in get_args(Prove):
        raise ConfigError(f"prove is {prove!r}; it must be 'auto' (prove reuse on this model, once) or 'off'")


def _check_number(owner: str, name: str, value: object, low: float, high: float | None = None) -> None:
    """Raise unless ``value`` is a real number in ``[low, high]``; NaN is outside every range."""
    span = f"at least {low:g}" if high is None else f"in [{low:g}, {high:g}]"
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not (value >= low and (high is None or value <= high)):  # type: ignore[operator]
        raise ConfigError(f"{owner}.{name} is {value!r}; it must be a number {span}")


def _check_span(owner: str, name: str, value: object) -> None:
    """Raise unless ``value`` is two numbers that ascend in [0, 1]."""
    pair = tuple(value) if isinstance(value, (tuple, list)) else ()
    are_numbers = len(pair) == 2 and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in pair)
    if not are_numbers or not 0 <= pair[0] < pair[1] <= 1:
        raise ConfigError(f"{owner}.{name} is {value!r}; it must be two numbers that ascend in [0, 1]")


def _check_count(owner: str, name: str, value: object, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigError(f"{owner}.{name} is {value!r}; it must be a whole number of at least {low}")


def _check_key_source(name: str, value: object) -> None:
    """Raise unless ``value`` says where a key comes from; a value that may be a key is not repeated."""
    is_variable = isinstance(value, str) and value.startswith("env:") and len(value) > len("env:")
    if value is not None and not is_variable and not callable(value):
        raise ConfigError(
            f"StoreConfig.{name} is of type {type(value).__name__}; it must be a function that returns the key, 'env:NAME', or None. "
            "A key itself is not taken, because a config may be printed or pickled"
        )


@dataclass(frozen=True, slots=True)
class RepairConfig(Named):
    """How stitched KV is repaired.

    Parameters
    ----------
    strategy
        Which rows are recomputed: ``query`` (the rows that the question attends to), ``hkvd`` (high KV deviation, CacheBlend),
        ``query_hkvd``, ``random``, ``first_k`` (heads of chunks, EPIC), ``boundary`` (rows around each seam), ``none``, ``all``.
    recompute_ratio
        Rows to recompute, as a fraction in [0, 1] of the chunk rows that are not exact.
    first_k
        Rows at the head of every chunk that is not exact, recomputed first; they count towards the ratio, and are recomputed even
        where it is smaller.
    shift
        Strength in [0, 1] of the residual shift: the mean change of a chunk's repaired rows, applied to its other rows.
    mismatch_ratio
        Ratio used instead, where larger, for prompts whose prefix differs from the one that the chunks were encoded behind.
    check_layer
        Layer at which ``hkvd`` measures deviation; at least 1, because layer 0 can't deviate.
    probe_span
        Layers whose attention ``query`` goes by, as fractions of all layers, from and to. The middle ones tell best what a question
        asks for: the first attend to neighbours, the last ones to what is about to be said; and the probe ends with the span.
    seed
        Seed of ``random``.
    """

    strategy: str = "query"
    recompute_ratio: float = 0.10
    first_k: int = 4
    shift: float = 0.5
    mismatch_ratio: float = 0.20
    check_layer: int = 1
    probe_span: tuple[float, float] = (1 / 3, 0.8)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            near = difflib.get_close_matches(str(self.strategy), STRATEGIES, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(
                f"RepairConfig.strategy is {self.strategy!r}; {hint}it must be one of {', '.join(STRATEGIES)}"
            )
        for name in ("recompute_ratio", "shift", "mismatch_ratio"):
            _check_number("RepairConfig", name, getattr(self, name), 0, 1)
        _check_span("RepairConfig", "probe_span", self.probe_span)
        object.__setattr__(self, "probe_span", tuple(self.probe_span))  # JSON has lists, which have no hash
        _check_count("RepairConfig", "first_k", self.first_k, 0)
        _check_count("RepairConfig", "check_layer", self.check_layer, 1)
        _check_count("RepairConfig", "seed", self.seed, 0)

    @classmethod
    def cacheblend(cls, recompute_ratio: float = 0.15) -> RepairConfig:
        """CacheBlend as published (arXiv 2405.16444): HKVD rows, no chunk heads, no shift."""
        return cls(strategy="hkvd", recompute_ratio=recompute_ratio, first_k=0, shift=0.0)


@dataclass(frozen=True, slots=True)
class StoreConfig(Named):
    """Budgets and limits of the KV store.

    Parameters
    ----------
    ram_bytes, ram_fraction
        Budget of the host's memory tier, in bytes and as a fraction in [0, 1] of the memory that this process may use; the lesser wins.
        The lowest priority leaves first, then what was not used for longest.
    disk_bytes, disk_fraction
        Budget of the disk tier in bytes of KV (``None``: no limit), and as a fraction in [0, 1] of the file system's size (1: no
        limit); the lesser wins. What is worth least leaves first: lowest priority, then least computing time saved per byte.
    min_free_bytes
        Bytes of the file system that the store leaves to others; chunks leave, or are not stored, to keep them free. 0: no chunk
        leaves for the sake of others, and one that finds the disk full is not stored.
    high_watermark, low_watermark
        Fractions in [0, 1] of ``disk_bytes``: eviction begins above the high one and ends at the low one. For ``min_free_bytes`` it
        begins when they are not free, and ends with the difference of the two, as a fraction of what is stored, beyond that.
    durability
        ``"durable"``: a chunk that was stored is still there after a power cut. ``"cache"``: the latest ones may be lost then, which
        saves the waiting for the disk. Nothing false is ever read, either way.
    gpu_bytes, gpu_fraction
        Budget of the tier in the accelerator's memory, in bytes (``None``: no limit) and as a fraction in [0, 1] of that memory; the
        lesser wins, and 0 means no such tier. A model on the CPU has none. The tier is emptied when memory runs out. How much memory
        there is, is known for CUDA (and ROCm); elsewhere only ``gpu_bytes`` counts.
    host_min_priority, disk_min_priority
        What is pushed out of the accelerator goes to the host, and what is stored goes to the disk, from this priority on; what has
        less is dropped, or kept in the host's memory alone. 0 to 100.
    write_policy
        ``"through"``: what was stored is on the disk. ``"back"``: it is in the host's memory, and a writer in the background brings it
        to the disk; what it has not yet is lost if the process is killed. ``flush()`` and ``close()`` wait for it.
    prefetch
        What a request does about reads that a prefetch has begun and not ended: ``"best_effort"`` computes instead, ``"wait"`` waits
        however long, ``"timeout"`` waits until ``load_timeout_s`` is over.
    index
        Where the index lives: ``"diskcache"``, or ``"sqlite"``, which needs nothing but Python. ``None``: the kind that the directory has,
        else diskcache where it is installed, else sqlite. Where a directory has the kind that is not asked for, opening it changes the
        kind, with a warning; processes that are to use the other one then fail until they open it again.
    read_only
        Change nothing in the directory, not even the index, which is then kept in memory.
    event_log
        File that events of stored chunks are appended to, as JSON lines; ``None``: none.
    on_event
        Called with each :class:`kvrag.store.StoreEvent`; must be quick, and not use the store.
    load_timeout_s
        Time that a request waits for the store in all, in seconds: for what is looked up and for what is loaded. What is not there by
        then is computed.
    min_chunk_tokens
        Shorter chunks are not stored: a row that must be repaired anyway saves nothing.
    on_miss
        What becomes of chunks that a prompt brings and the store has not. ``"compute"``: they are computed for the answer, each time.
        ``"store"``: after the answer, in the background, they are precomputed as by :meth:`~kvrag.KVRagEngine.precompute`, without a
        document id, so that only budgets erase them. That holds for explicit :class:`~kvrag.Chunk` segments and for registered texts,
        never for live text such as a user's turn.
    kv_dtype
        How KV is kept, on disk and in memory: ``"auto"`` as the model computed it; ``"int8"``, ``"fp8"`` or ``"int4"`` rounded to half or
        less of bfloat16's bytes (docs/quantised.md). What is rounded is close and never exact, and a model that it harms is refused.
        KV of one type is not found by an engine that asks for another.
    ram_dtype
        How the memory tier keeps KV; ``None``: like ``kv_dtype``. ``"auto"``: read from its codes once, which saves time and not memory.
        A rounded type above ``kv_dtype="auto"``: exact KV stays on disk, and every read is rounded, from either tier.
    gpu_dtype
        How the tier in the accelerator's memory keeps KV; ``None``: like the one below it. Otherwise as ``ram_dtype``, above either; where
        there is no such tier, it changes nothing.
    namespace_secret
        Key of the names: namespaces and digests of texts are HMACs with it, so that nobody without it can address, find or guess them.
    mac_key
        Key of a MAC over every chunk's file: one that was not written with it is a miss.
    encryption_key
        Key that files, their index and references are encrypted with (AES-256; needs the extra ``crypto``).

    Notes
    -----
    Each key is a function that returns at least 32 bytes, or ``"env:NAME"``, an environment variable that holds them as hex digits or
    base64. It is read when the store is opened. A store that was written with other keys is left alone and gives no hits.
    """

    ram_bytes: int = 2 * 2**30
    disk_bytes: int | None = None
    min_free_bytes: int = 256 * 2**20
    high_watermark: float = 0.95
    low_watermark: float = 0.85
    durability: str = "durable"
    index: str | None = None
    read_only: bool = False
    event_log: str | None = None
    on_event: Callable[[Any], None] | None = None
    load_timeout_s: float = 10.0
    min_chunk_tokens: int = 32
    on_miss: str = "compute"
    gpu_bytes: int | None = 0
    gpu_fraction: float = 0.1
    ram_fraction: float = 0.5
    disk_fraction: float = 1.0
    host_min_priority: int = 0
    disk_min_priority: int = 0
    write_policy: str = "through"
    prefetch: str = "timeout"
    kv_dtype: KVDtype = "auto"
    ram_dtype: KVDtype | None = None
    gpu_dtype: KVDtype | None = None
    namespace_secret: KeySource | None = field(default=None, repr=False)
    mac_key: KeySource | None = field(default=None, repr=False)
    encryption_key: KeySource | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        _check_count("StoreConfig", "ram_bytes", self.ram_bytes, 0)
        for name in ("disk_bytes", "gpu_bytes"):
            if getattr(self, name) is not None:
                _check_count("StoreConfig", name, getattr(self, name), 0)
        for name in ("gpu_fraction", "ram_fraction", "disk_fraction"):
            _check_number("StoreConfig", name, getattr(self, name), 0, 1)
        for name in ("host_min_priority", "disk_min_priority"):
            _check_count("StoreConfig", name, getattr(self, name), 0)
            _check_number("StoreConfig", name, getattr(self, name), 0, 100)
        _check_count("StoreConfig", "min_free_bytes", self.min_free_bytes, 0)
        _check_number("StoreConfig", "high_watermark", self.high_watermark, 0, 1)
        _check_number("StoreConfig", "low_watermark", self.low_watermark, 0, self.high_watermark)
        choices: tuple[object, ...]
        for name, choices in (
            ("durability", DURABILITIES),
            ("index", (None, *INDICES)),
            ("read_only", (False, True)),
            ("on_miss", ON_MISS),
            ("write_policy", WRITE_POLICIES),
            ("prefetch", PREFETCHES),
            ("kv_dtype", KV_DTYPES),
            ("ram_dtype", (None, *KV_DTYPES)),
            ("gpu_dtype", (None, *KV_DTYPES)),
        ):
            if getattr(self, name) not in choices:
                known = ", ".join(map(str, choices))
                raise ConfigError(f"StoreConfig.{name} is {getattr(self, name)!r}; it must be one of {known}")
        if self.read_only and self.on_miss == "store":
            raise ConfigError(
                "StoreConfig.on_miss is 'store', and a read_only store takes nothing; leave one of them out"
            )
        if not isinstance(self.event_log, (str, type(None))):
            raise ConfigError(f"StoreConfig.event_log is {self.event_log!r}; it must be the path of a file, or None")
        if self.on_event is not None and not callable(self.on_event):
            raise ConfigError(f"StoreConfig.on_event is {self.on_event!r}; it must be callable, or None")
        _check_number("StoreConfig", "load_timeout_s", self.load_timeout_s, 0)
        _check_count("StoreConfig", "min_chunk_tokens", self.min_chunk_tokens, 1)
        for name in KEY_OPTIONS:
            _check_key_source(name, getattr(self, name))
        if len({self.kv_dtype, self.ram_dtype} - {"auto", None}) > 1:
            raise ConfigError(
                f"StoreConfig.ram_dtype is {self.ram_dtype!r} above kv_dtype={self.kv_dtype!r}; KV is rounded once: let ram_dtype be "
                "the same or 'auto', or keep exact KV on disk with kv_dtype='auto'"
            )
        self._check_gpu_dtype()

    def _check_gpu_dtype(self) -> None:
        """Raise if the accelerator's tier would round what has been rounded."""
        is_read = self.kv_dtype != "auto" and self.ram_dtype == "auto"  # codes end in the host's memory then
        below = self.kv_dtype if self.ram_dtype in (None, "auto") else self.ram_dtype
        if self.gpu_dtype not in (None, "auto") and (is_read or below not in ("auto", self.gpu_dtype)):
            raise ConfigError(
                f"StoreConfig.gpu_dtype is {self.gpu_dtype!r} above kv_dtype={self.kv_dtype!r} and ram_dtype={self.ram_dtype!r}; "
                "KV is rounded once: let gpu_dtype be 'auto' or what the tier below keeps, or keep exact KV below with 'auto'"
            )

    @property
    def read_dtype(self) -> KVDtype:
        """What every KV that is read from the store has been rounded to."""
        tiers: tuple[KVDtype | None, ...] = (self.kv_dtype, self.ram_dtype, self.gpu_dtype)
        return next((each for each in tiers if each not in (None, "auto")), None) or "auto"

    def __getstate__(self) -> list[Any]:
        """Refuse to be pickled with a function, which may hold a key; without it, chunks would be written unprotected."""
        for name in KEY_OPTIONS:
            if callable(getattr(self, name)):
                raise ConfigError(f"a StoreConfig whose {name} is a function can't be pickled; use 'env:NAME' instead")
        return [getattr(self, f.name) for f in fields(self)]

    def __deepcopy__(self, _: dict[int, Any]) -> StoreConfig:
        return self

    def __copy__(self) -> StoreConfig:
        return self


@dataclass(frozen=True, slots=True)
class SamplingConfig(Named):
    """How answer tokens are chosen; names and meaning as in ``transformers.GenerationConfig``.

    Parameters
    ----------
    max_new_tokens
        Upper bound of answer tokens, at least 1.
    temperature
        0 is greedy decoding.
    top_p, top_k
        Nucleus and top-k filters; ``None`` is off. Used when sampling.
    repetition_penalty
        ``None`` takes the model's own generation config.
    seed
        Seed for sampling; ``None`` draws one.
    stop
        Strings that end the answer; they are not part of it.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _as_stop_strings(self.stop))
        _check_count("SamplingConfig", "max_new_tokens", self.max_new_tokens, 1)
        _check_number("SamplingConfig", "temperature", self.temperature, 0)
        if 0 < self.temperature < 1e-3:
            raise ConfigError(
                f"SamplingConfig.temperature is {self.temperature!r}; use 0 for greedy decoding, else at least 0.001"
            )
        if self.top_p is not None:
            _check_number("SamplingConfig", "top_p", self.top_p, 0, 1)
        if self.top_k is not None:
            _check_count("SamplingConfig", "top_k", self.top_k, 1)
        if self.repetition_penalty is not None:
            _check_number("SamplingConfig", "repetition_penalty", self.repetition_penalty, 1e-6)
        if self.seed is not None:
            _check_count("SamplingConfig", "seed", self.seed, 0)


def _as_stop_strings(stop: object) -> tuple[str, ...]:
    """Accept ``None``, one string or an iterable of strings."""
    if stop is None:
        return ()
    items = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else (stop,)
    for item in items:
        if not isinstance(item, str) or not item:
            raise ConfigError(f"SamplingConfig.stop holds {item!r}; every stop must be a non-empty string")
    return items
