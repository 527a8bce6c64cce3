"""Find the cheapest repair that reaches a target on a model and a corpus, and keep it as default.

The result, a profile, is kept in the cache directory beside the model's proof. Its name depends on
facts that are the same on every machine: the model, the context of its chunks, and the rounding of
their KV. The profiles that ship with the package, in ``profiles.json``, have the same names.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from itertools import count
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from pydantic import TypeAdapter

from kvrag.blend.cost import IN_ROWS, Price
from kvrag.blend.layout import Layout, place
from kvrag.blend.select import BASE_ROWS, BASE_SHARE, MOST_SHARE
from kvrag.cache import cache_dir
from kvrag.cache import keep as keep_file
from kvrag.config import RepairConfig
from kvrag.errors import InputError, OutOfMemoryError
from kvrag.evaluate.answers import Reference, answered
from kvrag.evaluate.engine import Engine
from kvrag.evaluate.questions import IS_RIGHT, planted, score
from kvrag.identity.fingerprint import digest
from kvrag.metrics import kl_divergence
from kvrag.progress import Progress, check_show

VERSION = 3  # of the measurement and of the repair; a change invalidates all kept profiles
TARGET_KL = 0.02
TARGET_TOP1 = 0.97
TARGET_LOST = 0.02
ANSWER_TOKENS = 24
LEAST_PROMPTS = 12  # of a profile that is kept
STANDARD_ERRORS = 2.2  # of a mean's 95% interval: Student's t for the least sample
START = RepairConfig(recompute_ratio=0.10)
LOWER = (0.05, 0.03, 0.02)
HIGHER = (None, 0.20, 0.40)  # None: the default
"""Recompute ratios tried after :data:`START`, in this order."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Trial:
    """A repair, and its measured quality and cost over the prompts.

    ``mean_kl`` is KL(full ‖ reuse) in nats per token of the model's own answer. ``top1`` is the
    share of these tokens with the same most likely token. ``kl_error`` and ``top1_error`` are the
    standard errors of the two means. ``rows`` are the repaired rows and ``cost`` all computed rows,
    both divided by the prompt's rows. ``lost`` is the share of the planted facts right by full
    prefill that reuse answers wrong.
    """

    repair: RepairConfig
    rows: float
    cost: float
    mean_kl: float
    kl_error: float
    top1: float
    top1_error: float
    lost: float = 0.0

    def reaches(self, max_mean_kl: float, min_top1: float) -> bool:
        """Whether the means' 95% intervals are within the limits, and few facts are lost."""
        highest_kl = self.mean_kl + STANDARD_ERRORS * self.kl_error
        lowest_top1 = self.top1 - STANDARD_ERRORS * self.top1_error
        is_close = highest_kl <= max_mean_kl and lowest_top1 >= min_top1
        return is_close and self.lost <= TARGET_LOST


@dataclass(frozen=True, slots=True)
class Profile:
    """Profile of a model: the trial kept for it, and the settings that found it.

    ``date``: ISO 8601, UTC.
    """

    kept: Trial
    max_mean_kl: float
    min_top1: float
    prompts: int
    chunks_per_prompt: int
    seed: int
    model: str
    versions: dict[str, str]
    date: str

    @property
    def is_reached(self) -> bool:
        """Whether the target was reached; if not, the trial with the least KL is kept."""
        return self.kept.reaches(self.max_mean_kl, self.min_top1)

    def __str__(self) -> str:
        missed = "" if self.is_reached else ", which misses the target"
        return (
            f"calibrated on {self.prompts} prompts: mean KL {self.kept.mean_kl:.3f}, "
            f"top-1 {self.kept.top1:.0%}{missed}"
        )


def check_sample(prompts: int, *, keep: bool) -> None:
    """Raise :class:`InputError` for a profile to keep of too few prompts."""
    if keep and prompts < LEAST_PROMPTS:
        raise InputError(
            f"{prompts} prompts are too few to choose a model's repair by; pass at least "
            f"{LEAST_PROMPTS}, or keep=False (--no-keep) to look without keeping the result"
        )


def calibrate_repair(
    engine: Engine,
    chunks: Sequence[str],
    *,
    max_mean_kl: float = TARGET_KL,
    min_top1: float = TARGET_TOP1,
    prompts: int = 24,
    chunks_per_prompt: int = 6,
    seed: int = 0,
    keep: bool = True,
    on_trial: Callable[[Trial], None] = lambda _: None,
    show_progress: bool | None = None,
) -> Profile:
    """Find the cheapest repair that reaches a target on your chunks, and keep it as the default.

    The engine uses it unless ``repair`` is given. Calibration prompts hold chunks in random order
    and a question about a chunk; their KV is kept in memory only. Takes minutes.

    Parameters
    ----------
    engine, chunks
        The engine, and chunk texts as your application splits them.
    max_mean_kl, min_top1
        The target: mean KL from the full prefill in nats per token, and share of equal most likely
        tokens, over the model's own answers. The 95% intervals of both must be within it.
    prompts, chunks_per_prompt, seed
        Number of prompts, chunks per prompt (as many as your application retrieves), and the seed
        of the draw.
    keep
        ``False``: change nothing, only measure. A profile of fewer than 12 prompts is not kept.
    on_trial
        Called with every :class:`Trial`.
    show_progress
        ``None``: for a long run, show a bar on a terminal and lines elsewhere; ``True``: show a
        bar; ``False``: show nothing.

    Raises
    ------
    InputError
        If there are too few chunks or prompts, or full prefill answers no prompt right; also if the
        profile is to be kept and there are fewer than 12 prompts. :class:`ContextLengthError` if
        the prompts exceed the model's context window.
    UnsupportedModelError
        If this model's KV can't be reused.
    """
    check_show(show_progress)
    check_sample(prompts, keep=keep)
    asked = planted(engine, chunks, prompts, chunks_per_prompt, seed)
    with closing(engine.in_memory()) as own:
        own.precompute(
            list(dict.fromkeys(text for each in asked for text in each.chunks)),
            show_progress=show_progress,
        )
        references = list(
            answered(
                own,
                asked,
                ANSWER_TOKENS,
                what="answering by full prefill",
                show_progress=show_progress,
            )
        )
        if not any(reference.is_right for reference in references):
            raise InputError(
                "full prefill answers no planted fact right, so none can be lost; a thinking model "
                "needs chat_template_kwargs={'enable_thinking': False}, a small one fewer chunks "
                "per prompt"
            )
        number = count(1)

        def measure(repair: RepairConfig) -> Trial:
            with Progress(
                f"calibrating, trial {next(number)}", prompts, unit="prompts", show=show_progress
            ) as progress:
                trial = _trial(own, references, repair, progress)
            on_trial(trial)
            return trial

        found = search(measure, lambda trial: trial.reaches(max_mean_kl, min_top1))
    profile = Profile(
        found,
        max_mean_kl,
        min_top1,
        prompts,
        chunks_per_prompt,
        seed,
        engine.source.name,
        {name: version(name) for name in ("kvrag", "torch", "transformers")},
        datetime.now(UTC).date().isoformat(),
    )
    if keep:
        engine.profile = engine.loaded.fingerprint, profile
        keep_file(profile_file(engine), json.dumps(asdict(profile)))
    return profile


def search(measure: Callable[[RepairConfig], Trial], reaches: Callable[[Trial], bool]) -> Trial:
    """Find the cheapest repair that reaches the target, without trying all repairs.

    Try no repair, then :data:`START`, then lower ratios as long as they reach the target, or higher
    ratios until the target is reached. If it is never reached, return the trial with the least KL.
    """
    trials: list[Trial] = []

    def tried(repair: RepairConfig) -> Trial:
        trials.append(measure(repair))
        return trials[-1]

    none = tried(RepairConfig(strategy="none"))
    if reaches(none):
        return none
    is_enough = reaches(tried(START))
    for ratio in LOWER if is_enough else HIGHER:
        if reaches(tried(replace(START, recompute_ratio=ratio))) != is_enough:
            break
    reached = [trial for trial in trials if reaches(trial)]
    if reached:
        return min(reached, key=lambda trial: trial.cost)
    return min(trials, key=lambda trial: trial.mean_kl)


def _trial(
    engine: Engine, references: Sequence[Reference], repair: RepairConfig, progress: Progress
) -> Trial:
    """Measure a repair on all prompts."""
    price = Price(IN_ROWS, repair, engine.loaded.reusable.depth)
    figures = []
    lost = 0
    for reference in references:
        found = engine.score(reference.prompt, reference.token_ids, mode="stitch", repair=repair)
        is_same = found.logits.argmax(-1) == reference.logits.argmax(-1)
        total = found.prompt_tokens
        figures.append(
            (
                found.repaired_tokens / total,
                price.of_forwards(_layout(engine, reference.prompt)) / total,
                float(kl_divergence(reference.logits, found.logits).mean()),
                float(is_same.double().mean()),
            )
        )
        if reference.is_right and not is_same.all():
            answer = engine.generate(
                reference.prompt, max_new_tokens=ANSWER_TOKENS, mode="stitch", repair=repair
            )
            lost += score(answer.text, reference.question.answers) < IS_RIGHT
        progress.advance()
    rows, cost, kls, tops = zip(*figures, strict=True)
    kl_error, top1_error = (stdev(values) / len(values) ** 0.5 for values in (kls, tops))
    share = lost / sum(reference.is_right for reference in references)
    return Trial(
        repair, fmean(rows), fmean(cost), fmean(kls), kl_error, fmean(tops), top1_error, share
    )


def _layout(engine: Engine, prompt: Any) -> Layout:
    spans = engine.explain(prompt, mode="stitch").spans
    if not all(span.hit for span in spans if span.kind == "chunk"):
        raise OutOfMemoryError(
            "the KV of the chunks does not fit into memory; calibrate with fewer prompts or chunks"
        )
    return place(
        (s.stop - s.start, s.kind if s.hit else "live", s.exact, n, False)
        for n, s in enumerate(spans)
    )


def profile_file(engine: Engine) -> Path:
    """Return the path of the profile for an engine's model, context and rounding."""
    name = digest(
        "profile",
        {
            "model": engine.loaded.identity.portable.encode(),
            "context": engine.context_digest.encode(),
            "kv_dtype": engine.store_config.kv_dtype.encode(),
            "version": bytes([VERSION]),
        },
    )
    return cache_dir() / "profiles" / f"{name}.json"


def kept_profile(engine: Engine) -> Profile | None:
    """Read this user's profile for an engine, else the shipped profile of the same name.

    A damaged file, or a profile of too few prompts, counts as absent. The log says once that a
    profile of this user's decides.
    """
    file = profile_file(engine)
    with suppress(OSError, ValueError):
        profile = TypeAdapter(Profile).validate_json(file.read_bytes())
        if profile.prompts >= LEAST_PROMPTS:
            _say_kept(file, in_words(profile.kept.repair, profile))
            return profile
    return _shipped().get(file.stem)


@cache
def _say_kept(file: Path, repair: str) -> None:
    logger.warning(
        "repair of this model: %s; kept in %s. Delete this file to undo it, or pass repair=",
        repair,
        file,
    )


@cache
def _shipped() -> dict[str, Profile]:
    text = files("kvrag.evaluate").joinpath("profiles.json").read_text("utf-8")
    return TypeAdapter(dict[str, Profile]).validate_json(text)


def in_words(repair: RepairConfig, origin: object) -> str:
    """Describe a repair and its origin, for reports."""
    return f"{described(repair)} ({origin})"


def described(repair: RepairConfig) -> str:
    """Describe a repair in a few words."""
    if repair.strategy == "none":
        return "none"
    share = f"{BASE_SHARE:.0%} and {BASE_ROWS} rows, at most {MOST_SHARE:.0%}"
    if repair.recompute_ratio is not None:
        share = f"ratio {repair.recompute_ratio:g}"
    return f"{repair.strategy}, {share}, first_k {repair.first_k}, shift {repair.shift:g}"
