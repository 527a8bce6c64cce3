"""Check that a model tolerates quantised KV, once per model and type.

A short prompt with two passages is stitched twice, unrepaired, with and without quantisation, and
the logits of the tokens after the passages are compared. If they exceed the thresholds of
``verify``, the type is refused before anything is stored or read. A passed verdict is cached beside
the proofs (:mod:`kvrag.model.load`), for the same model, device and versions.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from kvrag.blend.layout import Layout, place
from kvrag.blend.stitch import filling, stitch
from kvrag.cache import keep
from kvrag.errors import ConfigError, StoreError
from kvrag.kv.quantise import pack
from kvrag.metrics import MAX_MEAN_KL, MIN_TOP1, kl_divergence
from kvrag.model import CausalLM
from kvrag.model.lm import LoadedModel
from kvrag.model.load import has_passed, kept_file
from kvrag.model.rows import Rows
from kvrag.precompute.encode import encode_chunks, encode_prefix
from kvrag.runtime import own_modes
from kvrag.types import ChunkKV, KVDtype

logger = logging.getLogger(__name__)

VERSION = 2  # of the comparison; a change invalidates every cached verdict
AS_LIKELY = 0.5  # a token counts as the best if it has at least this fraction of its probability
# Most tokens of prefix, passages and question: a second or two for a small model on a CPU.
MAX_TOKENS = (16, 64, 64, 32)

PREFIX = "Read the passages and answer the question.\n\n"
PASSAGES = (
    "The lighthouse at Skerry Point was built in 1861 by Anna Lindqvist, an engineer from "
    "Gothenburg who had lost her brother at sea. It stands on a rock that the spring tides cover "
    "twice a month, so the stones were cut on the mainland, numbered and rowed out in calm "
    "weather. The lamp burned rape oil until 1904, paraffin until 1937, and has been electric ever "
    "since. Its light reaches nineteen nautical miles, two white flashes every fifteen seconds.",
    "In 1938 the last keeper, Tomas Hale, moved to the village of Orme with his wife and a parrot "
    "called Admiral. He kept a diary of the weather for fifty-two years, which the university "
    "printed in three volumes. The school in Orme was named after him in 1991. A museum next to "
    "the harbour shows the first lens, the keeper's boat and a letter in which the parrot's "
    "vocabulary is described with some regret.",
)
QUESTION = (
    "\n\nQuestion: Who built the lighthouse whose last keeper moved to Orme, and when?\n"
    "Answer: The lighthouse at Skerry Point was built in 1861 by Anna Lindqvist, an engineer from "
    "Gothenburg. Its last keeper was Tomas Hale, who moved to Orme in 1938."
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The effect of quantisation on a model.

    Attributes
    ----------
    mean_kl
        KL(without ‖ with quantisation) in nats per token.
    top1
        Share of tokens with the same most likely next token, or with a next token that is at least
        :data:`AS_LIKELY` times as likely as the best without quantisation. (Any rounding reorders
        equally likely tokens.)
    tokens
        Number of tokens compared.
    """

    mean_kl: float
    top1: float
    tokens: int

    @property
    def passed(self) -> bool:
        """Whether both thresholds are met; NaN does not pass."""
        return self.mean_kl <= MAX_MEAN_KL and self.top1 >= MIN_TOP1


class QuantiseCheck:
    """Admit models to a store that quantises KV to ``kv_dtype``, and remember them.

    ``"auto"`` admits every model.
    """

    def __init__(self, kv_dtype: KVDtype) -> None:
        self.kv_dtype: KVDtype = kv_dtype
        self._admitted: set[str] = set()
        self._lock = threading.Lock()

    @own_modes
    def admit(self, loaded: LoadedModel) -> None:
        """Check a model, unless it has passed before, in this process or an earlier process.

        Raises :class:`ConfigError` if the check fails. Models without KV reuse always pass.
        """
        if self.kv_dtype == "auto" or not isinstance(loaded.lm, CausalLM):
            return
        with self._lock:
            fingerprint = loaded.fingerprint
            if fingerprint not in self._admitted:
                self._check(loaded, loaded.lm, fingerprint)
                self._admitted.add(fingerprint)

    def _check(self, loaded: LoadedModel, lm: CausalLM, fingerprint: str) -> None:
        kv_dtype = self.kv_dtype
        file = kept_file("verdict", lm, fingerprint, gate=str(VERSION), kv_dtype=kv_dtype)
        if has_passed(Verdict, file):
            return
        try:
            verdict = judge(loaded, lm, kv_dtype)
        except StoreError as error:
            raise ConfigError(f"this model's KV can't be kept as {kv_dtype}: {error}") from error
        if not verdict.passed:
            softer = "'auto'" if kv_dtype == "int8" else "'int8' or 'auto'"
            raise ConfigError(
                f"this model does not tolerate KV rounded to {kv_dtype}: "
                f"KL {verdict.mean_kl:.3g} nats per token from the same reuse "
                f"without rounding (at most {MAX_MEAN_KL:g} is allowed), "
                f"the same or an equally likely next token for {verdict.top1:.0%} "
                f"(at least {MIN_TOP1:.0%} is needed); use StoreConfig(kv_dtype={softer})"
            )
        logger.info("KV rounded to %s moves this model by %.2g nats", kv_dtype, verdict.mean_kl)
        keep(file, json.dumps(asdict(verdict)))


@torch.inference_mode()
def judge(loaded: LoadedModel, lm: CausalLM, kv_dtype: KVDtype) -> Verdict:
    """Compare reuse with KV quantised to ``kv_dtype`` with reuse of unquantised KV.

    Raises ``StoreError`` if the KV can't be quantised.
    """
    prefix, *chunks, tail = draw_parts(loaded, lm)
    buffer, kv = encode_prefix(lm, prefix)
    assert kv is not None
    stored = [kv, *encode_chunks(lm, buffer, chunks)]
    first, second = map(len, chunks)
    layout = place(
        [
            (len(prefix), "prefix", True, 0, False),
            (first, "chunk", True, 1, False),
            (second, "chunk", False, 2, False),
            (len(tail), "live", False, -1, False),
        ]
    )
    reference = _answers(lm, layout, stored, tail)
    rounded = _answers(lm, layout, [pack(each, kv_dtype) for each in stored], tail)
    return Verdict(
        float(kl_divergence(reference, rounded).mean()), _same_top(reference, rounded), len(tail)
    )


def draw_parts(loaded: LoadedModel, lm: CausalLM) -> list[list[int]]:
    """Return the token ids of the prefix, the two passages, and the question with its answer.

    They are truncated to fit the model's window.
    """
    encoder = loaded.encoder
    texts = [
        encoder.live_ids(PREFIX, at_start=True),
        *map(encoder.chunk_ids, PASSAGES),
        encoder.live_ids(QUESTION),
    ]
    share = min(1.0, (lm.reuse_window - 1) / sum(MAX_TOKENS))
    return [
        list(ids[: max(1, int(most * share))]) for ids, most in zip(texts, MAX_TOKENS, strict=True)
    ]


def _answers(lm: CausalLM, layout: Layout, kvs: Sequence[ChunkKV], tail: list[int]) -> Tensor:
    """Stitch and return the logits of all rows after the passages, ``(T, vocab)``."""
    buffer = lm.buffer(layout.num_tokens)
    start = layout.num_tokens - len(tail)
    with filling(buffer):
        stitch(buffer, layout, kvs, lm.rotary(layout.num_tokens))
        logits, _ = lm.forward(
            torch.tensor(tail), Rows.span(start, layout.num_tokens), buffer, logits=len(tail)
        )
    return logits[0].float().cpu()


def _same_top(reference: Tensor, rounded: Tensor) -> float:
    """Return the share of rows whose best token with quantisation is also likely without it.

    Likely means: at least :data:`AS_LIKELY` times the probability of the best token. Both arguments
    are logits ``(T, vocab)``.
    """
    chosen = reference.gather(-1, rounded.argmax(-1, keepdim=True)).squeeze(-1)
    return float((chosen - reference.amax(-1) >= math.log(AS_LIKELY)).double().mean())
