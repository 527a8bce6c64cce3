"""GGUF files: transformers parses a file several times during a load, and here once.

::

    with parsed_once("model.gguf"):        parse #1 ── kept ──┐
        AutoConfig.from_pretrained(...)    ◀──────────────────┤
        AutoTokenizer.from_pretrained(...) ◀──────────────────┤
        AutoModel….from_pretrained(...)    ◀──────────────────┘  freed with the block

A vocabulary of 150,000 entries and its merges take seconds to parse.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from kvrag.errors import require

_turn = threading.Lock()
# Readers' attributes of this thread's load, by the real path of the file.
_parsed: ContextVar[dict[str, dict[str, Any]] | None] = ContextVar("parsed GGUF files")


def is_gguf(model: object) -> bool:
    """Whether a model is named by a GGUF file."""
    return isinstance(model, (str, os.PathLike)) and os.fspath(model).endswith(".gguf")


@contextmanager
def parsed_once(model: object) -> Iterator[None]:
    """Parse a model's GGUF file once within the block, and free what was parsed at its end.

    It concerns this thread alone: readers that other threads open meanwhile parse as ever. Blocks
    may be nested; the outermost counts. For other models, nothing happens.
    """
    if not is_gguf(model) or _parsed.get(None) is not None:
        yield
        return
    gguf: Any = require("gguf", extra="gguf", purpose="reading GGUF files")
    with _turn:
        reader, names = gguf.GGUFReader, gguf.get_tensor_name_map
        parse = reader.__init__
        token = _parsed.set({})
        reader.__init__ = _parsing_once(reader, parse)
        # transformers asks for the same table of names once for every module of the model.
        gguf.get_tensor_name_map = functools.cache(names)
        try:
            yield
        finally:
            reader.__init__ = parse
            gguf.get_tensor_name_map = names
            _parsed.reset(token)


def _parsing_once(reader: type, parse: Any) -> Any:
    """Return ``GGUFReader.__init__`` that takes a file parsed before from this thread's load."""
    # Slicing a memory map, once for every entry of a vocabulary, costs several times as much as
    # slicing a plain array over the same pages.
    as_array = property(
        lambda self: self.pages, lambda self, data: setattr(self, "pages", np.asarray(data))
    )
    plain = type("PlainReader", (reader,), {"data": as_array})

    @functools.wraps(parse)
    def begin(self: Any, path: Any, mode: str = "r") -> None:
        kept = _parsed.get(None)
        if kept is None or type(self) is not reader or mode != "r":
            parse(self, path, mode)
            return
        file = os.path.realpath(path)
        if file not in kept:
            found = plain(path)
            kept[file] = {**vars(found), "data": found.data}
        vars(self).update(kept[file])

    return begin
