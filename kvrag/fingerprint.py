"""Addresses: everything that changes KV goes into one key.

Identity of a chunk = model fingerprint, namespace, prefix, token ids. The canonical form is part of the format: a sequence of
``tag, length, bytes`` (so no field can imitate another), hashed with SHA-256 under a domain tag that carries the format version.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence

from kvrag.types import ChunkIdentity, ChunkKey

FORMAT_VERSION = 1
"""Version of the stored bytes and of the key; a change of either is a new number."""


def canonical(fields: Mapping[str, bytes]) -> bytes:
    """Encode named fields so that different fields never give the same bytes.

    Each field is ``u32 length of tag, tag, u64 length of value, value``, little endian, in the order of the tags.
    """
    parts = []
    for tag in sorted(fields):
        name, value = tag.encode(), fields[tag]
        parts += [struct.pack("<I", len(name)), name, struct.pack("<Q", len(value)), value]
    return b"".join(parts)


def digest(domain: str, fields: Mapping[str, bytes]) -> str:
    """SHA-256 (hex) of the canonical fields under a domain tag."""
    return hashlib.sha256(canonical({**fields, "\0domain": f"kvrag/{FORMAT_VERSION}/{domain}".encode()})).hexdigest()


def ids_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian u32."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def ids_digest(token_ids: Sequence[int]) -> str:
    """Digest of a run of token ids, such as a prefix."""
    return digest("ids", {"ids": ids_bytes(token_ids)})


def namespace_digest(namespace: str) -> str:
    """Digest of a namespace's name: names themselves are not written into blobs."""
    return digest("namespace", {"name": namespace.encode()})


def text_digest(text: str) -> str:
    """SHA-256 (hex) of a stripped chunk text."""
    return hashlib.sha256(text.encode()).hexdigest()


def content_key(identity: ChunkIdentity) -> str:
    """Address of a chunk regardless of the prefix that it was encoded behind."""
    return digest(
        "content",
        {
            "model": identity.model.encode(),
            "namespace": identity.namespace.encode(),
            "ids": ids_bytes(identity.token_ids),
        },
    )


def chunk_key(identity: ChunkIdentity) -> ChunkKey:
    """Address of a chunk behind its prefix."""
    return ChunkKey(digest("chunk", {"content": content_key(identity).encode(), "prefix": identity.prefix.encode()}))
