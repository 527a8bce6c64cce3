"""What is asked of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from kvrag.config import RepairConfig, as_config, check_mode
from kvrag.prompt.template import Prompt
from kvrag.prompt.tools import TEXT, Form
from kvrag.types import Mode


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and how to treat it: mode, repair, namespace (its digest), prefixes that its head may start with, the form of its answer."""

    prompt: Prompt
    mode: Mode
    repair: RepairConfig
    namespace: str
    prefixes: tuple[str, ...]
    form: Form = TEXT
    slides: bool = False


def check_options(mode: Mode, repair: object, max_context: str = "raise") -> RepairConfig | None:
    """Raise ``ConfigError`` for a wrong mode or ``max_context``, and return the repair as a config."""
    check_mode(mode, max_context)
    return None if repair is None else as_config(RepairConfig, repair, option="repair")
