"""Frozen configurations. A value outside its range is a :class:`~kvrag.errors.ConfigError` that names field, value and range."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, TypeVar, get_args

from kvrag.errors import ConfigError
from kvrag.types import Mode, Prove

T = TypeVar("T")

STRATEGIES = ("none", "all", "random", "first_k", "boundary", "hkvd", "query", "query_hkvd")
DURABILITIES = ("durable", "cache")
INDICES = ("diskcache", "sqlite")
ON_MISS = ("compute", "store")
MODES: tuple[str, ...] = get_args(Mode)


def unknown_option(name: str, known: Iterable[str], *, of: str) -> ConfigError:
    """Build the error for an option that does not exist, with the nearest names that do."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(known)}"
    return ConfigError(f"{of} has no option {name!r}; {hint}")


def build(cls: type[T], options: dict[str, Any]) -> T:
    """Build a config from keyword options, refusing unknown ones by name.

    Raises
    ------
    ConfigError
        If an option does not exist or has a value outside its range.
    """
    known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    for name in options:
        if name not in known:
            raise unknown_option(name, known, of=cls.__name__)
    return cls(**options)


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


def _check_count(owner: str, name: str, value: object, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigError(f"{owner}.{name} is {value!r}; it must be a whole number of at least {low}")


@dataclass(frozen=True, slots=True)
class RepairConfig:
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
    seed
        Seed of ``random``.
    """

    strategy: str = "query"
    recompute_ratio: float = 0.10
    first_k: int = 4
    shift: float = 0.5
    mismatch_ratio: float = 0.20
    check_layer: int = 1
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
        _check_count("RepairConfig", "first_k", self.first_k, 0)
        _check_count("RepairConfig", "check_layer", self.check_layer, 1)
        _check_count("RepairConfig", "seed", self.seed, 0)

    @classmethod
    def cacheblend(cls, recompute_ratio: float = 0.15) -> RepairConfig:
        """CacheBlend as published (arXiv 2405.16444): HKVD rows, no chunk heads, no shift."""
        return cls(strategy="hkvd", recompute_ratio=recompute_ratio, first_k=0, shift=0.0)


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Budgets and limits of the KV store.

    Parameters
    ----------
    ram_bytes
        Budget of the memory tier; least recently used chunks leave first.
    disk_bytes
        Budget of the disk tier in bytes of KV; ``None``: no limit. What is worth least leaves first: lowest priority, then least
        computing time saved per byte.
    min_free_bytes
        Bytes of the file system that the store leaves to others; chunks leave, or are not stored, to keep them free. 0: no chunk
        leaves for the sake of others, and one that finds the disk full is not stored.
    high_watermark, low_watermark
        Fractions in [0, 1] of ``disk_bytes``: eviction begins above the high one and ends at the low one.
    durability
        ``"durable"``: a chunk that was stored is still there after a power cut. ``"cache"``: the latest ones may be lost then, which
        saves the waiting for the disk. Nothing false is ever read, either way.
    index
        Where the index lives: ``"diskcache"``, or ``"sqlite"``, which needs nothing but Python. All processes on a directory must use
        the same one; after a change it is rebuilt.
    read_only
        Change nothing in the directory, not even the index, which is then kept in memory.
    event_log
        File that events of stored chunks are appended to, as JSON lines; ``None``: none.
    on_event
        Called with each :class:`kvrag.store.StoreEvent`; must be quick, and not use the store.
    load_timeout_s
        Chunks not loaded within this time count as misses and are computed.
    min_chunk_tokens
        Shorter chunks are not stored: a row that must be repaired anyway saves nothing.
    on_miss
        What becomes of chunks that a prompt brings and the store has not. ``"compute"``: they are computed for the answer, each time.
        ``"store"``: after the answer, in the background, they are precomputed as by :meth:`~kvrag.KVRagEngine.precompute`, without a
        document id, so that only budgets erase them. That holds for explicit :class:`~kvrag.Chunk` segments and for registered texts,
        never for live text such as a user's turn.
    """

    ram_bytes: int = 2 * 2**30
    disk_bytes: int | None = None
    min_free_bytes: int = 256 * 2**20
    high_watermark: float = 0.95
    low_watermark: float = 0.85
    durability: str = "durable"
    index: str = "diskcache"
    read_only: bool = False
    event_log: str | None = None
    on_event: Callable[[Any], None] | None = None
    load_timeout_s: float = 10.0
    min_chunk_tokens: int = 32
    on_miss: str = "compute"

    def __post_init__(self) -> None:
        _check_count("StoreConfig", "ram_bytes", self.ram_bytes, 0)
        if self.disk_bytes is not None:
            _check_count("StoreConfig", "disk_bytes", self.disk_bytes, 0)
        _check_count("StoreConfig", "min_free_bytes", self.min_free_bytes, 0)
        _check_number("StoreConfig", "high_watermark", self.high_watermark, 0, 1)
        _check_number("StoreConfig", "low_watermark", self.low_watermark, 0, self.high_watermark)
        named = (("durability", DURABILITIES), ("index", INDICES), ("read_only", (False, True)), ("on_miss", ON_MISS))
        for name, choices in named:
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


@dataclass(frozen=True, slots=True)
class SamplingConfig:
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
