"""Repair: recompute chosen rows against the whole stitched prompt, and carry their mean change to the rows left alone.

All strategies share one forward (:meth:`kvrag.model.CausalLM.forward`) over the chosen rows, the glue and the suffix, each at its own
position, with an exact causal limit per row. Its last row's logits choose the first answer token: no other forward stands before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvrag.blend.layout import Layout, Segment, mask_of, num_rows_of, rows_of
from kvrag.model import CausalLM, StopForward
from kvrag.model.rope import Rotations
from kvrag.model.rows import KVBuffer, Rows

SHIFT_SKIP = 4  # head rows of a chunk that don't count towards its mean change: former sinks change in their own way
SHIFT_PRIOR = 3  # rows without a change that each mean counts in: a few rows say little about a chunk
SHIFT_MIN_ROWS = 3  # fewer repaired rows than this give no estimate of a chunk's change worth applying


def probed_layers(span: tuple[float, float], num_layers: int) -> range:
    """Return the layers that a span of fractions takes in: at least one."""
    first = min(round(span[0] * num_layers), num_layers - 1)
    return range(first, max(first + 1, round(span[1] * num_layers)))


def probe(
    model: CausalLM,
    buffer: KVBuffer,
    layout: Layout,
    token_ids: torch.Tensor,
    *,
    span: tuple[float, float] = (0.0, 1.0),
) -> torch.Tensor:
    """Measure the attention that the suffix pays to every row of the stitched, unrepaired prompt.

    Live rows of the buffer are written on the way; the repair writes them again. ``token_ids`` are those of the whole prompt, int64
    ``(N,)``; ``span`` names the layers that count, as fractions of all: :attr:`kvrag.RepairConfig.probe_span`.

    Returns
    -------
    torch.Tensor
        Float32 ``(N,)`` on the host: probability per row, summed over layers, heads and suffix rows.
    """
    rows = rows_of(layout.live).to(model.device)
    layers = probed_layers(span, model.num_layers)
    _, mass = model.forward(
        token_ids[rows.cpu()], Rows.at(rows), buffer, logits=0, mass_rows=layout.num_suffix, mass_layers=layers
    )
    assert mass is not None
    return mass.cpu()


def deviation(
    model: CausalLM, buffer: KVBuffer, layout: Layout, token_ids: torch.Tensor, *, check_layer: int = 1
) -> torch.Tensor:
    """Measure how far stored values are from fresh ones at the check layer (CacheBlend's HKVD signal).

    All rows pass the layers before the check layer; its fresh keys and values stay in the buffer for all rows, as in the authors' code.

    Returns
    -------
    torch.Tensor
        Float32 ``(N,)`` on the host: squared difference of V, summed over heads and head dim.
    """
    layer_index = min(check_layer, model.num_layers - 1)
    found: list[torch.Tensor] = []

    def compare(
        layer: int, keys: torch.Tensor, values: torch.Tensor, fresh_keys: torch.Tensor, fresh_values: torch.Tensor
    ) -> None:
        if layer == layer_index:
            found.append((fresh_values.float() - values.float()).square().sum(dim=(0, 1, 3)))
            keys.copy_(fresh_keys)
            values.copy_(fresh_values)
            raise StopForward

    model.forward(token_ids, Rows.span(0, layout.num_tokens), buffer, logits=0, before_write=compare)
    return found[0].cpu()


PlaceAgain = Callable[[int, Sequence[Segment], torch.Tensor, torch.Tensor, torch.Tensor | None], bool]
"""Writes a layer's stored rows again, with residuals, and returns whether it could: :meth:`kvrag.blend.stitch.Stitcher.place_again`."""


@dataclass(frozen=True, slots=True)
class ResidualShift:
    """Shift a chunk's unrepaired rows by the mean change of its repaired ones, layer by layer, before attention.

    A stored chunk lacks what stands before it in this prompt, and much of that is common to its rows (the nearest published idea is
    AgentKVShift, arXiv 2607.21604). Keys are averaged position-free and rotated back to each row.

    Parameters
    ----------
    strength
        Factor in (0, 1].
    chunks
        Stale chunks with enough repaired rows, ``C`` of them.
    picked, at
        The repaired rows that count, of all chunks: as indices into the forward's rows and as positions, int64 ``(M,)``.
    average
        Float32 ``(C, M)``: takes the mean over each chunk's picked rows and :data:`SHIFT_PRIOR` that did not change.
    rotary
        Rotations of the prompt's positions.
    place_again, computed
        Writes the shifted rows from what is stored, with one rounding, but for the rows that this forward computes, bool ``(N,)``; where
        it can't, or is ``None``, the change is added to what stands in the buffer.
    """

    strength: float
    chunks: tuple[Segment, ...]
    picked: torch.Tensor
    at: torch.Tensor
    average: torch.Tensor
    rotary: Rotations
    place_again: PlaceAgain | None = None
    computed: torch.Tensor | None = None

    def __call__(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, fresh_keys: torch.Tensor, fresh_values: torch.Tensor
    ) -> None:
        """Shift the buffers in place; the fresh rows land afterwards, so repaired rows are not shifted."""
        if layer == 0:  # its keys and values depend on the token alone
            return
        table = self.rotary[layer]
        change = fresh_keys[0, :, self.picked].float() - keys[0, :, self.at].float()
        mean_keys = self.average @ table.unit_unrotate(change, self.at) * self.strength
        mean_values = self.average @ (fresh_values[0, :, self.picked].float() - values[0, :, self.at].float())
        mean_values *= self.strength
        residuals = table.without_magnitude(mean_keys), mean_values
        if self.place_again is not None and self.place_again(layer, self.chunks, *residuals, self.computed):
            return
        partners = table.partner(mean_keys)
        for index, chunk in enumerate(self.chunks):
            span, one = slice(chunk.start, chunk.stop), slice(index, index + 1)
            table.add_unit_rotated(keys[0, :, span], mean_keys[:, one], partners[:, one], span)
            values[0, :, span] += mean_values[:, one]


def may_shift(layout: Layout, selected: torch.Tensor | None, strength: float) -> bool:
    """Whether a repair of these rows (``None``: not known yet) may shift others, and so needs the stored values of all."""
    num_stale = num_rows_of(layout.stale)
    return strength > 0 and (num_stale > 0 if selected is None else 0 < len(selected) < num_stale)


def residual_shift(
    layout: Layout, rows: torch.Tensor, strength: float, rotary: Rotations, place_again: PlaceAgain | None = None
) -> ResidualShift | None:
    """Make the residual shift for a forward over ``rows``; ``None`` where no chunk has both repaired rows enough and others to shift."""
    chunks, picked = [], []
    for chunk in layout.stale if strength > 0 else ():
        inside = (rows >= chunk.start) & (rows < chunk.stop)
        counted = torch.nonzero(inside & (rows >= chunk.start + SHIFT_SKIP))[:, 0]
        if len(counted) >= SHIFT_MIN_ROWS and int(inside.sum()) < chunk.num_rows:
            chunks.append(chunk)
            picked.append(counted)
    if not chunks:
        return None
    every = torch.cat(picked)
    owner = torch.repeat_interleave(torch.tensor([len(p) for p in picked]))
    average = (owner == torch.arange(len(picked))[:, None]).float()
    average = (average / (average.sum(dim=1, keepdim=True) + SHIFT_PRIOR)).to(rows.device)
    computed = None if place_again is None else mask_of(rows, layout.num_tokens)
    return ResidualShift(strength, tuple(chunks), every, rows[every], average, rotary, place_again, computed)


def repair(
    model: CausalLM,
    buffer: KVBuffer,
    layout: Layout,
    token_ids: torch.Tensor,
    selected: torch.Tensor,
    *,
    shift: float,
    rotary: Rotations | None,
    place_again: PlaceAgain | None = None,
) -> torch.Tensor:
    """Recompute the selected rows of stale chunks (int64, ascending) and all live rows in one forward.

    ``shift`` is the strength of the residual shift, 0 is off; it needs the prompt's rotations, ``rotary``. ``place_again`` shifts rows
    where it can: see :class:`ResidualShift`.

    Returns
    -------
    torch.Tensor
        Logits ``(vocab,)`` of the prompt's last row, in the model's dtype.
    """
    rows = torch.sort(torch.cat([selected, rows_of(layout.live)])).values.to(model.device)
    if len(rows) == layout.num_tokens:
        return model.forward(token_ids, Rows.span(0, len(rows)), buffer)[0][0, -1]
    shifting = None if rotary is None else residual_shift(layout, rows, shift, rotary, place_again)
    return model.forward(token_ids[rows.cpu()], Rows.at(rows), buffer, before_write=shifting)[0][0, -1]
