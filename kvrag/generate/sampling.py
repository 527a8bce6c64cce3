"""Decode: choose an answer's tokens behind the prefilled prompt, and release text safe to show."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from kvrag.config import SamplingConfig
from kvrag.generate.calls import Calls, calls_in
from kvrag.generate.defaults import own_stops, processors_of
from kvrag.generate.grammar import Constraint
from kvrag.generate.logprobs import Delta, logprob_of
from kvrag.generate.request import Request
from kvrag.generate.thoughts import (
    TAIL,
    Decode,
    Form,
    FormBehind,
    Thoughts,
    num_sure,
    thoughts_in,
)
from kvrag.model.lm import LoadedModel
from kvrag.model.plain import Extend
from kvrag.types import FinishReason, TokenLogprob, ToolCall

_INCOMPLETE = "\ufffd"


class Sampler:
    """Sampler of an answer's tokens, greedy or random.

    ``processors`` are the logits processors of :func:`kvrag.generate.defaults.processors_of`;
    they see ``prompt_ids`` too, as in ``generate``. ``constraint``: the form of the answer.
    """

    def __init__(
        self,
        config: SamplingConfig,
        prompt_ids: Sequence[int],
        processors: LogitsProcessorList | None = None,
        *,
        constraint: Form | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._ids = torch.tensor([[*prompt_ids]], dtype=torch.int64, device=device)
        self._num_ids = len(prompt_ids)
        self._processors = processors or LogitsProcessorList()
        self._constraint = constraint
        self._is_greedy = config.is_greedy
        self._num_top = config.logprobs
        self.logprobs = list[TokenLogprob]()
        self._num_told = 0
        self._generator = torch.Generator()
        if config.seed is not None:
            self._generator.manual_seed(config.seed)
        else:
            self._generator.seed()

    def next(self, logits: Tensor) -> int:
        """Choose a token from logits ``(vocab,)`` and remember it."""
        scores = self._processed(logits[None].float())
        if self._is_greedy:
            token = int(scores.argmax())
        else:
            token = int(scores[0].softmax(dim=-1).cpu().multinomial(1, generator=self._generator))
        # the buffer doubles: a token must not cost a copy of all tokens before it
        if self._num_ids == self._ids.shape[1]:
            self._ids = torch.cat([self._ids, self._ids.new_zeros(1, 1 + self._num_ids)], dim=1)
        self._ids[0, self._num_ids] = token
        self._num_ids += 1
        if self._num_top is not None:
            self.logprobs.append(logprob_of(logits, token, self._num_top))
        if self._constraint:
            self._constraint.take(token)
        return token

    def _processed(self, scores: Tensor) -> Tensor:
        """Return scores ``(1, vocab)`` after the constraint and the processors.

        If the processors leave no token that the constraint allows, they are ignored.
        """
        if self._constraint:
            # first: a filter must not leave only forbidden tokens
            scores = self._constraint.masked(scores)
        if not self._processors:
            return scores
        scores = scores.to(self._ids.device)
        processed = self._processors(self._ids[:, : self._num_ids], scores)
        if self._constraint:  # again: a processor may force a token
            processed = processed.masked_fill(scores == float("-inf"), float("-inf"))
        return processed if (processed > float("-inf")).any() else scores

    def told(self, text: str, thought: str = "") -> str:
        """Return text, with the log-probabilities of tokens since the last call if requested.

        With a ``thought``, the text is empty.
        """
        if self._num_top is None and not thought:
            return text
        delta = Delta(text)
        delta.logprobs = tuple(self.logprobs[self._num_told :])
        self._num_told = len(self.logprobs)
        delta.reasoning_content = thought
        return delta

    @property
    def is_complete(self) -> bool:
        """Whether the answer's form is complete, so that no token may follow."""
        return self._constraint is not None and self._constraint.is_complete


def parts_of(
    loaded: LoadedModel,
    request: Request,
    config: SamplingConfig,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    eos_ids: frozenset[int],
    constraint: Constraint | None,
) -> tuple[Sampler, TextStream, Calls | None, Thoughts | None]:
    """Return the sampler of an answer, its text, and the parsers of its calls and its thought."""
    encoder = loaded.encoder
    decode: Decode = encoder.decode
    calls = thoughts = None
    if request.form.tools:
        decode, calls = calls_in(request.form, encoder, prompt_ids, eos_ids)
    is_chat = isinstance(request.prompt[0], Mapping)
    if is_chat and (tags := encoder.thought_tags) is not None:
        thoughts, decode = thoughts_in(tags, request, encoder, prompt_ids, eos_ids, decode)
    form: Form | None = constraint
    if constraint and thoughts:
        form = FormBehind(constraint, thoughts, encoder, decode, eos_ids)
    before = () if is_chat and not request.chat.continues else prompt_ids[-TAIL:]
    model = loaded.lm.model
    processors = processors_of(
        model, config, prompt_ids, max_new_tokens=max_new_tokens, eos_ids=eos_ids
    )
    return (
        Sampler(config, prompt_ids, processors, constraint=form, device=model.device),
        TextStream(decode, (*(config.stop or ()), *own_stops(loaded)), before),
        calls,
        thoughts,
    )


@dataclass(slots=True)
class Decoded:
    """An answer: token ids, text, finish reason, time of the first token, calls, and thought."""

    ids: list[int]
    text: str
    finish_reason: FinishReason
    first_s: float
    calls: tuple[ToolCall, ...]
    thought: str | None = None
    num_thought: int = 0


def decode(
    extend: Extend,
    logits: Tensor,
    sampler: Sampler,
    text: TextStream,
    *,
    max_new_tokens: int,
    eos_ids: frozenset[int],
    emit: Callable[[str], None],
    cancel: threading.Event,
    calls: Calls | None = None,
    thoughts: Thoughts | None = None,
) -> Decoded:
    """Choose the tokens of an answer in sequence; the first needs no forward.

    ``extend`` computes the rows after the prefilled prompt; ``max_new_tokens - 1`` of them have
    room. ``logits``, ``(vocab,)``, belong to the prompt's last row. ``emit`` receives text as it
    comes; ``cancel`` ends the answer before the next forward.
    """
    ids = [sampler.next(logits)]
    parts = list[str]()
    first_s = time.perf_counter()

    def show(delta: str, *, is_last: bool = False) -> None:
        whole = delta
        if thoughts:
            thought, delta = thoughts.push(delta, is_last=is_last)
            if thought:
                emit(sampler.told("", thought))
        if calls:
            delta = calls.push(delta, whole, is_last=is_last)
        if delta:
            parts.append(delta)
            emit(sampler.told(delta))

    show(text.push(ids[-1]))

    def is_over() -> bool:
        return text.is_stopped or ids[-1] in eos_ids or sampler.is_complete

    while not is_over() and len(ids) < max_new_tokens and not cancel.is_set():
        ids.append(sampler.next(extend(torch.tensor(ids[-1:]))[-1]))
        show(text.push(ids[-1]))
    show(text.finish(), is_last=True)
    reason: FinishReason = "length" if len(ids) == max_new_tokens else "cancelled"
    found = calls.found if calls else ()
    if is_over():
        reason = "tool_calls" if found else "stop"
    told = (thoughts.text or None, thoughts.num_tokens) if thoughts and thoughts.is_open else ()
    return Decoded(ids, "".join(parts), reason, first_s, found, *told)


class TextStream:
    """Stream of text deltas from token ids: whole characters, and no part of a ``stop`` string.

    A stop string ends the text. ``before`` are the last tokens of a text that it continues.
    """

    def __init__(
        self, decode: Decode, stop: Sequence[str] = (), before: Sequence[int] = ()
    ) -> None:
        self._decode = decode
        self._stop = stop
        self._ids = [*before]
        self._context = 0
        self._read = len(before)
        self._pending = ""
        self.is_stopped = False

    def push(self, token_id: int) -> str:
        """Add a token and return the text that may be shown now."""
        self._ids.append(token_id)
        return self._release(self._new_text(is_last=False))

    def finish(self) -> str:
        """Return the text that was held back."""
        shown = self._release(self._new_text(is_last=True))
        return shown if self.is_stopped else shown + self._pending

    def _new_text(self, *, is_last: bool) -> str:
        """Return the text of unread tokens.

        They are decoded behind a few earlier tokens, which keeps spaces and joined characters
        right. The earlier tokens must have text: if a SentencePiece decoder leaves them all out, it
        drops the first word's space as a dummy prefix.
        """
        before = self._decode(self._ids[self._context : self._read])
        now = self._decode(self._ids[self._context :])
        if now.endswith(_INCOMPLETE) and not is_last:
            return ""
        if len(now) > len(before):
            self._context = self._read
        self._read = len(self._ids)
        return now[len(before) :]

    def _release(self, text: str) -> str:
        if not self._stop:  # as a rule, so nothing is searched
            return text
        self._pending += text
        hits = [at for s in self._stop if (at := self._pending.find(s)) >= 0]
        self.is_stopped = bool(hits)
        sure = min(hits, default=num_sure(self._pending, self._stop))
        shown = self._pending[:sure]
        self._pending = self._pending[sure:]
        return shown
