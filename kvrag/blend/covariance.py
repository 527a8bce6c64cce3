"""A Gaussian process model of how stored rows change, with a covariance from the stored values.

A stored chunk was encoded without the text before it in this prompt. That text changes similar rows
in similar ways. So the changes of all rows are modelled as a Gaussian process with a kernel over
the rows' stored values. The process says which rows are most informative to repair (Krause et al.,
JMLR 9, 2008), and its posterior mean predicts the changes of all other rows from the changes of the
repaired rows (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006).

Rows change by different amounts: more if the question attends to them, and more near the beginning
of their chunk, where less text stood before them when they were encoded. So the process models
relative changes: changes divided by their expected size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvrag.blend.layout import Layout, rows_of
from kvrag.model.linear import linear
from kvrag.model.rows import KVBuffer

LAYERS = (0.25, 0.75)  # depths of the layers with the compared values, as fractions of all layers
COMMON = 0.25  # variance of the component that all rows share
NOISE = 1.5  # noise variance: the component of a row's change that no other row shares
STEPS = 32  # steps of the greedy choice of informative rows, at most
# The expected size of a row's change is, up to a factor,
# (place in the chunk + FIRST) ** BY_PLACE * max(attention / mean attention, LEAST) ** BY_MASS.
BY_PLACE = -0.15
FIRST = 8
BY_MASS = 0.1
LEAST = 1e-3


@dataclass(frozen=True, slots=True)
class RowCovariance:
    """The covariance of row changes, over the ``S`` rows from the first to the last stale chunk.

    Attributes
    ----------
    span
        Position of these rows in the prompt.
    rows
        Features, float32 ``(S, F)`` of unit length: the rows' stored values in the layers
        :data:`LAYERS`, minus the mean of the stale rows, normalised per layer.
    owner
        Index of the row's chunk, int64 ``(S,)``; -1 for rows outside stale chunks.
    size
        Expected size of the row's change up to a factor, float32 ``(S,)``.
    """

    span: slice
    rows: torch.Tensor
    owner: torch.Tensor
    size: torch.Tensor

    @classmethod
    def of(
        cls, buffer: KVBuffer, layout: Layout, mass: torch.Tensor | None = None
    ) -> RowCovariance:
        """Build the model from a stitched prompt with stale chunks.

        ``mass``, float32 ``(N,)``, is the attention that the question pays to every row.
        """
        span = slice(layout.stale[0].start, layout.stale[-1].stop)
        owner = torch.full((layout.num_tokens,), -1)
        place = torch.zeros(layout.num_tokens, dtype=torch.float32)
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

    def between(self, at: torch.Tensor, those: torch.Tensor | None = None) -> torch.Tensor:
        """Return the covariance of the rows' relative changes, float32 ``(T, M)``, without noise.

        The kernel is ``max(0, x_i · x_j) + COMMON``, doubled if both rows are of the same chunk.
        ``at`` and ``those`` are positions, int64 ``(M,)`` and ``(T,)``; ``None`` is the whole span.
        Rows of the result outside stale chunks are zero.
        """
        to = at - self.span.start
        rows = slice(None) if those is None else those - self.span.start
        found = linear(self.rows[rows], self.rows[to]).clamp_(min=0).add_(COMMON)
        found *= 1 + (self.owner[rows, None] == self.owner[to]).int()
        # Masked, because rows outside stale chunks may be uninitialised.
        return found.masked_fill_((self.owner[rows] < 0)[:, None], 0)

    def weights(self, at: torch.Tensor) -> torch.Tensor:
        """Return the weights of the posterior mean, float32 ``(S, M)``.

        They predict the changes of all rows of the span, ``s``, from the observed changes of the
        rows ``at``, ``a``: ``diag(size_s) K_sa (K_aa + NOISE · I)^-1 diag(size_a)^-1``.
        """
        known = self.between(at, at)
        known.diagonal().add_(NOISE)
        found: torch.Tensor = solve(known, self.between(at).T)
        return found.T.mul(self.size[:, None] / self.size[at - self.span.start]).contiguous()

    def most_informative(
        self, candidates: torch.Tensor, mass: torch.Tensor, count: int
    ) -> torch.Tensor:
        """Choose the ``count`` candidates that leave the least weighted posterior variance.

        Greedy, in at most :data:`STEPS` steps. The gain of a row is its own variance with noise,
        because a repaired row has no error, plus the reduction of the variance of all unrepaired
        candidates. Candidates are weighted by the square root of ``mass``, because the attention
        is measured on unrepaired KV and so only approximate.

        Parameters
        ----------
        candidates
            Positions of rows of stale chunks, int64 ``(C,)``.
        mass
            The attention that the question pays to the candidates, float32 ``(C,)``.

        Returns
        -------
        torch.Tensor
            Positions in the order of choice, int64 ``(count,)``.
        """
        left = self.between(candidates, candidates)
        weight = mass.clamp(min=0).sqrt()
        taken = torch.zeros_like(candidates, dtype=torch.bool)
        each = -(-count // STEPS)
        chosen = list[torch.Tensor]()
        for start in range(0, count, each):
            variance = left.diagonal()
            told = (weight @ left.square() - weight * variance.square()) / (variance + NOISE)
            gain = (weight * (variance + NOISE) + told).masked_fill(taken, -torch.inf)
            rows = gain.topk(min(each, count - start)).indices
            chosen.append(rows)
            taken.index_fill_(0, rows, True)  # an assignment would synchronise with the device
            weight.index_fill_(0, rows, 0)
            known = left[rows]
            inner = known[:, rows]
            inner.diagonal().add_(NOISE)
            left -= known.T @ solve(inner, known)
        return candidates[torch.cat(chosen)]


def solve(covariance: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Solve ``covariance · x = b``.

    The noise on the diagonal makes the covariance invertible. So the result isn't checked, which
    would synchronise the host with the device.
    """
    found: torch.Tensor = torch.linalg.solve_ex(covariance, b).result
    return found
