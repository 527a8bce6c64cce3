"""Options of requests, requests, and totals over them.

::

    SamplingConfig   ReuseOptions ◀── PrefillRequest ◀── ScoreRequest      (a prompt, and options:
            ▲          ▲                   ▲              (a continuation)   the engine's methods
            RequestOptions ◀───────── AnswerRequest                          have their parameters)
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from pydantic import SkipValidation

from kvrag.config import (
    Repair,
    RepairConfig,
    SamplingConfig,
    as_config,
    check_mode,
    check_template_kwargs,
    config_class,
    options_class,
)
from kvrag.config.options import Switch
from kvrag.prompt.explain import Watch
from kvrag.prompt.template import PLAIN, Chat, Prompt
from kvrag.prompt.tools import TEXT, JsonObject, ResponseFormat, answer_form
from kvrag.types import Accounting, MaxContext, Mode

Counted = TypeVar("Counted", bound=Accounting)

SUMMED = (
    "prompt_tokens",
    "cached_tokens",
    "history_tokens",
    "repaired_tokens",
    "computed_tokens",
    "loaded_bytes",
)


@options_class
class ReuseOptions:
    """Options of every request: how its prompt is rendered, and how stored KV is reused."""

    tools: SkipValidation[Sequence[JsonObject] | None] = None
    """Functions that the answer may call, as OpenAI's dicts; the prompt must be chat messages."""
    tool_choice: SkipValidation[str | JsonObject | None] = None
    """Choice of tools: ``"auto"``, ``"none"``, ``"required"``, or a tool's name."""
    response_format: SkipValidation[JsonObject | None] = None
    """Form of the answer: ``{"type": "json_object"}``, or ``{"type": "json_schema", "json_schema":
    {"name": ..., "schema": ...}}``. Decoding is constrained so that the answer satisfies
    ``tool_choice`` and ``response_format`` unless ``max_new_tokens`` ends it early (needs the extra
    ``structured``)."""
    chat_template_kwargs: SkipValidation[JsonObject | None] = None
    """Variables for the chat template, for instance ``{"enable_thinking": False}``; they are added
    to the engine's."""
    continue_final_message: Switch | None = False
    """Whether the answer continues the last message, which must be an assistant's."""
    mode: SkipValidation[Mode] = "auto"
    """Mode of reuse: ``"auto"``, ``"full"`` (no reuse), ``"prefix"`` (exact reuse of the prompt's
    head only) or ``"stitch"``."""
    repair: SkipValidation[Repair] = None
    """Repair of stitched KV: a :class:`kvrag.RepairConfig`, or a name; ``None``: the engine's."""
    namespace: SkipValidation[str | None] = None
    """Namespace of the chunks, which are never found from another one; ``None``: the engine's."""
    max_context: SkipValidation[MaxContext] = "raise"
    """Behaviour where prompt and answer exceed the context window: ``"raise"`` raises an error;
    ``"slide"`` evicts the oldest tokens except the first few, and labels the answer
    (``evicted_tokens``)."""

    def __post_init__(self) -> None:
        check_mode(self.mode, self.max_context)
        check_template_kwargs(self.chat_template_kwargs)
        self.repair_config  # noqa: B018 - checks it
        self.form  # noqa: B018 - checks it

    @cached_property
    def repair_config(self) -> RepairConfig | None:
        """Repair as a config; ``None``: the engine's."""
        return as_config(RepairConfig, self.repair, option="repair")

    @cached_property
    def form(self) -> ResponseFormat:
        """Form of the answer."""
        if self.tools is None and self.tool_choice is None and self.response_format is None:
            return TEXT
        return answer_form(self.tools, self.tool_choice, self.response_format)

    def chat(self, variables: JsonObject) -> Chat:
        """Return the options for rendering chat messages, with ``variables`` of the engine."""
        return Chat(
            self.form.tools,
            {**variables, **(self.chat_template_kwargs or {})},
            bool(self.continue_final_message),
        )


@options_class
class RequestOptions(ReuseOptions, SamplingConfig):
    """Options of a request that is answered."""


@config_class
class PrefillRequest(ReuseOptions):
    """Prompt to prefill or to explain, with its options."""

    prompt: SkipValidation[Prompt]
    """Text, chat messages, segments (``str`` and :class:`kvrag.Chunk`), or token ids."""


@config_class
class ScoreRequest(PrefillRequest):
    """Prompt whose continuation is scored, with its options."""

    continuation: SkipValidation[str | Sequence[int]]
    """Text, or token ids."""


@config_class
class AnswerRequest(PrefillRequest, RequestOptions):
    """Prompt to answer, with its options."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and its options.

    ``namespace`` is a digest; ``prefixes`` are texts that the prompt may start with; ``form`` is
    the form of the answer; ``slides``: whether rows may leave the context window; ``chat``: how
    chat messages are rendered.
    """

    prompt: Prompt
    mode: Mode
    repair: RepairConfig
    namespace: str
    prefixes: tuple[str, ...]
    form: ResponseFormat = TEXT
    slides: bool = False
    chat: Chat = PLAIN


class Figures(dict[str, Any]):
    """Figures by name, for JSON; also readable as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class EngineStats:
    """Totals over the requests of an engine, counting how their answers were made; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._totals = Counter[str]()
        self.watch = Watch()

    def count(self, result: Counted) -> Counted:
        """Add a request's result to the totals, and return it."""
        with self._lock:
            self._totals.update(["requests", f"requests_{result.exactness}"])
            self._totals.update({name: getattr(result, name) for name in SUMMED})
            self._totals["fallbacks"] += result.fallback_reason is not None
        return result

    def snapshot(self) -> dict[str, Any]:
        """Return the totals and the overall reuse ratio."""
        with self._lock:
            totals = self._totals.copy()
        return {
            **totals,
            "kv_reuse_ratio": totals["cached_tokens"] / max(totals["prompt_tokens"], 1),
            "requests_without_hits": self.watch.num_without_hits,
        }
