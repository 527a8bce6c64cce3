"""Options that were passed to the wrong thing, which would drop them: refused, with where they belong."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import fields

from kvrag.config import StoreConfig
from kvrag.errors import ConfigError
from kvrag.options import NEAR, unknown_option


def refuse_store_options(given: Iterable[str], own: Iterable[str], *, of: str) -> None:
    """Refuse options of a :class:`StoreConfig` that were passed to something else, where they would be dropped or come too late.

    Without ``encryption_key``, KV that was to be encrypted would be written plain.

    Parameters
    ----------
    given
        Names of options that are about to be handed on, or left out.
    own
        Names of options that exist; one that is closer to these is no option of the store.
    of
        What they were passed to.

    Raises
    ------
    ConfigError
        Names the option, and where it belongs.
    """
    stored = {f.name for f in fields(StoreConfig)}
    known = sorted(stored.union(own))
    for name in given:
        near = difflib.get_close_matches(name, known, n=1, cutoff=NEAR)
        if near and near[0] in stored:
            raise ConfigError(
                f"{of} has no option {name!r}; pass it to the store: store_config=StoreConfig({near[0]}=...)"
            )


def refuse_misplaced(given: Iterable[str], own: Iterable[str], *, of: str) -> None:
    """Refuse misspelt options of our own too: they would travel far before transformers refused them. As :func:`refuse_store_options`."""
    own, given = list(own), list(given)
    refuse_store_options(given, own, of=of)
    for name in given:
        if difflib.get_close_matches(name, own, n=1, cutoff=NEAR):
            raise unknown_option(name, own, of=of)


def check_model_kwargs(given: Iterable[str], own: Iterable[str], *, of: str) -> None:
    """Refuse, among options for ``from_pretrained``, those of the class itself and of the store. As :func:`refuse_store_options`."""
    own, given = set(own), list(given)
    for name in given:
        if name in own:
            raise ConfigError(f"model_kwargs of {of} holds {name!r}, an option of its own; pass {of}({name}=...)")
    refuse_store_options(given, own, of=f"model_kwargs of {of}")
