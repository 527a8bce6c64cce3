"""The keys of a store on the command line: environment variables alone, because arguments can be seen by others."""

from __future__ import annotations

import os
from typing import Any

VARIABLES = {option: f"KVRAG_{option.upper()}" for option in ("encryption_key",)}
"""Option of :class:`kvrag.StoreConfig` → environment variable."""


def key_options() -> dict[str, Any]:
    """Return the options for the keys that the environment has."""
    return {option: f"env:{name}" for option, name in VARIABLES.items() if os.environ.get(name)}
