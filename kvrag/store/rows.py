"""The rows of an index: their names, and values that may have been written by anyone.

=============================  ================================  ===============================================
row                            value                             for
=============================  ================================  ===============================================
``key K``                      fields of a record, ``texts``     one stored chunk
``content C``                  list of keys, oldest first        the variants of a chunk behind other prefixes
``text N D``                   ``entry``, ``seq``, ``keys``      one text of a namespace and its KV
``log N seq``                  text entry                        texts in the order of their arrival
``last N``                     seq                               the newest number in the log
``doc N I D``, ``ref N D I``   1                                 document I references text D, both directions
``use K``                      priority, time, hits, cost        what eviction goes by
``held K``                     name of a claim                   a chunk without a file, in its holder's memory
``gone K``                     1                                 a chunk whose file has yet to be erased
``unref N D I``                1                                 a reference whose file has yet to be erased
``erased``                     random, and another one behind +  another one after each erasure, and each eviction
``total``, ``clock``           chunks, bytes; accesses           statistics, logical time
=============================  ================================  ===============================================

A reference is held by a document on a text, and keeps all KV of that text. Texts may share a key: a tokenizer may
give the same ids for two of them. Rows that are not of this form are treated as absent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from kvrag.store.base import Record
from kvrag.store.header import parse_text
from kvrag.types import ChunkKey, TextEntry

FIELDS = {"content": str, "model": str, "namespace": str, "prefix": str, "num_tokens": int, "num_bytes": int}


def prefix_of(kind: str, *names: str) -> str:
    """Begin a row's name; JSON strings end visibly, so no name can imitate another."""
    return " ".join([kind, *map(json.dumps, names), ""])


def row_of(kind: str, *names: str) -> str:
    """Name of a row."""
    return prefix_of(kind, *names)[:-1]


def log_row(namespace: str, seq: int) -> str:
    """Name of a row of the log; numbers sort as they count."""
    return f"{prefix_of('log', namespace)}{seq:020d}"


def end_of(prefix: str) -> str:
    """Return the first string after all that begin with ``prefix``."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


DECODER = json.JSONDecoder()


def names_of(rest: str) -> list[str]:
    """Parse the names in a row's name, after its kind; none if it is not one of ours."""
    names, at = [], 0
    while at < len(rest):
        try:
            name, at = DECODER.raw_decode(rest, at)
        except ValueError:
            return []
        if not isinstance(name, str) or rest[at : at + 1] not in ("", " "):
            return []
        names.append(name)
        at += 1
    return names


def first_names(rows: list[tuple[str, Any]]) -> Iterator[str]:
    """Yield the first name in the rest of each row's name."""
    for rest, _ in rows:
        names = names_of(rest)
        if names:
            yield names[0]


def as_list(text: TextEntry) -> list[Any]:
    """JSON form of a text entry."""
    return [text.digest, text.head, text.tail, text.num_chars]


def text_of(value: object) -> TextEntry | None:
    """Parse a text entry."""
    try:
        return parse_text(value)
    except ValueError:
        return None


def texts_of(row: Any) -> list[TextEntry]:
    """Parse the texts of a key's row."""
    values = row.get("texts") if isinstance(row, dict) else None
    return [text for value in values if (text := text_of(value))] if isinstance(values, list) else []


def strings_of(value: object) -> list[str]:
    """Parse a list of strings."""
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def totals_of(value: object) -> tuple[int, int]:
    """Parse the totals."""
    match value:
        case [int(chunks), int(num_bytes)]:
            return chunks, num_bytes
    return 0, 0


def erasures_of(mark: str) -> str:
    """Return the part of the row ``erased`` that changes with erasures, and not with evictions."""
    return mark.partition("+")[0]


def record_of(key: ChunkKey, row: Any) -> Record | None:
    """Parse a key's row."""
    texts = texts_of(row)
    return sizes_of(key, row, texts[-1] if texts else None)


def sizes_of(key: ChunkKey, row: Any, text: TextEntry | None = None) -> Record | None:
    """Parse a key's row but for its texts, which is quicker."""
    if not isinstance(row, dict) or any(type(row.get(name)) is not kind for name, kind in FIELDS.items()):
        return None
    return Record(key=key, text=text, **{name: row[name] for name in FIELDS})


def merged(row: dict[str, Any], record: Record) -> dict[str, Any]:
    """Value of a key's row after ``record`` was added to it; the newest text stands last."""
    fields = asdict(record)
    texts = texts_of(row)
    if record.text is not None:
        texts = [*(text for text in texts if text.digest != record.text.digest), record.text]
    return {**{name: fields[name] for name in FIELDS}, "texts": [as_list(text) for text in texts]}
