"""The forms of the catalog's rows. A row that is not of its form counts as absent: anyone who can write to the directory may have made it.

::

    c <key>                   a chunk, stored or being written
    i <content>               keys of the chunk's variants, oldest first
    l <namespace> <page>      a page of the texts, by number, in the order in which they came
    n <namespace>             numbers of the first and of the last text
    s                         totals of the store
    t <namespace> <digest>    a text
    z <namespace> <document>  digests of a document's texts

Chunks come first and documents last because diskcache lists names from either end.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import Field, TypeAdapter

from kvrag.store.base import Record
from kvrag.store.worth import Usage
from kvrag.types import ChunkKey

Count = Annotated[int, Field(ge=0, lt=2**62)]
Hash = Annotated[int, Field(ge=0, lt=2**64)]


class Chunk(NamedTuple):
    """The row ``c``: a record without its key, digests of the chunk's texts, its usage, and whether its blob is yet to be written."""

    content: str
    model: str
    namespace: str
    prefix: str
    context: str
    num_tokens: Count
    num_bytes: Count
    digests: list[str]
    usage: Usage
    pending: bool

    def record(self, key: ChunkKey) -> Record:
        """Return the chunk with its key."""
        return Record(key, *self[:7])


class Entry(NamedTuple):
    """A :class:`~kvrag.types.TextEntry`."""

    digest: Annotated[str, Field(pattern=r"^[\x00-\x7f]*$")]
    head: Hash
    tail: Hash
    num_chars: Annotated[int, Field(ge=0, lt=2**48)]


class Text(NamedTuple):
    """The row ``t``: its entry, its number, the keys of its chunks, and how many documents refer to it."""

    entry: Entry
    number: Count
    keys: list[ChunkKey]
    refs: Count


class State(NamedTuple):
    """The row ``s``; ``dormant`` says whether there may be blobs of an earlier catalog."""

    generation: Count
    chunks: int = 0
    num_bytes: int = 0
    accesses: Count = 0
    dormant: bool = True


CHUNK, TEXT, STATE = TypeAdapter(Chunk), TypeAdapter(Text), TypeAdapter(State)
PAGE, STRINGS, RANGE = TypeAdapter(dict[Count, Entry]), TypeAdapter(list[str]), TypeAdapter(tuple[Count, Count])
