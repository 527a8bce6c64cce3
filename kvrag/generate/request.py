"""Request to an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvrag.config import RepairConfig, as_config, check_mode
from kvrag.prompt.template import Chat, Prompt
from kvrag.prompt.tools import TEXT, ResponseFormat
from kvrag.types import Mode


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and its options.

    ``namespace`` is a digest; ``prefixes`` are texts that the prompt may start with; ``form`` is
    the form of the answer; ``slides``: whether rows may leave the context window; ``variables``:
    for the chat template; ``continues``: whether the answer continues the last message.
    """

    prompt: Prompt
    mode: Mode
    repair: RepairConfig
    namespace: str
    prefixes: tuple[str, ...]
    form: ResponseFormat = TEXT
    slides: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False

    @property
    def chat(self) -> Chat:
        """Options for rendering chat messages."""
        return Chat(self.form.tools, self.variables, self.continues)


def check_options(mode: Mode, repair: object, max_context: str = "raise") -> RepairConfig | None:
    """Return the repair as a config; raise ``ConfigError`` for a wrong mode or ``max_context``."""
    check_mode(mode, max_context)
    if repair is None:
        return None
    return as_config(RepairConfig, repair, option="repair")
