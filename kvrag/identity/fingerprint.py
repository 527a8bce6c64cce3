"""Keys and fingerprints: digests of everything that changes KV.

A chunk's identity is the model's fingerprint, namespace, prefix, context, token ids and
``kv_dtype``. The canonical form is part of the format: a sequence of ``tag, length, bytes`` (so
that no field can imitate another), hashed with SHA-256 under a domain tag that holds the format
version. Stored digests name their hash (``sha256:...``); a key, which is also a file name, is the
bare 64 hex digits.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from kvrag.types import ChunkIdentity, ChunkKey

# Version of the stored bytes and of the keys; any change of either needs a new number.
FORMAT_VERSION = 4

# Values by name; a text stands for its bytes in UTF-8.
Fields = Mapping[str, bytes | str]


def canonical(fields: Fields) -> bytes:
    """Encode named fields so that different fields never give the same bytes.

    A field is ``u32 length of tag, tag, u64 length of value, value``, little endian; fields are in
    the order of their tags.
    """
    parts = []
    for tag in sorted(fields):
        name = tag.encode()
        value = fields[tag]
        if isinstance(value, str):
            value = value.encode()
        parts += [struct.pack("<I", len(name)), name, struct.pack("<Q", len(value)), value]
    return b"".join(parts)


def key_digest(domain: str, fields: Fields) -> str:
    """Return the SHA-256 (64 hex digits) of the canonical fields under a domain tag."""
    return hashlib.sha256(
        canonical({**fields, "\0domain": f"kvrag/{FORMAT_VERSION}/{domain}"})
    ).hexdigest()


def digest(domain: str, fields: Fields) -> str:
    """Return :func:`key_digest` with the name of the hash: ``sha256:...``."""
    return "sha256:" + key_digest(domain, fields)


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Everything about a loaded model and its tokenizer that changes the KV of a text.

    ``weights`` is a hub commit, or a digest of files or tensors (:mod:`kvrag.identity.weights`).
    ``tokenizer`` is a digest of vocabulary, merges, special tokens and normalizer. ``regime`` gives
    the prompt lengths that stored keys hold for, where RoPE angles depend on the length. ``dtype``
    is the dtype of the computation. ``adapters`` is a digest of the active adapters. ``extra_keys``
    are the user's own; KV is shared only where they are equal. ``config``, ``rope``, ``attention``
    (of every layer) and ``quantisation`` are JSON (:mod:`kvrag.identity.describe`). Fields that
    don't apply are empty.
    """

    weights: str
    config: str
    tokenizer: str
    rope: str
    regime: str
    attention: str
    dtype: str
    quantisation: str
    adapters: str
    extra_keys: Mapping[str, str] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """Digest of all fields, ``sha256:...``.

        It is the ``model`` of every :class:`~kvrag.types.ChunkIdentity`.
        """
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return digest("model", fields | {"extra_keys": canonical(self.extra_keys)})


def ids_bytes(token_ids: Sequence[int]) -> bytes:
    """Return token ids as little-endian u32."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def ids_digest(token_ids: Sequence[int]) -> str:
    """Return the digest of a run of token ids, such as a prefix."""
    return digest("ids", {"ids": ids_bytes(token_ids)})


def context_digest(token_ids: Sequence[int]) -> str:
    """Return the digest of the context between prefix and chunks; empty without a context."""
    if token_ids:
        return digest("context", {"ids": ids_bytes(token_ids)})
    return ""


def namespace_digest(namespace: str) -> str:
    """Return the digest of a namespace's name; the name itself is not stored."""
    return digest("namespace", {"name": namespace})


def text_digest(text: str) -> str:
    """Return the SHA-256 (hex) of a text, such as a chunk's, which is stripped."""
    return hashlib.sha256(text.encode()).hexdigest()


def content_key(identity: ChunkIdentity) -> str:
    """Return the key of a chunk without its prefix and context."""
    names = ("model", "namespace", "kv_dtype")
    fields = {
        "ids": ids_bytes(identity.token_ids),
        **{name: getattr(identity, name) for name in names},
    }
    return key_digest("content", fields)


@lru_cache(maxsize=4096)  # a request asks for the same few keys several times
def chunk_key(identity: ChunkIdentity) -> ChunkKey:
    """Return the key of a chunk behind its prefix and context."""
    return ChunkKey(
        key_digest(
            "chunk",
            {
                "content": content_key(identity),
                "prefix": identity.prefix,
                "context": identity.context,
            },
        )
    )
