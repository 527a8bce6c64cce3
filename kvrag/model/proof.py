"""Prove, on a loaded model, that reuse is exact where kvrag claims it.

The proof holds for the model's weights, dtype and device, and for the installed version of
transformers. A few dozen random tokens are encoded as chunks, moved and repaired as in a prompt,
and also run through transformers' own forward. The two must agree as the tests promise for tiny
models (docs/promises.md).

Most checks allow a difference of 1e-3; float32 stays far below. If a check fails, the proof
measures the rounding of this model, by runs of transformers against itself, and allows twice as
much. It also measures the effect of a planted mistake, because a limit above that effect proves
little. In a mixture of experts, a rounding may send a row to another expert, which does not repeat.
So a proof that fails or is inconclusive is repeated with other tokens, up to twice.

The reference is the model's attention as loaded. If a full prefill disagrees with it but agrees
with the eager attention, the eager attention is the reference, and a note says so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache, PreTrainedModel

from kvrag.model.forward import EAGER, evaluating, own_attention, switched
from kvrag.model.linear import mixing_layer
from kvrag.model.lm import CausalLM
from kvrag.model.lock import lock_of
from kvrag.model.rows import KVBuffer, Pair, Rows
from kvrag.model.traits import CACHE, accepted

# Agreement in float32: of logits, and of keys and values relative to the largest of their layer.
LIMIT = 1e-3
CAUSAL_LIMIT = 1e-5  # agreement of keys and values that must not depend on a later token
NOISE_FACTOR = 2.0  # a check may differ by this multiple of transformers' own rounding
# The proof's prompt crosses sliding windows up to this; longer windows would cost too much.
CROSSABLE_WINDOW = 512
COMPARED_ROWS = 32  # last rows with compared logits; earlier rows are compared by keys and values
ATTEMPTS = 3  # draws of tokens: a failure with all of them is no chance
FAR = 1500  # rows that keys are moved by, where the context window allows

# Keys and values per layer, ``(H_kv, N, D)``.
Pairs = list[Pair]


class Measured(NamedTuple):
    """Logits (float32, on the host) and KV of a run, or the differences between two runs."""

    logits: Any
    kv: Any


@dataclass(frozen=True, slots=True)
class Check:
    """Comparison: its promise, the claim, the largest difference found and the largest allowed.

    ``unit`` is ``"logits"`` (absolute) or ``"KV"`` (relative to the largest of the layer).
    """

    promise: str
    claim: str
    error: float
    limit: float = LIMIT
    unit: str = "logits"

    def allowing(self, noise: Measured) -> Check:
        """Return the check with its limit raised to the measured rounding."""
        rounding = noise.logits if self.unit == "logits" else noise.kv
        return replace(self, limit=max(self.limit, NOISE_FACTOR * rounding))

    @property
    def passed(self) -> bool:
        """Whether the error is within the limit; NaN is not."""
        return self.error <= self.limit


@dataclass(frozen=True, slots=True)
class Proof:
    """Checks of a model, with notes on the limits of the proof.

    ``fault`` is the effect of a planted mistake on the logits.
    """

    checks: tuple[Check, ...]
    notes: tuple[str, ...]
    tokens: int
    fault: float
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether there are checks and all of them passed."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def is_conclusive(self) -> bool:
        """Whether a planted mistake moves the logits by more than any check of logits allows."""
        return all(check.limit < self.fault for check in self.checks if check.unit == "logits")

    @property
    def max_error(self) -> float:
        """Largest difference of logits over all checks."""
        return max(check.error for check in self.checks if check.unit == "logits")

    @property
    def failure(self) -> str | None:
        """First failed check as a sentence; ``None`` if all passed."""
        sentence = (
            "the proof on this model failed: {0.claim} "
            "(largest difference {0.error:.2g}, allowed {0.limit:.2g})"
        )
        return next((sentence.format(check) for check in self.checks if not check.passed), None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def prove(lm: CausalLM) -> Proof:
    """Prove that reuse is exact on a loaded model.

    A proof is a dozen small forwards over random tokens.
    """
    start = time.perf_counter()
    for seed in range(ATTEMPTS):
        proof = _Trial(lm, seed).prove()
        if proof.passed and proof.is_conclusive:
            break
    own = own_attention(lm.config)
    if own != EAGER and any(check.promise == "0" and not check.passed for check in proof.checks):
        eager = _Trial(lm, 0, EAGER).prove()
        if eager.passed:
            proof = replace(
                eager,
                notes=(
                    *eager.notes,
                    f"transformers' {own!r} attention differs from its {EAGER!r} one, "
                    "which defines this model; kvrag follows the latter",
                ),
            )
    return replace(proof, seconds=time.perf_counter() - start)


def moved_embeddings(model: PreTrainedModel, seed: int) -> RemovableHandle:
    """Multiply embeddings by 1 ± epsilon in a ``with`` block: a rounding that the model amplifies.

    The model is still given ids, because some look up more than embeddings by them (Gemma 4).
    """

    def move(_: object, __: object, found: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        signs = torch.randint(0, 2, found.shape, generator=generator).to(found.device) * 2 - 1
        return (found.float() * (1 + torch.finfo(found.dtype).eps * signs)).to(found.dtype)

    embeddings: torch.nn.Module = model.get_input_embeddings()
    return embeddings.register_forward_hook(move)


class _Trial:
    """Prompt of random tokens: prefix, a chunk behind it, glue, a moved chunk and suffix."""

    def __init__(self, lm: CausalLM, seed: int, attention: str | None = None) -> None:
        self._lm = lm
        self._names = accepted(lm.text_model)
        self._attention = attention
        self._seed = seed
        self._windows = sorted(
            {
                size
                for trait in lm.traits
                for size in (trait.reach.window, trait.reach.chunk)
                if size is not None
            }
        )
        lengths = [
            3,
            max(12, max((w for w in self._windows if w <= CROSSABLE_WINDOW), default=0) + 8),
            3,
            10,
            4,
        ]
        while sum(lengths) > lm.context_window - 1 and max(lengths) > 2:
            lengths = [max(2, length // 2) for length in lengths]
        *ids, self._other = draw(lm, sum(lengths) + 1, seed).tolist()
        self._ids = torch.tensor(ids)
        self._prefix, self._first, _, self._moved, _ = (
            slice(a, b) for a, b in pairwise(accumulate(lengths, initial=0))
        )

    @torch.inference_mode()
    def prove(self) -> Proof:
        """Run the checks."""
        ids = self._ids
        note = (
            f"the sliding window of {{}} was not crossed: the proof's prompt has {len(ids)} tokens"
        )
        notes = tuple(note.format(window) for window in self._windows if window >= len(ids))
        own = self._run_own()
        prefix, first, moved = encode(
            self._lm, [ids[self._prefix], ids[self._first], ids[self._moved]]
        )
        every = self._blend(ids, [prefix, first, moved], self._moved)
        wrong = [(keys.roll(1, dims=1), values) for keys, values in first]
        planted = self._blend(ids, [prefix, wrong, moved], self._moved)
        checks: tuple[Check, ...] = (
            *compared("0", "a full prefill gives transformers' own {}", self._blend(ids), own),
            *compared("1", "repairing every row gives the full prefill's {}", every, own),
            Check(
                "3",
                "no row sees a later token",
                self._future([prefix, first, moved]),
                CAUSAL_LIMIT,
                "KV",
            ),
        )
        # Its limit allows for rounding already: these keys are only rotated.
        far = Check(
            "4", "keys rotated to a far position are the model's own", *self._far_keys(), "KV"
        )
        if not all(check.passed for check in (*checks, far)):
            noise = self._noise(own)
            checks = (
                *(check.allowing(noise) for check in checks),
                # No rounding excuses mixed rows, because the measured one contains their effect.
                Check("3", *mixing_layer(self._lm.model, self._run_own), CAUSAL_LIMIT, "KV"),
            )
        return Proof((*checks, far), notes, len(ids), gap(planted.logits, every.logits), 0.0)

    def _run_own(self, *, pieces: int = 1, moved: bool = False) -> Measured:
        """Run the prompt through transformers alone, in ``pieces`` parts.

        With ``moved``, the embeddings of its tokens are moved by a rounding.
        """
        model = self._lm.text_model
        cache = DynamicCache()
        batch = self._ids.to(self._lm.device)[None]
        with (
            lock_of(model),
            moved_embeddings(model, self._seed) if moved else nullcontext(),
            evaluating(model) if self._attention is None else switched(model, self._attention),
        ):
            options = dict.fromkeys(CACHE & self._names, cache)
            if "logits_to_keep" in self._names:
                options["logits_to_keep"] = COMPARED_ROWS
            run = partial(model, use_cache=True, **options)
            # Without positions, Qwen-VL counts from the image that the model last saw.
            parts = [
                run(
                    input_ids=batch[:, rows],
                    **dict.fromkeys(self._names & {"position_ids"}, rows[None]),
                ).logits[0]
                for rows in torch.arange(len(self._ids), device=batch.device).tensor_split(pieces)
            ]
        logits = torch.cat(parts)[-COMPARED_ROWS:].float().cpu()
        return Measured(logits, [(keys[0], values[0]) for keys, values in self._lm.cached(cache)])

    def _noise(self, own: Measured) -> Measured:
        """Measure how far transformers differs from itself.

        It runs the prompt in two parts, and from moved embeddings.
        """
        others = [self._run_own(pieces=2), self._run_own(moved=True)]
        return Measured(
            max(gap(o.logits, own.logits) for o in others),
            max(kv_gap(o.kv, own.kv) for o in others),
        )

    def _blend(
        self, ids: Tensor, stored: Sequence[Pairs] = (), selected: slice = slice(0)
    ) -> Measured:
        """Stitch stored KV, and compute the selected rows and all rows without stored KV."""
        kv = _blank(self._lm, len(ids))
        rotary = self._lm.rotary(len(ids))
        is_computed = torch.ones(len(ids), dtype=torch.bool)
        for span, layers in zip((self._prefix, self._first, self._moved), stored, strict=False):
            is_computed[span] = False
            for layer, (keys, values) in enumerate(layers):
                kv.keys(layer)[0, :, span] = rotary[layer].rotate(keys, span)
                kv.values(layer)[0, :, span] = values
        is_computed[selected] = True
        rows = is_computed.nonzero()[:, 0].to(self._lm.device)
        compute = Rows.span(0, len(ids)) if not stored else Rows.at(rows)
        logits, _ = self._lm.forward(
            ids[rows.cpu()], compute, kv, logits=min(len(rows), COMPARED_ROWS)
        )
        return Measured(
            logits[0].float().cpu(), [(keys[0], values[0]) for keys, values in kv.layers]
        )

    def _future(self, stored: Sequence[Pairs]) -> float:
        """Compare two repairs that differ in a token, in the rows before that token.

        Half of the moved chunk's rows are repaired. In the second repair, the last of them has
        another token.
        """
        selected = slice(self._moved.start, self._moved.stop, 2)
        last = range(len(self._ids))[selected][-1]
        changed = self._ids.clone()
        changed[last] = self._other
        one, two = (self._blend(ids, stored, selected).kv for ids in (self._ids, changed))
        return kv_gap(two, one, slice(0, last))

    def _far_keys(self) -> tuple[float, float]:
        """Compare transformers' cached keys at far positions with captured keys, rotated there.

        Keys of the first layer depend on the token alone, so they are captured at position 0; keys
        of the other layers are captured in the far run itself. Returns the largest difference and
        its limit.
        """
        lm = self._lm
        limit = 8 * torch.finfo(lm.dtype).eps + 1e-6
        tokens = self._ids[:8].to(lm.device)
        start = max(0, min(FAR, lm.reuse_window - len(tokens) - 1))
        positions = torch.arange(start, start + len(tokens), device=lm.device)
        if "position_ids" not in self._names:  # such a model rotates no keys
            return 0.0, limit
        cache = DynamicCache()
        with lm.capture() as captured:
            lm.forward(tokens, Rows.span(0, len(tokens)), _blank(lm, len(tokens)), logits=0)
            first = captured[0]
            captured.clear()
            with evaluating(lm.model):
                lm.text_model(
                    input_ids=tokens[None],
                    use_cache=True,
                    position_ids=positions[None],
                    **dict.fromkeys(CACHE & self._names, cache),
                )
        rotary = lm.rotary(start + len(tokens))
        cached = [keys[0] for keys, _ in lm.cached(cache)]
        found = {
            n: rotary[n].rotate(keys[0].transpose(0, 1), positions)
            for n, keys in {**captured, 0: first}.items()
        }
        return max(
            gap(keys, cached[n]) / float(cached[n].abs().max()) for n, keys in found.items()
        ), limit


def encode(lm: CausalLM, parts: list[Tensor]) -> list[Pairs]:
    """Encode a prefix and, in a padded batch behind it, chunks.

    Returns position-free keys and values, layer by layer: of the prefix, then of every chunk.
    """
    prefix, *chunks = parts
    longest = max(map(len, chunks))
    start = len(prefix)
    ids = torch.stack([torch.cat([prefix, c, c.new_zeros(longest - len(c))]) for c in chunks])
    kv = _blank(lm, start + longest, batch=len(chunks))
    with lm.capture() as captured:
        lm.forward(ids, Rows.span(0, start + longest), kv, logits=0)

    def taken(i: int, rows: slice) -> Pairs:
        return [
            (captured[n][i, rows].transpose(0, 1), values[i, :, rows])
            for n, (_, values) in enumerate(kv.layers)
        ]

    behind = [taken(i, slice(start, start + len(chunk))) for i, chunk in enumerate(chunks)]
    return [taken(0, slice(0, start)), *behind]


def _blank(lm: CausalLM, capacity: int, *, batch: int = 1) -> KVBuffer:
    """Allocate a buffer full of NaN.

    Reused memory may still hold the right rows of an earlier run, which would hide unwritten rows.
    """
    kv = lm.buffer(capacity, batch=batch)
    for keys, values in kv.layers:
        keys.fill_(math.nan)
        values.fill_(math.nan)
    return kv


def draw(lm: Any, count: int, seed: int) -> Tensor:
    """Draw random ids without the special tokens of the config.

    A model may refuse the token of an image without an image.
    """
    allowed = torch.ones(lm.vocab_size)
    left = list(lm.model.config.to_dict().items())
    for name, value in left:
        if isinstance(value, dict):
            left += value.items()
        elif str(name).endswith(("_token_id", "_token_index")):
            ids = value if isinstance(value, list) else [value]
            allowed[[i for i in ids if isinstance(i, int) and 0 <= i < lm.vocab_size]] = 0
    return torch.multinomial(
        allowed, count, replacement=True, generator=torch.Generator().manual_seed(seed)
    )


def compared(promise: str, claim: str, found: Measured, own: Measured) -> tuple[Check, Check]:
    """Compare a run with transformers' own: the logits of its last rows, and the KV of all rows.

    ``claim`` has a place for what is compared.
    """
    last = own.logits[-len(found.logits) :]
    return (
        Check(promise, claim.format("logits"), gap(found.logits, last)),
        Check(promise, claim.format("keys and values"), kv_gap(found.kv, own.kv), unit="KV"),
    )


def gap(logits: Tensor, reference: Tensor) -> float:
    """Return the largest absolute difference."""
    return float((logits - reference).abs().max())


def kv_gap(kv: Pairs, reference: Pairs, rows: slice = slice(None)) -> float:
    """Return the largest difference of keys or values, relative to the largest of their layer."""
    worst = [
        gap(tensor[:, rows].float(), target[:, rows].float()) / (float(target.abs().max()) or 1.0)
        for pair, expected in zip(kv, reference, strict=True)
        for tensor, target in zip(pair, expected, strict=True)
    ]
    return float(torch.tensor(worst).max())  # NaN if any value is, unlike max()
