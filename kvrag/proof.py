"""Prove, for one loaded model, that reuse is exact where kvrag says so: its weights, its dtype, its device, this version of transformers.

A few dozen random tokens go through the stages as a prompt would, and through transformers' own forward with its own attention. What
the two must agree on is what the tests promise for tiny models (docs/promises.md); here it is measured on the model that will answer.

**Limits.** A check may differ by 1e-3; float32 stays far below. Where it differs by more, what rounding does to this model is measured
between transformers and itself: the prompt in one piece against two, and against embeddings that are moved by one unit in the last place,
which shows how this model amplifies a rounding whatever attention it uses. Twice as much is then allowed. A mistake is seen if it moves
the result by more: how much a planted one does (a chunk's keys one row off) is measured, too, and reported. In low precision a mixture
of experts may send a row to another expert for a rounding; such a chance does not repeat, a mistake does, so a proof that fails there is
tried with other tokens, twice.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache

from kvrag.cache import KVBuffer
from kvrag.layout import Layout, place, rows_of
from kvrag.models import CausalLM
from kvrag.precompute import encode_chunks, encode_prefix
from kvrag.repair import repair
from kvrag.stitch import stitch
from kvrag.types import ChunkKV

LOGITS_LIMIT = 1e-3
"""Promised agreement of logits in float32."""

KV_LIMIT = 1e-3
"""Agreement of keys and values, relative to the largest of their layer."""

CAUSAL_LIMIT = 1e-5
"""Agreement of keys and values that must not depend on what differs, relative to the largest of their layer."""

NOISE_FACTOR = 2.0
"""How many times as much as transformers from itself a check may differ."""

COMPARED_ROWS = 32
"""Last rows whose logits are compared; the rows before them are compared by their keys and values."""

CROSSABLE_WINDOW = 512
"""Sliding windows up to this are crossed by the proof's prompt; longer ones would cost more than a proof should."""

FAR = 1500
"""How far keys are moved, in rows, where the context window allows."""

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer, ``(H_kv, N, D)``."""


@dataclass(frozen=True, slots=True)
class Noise:
    """How far transformers is from itself: logits (absolute), and keys and values (relative to the largest of their layer)."""

    logits: float
    kv: float


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


@dataclass(frozen=True, slots=True)
class _Sample:
    """The proof's prompt: prefix, a chunk behind it, glue, a chunk that is moved, suffix; ids ``(N,)`` and their layout."""

    ids: torch.Tensor
    layout: Layout
    other: int
    """An id to change tokens to."""

    @property
    def prefix(self) -> list[int]:
        return self._ids_of(0)

    @property
    def chunks(self) -> list[list[int]]:
        return [self._ids_of(1), self._ids_of(3)]

    def _ids_of(self, segment: int) -> list[int]:
        s = self.layout.segments[segment]
        return [int(i) for i in self.ids[s.start : s.stop]]


@dataclass(frozen=True, slots=True)
class _Run:
    """What a forward over the prompt gave: logits of its last rows, float32 on the host, and the KV of all rows."""

    logits: torch.Tensor
    kv: Pairs


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
    attempts = 1 if lm.dtype == torch.float32 else 3
    for attempt in range(attempts):
        proof = _prove_once(lm, seed + attempt)
        if proof.passed and proof.is_conclusive:
            break
    return replace(proof, seconds=time.perf_counter() - start)


@torch.inference_mode()
def _prove_once(lm: CausalLM, seed: int) -> Proof:
    windows = windows_of(lm)
    sample = _draw(lm, seed, max((w for w in windows if w <= CROSSABLE_WINDOW), default=0))
    notes = [
        f"the sliding window of {w} was not crossed: the proof's prompt has {len(sample.ids)} tokens"
        for w in windows
        if w >= len(sample.ids)
    ]
    own = _own(lm, sample.ids)
    stored = _stored(lm, sample)
    every = _blend(lm, sample.ids, sample.layout, stored, rows_of(sample.layout.stale))
    full = _full(lm, sample.ids)
    first, fault = _first_chunk(lm, sample, stored, own)
    checks = (
        Check("0", "a full prefill gives transformers' own logits", _gap(full.logits, own.logits), LOGITS_LIMIT, "logits"),
        Check("0", "a full prefill gives transformers' own keys and values", kv_distance(full.kv, own.kv), KV_LIMIT, "KV"),
        Check("1", "repairing every row gives the full prefill's logits", _gap(every.logits, own.logits[-1:]), LOGITS_LIMIT, "logits"),
        Check("1", "repairing every row gives the full prefill's keys and values", kv_distance(every.kv, own.kv), KV_LIMIT, "KV"),
        Check("2", "a chunk behind its own prefix needs no repair", first, LOGITS_LIMIT, "logits"),
        Check("3", "no row sees a later token", _future(lm, sample, stored, seed), CAUSAL_LIMIT, "KV"),
        Check("4", "keys turned to a far position are the model's own", *_moved(lm, sample.ids), "KV"),
    )  # fmt: skip
    if not all(check.passed for check in checks):
        noise = _noise(lm, sample.ids, own)
        checks = tuple(check.allowing(noise) for check in checks)
    return Proof(checks, tuple(notes), len(sample.ids), fault, 0.0)


def windows_of(lm: CausalLM) -> list[int]:
    """Return the sliding windows (and attention chunks) of a model's layers, ascending; empty where every row sees all before it."""
    sizes = {size for trait in lm.traits for size in (trait.reach.window, trait.reach.chunk)}
    return sorted(size for size in sizes if size is not None)


def _draw(lm: CausalLM, seed: int, window: int) -> _Sample:
    """Draw a prompt whose chunks are moved by more than the window, from ids that mean nothing special to the model."""
    lengths = [3, max(12, window + 8), 3, 10, 4]
    room = lm.context_window - 1
    while sum(lengths) > room and max(lengths) > 2:
        lengths = [max(2, length // 2) for length in lengths]
    random = torch.Generator().manual_seed(seed)
    allowed = torch.ones(lm.vocab_size)
    allowed[[i for i in _special_ids(lm.model) if 0 <= i < lm.vocab_size]] = 0
    drawn = torch.multinomial(allowed, sum(lengths) + 1, replacement=True, generator=random)
    kinds = (("prefix", True, 0), ("chunk", True, 1), ("live", False, -1), ("chunk", False, 2), ("live", False, -1))
    layout = place((n, kind, exact, source, False) for n, (kind, exact, source) in zip(lengths, kinds, strict=True))  # type: ignore[misc]
    other = int(drawn[-1])
    return _Sample(drawn[:-1], layout, other)


def _special_ids(model: Any) -> set[int]:
    """Ids that a config names: ends of texts, and places for images, which a model may refuse without one."""

    def walk(values: Any) -> Iterator[int]:
        for name, value in values.items():
            if isinstance(value, dict):
                yield from walk(value)
            elif str(name).endswith(("_token_id", "_token_index")):
                yield from [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)]

    return set(walk(model.config.to_dict()))


# -- the two sides ---------------------------------------------------------------------------------------------------------


@contextmanager
def _evaluating(lm: CausalLM) -> Iterator[Any]:
    """Give the model itself, alone, in evaluation mode and with its own attention."""
    model = lm.model
    with lm._lock:
        was_training = model.training
        if was_training:
            model.eval()
        try:
            yield model
        finally:
            if was_training:
                model.train()


def _own(lm: CausalLM, ids: torch.Tensor, *, pieces: int = 1) -> _Run:
    """Run a prompt through transformers alone, in one piece or more."""
    cache, batch = DynamicCache(), ids.to(lm.device)[None]
    with _evaluating(lm) as model:
        keep = _taken_by(model, {"logits_to_keep": COMPARED_ROWS})
        parts = [
            model(input_ids=part, past_key_values=cache, use_cache=True, **keep).logits[0]
            for part in batch.tensor_split(pieces, dim=1)
        ]
    logits = torch.cat(parts)[-COMPARED_ROWS:].float().cpu()
    return _Run(logits, [(layer.keys[0], layer.values[0]) for layer in cache.layers])


def _taken_by(model: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return those options that a model's ``forward`` takes by name."""
    names = inspect.signature(type(model).forward).parameters
    return {name: value for name, value in options.items() if name in names}


def _noise(lm: CausalLM, ids: torch.Tensor, own: _Run) -> Noise:
    """Measure how far transformers is from itself."""
    others = [_own(lm, ids, pieces=2)]
    with _moved_embeddings(lm):
        others.append(_own(lm, ids))
    return Noise(max(_gap(o.logits, own.logits) for o in others), max(kv_distance(o.kv, own.kv) for o in others))


@contextmanager
def _moved_embeddings(lm: CausalLM) -> Iterator[None]:
    """Move every embedding by one unit in the last place, up or down: a rounding that the model then amplifies."""
    random = torch.Generator().manual_seed(0)

    def move(_: torch.nn.Module, __: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        signs = (torch.randint(0, 2, output.shape, generator=random) * 2 - 1).to(output.device)
        return (output.float() * (1 + torch.finfo(output.dtype).eps * signs)).to(output.dtype)

    with lm._lock:  # the hook would see the forwards of others too
        handle = lm.model.get_input_embeddings().register_forward_hook(move)
        try:
            yield
        finally:
            handle.remove()


def _full(lm: CausalLM, ids: torch.Tensor) -> _Run:
    buffer = lm.buffer(len(ids))
    logits, _ = lm.forward(ids, slice(0, len(ids)), buffer, logits=min(COMPARED_ROWS, len(ids)))
    return _Run(logits[0].float().cpu(), _pairs(lm, buffer))


def _stored(lm: CausalLM, sample: _Sample) -> list[ChunkKV]:
    """Precompute the prefix and, in one padded batch behind it, both chunks."""
    prefix, kv = encode_prefix(lm, sample.prefix)
    assert kv is not None
    return [kv, *encode_chunks(lm, prefix, sample.chunks)]


def _blend(
    lm: CausalLM,
    ids: torch.Tensor,
    layout: Layout,
    stored: Sequence[ChunkKV],
    selected: torch.Tensor,
    *,
    plant: bool = False,
) -> _Run:
    """Stitch and repair a prompt; ``plant`` puts the first chunk's keys one row off, as a mistake would."""
    buffer, rotary = lm.buffer(len(ids)), lm.rotary(len(ids))
    stitch(buffer, layout, stored, rotary)
    if plant:
        rows = slice(layout.segments[1].start, layout.segments[1].stop)
        for layer in range(lm.num_layers):
            buffer.keys(layer)[:, :, rows] = buffer.keys(layer)[:, :, rows].roll(1, dims=2)
    logits = repair(lm, buffer, layout, ids, selected, shift=0.0, rotary=rotary)
    return _Run(logits[None].float().cpu(), _pairs(lm, buffer))


def _pairs(lm: CausalLM, buffer: KVBuffer) -> Pairs:
    return [(buffer.keys(layer)[0], buffer.values(layer)[0]) for layer in range(lm.num_layers)]


# -- checks ----------------------------------------------------------------------------------------------------------------


def _gap(logits: torch.Tensor, reference: torch.Tensor) -> float:
    return float((logits - reference).abs().max())


def kv_distance(kv: Pairs, reference: Pairs, rows: slice = slice(None)) -> float:
    """Largest difference of keys or values in some rows, relative to the largest magnitude of their layer."""
    worst = 0.0
    for pair, expected in zip(kv, reference, strict=True):
        for tensor, target in zip(pair, expected, strict=True):
            scale = float(target.abs().max()) or 1.0
            gap = float((tensor[:, rows].float() - target[:, rows].float()).abs().max()) / scale
            worst = max(worst, gap) if gap == gap else float("nan")
    return worst


def _first_chunk(lm: CausalLM, sample: _Sample, stored: Sequence[ChunkKV], own: _Run) -> tuple[float, float]:
    """Compare prefix, first chunk and glue, unrepaired, with transformers; and the same with a planted mistake."""
    layout = Layout(sample.layout.segments[:3])
    ids, nothing = sample.ids[: layout.num_tokens], torch.empty(0, dtype=torch.int64)
    row = (
        layout.num_tokens - 1 - len(sample.ids)
    )  # from the end: the prompt's head is causal, what follows doesn't matter
    reference = own.logits[row][None]
    sound, faulty = (_blend(lm, ids, layout, stored, nothing, plant=plant) for plant in (False, True))
    return _gap(sound.logits, reference), _gap(faulty.logits, reference)


def _future(lm: CausalLM, sample: _Sample, stored: Sequence[ChunkKV], seed: int) -> float:
    """Repair half of the moved chunk's rows twice, the second time with another token in the last of them; compare what stands before."""
    rows = rows_of(sample.layout.stale)
    picked = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[: (len(rows) + 1) // 2]]
    selected = picked.sort().values
    changed = sample.ids.clone()
    last = int(selected[-1])
    changed[last] = sample.other
    one, two = (_blend(lm, ids, sample.layout, stored, selected) for ids in (sample.ids, changed))
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
    far = _taken_by(lm.model, {"position_ids": positions[None]})
    if not far:  # a model that takes no positions turns no keys
        return 0.0, limit
    cache = DynamicCache()
    with lm.capture() as captured:
        lm.forward(tokens, slice(0, len(tokens)), lm.buffer(len(tokens)), logits=0)
        first = captured[0]
        captured.clear()
        with _evaluating(lm) as model:
            model(input_ids=tokens[None], past_key_values=cache, use_cache=True, **far)
    rotary, worst = lm.rotary(start + len(tokens)), 0.0
    for layer, keys in {**captured, 0: first}.items():
        turned, cached = rotary[layer].rotate(keys[0].transpose(0, 1), positions), cache.layers[layer].keys[0]
        worst = max(worst, float((turned - cached).abs().max() / cached.abs().max()))
    return worst, limit
