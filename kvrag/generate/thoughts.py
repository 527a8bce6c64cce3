"""Tell the thought of a model from the answer behind it, by the tags of its chat template."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from copy import copy
from typing import Any

from torch import Tensor

from kvrag.generate.grammar import Constraint
from kvrag.generate.request import Request
from kvrag.prompt.marks import Tags
from kvrag.prompt.template import PromptEncoder

Decode = Callable[[Sequence[int]], str]
TAIL = 32  # tokens of a prompt's end; a tag has fewer


def num_sure(text: str, marks: Sequence[str]) -> int:
    """Return the number of characters before the longest end that may become one of the marks."""
    ends = [n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])]
    return len(text) - max(ends, default=0)


def decoder_of(tokenizer: Any, hidden: Collection[int]) -> Decode:
    """Return a decoder that shows control tokens, too, but for the ``hidden`` ones."""

    def decode(ids: Sequence[int]) -> str:
        return str(
            tokenizer.decode(
                [token for token in ids if token not in hidden],
                clean_up_tokenization_spaces=False,
            )
        )

    return decode


class Thoughts:
    """Parser of an answer that may begin with a thought, while it streams.

    White space around the tags is dropped. ``is_open``: whether the thought has been opened, by the
    prompt or the model; ``is_over``: whether the answer has begun.
    """

    def __init__(self, tags: Tags, *, is_open: bool) -> None:
        self.opening, self._closing = tags
        self.is_open = is_open
        self.is_over = False
        self.text = ""
        self.num_tokens = 0
        self._is_blank = is_open
        self._held = ""

    def push(self, text: str, *, is_last: bool = False) -> tuple[str, str]:
        """Add the text of a token; return the thought and the answer that may be shown now."""
        self._held += text
        thought = "" if self.is_over else self._thought(is_last=is_last)
        self.text += thought
        if self.is_over:
            return thought, self._take(len(self._held))
        self.num_tokens += not is_last
        return thought, ""

    def _thought(self, *, is_last: bool) -> str:
        """Return more of the thought; text that may become a tag is held back."""
        if not self.is_open:
            begun = self._held.lstrip()
            if not begun.startswith(self.opening):
                self.is_over = is_last or not self.opening.startswith(begun)
                return ""
            self._held = begun.removeprefix(self.opening)
            self.is_open = self._is_blank = True
        found, tag, rest = self._held.partition(self._closing)
        if not tag and not is_last:
            found = found[: num_sure(found, (self._closing,))]
        shown = self._take(len(found.rstrip()))
        if tag:
            self.is_over = self._is_blank = True
            self._held = rest
        return shown

    def _take(self, num_chars: int) -> str:
        """Take text that was held, without white space at the beginning of a part."""
        taken = self._held[:num_chars]
        self._held = self._held[num_chars:]
        if self._is_blank:
            taken = taken.lstrip()
            self._is_blank = not taken
        return taken


class FormBehind:
    """Constraint of an answer that begins behind a thought.

    A thought that the prompt doesn't open may be opened by the tokens of its tag. The token that
    completes the closing tag belongs to the thought; the tokens ``ends`` may not come before it.
    """

    def __init__(
        self,
        form: Constraint,
        thoughts: Thoughts,
        encoder: PromptEncoder,
        decode: Decode,
        ends: Collection[int],
    ) -> None:
        self._form = form
        self._thoughts = copy(thoughts)
        self._opening = encoder.private.encode(thoughts.opening, add_special_tokens=False)
        self._num_taken = 0
        self._decode = decode
        self._ends = [*ends]

    def masked(self, scores: Tensor) -> Tensor:
        """Return scores ``(1, vocab)``, minus infinity for tokens that may not come next."""
        if self._thoughts.is_over:
            return self._form.masked(scores)
        if self._thoughts.is_open:
            allowed = scores.clone()
            allowed[:, self._ends] = float("-inf")
            return allowed
        token = self._opening[self._num_taken]
        allowed = scores - float("inf") if self._num_taken else self._form.masked(scores)
        allowed[0, token] = scores[0, token]
        return allowed

    def take(self, token: int) -> None:
        """Advance the thought, or the grammar, by the chosen token."""
        if not self._thoughts.is_over:
            self._num_taken += 1
            self._thoughts.push(self._decode([token]))
            if self._thoughts.is_open or not self._thoughts.is_over:
                return
        self._form.take(token)

    @property
    def is_complete(self) -> bool:
        """Whether the answer's form is complete, so that no token may follow."""
        return self._form.is_complete


Form = Constraint | FormBehind


def thoughts_in(
    tags: Tags,
    request: Request,
    encoder: PromptEncoder,
    prompt_ids: Sequence[int],
    eos_ids: frozenset[int],
    decode: Decode,
) -> tuple[Thoughts | None, Decode]:
    """Return the parser of a thought before the answer to a chat, and a decoder that keeps tags.

    No thought is expected where the prompt closes it, or has a part of the answer.
    """
    tokenizer = encoder.private
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    hidden = eos_ids.union(special, tokenizer.all_special_ids)
    with_tags = decoder_of(tokenizer, hidden.difference(tokenizer.convert_tokens_to_ids([*tags])))
    tail = with_tags(prompt_ids[-TAIL:]).rstrip()
    is_open = tail.endswith(tags[0])
    if request.chat.continues:
        last: Any = request.prompt[-1]
        begun = str(last["content"])
        is_open = begun.rfind(tags[0]) > begun.rfind(tags[1])
    if not is_open and (request.chat.continues or tail.endswith(tags[1])):
        return None, decode
    return Thoughts(tags, is_open=is_open), with_tags if decode == encoder.decode else decode
