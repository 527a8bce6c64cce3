"""Compute log-probabilities of answer and prompt tokens, and write them in OpenAI's format."""

from __future__ import annotations

import codecs
import math
import re
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

from kvrag.blend.prefill import Prefilled
from kvrag.types import TokenLogprob

# SentencePiece's spelling of a byte that is no character alone
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_BYTE_OF = {char: byte for byte, char in bytes_to_unicode().items()}
"""Bytes, by the characters that byte-level tokenizers (GPT-2's and its heirs) write for them."""

SLICE_BYTES = 2**26
"""Bytes of float32 logits that are held at a time."""


class Delta(str):
    """Text delta of an answer, with the log-probabilities of the tokens since the last delta.

    A delta of a thought has no text, as that is the answer's.
    """

    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning_content: str = ""


def logprob_of(logits: torch.Tensor, token: int, num_top: int) -> TokenLogprob:
    """Return a token's log-probability, and the ``num_top`` largest, from logits ``(vocab,)``."""
    values = torch.log_softmax(logits.float(), dim=-1)
    top = values.topk(min(num_top, len(values)))
    pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return TokenLogprob(token, float(values[token]), pairs)


def read_on(
    done: Prefilled, ids: Sequence[int], num_top: int, cancel: threading.Event
) -> Prefilled:
    """Extend a prefilled prompt by token ids, and score its tokens.

    Returns the longer prompt, with the log-probabilities of all its tokens. The very first has
    ``nan``, as nothing predicts it. Logits are read in slices: the logits of a long prompt over a
    large vocabulary would not fit into memory. Raises ``CancelledError`` if ``cancel`` is set
    before the end.
    """
    told = [TokenLogprob(done.token_ids[0], math.nan)]
    logits = done.logits
    size = max(1, SLICE_BYTES // (4 * len(logits)))
    for start in range(0, len(ids), size):
        if cancel.is_set():
            raise CancelledError
        some = list(ids[start : start + size])
        rows = done.extend(torch.tensor(some)).cpu()
        before = [logits, *rows[:-1]]
        told += [logprob_of(row, token, num_top) for row, token in zip(before, some, strict=True)]
        logits = rows[-1]
    whole = [*done.token_ids, *ids]
    return replace(
        done,
        token_ids=whole,
        logits=logits,
        sources=(("computed", len(whole)),),
        prompt_logprobs=tuple(told),
    )


class LogprobWriter:
    """Writer of an answer's log-probabilities, at once or as they come.

    ``is_chat``: in the format of chat completions, else of text completions. ``echo``: the prompt's
    text, if its tokens come first.
    """

    def __init__(self, tokenizer: Any, *, is_chat: bool, echo: str = "") -> None:
        self._tokenizer = tokenizer
        self._is_chat = is_chat
        self._added = frozenset(tokenizer.added_tokens_decoder)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._is_byte_level = backend is not None and "ByteLevel" in str(backend.decoder)
        self.bytes_of = cache(self._bytes_of)
        self._offset = 0
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._echo = echo

    def write(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the entries of the next tokens; text offsets continue from the last call."""
        if self._is_chat:
            content = [
                self._entry(each.token_id, each.logprob)
                | {"top_logprobs": [self._entry(*pair) for pair in each.top]}
                for each in logprobs
            ]
            return {"content": content, "refusal": None}
        if self._echo:  # before it are a begin token's name, or a tokenizer's own space
            shown = b"".join([self.bytes_of(each.token_id) for each in logprobs])
            self._offset = -max(0, shown.decode("utf-8", "replace").find(self._echo))
            self._echo = ""
        rows = []
        for each in logprobs:
            pairs = [*each.top, (each.token_id, each.logprob)]
            top = {self._spelt(token): _finite(value) for token, value in pairs}
            own = _finite(each.logprob)
            spelt = self._spelt(each.token_id)
            rows.append((spelt, own, None if own is None else top, max(0, self._offset)))
            self._offset += len(self._characters.decode(self.bytes_of(each.token_id)))
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [row[n] for row in rows] for n, name in enumerate(names)}

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        return {
            "token": self._spelt(token),
            "logprob": _finite(value),
            "bytes": list(self.bytes_of(token)),
        }

    def _spelt(self, token: int) -> str:
        r"""Return a token as text; ``bytes:\xe2\x82``, as OpenAI does, if it isn't valid UTF-8."""
        found = self.bytes_of(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def _bytes_of(self, token: int) -> bytes:
        """Return a token's UTF-8 bytes; a control token has the bytes of its name."""
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # models have more logits than their tokenizers have tokens
            return b""
        if token in self._added:
            return str(piece).encode()
        if self._is_byte_level:
            return bytes([_BYTE_OF[char] for char in piece])
        found = _BYTE.fullmatch(piece)
        if found:
            return bytes([int(found[1], 16)])
        return str(piece).replace("\u2581", " ").encode()


def _finite(value: float) -> float | None:
    """Return a number that JSON can express.

    OpenAI writes -9999 for a token that is as good as impossible, and null if nothing predicts it.
    """
    if math.isnan(value):
        return None
    return max(value, -9999.0)
