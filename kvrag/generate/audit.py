"""Audit reuse: prefill some repaired prompts in full after their answers, and compare.

The audit runs in the background, a prompt at a time, and gives up within a layer when a request
comes.
"""

from __future__ import annotations

import logging
import random
import threading
from concurrent.futures import Future
from functools import partial

import torch

from kvrag.blend.prefill import Prefilled
from kvrag.generate.scheduler import Scheduler
from kvrag.metrics import kl_divergence
from kvrag.model import StopForward
from kvrag.model.lm import LoadedModel
from kvrag.model.rows import Rows
from kvrag.runtime import Pool

logger = logging.getLogger(__name__)

AUDITS = Pool("kvrag-audit", max_threads=1)


class Audit:
    """Audit of an engine.

    It draws prompts by a generator with a fixed seed, counts the differences, and keeps nothing of
    a prompt.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._draws = random.Random(0)
        self._audited = self._same = self._skipped = 0
        self._sum_kl = self._max_kl = 0.0
        self._has_warned = False
        self._latest: Future[None] | None = None

    def offer(
        self, loaded: LoadedModel, done: Prefilled, share: float, scheduler: Scheduler
    ) -> None:
        """Audit an answered prompt if it was repaired and is drawn; return at once.

        ``share`` is the probability of a draw; ``scheduler`` schedules the requests.
        """
        if done.exactness != "repaired" or self._draws.random() >= share:
            return
        if self._latest and not self._latest.done():
            self._skip()
            return
        try:
            ids = torch.tensor(done.token_ids)
            fingerprint = loaded.fingerprint
            work = partial(self._audit, loaded, fingerprint, ids, done.logits, scheduler)
            self._latest = AUDITS.submit(work, cancel=self._closed)
        except Exception as error:
            # too many threads, or an adapter that can't be reused: the answer has been given
            self._skip(error)

    def close(self) -> None:
        """Stop auditing; a running audit ends after its layer."""
        self._closed.set()

    def stats(self) -> dict[str, float]:
        """Return the numbers of audited and skipped prompts, and how much reuse changed.

        The latter is the mean and the largest KL(full ‖ reuse) at the first token, in nats, and the
        top-1 agreement.
        """
        with self._lock:
            count = max(self._audited, 1)
            means = {
                "mean_kl": self._sum_kl / count,
                "top1": self._same / count,
                "max_kl": self._max_kl,
            }
            return {"requests": self._audited, "skipped": self._skipped, **means}

    def _audit(
        self,
        loaded: LoadedModel,
        fingerprint: str,
        ids: torch.Tensor,
        reused: torch.Tensor,
        scheduler: Scheduler,
    ) -> None:
        """Prefill a prompt in full and compare; an error counts as a skipped prompt."""
        try:
            full = self._prefilled(loaded, ids, scheduler)
            # another fingerprint: an adapter was switched meanwhile
            if full is None or loaded.fingerprint != fingerprint:
                self._skip()
                return
            kl = float(kl_divergence(full, reused))
            is_same = bool(full.argmax() == reused.argmax())
        except Exception as error:  # the answer has been given
            self._skip(error)
            return
        with self._lock:
            self._audited += 1
            self._same += is_same
            self._sum_kl, self._max_kl = self._sum_kl + kl, max(self._max_kl, kl)

    def _prefilled(
        self, loaded: LoadedModel, ids: torch.Tensor, scheduler: Scheduler
    ) -> torch.Tensor | None:
        """Return the last row's logits ``(vocab,)``, unless a request came or the engine closed."""

        def look(*tensors: object) -> None:
            if self._closed.is_set() or not scheduler.is_idle:
                raise StopForward
            fresh = tensors[-1]
            if isinstance(fresh, torch.Tensor) and fresh.is_cuda:
                torch.cuda.synchronize(fresh.device)  # queued layers can't be given up

        if self._closed.is_set() or not scheduler.is_idle:
            return None
        lm = loaded.reusable
        rows = Rows.span(0, len(ids))
        logits, _ = lm.forward(ids, rows, lm.buffer(len(ids)), before_write=look)
        if logits.numel():
            return logits[0, -1].cpu()
        return None

    def _skip(self, error: Exception | None = None) -> None:
        with self._lock:
            self._skipped += 1
            if error is not None and not self._has_warned and not self._closed.is_set():
                self._has_warned = True
                logger.warning(
                    "a prompt was not audited (%s); further failures are counted only", error
                )
