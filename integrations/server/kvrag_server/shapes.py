"""Responses in OpenAI's format: choices, pieces of choices, and usage."""

from __future__ import annotations

import codecs
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from kvrag import GenerationResult, TokenLogprob
from kvrag.adapters import Delta
from kvrag_server.fields import JsonObject

# SentencePiece's spelling of a byte that is no character alone
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_BYTE_OF = {char: byte for byte, char in bytes_to_unicode().items()}
"""Bytes, by the characters that byte-level tokenizers (GPT-2's and its heirs) write for them."""
_TOLD = (
    "exactness",
    "cached_tokens",
    "history_tokens",
    "repaired_tokens",
    "computed_tokens",
    "evicted_tokens",
    "fallback_reason",
    "kv_dtype",
    "ttft_ms",
)
"""Fields of a result that its record shows, beside the times of its stages."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Format of a kind of completion.

    It has a name, a prefix of ids, and a flag whether text is in messages.
    """

    object: str
    prefix: str
    is_chat: bool

    def whole(
        self, index: int, result: GenerationResult, tokenizer: Any, echo: str = ""
    ) -> JsonObject:
        """Return a finished choice; its text begins with ``echo``."""
        writer = LogprobWriter(tokenizer, is_chat=self.is_chat, echo=echo)
        logprobs = result.logprobs and writer.write(result.logprobs)
        own: JsonObject = {"text": result.text}
        if self.is_chat:
            calls = {"tool_calls": calls_of(result)} if result.tool_calls else {}
            content = None if calls and not result.text else result.text
            message = {
                "role": "assistant",
                "content": content,
                "refusal": None,
                **calls,
                **_thought(result.reasoning_content),
            }
            own = {"message": message}
        return {
            "index": index,
            **own,
            "logprobs": logprobs,
            "finish_reason": result.finish_reason,
        }

    def delta(
        self,
        index: int,
        text: str | None,
        finish_reason: str | None = None,
        logprobs: JsonObject | None = None,
    ) -> JsonObject:
        """Return a piece of a choice; ``text=None`` gives its beginning."""
        own: JsonObject = {"text": text or ""}
        if self.is_chat and text is None:
            own = {"delta": {"role": "assistant", "content": ""}}
        elif self.is_chat:
            thought = _thought(getattr(text, "reasoning_content", None))
            own = {"delta": thought | ({"content": text} if text else {})}
        return {
            "index": index,
            **own,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }


def _thought(text: str | None) -> dict[str, str]:
    """Return the fields of a thought: DeepSeek's name, and vLLM's."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


def calls_of(result: GenerationResult) -> list[JsonObject]:
    """Return an answer's tool calls in OpenAI's format."""
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": json.dumps(call.arguments, ensure_ascii=False),
            },
        }
        for call in result.tool_calls
    ]


class LogprobStream:
    """Log-probabilities of a stream's choices, sent a single time per token.

    They are sent with the text that the token completes, or at the end. ``echo`` holds the prompts'
    texts that the choices begin with.
    """

    def __init__(self, tokenizer: Any, *, is_chat: bool, echo: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self._make = partial(LogprobWriter, tokenizer, is_chat=is_chat)
        self._echo = echo
        self._writers: dict[int, LogprobWriter] = {}
        self._counts: Counter[int] = Counter()

    def of(self, index: int, piece: str | GenerationResult) -> JsonObject | None:
        """Return the log-probabilities of a piece, or the rest at the end, if any."""
        new = piece.logprobs if isinstance(piece, Delta) else ()
        if isinstance(piece, GenerationResult):
            new = (piece.logprobs or ())[self._counts[index] :]
        self._counts[index] += len(new)
        if not new:
            return None
        if index not in self._writers:
            self._writers[index] = self._make(echo=self._echo[index] if self._echo else "")
        return self._writers[index].write(new)


CHAT = Shape("chat.completion", "chatcmpl", True)
TEXT = Shape("text_completion", "cmpl", False)


def usage_of(
    results: Sequence[GenerationResult], n: int, tokenizer: Any, *, is_traced: bool
) -> JsonObject:
    """Return token counts in OpenAI's format, and the record of how the answers were made.

    A prompt counts a single time for its ``n`` choices. If it is traced, the record has details.
    """
    prompts = results[::n]
    num_in = sum(r.prompt_tokens for r in prompts)
    num_out = sum(len(r.token_ids) for r in results)
    usage: JsonObject = {
        "prompt_tokens": num_in,
        "completion_tokens": num_out,
        "total_tokens": num_in + num_out,
        "prompt_tokens_details": {"cached_tokens": sum(r.cached_tokens for r in prompts)},
    }
    if num_thought := sum(r.reasoning_tokens for r in results):
        usage["completion_tokens_details"] = {"reasoning_tokens": num_thought}
    return {
        "usage": usage,
        "kvrag": [_made(r) | (_trace(r, tokenizer) if is_traced else {}) for r in results],
    }


def _made(result: GenerationResult) -> JsonObject:
    """Return the record of how an answer was made, as plain JSON values."""
    made = {name: getattr(result, name) for name in _TOLD}
    return made | {"timings_ms": dict(result.timings_ms)}


def _trace(result: GenerationResult, tokenizer: Any) -> JsonObject:
    """Return the prompt's tokens as text, the sources of their KV, and the stages.

    Stages are in milliseconds from the begin of the first stage. The joined texts of the tokens are
    the prompt: a token that ends inside a character is empty, and the token that completes the
    character has it.
    """
    writer = LogprobWriter(tokenizer, is_chat=True)
    characters = codecs.getincrementaldecoder("utf-8")("replace")
    tokens = [characters.decode(writer.bytes_of(token)) for token in result.prompt_ids]
    zero = min([start for _, start, _ in result.stages], default=0.0)
    stages = [
        [name, (start - zero) * 1e3, (end - zero) * 1e3] for name, start, end in result.stages
    ]
    return {"tokens": tokens, "sources": [list(run) for run in result.sources], "stages": stages}


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

    def write(self, logprobs: Sequence[TokenLogprob]) -> JsonObject:
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

    def _entry(self, token: int, value: float) -> JsonObject:
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
