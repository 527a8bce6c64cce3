"""How alike the changes of stored rows are: what one row's repair says of another's change, without either forward.

A stored chunk lacks what stands before it in this prompt, and that changes rows that are alike in a like way. So the changes of all rows
are taken for one Gaussian process: the repair reads off it which rows tell most of the others, and how to shift the others by what was
found (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006; choosing rows: Krause et al., JMLR 9, 2008).

Rows change by different amounts: those that the question reads more, and those nearer to their chunk's beginning, which had less before
them when they were encoded. So the process is that of changes divided by their expected size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvrag.blend.layout import Layout, rows_of
from kvrag.model.rows import KVBuffer

LAYERS = (0.25, 0.75)  # where rows are compared, as fractions of all layers
COMMON = 0.25  # variance of what all rows' changes share
NOISE = 1.5  # variance of what a row's change shares with none
STEPS = 32  # in which the most informative rows are chosen
BY_PLACE, FIRST = (
    -0.15,
    8,
)  # a row's change grows as (its place in the chunk + FIRST) to this power,
BY_MASS, LEAST = (
    0.1,
    1e-3,
)  # and as the attention paid to it, relative to the mean and at least LEAST, to this one


@dataclass(frozen=True, slots=True)
class Likeness:
    """The rows from the first to the last of a prompt's stale chunks, ``S`` of them, as they are stored.

    ``span`` says where they are in the prompt; ``rows``, float32 ``(S, F)`` of unit length, are their values in the layers :data:`LAYERS`,
    centred; ``owner``, int64 ``(S,)``, is the number of each row's chunk, -1 for rows of none; ``size``, float32 ``(S,)``, is the expected
    size of each row's change, up to a factor.
    """

    span: slice
    rows: torch.Tensor
    owner: torch.Tensor
    size: torch.Tensor

    @classmethod
    def of(cls, buffer: KVBuffer, layout: Layout, mass: torch.Tensor | None = None) -> Likeness:
        """Compare the rows of a stitched prompt with stale chunks; ``mass``, float32 ``(N,)``, is the attention that the question pays."""
        span = slice(layout.stale[0].start, layout.stale[-1].stop)
        owner, place = torch.full((layout.num_tokens,), -1), torch.zeros(layout.num_tokens)
        for index, chunk in enumerate(layout.stale):
            owner[chunk.start : chunk.stop] = index
            place[chunk.start : chunk.stop] = torch.arange(FIRST, FIRST + chunk.num_rows)
        size = place.clamp_(min=1).pow_(BY_PLACE)
        if mass is not None:
            size *= (
                (mass / mass[owner >= 0].mean()).clamp_(min=LEAST).pow_(BY_MASS).nan_to_num_(1.0)
            )
        layers = [
            buffer.values(layer)
            for layer in sorted({int(share * len(buffer.layers)) for share in LAYERS})
        ]
        sides = owner[span], size[span], rows_of(layout.stale) - span.start
        owner, size, stale = (x.to(layers[0].device, non_blocking=True) for x in sides)
        found = list[torch.Tensor]()
        for layer in layers:
            values = layer[0, :, span].float().transpose(0, 1).flatten(1)
            found.append(torch.nn.functional.normalize(values - values[stale].mean(dim=0), dim=1))
        return cls(span, torch.cat(found, dim=1).div_(len(found) ** 0.5), owner, size)

    def covariance(self, at: torch.Tensor, those: torch.Tensor | None = None) -> torch.Tensor:
        """Return the covariance of relative changes of rows, float32: ``max(0, x_i x_j) + COMMON``, twice that within a chunk.

        ``at`` and ``those`` (``None``: the span) are positions, int64 ``(M,)`` and ``(T,)``; the result is ``(T, M)``, zero for live rows.
        """
        to = at - self.span.start
        rows = slice(None) if those is None else those - self.span.start
        found = (self.rows[rows] @ self.rows[to].T).clamp_(min=0).add_(COMMON)
        found *= 1 + (self.owner[rows, None] == self.owner[to]).int()
        return found.masked_fill_(
            (self.owner[rows] < 0)[:, None], 0
        )  # what is there may not be written yet

    def weights(self, at: torch.Tensor) -> torch.Tensor:
        """Return what predicts all rows' changes from those of the rows ``at``, float32 ``(S, M)``: ``K_sa (K_aa + noise)^-1``, scaled."""
        known = self.covariance(at, at)
        known.diagonal().add_(NOISE)
        found: torch.Tensor = solve(known, self.covariance(at).T)
        return found.T.mul(self.size[:, None] / self.size[at - self.span.start]).contiguous()

    def most_telling(
        self, candidates: torch.Tensor, mass: torch.Tensor, count: int
    ) -> torch.Tensor:
        """Choose, of ``candidates``, the ``count`` rows whose repair leaves least error: int64 ``(count,)``, as they were chosen.

        Greedy, in at most :data:`STEPS` steps: a repaired row has no error, and the variance of the others falls by what it tells of
        them. Rows weigh by the square root of their attention ``mass``, float32 ``(C,)``: what the question reads is known from unrepaired
        KV alone. ``candidates`` are rows of stale chunks, int64 ``(C,)`` positions in the prompt.
        """
        left, weight = self.covariance(candidates, candidates), mass.clamp(min=0).sqrt()
        taken, each, chosen = (
            torch.zeros_like(candidates, dtype=torch.bool),
            -(-count // STEPS),
            list[torch.Tensor](),
        )
        for start in range(0, count, each):
            variance = left.diagonal()
            told = (weight @ left.square() - weight * variance.square()) / (variance + NOISE)
            gain = (weight * (variance + NOISE) + told).masked_fill(taken, -torch.inf)
            rows = gain.topk(min(each, count - start)).indices
            chosen.append(rows)
            taken.index_fill_(0, rows, True)  # an assignment would wait for the device
            weight.index_fill_(0, rows, 0)
            known, inner = left[rows], left[rows][:, rows]
            inner.diagonal().add_(NOISE)
            left -= known.T @ solve(inner, known)
        return candidates[torch.cat(chosen)]


def solve(covariance: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Solve for a covariance with noise, which has a solution: so the host needn't ask the device whether it was found."""
    found: torch.Tensor = torch.linalg.solve_ex(covariance, b).result
    return found
