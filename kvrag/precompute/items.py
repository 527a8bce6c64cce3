"""What is precomputed, checked before anything is computed: texts and the ids of their documents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvrag.errors import ConfigError, InputError
from kvrag.prompt.template import check_chunk_text


def pair_up(texts: Sequence[str], ids: Sequence[str] | None) -> list[tuple[str | None, str]]:
    """Pair texts with their ids, if any.

    Raises
    ------
    InputError
        If their numbers differ.
    """
    if not isinstance(texts, Iterable) or isinstance(texts, (Mapping, bytes)):
        raise InputError(f"texts is of type {type(texts).__name__}; pass a list of strings")
    texts = [texts] if isinstance(texts, str) else list(texts)
    ids = [ids] if isinstance(ids, str) else ids
    names: list[str | None] = [None] * len(texts) if ids is None else list(ids)
    if len(names) != len(texts):
        raise InputError(f"{len(texts)} texts came with {len(names)} ids; pass one id per text, or none")
    return list(zip(names, texts, strict=True))


def check_items(items: Sequence[tuple[str | None, str]]) -> list[tuple[str | None, str]]:
    """Validate before anything is computed; returns ``(id, stripped text)``.

    Raises
    ------
    InputError
        If a text is no string or empty, or one id names different texts.
    """
    out: list[tuple[str | None, str]] = []
    seen: dict[str, str] = {}
    for index, (name, text) in enumerate(items):
        try:
            body = check_chunk_text(text).strip()
        except InputError as error:
            raise InputError(f"chunk {index} (id {name!r}): {error}") from None
        if name is not None:
            if not isinstance(name, str):
                raise InputError(f"chunk {index} has the id {name!r}; ids must be strings")
            if seen.setdefault(name, body) != body:
                raise InputError(f"the id {name!r} names two different texts; give each text its own id")
        out.append((name, body))
    return out


def check_batch_size(batch_size: object) -> None:
    """Raise :class:`ConfigError` unless it is a whole number of at least 1."""
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(f"batch_size is {batch_size!r}; it must be a whole number of at least 1")
