"""Shapes, hole patterns and honest FLOP counts for the kernels' benchmark."""

from __future__ import annotations

from dataclasses import dataclass

import torch

SUFFIX = 64
PAGE = 16  # slots


@dataclass(frozen=True)
class Shape:
    """Heads of a model, prompt length, share of repaired rows, and where they lie: uniform, heads (of 512-token chunks) or end.

    With ``requests``, it is a step of so many requests instead, a row each, in one pool of ``keys`` slots.
    """

    heads: int
    kv_heads: int
    dim: int
    keys: int
    ratio: float
    pattern: str = "uniform"
    requests: int = 1

    @property
    def name(self) -> str:
        if self.requests > 1:
            each = self.keys // self.requests
            return f"{self.heads}/{self.kv_heads} hd{self.dim} N={self.requests}×{each} decode"
        return f"{self.heads}/{self.kv_heads} hd{self.dim} N={self.keys} {self.ratio:.0%} {self.pattern}"

    def rows(self) -> torch.Tensor:
        """Return the rows to compute, ascending: the holes and the last 64; of several requests, the last of each."""
        if self.requests > 1:
            return self.first() + self.keys // self.requests - 1
        body = self.keys - SUFFIX
        count = round(self.ratio * body)
        if self.pattern == "uniform":
            holes = torch.randperm(body, generator=torch.Generator().manual_seed(0))[:count]
        elif self.pattern == "heads":
            per_chunk = max(1, round(self.ratio * 512)) if count else 0
            holes = torch.cat(
                [torch.arange(s, min(s + per_chunk, body)) for s in range(0, body, 512)]
            )
        else:
            holes = torch.arange(body - count, body)
        return torch.cat([holes.sort().values, torch.arange(body, self.keys)])

    def first(self) -> torch.Tensor:
        """Return the first key that each row sees."""
        if self.requests > 1:
            return torch.arange(self.requests) * (self.keys // self.requests)
        return torch.zeros_like(self.rows())

    def flops(self) -> int:
        """Useful FLOPs: ``4 · H · D`` per visible key of each row."""
        return 4 * self.heads * self.dim * int((self.rows() + 1 - self.first()).sum())


MODELS = (
    (9, 3, 64),
    (14, 2, 64),
    (16, 2, 128),
    (28, 4, 128),
    (32, 8, 128),
    (32, 32, 128),
    (32, 32, 96),
    (8, 4, 256),
)
_FIRST = [
    Shape(32, 8, 128, n, 0.15) for n in (32768, 8192)
]  # with the first targets: a run may be cut short
_FIRST += [
    Shape(14, 2, 64, 32768, 0.15),
    Shape(16, 2, 128, 8192, 0.15),
    Shape(32, 8, 128, 8192, 1.0),
]
_REST = [
    Shape(*m, n, 0.15)
    for m in ((14, 2, 64), (16, 2, 128), (32, 8, 128))
    for n in (2048, 8192, 32768)
]
_STEPS = [Shape(32, 8, 128, 8 * n, 0.0, requests=8) for n in (2048, 6144)]
SHORT = list(dict.fromkeys([*_FIRST, *_REST, *_STEPS]))
_LONG = [
    *(Shape(*m, n, 0.15) for m in MODELS for n in (2048, 8192, 32768)),
    *(Shape(*m, 8192, r) for m in ((16, 2, 128), (32, 8, 128)) for r in (0.0, 0.05, 0.3, 1.0)),
    *(Shape(32, 8, 128, 8192, 0.15, pattern) for pattern in ("heads", "end")),
    Shape(32, 8, 128, 131072, 0.05),
]
FULL = list(dict.fromkeys([*SHORT, *_LONG]))
DRY = [
    Shape(4, 2, 64, 512, 0.15),
    Shape(6, 2, 96, 300, 0.3, "heads"),
    Shape(4, 2, 64, 96, 0.0, requests=3),
]
