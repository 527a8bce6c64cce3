"""Prove, for one loaded model, that reuse is exact where kvrag says so: its weights, its dtype, its device, this version of transformers.

A few dozen random tokens go through the stages as a prompt would, and through transformers' own forward with its own attention. What
the two must agree on is what the tests promise for tiny models (docs/promises.md); here it is measured on the model that will answer.

**Limits.** A check may differ by 1e-3; float32 stays far below. Where it differs by more, what rounding does to this model is measured
between transformers and itself: the prompt in one piece against two, and against embeddings that are moved by one unit in the last place,
which shows how this model amplifies a rounding whatever attention it uses. Twice as much is then allowed. A mistake is seen if it moves
the result by more: how much a planted one does (a chunk's keys one row off) is measured, too, and reported. A mixture of experts may
send a row to another expert for a rounding (in float32, too, if rarely); such a chance does not repeat, a mistake does, so a proof that
fails is tried with other tokens, twice.

**Which attention.** The model's own, as it was loaded. Some don't mean the same by all of them (SDPA drops Gemma 2's soft cap, and is the
default with transformers 5.17): where the own one differs, the eager one, the modelling file's, decides, and a note says so.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache

from kvrag.blend.layout import Layout, rows_of
from kvrag.model import CausalLM
from kvrag.model.rows import Rows
from kvrag.model.trial import (
    Noise,
    Run,
    Sample,
    draw_sample,
    evaluating,
    gap,
    kv_distance,
    measure_noise,
    precompute_sample,
    run_blend,
    run_full,
    run_own,
    taken_by,
)
from kvrag.types import ChunkKV

LOGITS_LIMIT = 1e-3
"""Promised agreement of logits in float32."""

KV_LIMIT = 1e-3
"""Agreement of keys and values, relative to the largest of their layer."""

CAUSAL_LIMIT = 1e-5
"""Agreement of keys and values that must not depend on what differs, relative to the largest of their layer."""

NOISE_FACTOR = 2.0
"""How many times as much as transformers from itself a check may differ."""

CROSSABLE_WINDOW = 512
"""Sliding windows up to this are crossed by the proof's prompt; longer ones would cost more than a proof should."""

EAGER = "eager"
"""Transformers' reference attention: the code of the modelling file itself."""

ATTEMPTS = 3
"""Draws of tokens: what fails with every one of them is no chance."""

FAR = 1500
"""How far keys are moved, in rows, where the context window allows."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was compared.

    Parameters
    ----------
    promise
        Number of the promise, or what it rests on.
    claim
        What must hold.
    error
        Largest difference found.
    limit
        Largest difference allowed.
    unit
        ``"logits"`` (absolute) or ``"KV"`` (relative to the largest of the layer).
    """

    promise: str
    claim: str
    error: float
    limit: float
    unit: str

    def allowing(self, noise: Noise) -> Check:
        """Return the same check with room for rounding; keys that are only turned have theirs already."""
        if self.promise == "4":
            return self
        return replace(
            self, limit=max(self.limit, NOISE_FACTOR * (noise.logits if self.unit == "logits" else noise.kv))
        )

    @property
    def passed(self) -> bool:
        """Whether the error is within the limit; NaN is not."""
        return self.error <= self.limit


@dataclass(frozen=True, slots=True)
class Proof:
    """What was compared for one model, and what it cost.

    Parameters
    ----------
    checks
        The comparisons.
    notes
        What the proof can't say, in sentences.
    tokens
        Length of its prompt.
    fault
        Difference of logits that a planted mistake makes, for comparison with the limits.
    seconds
        Wall time.
    """

    checks: tuple[Check, ...]
    notes: tuple[str, ...]
    tokens: int
    fault: float
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every check passed, and there were some."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def is_conclusive(self) -> bool:
        """Whether a planted mistake moves the logits by more than any check allows: else one could hide in the rounding."""
        return all(check.limit < self.fault for check in self.checks if check.unit == "logits")

    @property
    def max_error(self) -> float:
        """Largest difference of logits."""
        return max(check.error for check in self.checks if check.unit == "logits")

    @property
    def failure(self) -> str | None:
        """The first check that failed, as a sentence; ``None`` where all passed."""
        failed = next((check for check in self.checks if not check.passed), None)
        if failed is None:
            return None
        return f"the proof on this model failed: {failed.claim} (largest difference {failed.error:.2g}, allowed {failed.limit:.2g})"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Proof:
        """Read what :meth:`to_dict` gave.

        Raises
        ------
        TypeError, KeyError, ValueError
            If it is something else.
        """
        checks = tuple(
            Check(str(c["promise"]), str(c["claim"]), float(c["error"]), float(c["limit"]), str(c["unit"]))
            for c in values["checks"]
        )
        notes = tuple(str(note) for note in values["notes"])
        return cls(checks, notes, int(values["tokens"]), float(values["fault"]), float(values["seconds"]))


def prove(lm: CausalLM, *, seed: int = 0) -> Proof:
    """Prove that reuse is exact for a loaded model, by a dozen small forwards.

    Parameters
    ----------
    lm
        The model.
    seed
        Seed of the tokens.

    Returns
    -------
    Proof
        See there; ask for ``.passed``.
    """
    start = time.perf_counter()
    for attempt in range(ATTEMPTS):
        proof = _prove_once(lm, seed + attempt)
        if proof.passed and proof.is_conclusive:
            break
    own = str(lm.model.config._attn_implementation)
    if own != EAGER and any(check.promise == "0" and not check.passed for check in proof.checks):
        by_definition = _prove_once(lm, seed, EAGER)
        if by_definition.passed:
            note = f"transformers' {own!r} attention differs from its {EAGER!r} one, which defines this model; kvrag follows the latter"
            proof = replace(by_definition, notes=(*by_definition.notes, note))
    return replace(proof, seconds=time.perf_counter() - start)


@torch.inference_mode()
def _prove_once(lm: CausalLM, seed: int, attention: str | None = None) -> Proof:
    """Prove with one draw of tokens, against transformers' attention of this name (``None``: the model's own)."""
    windows = windows_of(lm)
    sample = draw_sample(lm, seed, max((w for w in windows if w <= CROSSABLE_WINDOW), default=0))
    notes = [
        f"the sliding window of {w} was not crossed: the proof's prompt has {len(sample.ids)} tokens"
        for w in windows
        if w >= len(sample.ids)
    ]
    own = run_own(lm, sample.ids, attention=attention)
    stored = precompute_sample(lm, sample)
    every = run_blend(lm, sample.ids, sample.layout, stored, rows_of(sample.layout.stale))
    full = run_full(lm, sample.ids)
    first, fault = _first_chunk(lm, sample, stored, own)
    checks: tuple[Check, ...] = (
        Check("0", "a full prefill gives transformers' own logits", gap(full.logits, own.logits), LOGITS_LIMIT, "logits"),
        Check("0", "a full prefill gives transformers' own keys and values", kv_distance(full.kv, own.kv), KV_LIMIT, "KV"),
        Check("1", "repairing every row gives the full prefill's logits", gap(every.logits, own.logits[-1:]), LOGITS_LIMIT, "logits"),
        Check("1", "repairing every row gives the full prefill's keys and values", kv_distance(every.kv, own.kv), KV_LIMIT, "KV"),
        Check("2", "a chunk behind its own prefix needs no repair", first, LOGITS_LIMIT, "logits"),
        Check("3", "no row sees a later token", _future(lm, sample, stored, seed), CAUSAL_LIMIT, "KV"),
        Check("4", "keys turned to a far position are the model's own", *_moved(lm, sample.ids), "KV"),
    )  # fmt: skip
    if not all(check.passed for check in checks):
        noise = measure_noise(lm, sample.ids, own, attention)
        checks = tuple(check.allowing(noise) for check in checks)
    return Proof(checks, tuple(notes), len(sample.ids), fault, 0.0)


def windows_of(lm: CausalLM) -> list[int]:
    """Return the sliding windows (and attention chunks) of a model's layers, ascending; empty where every row sees all before it."""
    sizes = {size for trait in lm.traits for size in (trait.reach.window, trait.reach.chunk)}
    return sorted(size for size in sizes if size is not None)


def _first_chunk(lm: CausalLM, sample: Sample, stored: Sequence[ChunkKV], own: Run) -> tuple[float, float]:
    """Compare prefix, first chunk and glue, unrepaired, with transformers; and the same with a planted mistake."""
    layout = Layout(sample.layout.segments[:3])
    ids, nothing = sample.ids[: layout.num_tokens], torch.empty(0, dtype=torch.int64)
    row = (
        layout.num_tokens - 1 - len(sample.ids)
    )  # from the end: the prompt's head is causal, what follows doesn't matter
    reference = own.logits[row][None]
    sound, faulty = (run_blend(lm, ids, layout, stored, nothing, plant=plant) for plant in (False, True))
    return gap(sound.logits, reference), gap(faulty.logits, reference)


def _future(lm: CausalLM, sample: Sample, stored: Sequence[ChunkKV], seed: int) -> float:
    """Repair half of the moved chunk's rows twice, the second time with another token in the last of them; compare what stands before."""
    rows = rows_of(sample.layout.stale)
    picked = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[: (len(rows) + 1) // 2]]
    selected = picked.sort().values
    changed = sample.ids.clone()
    last = int(selected[-1])
    changed[last] = sample.other
    one, two = (run_blend(lm, ids, sample.layout, stored, selected) for ids in (sample.ids, changed))
    return kv_distance(two.kv, one.kv, slice(0, last))


def _moved(lm: CausalLM, ids: torch.Tensor) -> tuple[float, float]:
    """Run some tokens far from the beginning through transformers, and compare the keys in its cache with captured keys, turned there.

    Keys of the first layer depend on the token alone, so they are captured at the beginning; those of the others in the same run.

    Returns
    -------
    error, limit : float
        Relative to the largest key of the layer; the limit is a few roundings of the dtype.
    """
    tokens, limit = ids[:8].to(lm.device), 8 * torch.finfo(lm.dtype).eps + 1e-6
    start = max(0, min(FAR, lm.reuse_window - len(tokens) - 1))
    positions = torch.arange(start, start + len(tokens), device=lm.device)
    far = taken_by(lm.model, {"position_ids": positions[None]})
    if not far:  # a model that takes no positions turns no keys
        return 0.0, limit
    cache = DynamicCache()
    with lm.capture() as captured:
        lm.forward(tokens, Rows.span(0, len(tokens)), lm.buffer(len(tokens)), logits=0)
        first = captured[0]
        captured.clear()
        with evaluating(lm) as model:
            model(input_ids=tokens[None], past_key_values=cache, use_cache=True, **far)
    rotary, worst = lm.rotary(start + len(tokens)), 0.0
    for layer, keys in {**captured, 0: first}.items():
        turned, cached = rotary[layer].rotate(keys[0].transpose(0, 1), positions), cache.layers[layer].keys[0]
        worst = max(worst, float((turned - cached).abs().max() / cached.abs().max()))
    return worst, limit
