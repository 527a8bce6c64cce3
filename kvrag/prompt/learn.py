"""Learn what stands before the first chunk of an application's prompts, where its user asks for that: ``prefix="learn"``.

A head is learnt when it came, character for character, with :data:`LEARN_AFTER` prompts of which no two have the same first chunk or the
same end. So a question never becomes part of it: behind a question that stands before the chunks, the end stays the same, and a
conversation that grows keeps its first chunk. What looks like a chunk's metadata is not part of a head.
"""

from __future__ import annotations

import logging
import re

from kvrag.identity.fingerprint import text_digest
from kvrag.prompt.plan import Plan
from kvrag.prompt.prefix import LEARN, LearnPrefix, Prefix
from kvrag.threads import fork_lock

logger = logging.getLogger(__name__)

LEARN_AFTER = 3
MAX_LEARNT = 4  # prefixes of a namespace, and so the KV of one chunk: that many templates an application may have in use
MAX_METADATA = 2000  # characters
MAX_HEADS = (
    256  # heads that may yet be learnt and are remembered; the one that came first is forgotten
)

METADATA = re.compile(r"(?m)(?:^[\w .-]{1,40}: \S.*\n)+(?:\s*|[\w .-]{1,40}: )\Z")
"""What frameworks show of a chunk before its text, a line for each entry; the last one may begin the text's own line."""


def head_of(plan: Plan) -> str | None:
    """Return the text before a plan's first chunk; ``None`` without one."""
    first = next((n for n, piece in enumerate(plan.pieces) if piece.piece.kind == "chunk"), None)
    return None if first is None else "".join([piece.piece.text for piece in plan.pieces[:first]])


class Learner:
    """Learns the prefixes of each namespace from the plans of an engine's prompts; thread-safe. Of what it has seen, it keeps digests.

    ``named`` are the prefixes that an engine's prompts may begin with, by namespace; those that are learnt are added.
    """

    def __init__(self, named: dict[str, dict[str, None]]) -> None:
        self._named = named
        self._lock = fork_lock()
        self._seen: dict[tuple[str, str], tuple[set[str], set[str]]] = {}
        self._learnt: dict[str, tuple[str, ...]] = {}

    def learnt(self, namespace: str) -> tuple[str, ...]:
        """Return the namespace's prefixes in use, in the order in which they were learnt."""
        return self._learnt.get(namespace, ())

    def see(self, namespace: str, plan: Plan, first: str) -> str | None:
        """Look at a plan; return the prefix that its chunks are to be encoded behind, ``None`` where that is known or nothing is to do.

        ``first`` is the prefix until then. If prompts begin with it, or with one that has KV (learnt by an earlier process), it is in use.
        """
        whole = head_of(plan)
        if whole is None or plan.fault or plan.refusal:
            return None
        metadata = METADATA.search(whole, len(whole) - MAX_METADATA)
        head = whole[: metadata.start()] if metadata else whole
        with self._lock:
            if head in (learnt := self.learnt(namespace)):
                return head if plan.has_mismatch else None
            is_named = head == first or (
                plan.pieces[0].identity is not None and plan.pieces[0].piece.text == head
            )
            if len(learnt) == MAX_LEARNT or not (
                is_named or self._is_constant(namespace, head, plan)
            ):
                return None
            self._learnt[namespace] = (*learnt, head)
            self._named.setdefault(namespace, {})[head] = None
        if not is_named:
            what = "was learnt; chunks that prompts bring are encoded again behind it. Pass it and precompute once more to have all so"
            logger.warning("prefix=%r %s", head, what)
        return head if not is_named or plan.has_mismatch else None

    def _is_constant(self, namespace: str, head: str, plan: Plan) -> bool:
        """Count a prompt with this head, unless its first chunk or its end came with it before; whether these are enough."""
        chunks = [n for n, piece in enumerate(plan.pieces) if piece.piece.kind == "chunk"]
        end = "".join([piece.piece.text for piece in plan.pieces[chunks[-1] + 1 :]])
        first, last = text_digest(plan.pieces[chunks[0]].piece.text), text_digest(end)
        key = namespace, text_digest(head)
        firsts, lasts = self._seen[key] = self._seen.pop(key, (set(), set()))  # the latest is last
        if first not in firsts and last not in lasts:
            firsts.add(first)
            lasts.add(last)
        if len(self._seen) > MAX_HEADS:
            del self._seen[next(iter(self._seen))]
        return len(firsts) == LEARN_AFTER


def learning(
    prefix: Prefix | None, named: dict[str, dict[str, None]]
) -> tuple[Learner | None, Prefix | None]:
    """Return a learner, if that is asked for, and the prefix until then."""
    asked = LearnPrefix() if isinstance(prefix, str) and prefix == LEARN else prefix
    return (Learner(named), asked.first) if isinstance(asked, LearnPrefix) else (None, prefix)
