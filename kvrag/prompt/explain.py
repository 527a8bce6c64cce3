"""Describe a plan in words: spans, hits, the reason of each miss, and what to do about it."""

from __future__ import annotations

import html
import re
import warnings
from collections.abc import Callable

from kvrag.prompt.plan import Plan
from kvrag.prompt.spans import SpanIndex
from kvrag.types import ExplainedSpan, Explanation, Mode

MANY = 10  # prompts without a hit, and none with one, after which a cause that is not sure is worth a warning
_METADATA = re.compile(r"(?m)(?:^[\w .-]{1,40}: \S.*\n)+\s*\Z")  # as LlamaIndex shows a node's before its text


def _unescaped(text: str) -> str:
    plain = {"n": "\n", "r": "\r", "t": "\t"}
    text = re.sub(r"\\([nrt\"'\\])", lambda found: plain.get(found[1], found[1]), text)
    return re.sub(r"\\u([0-9a-fA-F]{4})", lambda found: chr(int(found[1], 16)), text)


_REWRITTEN: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("escaped, as by repr(), str() of a list, or JSON: join their texts instead", _unescaped),
    ("with HTML's escapes: turn them off in the template", html.unescape),
    ("quoted or indented, line by line", lambda text: re.sub(r"(?m)^[ \t>|]+", "", text)),
    ("with other line ends (CRLF)", lambda text: text.replace("\r\n", "\n")),
)
"""What applications do to texts, and what undoes it."""


def likely_cause(plan: Plan, scanner: SpanIndex, min_tokens: int) -> tuple[str, bool]:
    """Say why no known chunk was found in a prompt, and whether that is sure; ``scanner`` knows the chunks."""
    text = "".join([piece.piece.text for piece in plan.pieces])
    for how, undone in _REWRITTEN:
        if (plain := undone(text)) != text and scanner.scan(plain):
            return f"known chunks stand in this prompt {how}", True
    if scanner.head_places(text):
        why = "its white space was changed, or it was edited or cut"
        return f"a known chunk begins in this prompt and goes on otherwise: {why}", True
    unsure = f"rewritten, cut at its beginning, or shorter than {min_tokens} tokens"
    return f"no known chunk text stands in this prompt: it is {unsure}, or was precomputed in another namespace", False


def prefix_advice(plan: Plan) -> str:
    """Say what to pass as ``prefix``, to make the first chunk exact."""
    first = plan.pieces[0].piece
    head = first.text if first.kind == "live" else ""
    if metadata := _METADATA.search(head):
        line = metadata[0].strip()[:80]
        return f"{line!r} stands before the chunk; precompute its text with its metadata (LlamaIndex: content='llm')"
    return f"precompute with what stands before the first chunk: prefix={head!r}"


class Watch:
    """Watches the plans of an engine's requests, counts those without a hit, and warns of what costs the user most; once of each thing."""

    def __init__(self) -> None:
        self.num_without_hits = 0
        self._has_hit = self._has_warned = False

    def notice(self, plan: Plan, scanner: SpanIndex, min_tokens: int, *, is_stored_later: bool) -> None:
        """Look at one plan whose request asks for reuse, for :func:`likely_cause`; what is stored after the answer is no miss."""
        if plan.has_mismatch and not self._has_warned:
            self._has_warned = True
            what = "chunks were encoded behind another prefix than this prompt has, so none of them is exact and more rows are repaired"
            warnings.warn(f"{what}; {prefix_advice(plan)}", UserWarning, stacklevel=2)
        chunks = [piece for piece in plan.pieces if piece.piece.kind == "chunk"]
        self._has_hit |= (is_hit := any([piece.identity is not None for piece in chunks]))
        if is_hit or is_stored_later or plan.fault or plan.refusal or not len(scanner):
            return
        self.num_without_hits += 1
        if self._has_hit or self.num_without_hits > MANY:
            return
        missed = next((piece.reason for piece in chunks if piece.reason), None)
        cause, is_sure = (missed, True) if missed else likely_cause(plan, scanner, min_tokens)
        if is_sure or self.num_without_hits == MANY:
            self._has_hit = True  # once is enough
            what = f"no stored chunk is reused, though there are some: {cause}"
            warnings.warn(f"{what}; see explain()", UserWarning, stacklevel=2)


def explain_plan(plan: Plan, mode: Mode, reason: str | None, scanner: SpanIndex, min_tokens: int) -> Explanation:
    """Describe a plan without loading anything.

    ``mode`` is what it comes to: ``full`` (no reuse), ``prefix`` (all that is reused is exact) or ``stitch``; ``reason`` says why less is
    reused than was asked for. ``scanner`` and ``min_tokens`` are as for :func:`likely_cause`.
    """
    spans = _spans(plan)
    notes = [reason] if reason else []
    has_asked = plan.fault is None and plan.refusal is None
    if has_asked and not any(span.kind == "chunk" for span in spans):
        notes.append(likely_cause(plan, scanner, min_tokens)[0])
    if plan.has_mismatch:
        notes.append(f"to make the first chunk exact, {prefix_advice(plan)}")
    if plan.kv_dtype != "auto" and mode != "full":
        notes.append(f"stored KV is rounded to {plan.kv_dtype}: no answer that uses it is exact")
    return Explanation(spans=spans, prompt_tokens=len(plan.token_ids), mode=mode, notes=notes)


def _spans(plan: Plan) -> list[ExplainedSpan]:
    spans: list[ExplainedSpan] = []
    for piece in plan.pieces:
        start = spans[-1].stop if spans else 0
        spans.append(
            ExplainedSpan(
                kind="prefix" if not spans and piece.piece.kind == "live" else piece.piece.kind,
                start=start,
                stop=start + len(piece.ids),
                text=piece.piece.text,
                hit=piece.identity is not None,
                exact=piece.is_exact and plan.kv_dtype == "auto",
                reason=piece.reason,
            )
        )
    return spans
