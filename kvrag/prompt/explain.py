"""Describe a plan in words: spans, hits, the reasons of misses, and their remedies."""

from __future__ import annotations

import html
import re
import unicodedata
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from kvrag.identity.fingerprint import text_digest
from kvrag.prompt.plan import Lookup, Plan
from kvrag.prompt.spans import ANCHOR_CHARS, SpanIndex
from kvrag.runtime import Deadline
from kvrag.types import ExplainedSpan, Explanation, Mode

_FOUND = "this prompt has known chunks"
Undo = Callable[[str], str]
_METADATA_FIRST = r"\A(?:[\w .-]{1,40}: \S.*\n)+\s*"
# quotes, dashes, invisible characters
_SIGNS = str.maketrans("\u2018\u2019\u201c\u201d\u2013\u2014", "''\"\"--", "\u00ad\u200b")
MAX_READ = 256  # latest stored texts that are read to explain why no chunk was found
MANY = 10  # prompts, all without hits, after which an uncertain reason is worth a warning
OTHER_PREFIX_ADVICE = (
    "chunks were encoded behind another prefix than this prompt has, so more rows are repaired and "
    "none is exact: precompute them with prefix=, the text before the first chunk (explain() shows "
    "it), which must be the same in all prompts"
)


def _unescaped(text: str) -> str:
    plain = {"n": "\n", "r": "\r", "t": "\t"}
    text = re.sub(r"\\([nrt\"'\\])", lambda found: plain.get(found[1], found[1]), text)
    text = re.sub(
        r"\\(?:x([0-9a-f]{2})|u([0-9a-fA-F]{4}))",
        lambda found: chr(int(found[1] or found[2], 16)),
        text,
    )
    # JSON writes a character beyond 16 bits as two
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _lines(text: str) -> str:
    return " ".join(text.split())


def _signs(text: str) -> str:
    return unicodedata.normalize("NFKC", text).translate(_SIGNS)


def _without(pattern: str, by: str = "") -> Undo:
    return partial(re.compile(pattern).sub, by)


ESCAPED = (
    "escaped, as by repr(), str() of a list, or JSON: join their texts instead "
    '("\\n\\n".join(d.page_content for d in docs), such as a format_docs before the template)'
)
# Changes that applications make to texts: in words, a function that undoes the change in the
# prompt, and, where that is not enough, a function to apply to stored texts as well.
CHANGES: tuple[tuple[str, Undo, Undo | None], ...] = (
    (ESCAPED, _unescaped, None),
    ("with HTML's escapes: turn them off in the template", html.unescape, None),
    (
        "with backslashes before punctuation, as in Markdown",
        _without(r"\\([^a-zA-Z0-9\s])", r"\1"),
        None,
    ),
    ("quoted or indented, line by line", _without(r"(?m)^[ \t>|]+"), None),
    ("with numbers before their lines", _without(r"(?m)^ *\d+[:.|)]? ?"), None),
    ("with other line ends (CRLF)", _without(r"\r\n", "\n"), None),
    ("with their white space changed, as by wrapping lines", _lines, _lines),
    ("upper-cased or lower-cased, as by a postprocessor", str.casefold, str.casefold),
    ("with other signs for the same, such as quotes (Unicode)", _signs, _signs),
    (
        "without the metadata they were precomputed with: pass content='text'",
        str,
        _without(_METADATA_FIRST),
    ),
    (
        "without their HTML or Markdown",
        _lines,
        lambda text: _lines(_without(r"<[^<>\n]*>|[*_`#]+")(text)),
    ),
)


def _texts(lookup: Lookup) -> list[str]:
    """Read the latest stored texts, at most :data:`MAX_READ`, in a time budget of their own.

    The store keeps no texts: they are decoded. If the time is over, those read by then count.
    """
    found = list[str]()
    deadline = Deadline(lookup.deadline.seconds)

    def read() -> None:
        for entry in lookup.scanner.some(MAX_READ):
            if deadline.fault is not None:  # the advice has been given without the rest
                return
            texts = map(lookup.encoder.decode, lookup.ids_of(entry.digest))
            found.extend([text for text in texts if text_digest(text) == entry.digest])

    deadline.ask(read, None, what="the KV store")
    return [*found]


def _proven(text: str, scanner: SpanIndex, texts: Sequence[str]) -> str | None:
    """Name the change that known chunks in a text underwent, if it is found.

    ``texts`` are texts of some known chunks.
    """
    for how, undo, undo_known in CHANGES:
        plain = undo(text)
        known = [undo_known(each) for each in texts] if undo_known else []
        is_undone = undo_known is None and plain != text and bool(scanner.scan(plain))
        if is_undone or any([each and each in plain for each in known]):
            return f"{_FOUND} {how}"
    return None


def with_reason(plan: Plan, scanner: SpanIndex) -> Plan:
    """Return the plan, with the reason if it has known chunks escaped.

    A first part of such a chunk may be reused, so the whole text is unescaped.
    """
    if not any([p.identity is None and "\\" in p.piece.text for p in plan.pieces]):
        return plan
    text = "".join([piece.piece.text for piece in plan.pieces])
    plain = _unescaped(text)
    if any([plain[span.start : span.stop] not in text for span in scanner.scan(plain)]):
        return replace(plan, miss_reason=f"{_FOUND} {ESCAPED}")
    return plan


def _sure_reason(text: str, lookup: Lookup, *, reads: bool = True) -> str | None:
    """Return the certain reason why a prompt's text has no known chunk, if one is found.

    Stored texts are read only if ``reads``.
    """
    scanner = lookup.scanner
    texts = _texts(lookup) if reads else []
    if not len(scanner):
        return (
            f"no chunk of {lookup.min_tokens} tokens or more is stored in this namespace: "
            "precompute the texts first"
        )
    proven = _proven(text, scanner, texts)
    if proven:
        return proven
    if scanner.head_places(text):
        return (
            "a known chunk begins in this prompt and goes on otherwise: "
            "its white space was changed, or it was edited or cut"
        )
    if scanner.tail_places(text):
        return (
            "a known chunk ends in this prompt, cut at its beginning: "
            "precompute the part that is shown"
        )
    lines = [line.strip() for line in text.splitlines() if len(line.strip()) >= ANCHOR_CHARS]
    if any([line in each for each in texts for line in lines]):
        return (
            "this prompt has parts of known chunks: precompute the parts, not the whole documents"
        )
    return None


def _unsure_reason(lookup: Lookup) -> str:
    return (
        "this prompt has no known chunk text: it is rewritten, or shorter than "
        f"{lookup.min_tokens} tokens or {ANCHOR_CHARS} characters and so computed with each "
        "prompt, or was precomputed in another namespace"
    )


def _live_text(plan: Plan) -> str:
    return "\n\n".join([piece.piece.text for piece in plan.pieces if piece.piece.kind == "live"])


class Watch:
    """Monitor of an engine's plans.

    Counts prompts without hits. Warns once of a prefix mismatch, and once of missing hits.
    """

    def __init__(self) -> None:
        self.num_without_hits = 0
        self._has_hit = self._has_warned = self._has_told_reason = False

    def notice(self, plan: Plan, lookup: Lookup, *, is_stored_later: bool) -> None:
        """Check the plan of a request that asks for reuse.

        ``is_stored_later``: misses are stored after the answer, so no hits are no problem.
        """
        if plan.has_mismatch and not self._has_warned:
            self._has_warned = True
            warnings.warn(OTHER_PREFIX_ADVICE, UserWarning, stacklevel=2)
        chunks = [piece for piece in plan.pieces if piece.piece.kind == "chunk"]
        self._has_hit |= (is_hit := any([piece.identity is not None for piece in chunks]))
        if plan.miss_reason and not self._has_told_reason:
            self._has_hit = self._has_told_reason = True  # a single warning is enough
            what = "stored chunks are" if is_hit else "no stored chunk is"
            also = "not reused" if is_hit else "reused, though there are some"
            warnings.warn(
                f"{what} {also}: {plan.miss_reason}; see explain()", UserWarning, stacklevel=2
            )
        if is_hit or is_stored_later or plan.fault or plan.reason or not len(lookup.scanner):
            return
        self.num_without_hits += 1
        if self._has_hit or self.num_without_hits > MANY:
            return
        missed = next((piece.reason for piece in chunks if piece.missed), None)
        is_last = self.num_without_hits == MANY
        reason = missed or _sure_reason(_live_text(plan), lookup, reads=is_last)
        if reason or is_last:
            self._has_hit = True  # a single warning is enough
            reason = reason or _unsure_reason(lookup)
            what = f"no stored chunk is reused, though there are some: {reason}"
            warnings.warn(f"{what}; see explain()", UserWarning, stacklevel=2)


def explain_plan(plan: Plan, mode: Mode, reason: str | None, lookup: Lookup) -> Explanation:
    """Describe a plan without loading KV.

    ``mode`` is the outcome: ``full`` (no reuse), ``prefix`` (all reused KV is exact) or ``stitch``;
    ``reason`` says why less is reused than the request allows. ``lookup`` is the plan's.
    """
    spans = _spans(plan)
    notes = [reason] if reason else []
    found = None
    has_asked = plan.fault is None and plan.reason is None
    if has_asked and not any(span.kind == "chunk" for span in spans):
        found = _sure_reason(_live_text(plan), lookup) or _unsure_reason(lookup)
    elif has_asked:
        found = plan.miss_reason or _proven(_live_text(plan), lookup.scanner, _texts(lookup))
    if found and found not in (reason or ""):
        notes.append(found)
    if plan.has_mismatch:
        notes.append(OTHER_PREFIX_ADVICE)
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
