"""Log-probabilities of the tokens of answers and prompts, and how OpenAI writes them."""

from __future__ import annotations

import codecs
import math
import re
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import Any

import torch

from kvrag.blend.prefill import Prefilled
from kvrag.types import Source, TokenLogprob

_BYTE = re.compile(
    r"<0x([0-9A-F]{2})>"
)  # SentencePiece's spelling of a byte that is no character alone
_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_UNPRINTED = [byte for byte in range(256) if byte not in _PRINTED]
_BYTE_OF = {chr(byte): byte for byte in _PRINTED} | {
    chr(256 + at): byte for at, byte in enumerate(_UNPRINTED)
}
"""Byte of each character that byte-level tokenizers (GPT-2's and its heirs) write for one."""

SLICE_BYTES = 2**26
"""Of float32 logits that are held at a time."""


class Delta(str):
    """A piece of an answer's text, and the log-probabilities of the tokens that ended since the piece before it."""

    logprobs: tuple[TokenLogprob, ...] = ()


def logprob_of(logits: torch.Tensor, token: int, num_top: int) -> TokenLogprob:
    """Return a chosen token's log-probability, and the ``num_top`` largest ones, from logits ``(vocab,)``."""
    values = torch.log_softmax(logits.float(), dim=-1)
    top = values.topk(min(num_top, len(values)))
    pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return TokenLogprob(token, float(values[token]), pairs)


def read_on(
    done: Prefilled, ids: Sequence[int], num_top: int, cancel: threading.Event
) -> tuple[Prefilled, tuple[TokenLogprob, ...]]:
    """Go on with a prefilled prompt through the token ids that follow it, and return it with them, and the log-probabilities of all.

    Logits are read slice by slice: those of a long prompt and a large vocabulary have no room at once.
    The first token of all has ``nan``, as nothing predicts it. Raises ``CancelledError`` if ``cancel`` is set before the end.
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
    sources: tuple[tuple[Source, int], ...] = (("computed", len(whole)),)
    grown = replace(
        done,
        token_ids=whole,
        logits=logits,
        num_live=len(whole),
        num_exact=len(whole),
        sources=sources,
    )
    return grown, tuple(told)


class Writer:
    """Writes the log-probabilities of one answer, all at once or as they come, as chat or text completions have them.

    ``echo``: the prompt's text, where its tokens come first.
    """

    def __init__(self, tokenizer: Any, *, is_chat: bool, echo: str = "") -> None:
        self._tokenizer, self._is_chat = tokenizer, is_chat
        self._added, self._bytes = frozenset(tokenizer.added_tokens_decoder), dict[int, bytes]()
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._is_byte_level = backend is not None and "ByteLevel" in str(backend.decoder)
        self._offset, self._characters = 0, codecs.getincrementaldecoder("utf-8")("replace")
        self._echo = echo

    def write(self, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
        """Return the next tokens'; offsets go on from those before."""
        if self._is_chat:
            return {"content": [self._chat(each) for each in logprobs], "refusal": None}
        if self._echo:
            logprobs = list(logprobs)
            self._offset = -self._unseen(logprobs)
            self._echo = ""
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        out: dict[str, list[Any]] = {name: [] for name in names}
        for each in logprobs:
            pairs = [*each.top, (each.token_id, each.logprob)]
            top = {self._spelt(token): _finite(value) for token, value in pairs}
            own = _finite(each.logprob)
            values = (
                self._spelt(each.token_id),
                own,
                None if own is None else top,
                max(0, self._offset),
            )
            for name, value in zip(names, values, strict=True):
                out[name].append(value)
            self._offset += len(self._characters.decode(self.bytes_of(each.token_id)))
        return out

    def _unseen(self, logprobs: Iterable[TokenLogprob]) -> int:
        """Return how many characters of the tokens stand before the prompt's text: a begin token's name, or a tokenizer's own space."""
        text = b"".join([self.bytes_of(each.token_id) for each in logprobs]).decode(
            "utf-8", "replace"
        )
        return max(0, text.find(self._echo))

    def _chat(self, each: TokenLogprob) -> dict[str, Any]:
        return self._entry(each.token_id, each.logprob) | {
            "top_logprobs": [self._entry(*pair) for pair in each.top]
        }

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        return {
            "token": self._spelt(token),
            "logprob": _finite(value),
            "bytes": list(self.bytes_of(token)),
        }

    def _spelt(self, token: int) -> str:
        r"""Return a token as text, and one that ends inside a character as OpenAI does: ``bytes:\xe2\x82``."""
        found = self.bytes_of(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def bytes_of(self, token: int) -> bytes:
        """Return the UTF-8 bytes that a token stands for; a control token stands for its name."""
        if token not in self._bytes:
            self._bytes[token] = self._read(token)
        return self._bytes[token]

    def _read(self, token: int) -> bytes:
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # models have more logits than their tokenizers have tokens
            return b""
        if token in self._added:
            return str(piece).encode()
        if self._is_byte_level:
            return bytes([_BYTE_OF[char] for char in piece])
        if found := _BYTE.fullmatch(piece):
            return bytes([int(found[1], 16)])
        return str(piece).replace("\u2581", " ").encode()


def _finite(value: float) -> float | None:
    """Return a number that JSON can say: OpenAI writes -9999 for what is as good as impossible, and null for what nothing predicts."""
    return None if math.isnan(value) else max(value, -9999.0)
