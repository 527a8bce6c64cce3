"""Text to token ids, segment by segment, and how often that shows.

A chunk must have the same ids in every prompt, so it is tokenised alone, and a prompt's ids are the concatenation of its segments' ids.
Three things make "alone" differ from "inside a prompt", whatever the tokenizer, and are put right here:

* a *dummy prefix*: SentencePiece writes a space before the first word of a text. A segment that continues a prompt gets none: it is
  tokenised behind an anchor whose ids are taken off again, as transformers does for chats.
* *control tokens*: the text ``<|im_end|>`` inside a document stays text. ``split_special_tokens`` does that for tokens marked special;
  those that the chat template writes without being marked, and those that a vocabulary holds as ordinary pieces, are spelled out.
* *BOS* stands once, at the start of the prompt, whether the tokenizer or the template writes it.

What is left are merges across a seam, such as ``.`` and a line break; :func:`count_seams` counts them.
"""

from __future__ import annotations

import re
import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field
from difflib import SequenceMatcher
from functools import lru_cache
from itertools import accumulate
from numbers import Integral
from typing import Any, Literal

from kvrag.errors import ConfigError, InputError, ModelError
from kvrag.threads import fork_lock

TokenIds = tuple[int, ...]

ANCHORS = ("\n", ".", "|", "0")
"""Texts to tokenise a continuation behind, tried in this order: the first whose own ids stay as they are is taken."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of text of one kind. ``chunk`` text never becomes control tokens; ``is_given`` marks an explicit :class:`Chunk`.

    ``part_of`` holds the token ids of a stored chunk of which this is the first part, and ``num_ids`` how many of
    them are its own; empty and 0 otherwise. ``digest`` is that of a registered text that was found.
    """

    text: str
    kind: Literal["live", "chunk"] = "live"
    is_given: bool = False
    part_of: TokenIds = ()
    num_ids: int = 0
    digest: str = field(default="", compare=False)

    @property
    def ids(self) -> TokenIds:
        """Token ids of a first part."""
        return self.part_of[: self.num_ids]


_SENTENCE = re.compile(r"(?:[.!?…][\"'”’)\]*_]*(?=\s)|\n|[。！？][”’」』）]*)\s*")
SPACES = ("Ġ", "Ċ", "▁")
"""Marks of a space or a line break at a token's beginning, as tokenizers write them."""

_locks: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
_locks_guard = fork_lock()


class SegmentTokenizer:
    """Tokenises the segments of a prompt one by one, so that their ids can be joined.

    ``bos_ids`` is what the ``tokenizer``, one of transformers, puts before a text: BOS, nothing, or what a model has instead (GLM: two
    tokens); ``has_dummy_prefix`` says whether it writes a space before the first word. Raises ``ConfigError`` if it is no transformers
    tokenizer, ``ModelError`` if it can't keep control-token text as text.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not callable(tokenizer) or not hasattr(tokenizer, "all_special_ids"):
            raise ConfigError(
                f"tokenizer is of type {type(tokenizer).__name__}; pass a transformers tokenizer, for example "
                "AutoTokenizer.from_pretrained(...) or PreTrainedTokenizerFast(tokenizer_object=...)"
            )
        self.tokenizer = tokenizer
        # A fast tokenizer keeps "are control tokens text?" as a state of its own, set by each call.
        with _locks_guard:  # one lock for a tokenizer, however many engines use it
            self._lock = _locks.setdefault(tokenizer, fork_lock())
        try:
            alone = self._encode("a", as_text=True)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise ModelError(
                f"the tokenizer {type(tokenizer).__name__} can't keep control-token text inside a document as text "
                f"(split_special_tokens: {error}); load the model's fast tokenizer with AutoTokenizer.from_pretrained(...)"
            ) from error
        with self._lock:
            self.bos_ids: list[int] = _before(alone, list(tokenizer("a")["input_ids"]))
        newline = self._encode("\n", as_text=True)
        self.has_dummy_prefix = self._encode("\na", as_text=True) != newline + alone
        control = control_tokens(tokenizer)
        self._control_ids = frozenset(control.values())
        texts = sorted(control, key=len, reverse=True)
        self._control_text = re.compile(f"({'|'.join(map(re.escape, texts)) or '(?!)'})")
        self._piece = lru_cache(maxsize=None)(self._text_of)
        self.chunk_ids = lru_cache(maxsize=4096)(self.document_ids)
        self.head_ids = lru_cache(maxsize=16)(
            lambda text: tuple(self.live_ids(text, at_start=True))
        )

    def live_ids(self, text: str, *, at_start: bool = False) -> list[int]:
        """Tokenise live text: control tokens are recognised.

        ``at_start``: the prompt starts here, so BOS stands first, exactly once, and a dummy prefix stays where the tokenizer puts it.

        Raises
        ------
        InputError
            If the text can't be encoded as UTF-8.
        """
        check_encodable(text)
        if not at_start:
            return self._continued(text, as_text=False)
        ids = self._encode(text, as_text=False)
        return ids if ids[: len(self.bos_ids)] == self.bos_ids else [*self.bos_ids, *ids]

    def continuation_ids(self, continuation: object, vocab_size: int) -> list[int]:
        """Return the token ids of text that follows a prompt, or ids as they are given; raises :class:`InputError` on anything else."""
        ids = (
            self.live_ids(continuation)
            if isinstance(continuation, str)
            else given_ids(continuation, vocab_size)
        )
        if not ids:
            raise InputError(
                f"the continuation is {continuation!r}; pass text, or token ids below {vocab_size}"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Turn ids into text, control tokens left out."""
        return str(
            self.tokenizer.decode(
                list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def sentence_starts(self, ids: Sequence[int]) -> list[bool]:
        """Return whether each token of a prompt begins a sentence or a line.

        A full stop ends a sentence only where a space follows, so that ``3.14`` stays whole; line breaks and ideographic stops always do.
        """
        pieces = list(map(self._piece, ids))
        places, starts = list(accumulate(map(len, pieces))), [True, *[False] * len(ids)]
        for end in _SENTENCE.finditer("".join(pieces)):
            starts[bisect_right(places, end.end())] = True
        return starts[: len(ids)]

    def _text_of(self, token: int) -> str:
        """Return a token's text, with the space before it that some tokenizers leave out where they decode a token alone."""
        text = str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))
        is_apart = str(self.tokenizer.convert_ids_to_tokens(token)).startswith(SPACES)
        return f" {text}" if is_apart and not text[:1].isspace() else text

    def control_text_after(self, text: str, start: int) -> int:
        """Return where the first control-token text from ``start`` on begins; the text's length where there is none."""
        found = self._control_text.search(text, start)
        return found.start() if found else len(text)

    def document_ids(self, text: str) -> TokenIds:
        """Tokenise chunk text: the same ids in every prompt, and control-token text stays text. ``chunk_ids`` remembers the latest."""
        check_encodable(text)
        ids = self._continued(text, as_text=True)
        if not self._control_ids.isdisjoint(ids):
            parts = self._control_text.split(text)  # odd ones are control-token text
            ids = self._joined(
                c for n, part in enumerate(parts) for c in (part if n % 2 else [part])
            )
            if not self._control_ids.isdisjoint(
                ids
            ):  # a spelling that only the tokenizer's normaliser makes one
                ids = self._joined(text)
        return tuple(ids)

    def _joined(self, parts: Iterable[str]) -> list[int]:
        return [i for part in parts for i in self._continued(part, as_text=True)]

    def _continued(self, text: str, *, as_text: bool) -> list[int]:
        """Tokenise text that something stands before: without a dummy prefix."""
        if self.has_dummy_prefix and text:
            for anchor in ANCHORS:
                head, both = (
                    self._encode(anchor, as_text=as_text),
                    self._encode(anchor + text, as_text=as_text),
                )
                if head and both[: len(head)] == head:
                    return both[len(head) :]
        return self._encode(text, as_text=as_text)

    def _encode(self, text: str, *, as_text: bool) -> list[int]:
        if not text:
            return []
        with self._lock:
            return list(
                self.tokenizer(text, add_special_tokens=False, split_special_tokens=as_text)[
                    "input_ids"
                ]
            )


def control_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the tokens that must not come from a document's text, as text → id.

    They are the tokens marked special and the added ones that the chat template writes; ``<unk>``, white space and single characters,
    which some tokenizers list among them, are ordinary text.
    """
    template = str(getattr(tokenizer, "chat_template", None) or "")
    added = tokenizer.added_tokens_decoder
    found = {str(t.content): int(i) for i, t in added.items() if t.special or t.content in template}
    found |= dict(
        zip(map(str, tokenizer.all_special_tokens), tokenizer.all_special_ids, strict=True)
    )
    return {
        text: i
        for text, i in found.items()
        if i != tokenizer.unk_token_id and len(text.strip()) > 1
    }


def given_ids(value: object, vocab_size: int) -> list[int] | None:
    """Return token ids that a user passed, a sequence of whole numbers; ``None`` if it is something else.

    Raises
    ------
    InputError
        If the model has no token of one of the ids; names the first.
    """
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)) or not value:
        return None
    if not all([isinstance(i, Integral) and not isinstance(i, bool) for i in value]):
        return None
    for at, i in enumerate(value):
        if not 0 <= i < vocab_size:
            raise InputError(
                f"token id {i} at position {at} is not one of the model's, which are 0 to {vocab_size - 1}"
            )
    return [int(i) for i in value]


def check_encodable(text: str) -> None:
    """Raise :class:`InputError` if the text holds what UTF-8 can't encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text holds {text[error.start]!r} at character {error.start}, which UTF-8 can't encode; decode its source with "
            "errors='replace'"
        ) from error


def _before(ids: list[int], all_ids: list[int]) -> list[int]:
    """Return what stands before ``ids`` in ``all_ids``; nothing if they are not in there."""
    starts = range(len(all_ids) - len(ids) + 1)
    return next((all_ids[:at] for at in starts if ids and all_ids[at : at + len(ids)] == ids), [])


@dataclass(frozen=True, slots=True)
class SeamCount:
    """How a prompt's segment-wise ids differ from those of its whole text.

    ``seams`` are the places where two of its segments meet, ``tokens`` its segment-wise tokens, ``changed_tokens`` those that the whole
    text's ids don't have, ``changed_seams`` the seams next to them. A separator that is another token alone counts both of its seams.
    """

    seams: int = 0
    changed_seams: int = 0
    tokens: int = 0
    changed_tokens: int = 0

    def __add__(self, other: SeamCount) -> SeamCount:
        return SeamCount(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def count_seams(segments: Sequence[Sequence[int]], whole: Sequence[int]) -> SeamCount:
    """Compare a prompt's segment-wise ids with those of its text tokenised at once.

    A difference that touches no seam, such as control-token text that stays text inside a chunk, is not counted.
    """
    segments = [ids for ids in segments if ids]
    ours = [i for ids in segments for i in ids]
    seams = list(accumulate(map(len, segments)))[:-1]
    changed: set[int] = set()
    changed_tokens = 0
    for kind, start, stop, *_ in SequenceMatcher(None, ours, whole, autojunk=False).get_opcodes():
        if kind != "equal":
            across = [s for s in seams if start < s < stop] or [
                s for s in seams if s in (start, stop)
            ]
            changed.update(across)
            changed_tokens += stop - start if across else 0
    return SeamCount(len(seams), len(changed), len(ours), changed_tokens)
