"""Tokenise a prompt segment by segment.

A chunk must have the same ids in every prompt, so it is tokenised alone, and a prompt's ids are the
concatenation of its segments' ids. Three things make "alone" differ from "inside a prompt" with any
tokenizer, and are corrected here:

* a *dummy prefix*: SentencePiece writes a space before the first word of a text. A segment that
  continues a prompt must not get it: the segment is tokenised behind an anchor, and the anchor's
  ids are removed, as transformers does for chats.
* *control tokens*: the text ``<|im_end|>`` inside a document stays text. ``split_special_tokens``
  does that for tokens marked special. Unmarked control tokens that the chat template writes, or
  that the vocabulary holds as ordinary pieces, are spelled out.
* *BOS* stands once, at the start of the prompt, whether the tokenizer or the template writes it.

Truncation, padding and the treatment of special tokens are state of a tokenizer's backend, which
every call of the application sets, in any thread. kvrag encodes with a copy (:class:`_Private`).

Merges across a seam, such as ``.`` and a line break, remain.
"""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from typing import Any, Literal

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kvrag.errors import ConfigError, InputError, ModelError
from kvrag.runtime import RUNTIME

TokenIds = tuple[int, ...]

# Texts to tokenise a continuation behind, tried in order until an anchor keeps its own ids.
ANCHORS = ("\n", ".", "|", "0")


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of live or chunk text.

    ``chunk`` text never becomes control tokens; ``is_given`` marks an explicit :class:`Chunk`. If
    the piece is the first part of a stored chunk, ``part_of`` holds that chunk's token ids, and the
    first of them are the piece's; otherwise it is empty.
    """

    text: str
    kind: Literal["live", "chunk"] = "live"
    is_given: bool = False
    part_of: TokenIds = ()


UNKNOWN = "\ufffd"  # the text of bytes that are not a whole character
MAX_SHARING = 8  # tokens that may share characters: a character has four bytes at most
MAX_PIECES = 1 << 17  # texts of tokens that are kept


class UnreadableTextError(InputError):
    """A text can't be encoded or tokenised, or holds a token that the model can't read."""


class _Private:
    """Copy of a tokenizer that kvrag alone calls; all engines with the tokenizer share it.

    It is made anew where tokens were added to the tokenizer, or marked as special.
    """

    def __init__(self) -> None:
        self.copy: Any = None
        self._facts: object = None
        self._lock = threading.RLock()

    def ids(self, tokenizer: Any, text: str, **settings: Any) -> list[int]:
        """Return a text's token ids by the copy; one thread at a time, as a call sets its state."""
        with self._lock:
            facts = len(tokenizer), tokenizer.all_special_tokens
            if facts != self._facts:
                self.copy = _copied(tokenizer)
                self._facts = facts
            return list(self.copy(text, **settings)["input_ids"])


def _copied(tokenizer: Any) -> Any:
    """Copy a tokenizer and its backend; a call of a tokenizer in Python sets no state."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        return tokenizer
    if not isinstance(tokenizer, PreTrainedTokenizerBase):  # its calls reach the backend it wraps
        return PreTrainedTokenizerFast(tokenizer_object=backend)
    copied = copy.copy(tokenizer)
    copied._tokenizer = _twin(backend)
    return copied


def _twin(backend: Tokenizer) -> Tokenizer:
    """Return a backend with settings of its own, and the same vocabulary.

    A deep copy would read a large vocabulary again, which takes seconds.
    """
    twin = Tokenizer(backend.model)
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        part = getattr(backend, name)
        if part is not None:
            setattr(twin, name, part)
    added = backend.get_added_tokens_decoder()
    twin.add_tokens([added[i] for i in sorted(added)])
    if twin.get_added_tokens_decoder() != added:  # ids with gaps
        return copy.deepcopy(backend)
    return twin


class SegmentTokenizer:
    """Segment-wise use of a transformers tokenizer: the ids of segments can be joined.

    ``bos_ids`` are the ids that the tokenizer puts before a text: BOS, nothing, or a model's
    substitute (GLM: two tokens). ``has_dummy_prefix``: it writes a space before the first word.
    ``config`` is the model's, if known: texts with tokens beyond its embeddings are refused.
    Raises ``ConfigError`` if ``tokenizer`` is not from transformers, ``ModelError`` if it can't
    keep control-token text as text.
    """

    def __init__(self, tokenizer: Any, model: Any = None) -> None:
        if not callable(tokenizer) or not hasattr(tokenizer, "all_special_ids"):
            raise ConfigError(
                f"tokenizer is of type {type(tokenizer).__name__}; pass a transformers tokenizer, "
                "for example AutoTokenizer.from_pretrained(...) or "
                "PreTrainedTokenizerFast(tokenizer_object=...)"
            )
        self.tokenizer = tokenizer
        self.config: Any = None if model is None else model.config
        self._private = RUNTIME.of(tokenizer, _Private)
        try:
            alone = self._encode("a", as_text=True)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise ModelError(
                f"the tokenizer {type(tokenizer).__name__} can't keep control-token text inside a "
                f"document as text (split_special_tokens: {error}); load the model's fast "
                "tokenizer with AutoTokenizer.from_pretrained(...)"
            ) from error
        self.bos_ids = _before(alone, self._private.ids(tokenizer, "a"))
        newline = self._encode("\n", as_text=True)
        self.has_dummy_prefix = self._encode("\na", as_text=True) != newline + alone
        control = control_tokens(tokenizer)
        self._control_ids = frozenset(control.values())
        texts = sorted(control, key=len, reverse=True)
        self._control_text = re.compile(f"({'|'.join(map(re.escape, texts)) or '(?!)'})")
        self._anchor = self._encode(ANCHORS[1], as_text=True)
        self._anchor_text = self._decoded(*self._anchor)
        self._piece = lru_cache(maxsize=MAX_PIECES)(self._text_of)
        self.chunk_ids = lru_cache(maxsize=4096)(self.document_ids)
        self.head_ids = lru_cache(maxsize=16)(
            lambda text: tuple(self.live_ids(text, at_start=True))
        )

    @property
    def private(self) -> Any:
        """Tokenizer that no other code calls: its settings are kvrag's own."""
        return self._private.copy

    def text_ids(self, text: str) -> TokenIds:
        """Return the token ids of a text alone, without special tokens, to count them.

        Splitters count all documents: characters that UTF-8 can't encode count as ``?``.
        """
        return tuple(self._all_ids(text.encode("utf-8", "replace").decode(), as_text=False))

    def num_tokens(self, text: str) -> int:
        """Count a chunk's tokens; roughly if :meth:`document_ids` refuses the text."""
        try:
            return len(self.chunk_ids(text))
        except InputError:
            return len(text.split())

    def live_ids(self, text: str, *, at_start: bool = False) -> list[int]:
        """Tokenise live text: control tokens are recognised.

        ``at_start``: the prompt starts here, so the ids begin with BOS, exactly once, and keep the
        tokenizer's dummy prefix.

        Raises
        ------
        InputError
            If the text can't be encoded as UTF-8, or the model has no embedding for a token.
        """
        check_encodable(text)
        if not at_start:
            return self._continued(text, as_text=False)
        ids = self._encode(text, as_text=False)
        if ids[: len(self.bos_ids)] == self.bos_ids:
            return ids
        beyond = max(self.bos_ids, default=0)
        if self.config is not None and beyond >= self.config.vocab_size:
            raise self._beyond(beyond)
        return [*self.bos_ids, *ids]

    def continuation_ids(self, continuation: object, vocab_size: int) -> list[int]:
        """Return the token ids of a continuation, which is text or token ids.

        Raises :class:`InputError` on anything else, and if it is empty.
        """
        if isinstance(continuation, str):
            ids = self.live_ids(continuation)
        else:
            ids = given_ids(continuation, vocab_size) or []
        if not ids:
            raise InputError(
                f"the continuation is {continuation!r}; pass text, or token ids below {vocab_size}"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text; leave out control tokens."""
        return str(
            self.private.decode(
                list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of every token; joined, they are the text of all.

        Of tokens that share a character, the first has it, and the others have none.
        """
        texts = list(map(self._piece, ids))
        parts = list[int]()
        if UNKNOWN in "".join(texts):
            parts = [n for n, text in enumerate(texts) if UNKNOWN in text]
        while parts:
            start = parts[0]
            stop = next((n for n, at in enumerate(parts, start) if n != at), start + len(parts))
            del parts[: stop - start]
            texts[start:stop] = self._characters(ids[start:stop])
        return texts

    def _characters(self, ids: Sequence[int]) -> list[str]:
        """Return the texts of tokens that are parts of characters."""
        left = self._text_of(*ids)
        texts = [""] * len(ids)
        first = 0
        for stop in range(1, len(ids) + 1):
            if stop - first > MAX_SHARING:
                break
            text = self._piece(*ids[first:stop])
            if left.startswith(text):
                texts[first] = text
                left = left[len(text) :]
                first = stop
        if left:
            texts[first] = left
        return texts

    def _text_of(self, *tokens: int) -> str:
        """Return the text of tokens inside a text; many tokenizers drop the first spaces."""
        return self._decoded(*self._anchor, *tokens).removeprefix(self._anchor_text)

    def _decoded(self, *ids: int) -> str:
        return str(self.private.decode(list(ids), clean_up_tokenization_spaces=False))

    def control_text_after(self, text: str, start: int) -> int:
        """Return the index of the first control-token text from ``start`` on, or the length."""
        found = self._control_text.search(text, start)
        if found:
            return found.start()
        return len(text)

    def document_ids(self, text: str) -> TokenIds:
        """Tokenise chunk text: the same ids in every prompt, and control-token text stays text.

        ``chunk_ids`` is the same with a cache. Raises as :meth:`live_ids`.
        """
        check_encodable(text)
        ids = self._continued(text, as_text=True)
        if not self._control_ids.isdisjoint(ids):
            parts = self._control_text.split(text)  # odd parts are control-token text
            ids = self._joined(
                c for n, part in enumerate(parts) for c in (part if n % 2 else [part])
            )
            # another spelling, which the tokenizer's normaliser turns into a control token
            if not self._control_ids.isdisjoint(ids):
                ids = self._joined(text)
        return tuple(ids)

    def _joined(self, parts: Iterable[str]) -> list[int]:
        return [i for part in parts for i in self._continued(part, as_text=True)]

    def _continued(self, text: str, *, as_text: bool) -> list[int]:
        """Tokenise text that continues a prompt, without a dummy prefix."""
        if self.has_dummy_prefix and text:
            for anchor in ANCHORS:
                head = self._encode(anchor, as_text=as_text)
                both = self._encode(anchor + text, as_text=as_text)
                if head and both[: len(head)] == head:
                    return both[len(head) :]
        return self._encode(text, as_text=as_text)

    def _encode(self, text: str, *, as_text: bool) -> list[int]:
        ids = self._all_ids(text, as_text=as_text)
        if self.config is not None and max(ids, default=0) >= self.config.vocab_size:
            raise self._beyond(max(ids))
        return ids

    def _beyond(self, token: int) -> UnreadableTextError:
        """Return the error for a token that the model has no embedding for."""
        return UnreadableTextError(
            f"the text holds {self.tokenizer.convert_ids_to_tokens(token)!r}, token {token}, "
            f"but the model has embeddings for 0 to {self.config.vocab_size - 1}; pass its "
            "own tokenizer, or call model.resize_token_embeddings(len(tokenizer))"
        )

    def _all_ids(self, text: str, *, as_text: bool) -> list[int]:
        if not text:
            return []
        try:
            return self._private.ids(
                self.tokenizer, text, add_special_tokens=False, split_special_tokens=as_text
            )
        except Exception as error:  # tokenizers' own errors share no base class
            raise UnreadableTextError(
                f"the tokenizer can't encode the text that begins {text[:20]!r} ({error}); "
                "change the text, or give the tokenizer an unk_token"
            ) from error


def control_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the control tokens, as text → id: a document's text must never become these.

    They are the tokens marked special and the added tokens that the chat template writes.
    ``<unk>``, white space and single characters, which some tokenizers list among them, are
    ordinary text.
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
    """Return a user's token ids; ``None`` if the value is not a sequence of integers, or is empty.

    Raises
    ------
    InputError
        If the model has no token with such an id; names the first.
    """
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)) or not value:
        return None
    if not isinstance(value[0], Integral):  # soon said of segments and messages
        return None
    if not all([isinstance(i, Integral) and not isinstance(i, bool) for i in value]):
        return None
    for at, i in enumerate(value):
        if not 0 <= i < vocab_size:
            raise InputError(
                f"token id {i} at position {at} is not one of the model's, "
                f"which are 0 to {vocab_size - 1}"
            )
    return [int(i) for i in value]


def check_encodable(text: str) -> None:
    """Raise :class:`InputError` if UTF-8 can't encode the text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnreadableTextError(
            f"the text holds {text[error.start]!r} at character {error.start}, which UTF-8 can't "
            "encode; decode its source with errors='replace'"
        ) from error


def _before(ids: list[int], all_ids: list[int]) -> list[int]:
    """Return the ids before ``ids`` in ``all_ids``; empty if ``ids`` don't occur there."""
    starts = range(len(all_ids) - len(ids) + 1)
    return next((all_ids[:at] for at in starts if ids and all_ids[at : at + len(ids)] == ids), [])
