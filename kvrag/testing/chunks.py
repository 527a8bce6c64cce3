"""Small made-up chunks for tests of stores, without a model."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from kvrag.identity.fingerprint import chunk_key, namespace_digest
from kvrag.types import ChunkIdentity, ChunkKV, LayerKV, TextEntry

NAMESPACE = namespace_digest("default")


def make_identity(
    number: int = 0,
    *,
    model: str = "model",
    namespace: str = NAMESPACE,
    prefix: str = "prefix",
    tokens: int = 3,
) -> ChunkIdentity:
    """Return the identity of a small chunk; different numbers give different token ids."""
    return ChunkIdentity(
        model, namespace, prefix, tuple(range(1000 * number, 1000 * number + tokens))
    )


def make_kv(
    identity: ChunkIdentity, *, dtype: torch.dtype = torch.float32, layers: int = 2
) -> ChunkKV:
    """Return random KV that is determined by the identity.

    It has two heads, and keys and values of different width.
    """
    random = torch.Generator().manual_seed(int(chunk_key(identity)[:15], 16))

    def tensor(dim: int) -> Tensor:
        return torch.randn(2, len(identity.token_ids), dim, generator=random).to(dtype)

    return ChunkKV(tuple(LayerKV(tensor(4), tensor(2)) for _ in range(layers)))


def make_text(name: str) -> TextEntry:
    """Return the entry of a made-up text; different names give different entries."""
    digest = hashlib.sha256(name.encode()).hexdigest()
    return TextEntry(digest, int(digest[:16], 16), int(digest[16:32], 16), len(name))


def same_bits(a: ChunkKV | None, b: ChunkKV | None) -> bool:
    """Whether two chunks have the same shapes, dtypes and bits."""
    if a is None or b is None or len(a.layers) != len(b.layers):
        return False
    if [len(layer.tensors) for layer in a.layers] != [len(layer.tensors) for layer in b.layers]:
        return False
    pairs = [
        (x, y)
        for p, q in zip(a.layers, b.layers, strict=True)
        for x, y in zip(p.tensors, q.tensors, strict=True)
    ]
    return all(
        x.dtype == y.dtype
        and x.shape == y.shape
        and torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
        for x, y in pairs
    )
