"""Learn the prefix, the text before the first chunk, from an application's prompts.

The user asks for it with ``prefix="learn"``. A head is learned after :data:`LEARN_AFTER` prompts
began with it verbatim, of which no two share their first chunk or their ending. So a question never
becomes part of it: if a question stands before the chunks, the endings are the same, and a
conversation that grows keeps its first chunk. Text that looks like a chunk's metadata is not part
of a head.
"""

from __future__ import annotations

import logging
import re
import threading

from kvrag.identity.fingerprint import text_digest
from kvrag.prompt.plan import Plan
from kvrag.prompt.prefix import LEARN, LearnPrefix, Prefix

logger = logging.getLogger(__name__)

LEARN_AFTER = 3
MAX_LEARNT = 4  # prefixes per namespace: an application may use so many templates
MAX_METADATA = 2000  # characters
MAX_HEADS = 256  # heads that may yet be learned; beyond, the least recently seen is dropped

METADATA = re.compile(r"(?m)(?:^[\w .-]{1,40}: \S.*\n)+(?:\s*|[\w .-]{1,40}: )\Z")
"""Metadata that frameworks write before a chunk's text, a line per entry; a label may begin the
text's own line."""


def head_of(plan: Plan) -> str | None:
    """Return the text before a plan's first chunk; ``None`` without a chunk."""
    first = next((n for n, piece in enumerate(plan.pieces) if piece.piece.kind == "chunk"), None)
    if first is None:
        return None
    return "".join([piece.piece.text for piece in plan.pieces[:first]])


class Learner:
    """Thread-safe learner of prefixes, by namespace, from the plans of an engine's prompts.

    Of prompts that it has seen, it keeps only digests. ``named`` holds the prefixes, by namespace,
    that an engine's prompts may begin with; learned prefixes are added to it.
    """

    def __init__(self, named: dict[str, dict[str, None]]) -> None:
        self._named = named
        self._lock = threading.RLock()
        self._seen: dict[tuple[str, str], tuple[set[str], set[str]]] = {}
        self._learnt: dict[str, tuple[str, ...]] = {}

    def learnt(self, namespace: str) -> tuple[str, ...]:
        """Return the namespace's learned prefixes, oldest first."""
        return self._learnt.get(namespace, ())

    def see(self, namespace: str, plan: Plan, first: str) -> None:
        """Observe a plan, and log a prefix that is learned from it.

        ``first`` is the prefix that is used until a prefix is learned. A head that equals it, or
        that has stored KV (of an earlier process), is accepted at once.
        """
        whole = head_of(plan)
        if whole is None or plan.fault or plan.refusal:
            return
        metadata = METADATA.search(whole, len(whole) - MAX_METADATA)
        head = whole[: metadata.start()] if metadata else whole
        with self._lock:
            learnt = self.learnt(namespace)
            is_named = head == first or (
                plan.pieces[0].identity is not None and plan.pieces[0].piece.text == head
            )
            if (
                head in learnt
                or len(learnt) == MAX_LEARNT
                or not (is_named or self._is_constant(namespace, head, plan))
            ):
                return
            self._learnt[namespace] = (*learnt, head)
            self._named.setdefault(namespace, {})[head] = None
        if not is_named:
            what = "was learned; pass it to precompute, which encodes the chunks behind it"
            logger.warning("prefix=%r %s", head, what)

    def _is_constant(self, namespace: str, head: str, plan: Plan) -> bool:
        """Whether enough prompts have come with this head.

        Counts this prompt, unless its first chunk or its ending came with the head before.
        """
        chunks = [n for n, piece in enumerate(plan.pieces) if piece.piece.kind == "chunk"]
        end = "".join([piece.piece.text for piece in plan.pieces[chunks[-1] + 1 :]])
        first = text_digest(plan.pieces[chunks[0]].piece.text)
        last = text_digest(end)
        key = namespace, text_digest(head)
        # reinserted, so that the most recent head is last
        firsts, lasts = self._seen[key] = self._seen.pop(key, (set(), set()))
        if first not in firsts and last not in lasts:
            firsts.add(first)
            lasts.add(last)
        if len(self._seen) > MAX_HEADS:
            del self._seen[next(iter(self._seen))]
        return len(firsts) == LEARN_AFTER


def learning(
    prefix: Prefix | None, named: dict[str, dict[str, None]]
) -> tuple[Learner | None, Prefix | None]:
    """Return a learner if ``prefix`` asks for it, and the prefix to use until it has learned."""
    asked = LearnPrefix() if isinstance(prefix, str) and prefix == LEARN else prefix
    if isinstance(asked, LearnPrefix):
        return Learner(named), asked.first
    return None, prefix
