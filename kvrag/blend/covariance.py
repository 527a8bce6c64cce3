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

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrag.blend.layout import Layout, uploaded
from kvrag.model.linear import linear
from kvrag.model.rows import KVBuffer

# Calls a function with tensors, by a recording.
Run = Callable[..., Tensor]

LAYERS = (0.25, 0.75)  # depths of the layers with the compared values, as fractions of all layers
COMMON = 0.25  # variance of the component that all rows share
NOISE = 1.5  # noise variance: the component of a row's change that no other row shares
# Number of candidates of ``query_gain``, the rows with the most attention. It chooses at most half
# of them; the rest of the budget goes to the next rows by attention.
POOL = 512
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
        :data:`LAYERS`, minus the mean of the stale rows, normalised per layer. Those of rows
        outside stale chunks are finite.
    owner
        Index of the row's chunk, int32 ``(S,)``; -1 for rows outside stale chunks.
    size
        Expected size of the row's change up to a factor, float32 ``(S,)``.
    run
        Function that runs :func:`choose` by a recording, if the model has recordings.
    """

    span: slice
    rows: Tensor
    owner: Tensor
    size: Tensor
    run: Run | None = None

    @classmethod
    def of(
        cls,
        buffer: KVBuffer,
        layout: Layout,
        mass: Tensor | None = None,
        *,
        run: Run | None = None,
    ) -> RowCovariance:
        """Build the model from a stitched prompt with stale chunks.

        ``mass``, float32 ``(N,)``, is the attention that the question pays to every row.
        """
        span = slice(layout.stale[0].start, layout.stale[-1].stop)
        layers = [
            buffer.values(layer)[0, :, span].transpose(0, 1).flatten(1)
            for layer in sorted({int(share * len(buffer.layers)) for share in LAYERS})
        ]
        widths = [layer.shape[1] for layer in layers]
        owner, size = uploaded(_sides(layout, span, mass), layers[0].device)
        # Other rows may be uninitialised.
        rows = torch.cat(layers, dim=1).float().masked_fill_((owner < 0)[:, None], 0)
        # All other rows are 0, so this is the mean of the stale rows.
        rows -= rows.sum(dim=0) / layout.num_stale
        for part in torch.split(rows, widths, dim=1):
            torch.nn.functional.normalize(part, dim=1, out=part)
        return cls(span, rows.div_(len(layers) ** 0.5), owner, size.view(torch.float32), run)

    def weights(self, at: Tensor) -> Tensor:
        """Return the weights of the posterior mean, float32 ``(S, M)``.

        They predict the changes of all rows of the span, ``s``, from the observed changes of the
        rows ``at``, ``a``: ``diag(size_s) K_sa (K_aa + NOISE · I)^-1 diag(size_a)^-1``.
        """
        to = at - self.span.start
        observed = self.rows[to], self.owner[to]
        known = kernel(*observed, *observed)
        known.diagonal().add_(NOISE)
        # A product with the inverse takes half the time of a solution for all rows. The noise keeps
        # it as exact, and makes a check needless, which would wait for the device.
        inverse = torch.linalg.inv_ex(known).inverse
        return linear(kernel(self.rows, self.owner, *observed), inverse).mul_(
            self.size[:, None] / self.size[to]
        )

    def most_informative(self, candidates: Tensor, mass: Tensor, count: int) -> Tensor:
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
        at = candidates - self.span.start
        each = -(-count // STEPS)
        weight = mass.clamp(min=0).sqrt()
        given = self.rows[at], self.owner[at], weight, torch.zeros_like(weight)
        # Fewer candidates would need a recording for each of their numbers.
        if self.run is not None and len(at) == POOL:
            chosen = self.run(choose, *given, each=each, steps=STEPS)
        else:
            chosen = choose(*given, each=each, steps=-(-count // each))
        return candidates[chosen[:count]]


def _sides(layout: Layout, span: slice, mass: Tensor | None) -> Tensor:
    """Return owners of rows, and the bits of expected sizes of their changes, int32 ``(2, S)``."""
    starts, stops = torch.tensor([[s.start for s in layout.stale], [s.stop for s in layout.stale]])
    places = torch.arange(span.start, span.stop)
    owner = torch.bucketize(places, starts, right=True) - 1
    is_stale = places < stops[owner]
    size = (places - starts[owner] + FIRST).float().pow_(BY_PLACE)
    if mass is not None:
        relative = mass[span] / mass[span][is_stale].mean()
        # Without any attention the mean is 0, and no row counts more than another.
        size *= relative.clamp_(min=LEAST).pow_(BY_MASS).nan_to_num_(1.0)
    # Floats travel as their bits, so that a single copy brings both.
    return torch.stack([owner.where(is_stale, -1).int(), size.view(torch.int32)])


def kernel(rows: Tensor, owner: Tensor, others: Tensor, of_others: Tensor) -> Tensor:
    """Return the covariance of rows' changes with those of others, float32 ``(T, M)``.

    It is ``max(0, x_i · x_j) + COMMON``, doubled if both rows are of the same chunk. ``rows`` and
    ``others`` are features ``(T, F)`` and ``(M, F)``; ``owner`` and ``of_others`` say whose they
    are, ``(T,)`` and ``(M,)``.
    """
    found = linear(rows, others).clamp_(min=0).add_(COMMON)
    return found.addcmul_(found, owner[:, None] == of_others)


def choose(
    rows: Tensor,
    owner: Tensor,
    weight: Tensor,
    hidden: Tensor,
    *,
    each: int,
    steps: int,
) -> Tensor:
    """Choose rows as :meth:`RowCovariance.most_informative` does, ``each`` of them in a step.

    It reads nothing on the host, and its shapes depend on nothing but those of its inputs, so that
    it can be recorded. Candidates that only fill the inputs up have weight 0 and are hidden.

    Parameters
    ----------
    rows, owner
        Features of the candidates, float32 ``(C, F)``, and whose they are, ``(C,)``.
    weight, hidden
        Weights of the candidates, and minus infinity for those that may not be chosen, or else 0;
        float32 ``(C,)``. Both are changed in place: chosen rows weigh nothing and are hidden.

    Returns
    -------
    torch.Tensor
        Indices in the order of choice, int64 ``(steps · each,)``. Those after the last candidate
        mean nothing.
    """
    left = kernel(rows, owner, rows, owner)
    variance = left.diagonal()
    chosen = list[Tensor]()
    for _ in range(steps):
        own = variance + NOISE
        told = torch.mv(left.square(), weight)
        # Without the row's own share: being repaired, it gains all its variance, with the noise.
        told.addcmul_(weight, variance.square(), value=-1).div_(own)
        best = told.addcmul_(weight, own).add_(hidden).topk(each).indices
        chosen.append(best)
        hidden.index_fill_(0, best, -torch.inf)
        weight.index_fill_(0, best, 0)
        known = left[best]
        inner = known[:, best]
        inner.diagonal().add_(NOISE)
        # Unchecked, because a check would wait for the device: the noise makes it invertible.
        root = torch.linalg.cholesky_ex(inner).L
        known = torch.linalg.solve_triangular(root, known, upper=False)
        # What is left of the others' covariance once the chosen rows are known.
        left.addmm_(known.T, known, alpha=-1)
    return torch.cat(chosen)
