"""Repair: recompute selected rows against the stitched prompt, and shift the rows left unrepaired.

All strategies share a single forward (:meth:`kvrag.model.CausalLM.forward`) over the selected rows,
the glue and the suffix, at their own positions and with an exact causal mask per row. The logits of
its last row choose the first answer token, so no other forward is needed before decoding. Many
rows without stored KV are computed earlier, by :func:`fill`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvrag.blend.covariance import RowCovariance
from kvrag.blend.layout import Layout, rows_of, uploaded
from kvrag.model import CausalLM, StopForward
from kvrag.model.linear import linear
from kvrag.model.rope import Rotations
from kvrag.model.rows import KVBuffer, Rows

CHECK_LAYER = 1  # where the deviation is measured, as in CacheBlend's code; layer 0 can't change
# First rows of a chunk that the shift neither observes nor changes: they were attention sinks when
# the chunk was encoded, and change in their own way.
SHIFT_SKIP = 4
SHIFT_MAX_ROWS = 1024  # most observed rows, evenly spread: more would cost memory
# Most rows at the end of the prompt that the probe reads twice. Buffers have room for them behind
# the prompt.
REREAD = 128


def fill(model: CausalLM, buffer: KVBuffer, layout: Layout, token_ids: Tensor) -> None:
    """Compute the rows to fill of a layout, which see the stitched rows unrepaired."""
    rows = rows_of(layout.ahead)
    model.forward(token_ids[rows], Rows.at(rows), buffer, logits=0)


def probed_layers(span: tuple[float, float], num_layers: int) -> range:
    """Return the layers in a span of fractions of all layers; at least a single layer."""
    first = min(round(span[0] * num_layers), num_layers - 1)
    return range(first, max(first + 1, round(span[1] * num_layers)))


def probe(
    model: CausalLM,
    buffer: KVBuffer,
    layout: Layout,
    token_ids: Tensor,
    *,
    span: tuple[float, float] = (0.0, 1.0),
) -> Tensor:
    """Measure the attention of the suffix to every row of the stitched, unrepaired prompt.

    The probe's forward computes the live rows, then the last rows of the suffix a second time
    behind the prompt. In the second reading, the suffix's first words can attend to its last words,
    so they find more of the text that the answer needs. The probe writes the live rows of the
    buffer and up to :data:`REREAD` rows behind the prompt; repair and decoding overwrite them.

    Parameters
    ----------
    token_ids
        Ids of the whole prompt, int64 ``(N,)``.
    span
        Layers whose attention counts, as fractions of all layers:
        :attr:`kvrag.RepairConfig.probe_span`.

    Returns
    -------
    torch.Tensor
        Float32 ``(N,)`` on the host: attention mass per row (see
        :class:`~kvrag.model.attention.Mass`), summed over layers.
    """
    live = layout.live_rows
    total = layout.num_tokens
    suffix = layout.num_suffix
    num_again = max(0, min(suffix, REREAD, model.reuse_window - total))
    again = torch.arange(total, total + num_again)
    _, mass = model.forward(
        # The last tokens of the prompt come again, at positions behind it.
        token_ids[torch.cat([live, again - num_again])],
        Rows.at(torch.cat([live, again])),
        buffer,
        logits=0,
        mass_rows=suffix + num_again,
        mass_layers=probed_layers(span, model.depth),
    )
    assert mass is not None
    return mass[:total].cpu()


def deviation(model: CausalLM, buffer: KVBuffer, layout: Layout, token_ids: Tensor) -> Tensor:
    """Measure the deviation of stored values from fresh values at the check layer.

    This is the HKVD signal of CacheBlend. The forward computes all rows up to the check layer. As
    in the authors' code, that layer's fresh keys and values stay in the buffer for all rows.

    Returns
    -------
    torch.Tensor
        Float32 ``(N,)`` on the host: squared difference of V, summed over heads and head dim.
    """
    layer_index = min(CHECK_LAYER, model.num_layers - 1)
    found: list[Tensor] = []

    def compare(
        layer: int,
        keys: Tensor,
        values: Tensor,
        fresh_keys: Tensor,
        fresh_values: Tensor,
    ) -> None:
        if layer == layer_index:
            found.append((fresh_values.float() - values.float()).square().sum(dim=(0, 1, 3)))
            keys.copy_(fresh_keys)
            values.copy_(fresh_values)
            # Later layers would only cost time.
            raise StopForward

    model.forward(
        token_ids, Rows.span(0, layout.num_tokens), buffer, logits=0, before_write=compare
    )
    return found[0].cpu()


@dataclass(frozen=True, slots=True)
class ResidualShift:
    """Shift unrepaired rows by their predicted change, layer by layer, before attention.

    Gaussian process regression predicts the changes of unrepaired rows as the posterior mean given
    the changes (fresh - stored) of repaired rows: see
    :class:`~kvrag.blend.covariance.RowCovariance`. (The nearest published idea, AgentKVShift,
    arXiv 2607.21604, takes a chunk's mean.) Changes of keys are compared position-free: rotated
    back from the observed rows, and forward to the shifted rows.

    Parameters
    ----------
    span
        The ``S`` rows from the first to the last stale chunk, which may be shifted.
    picked, at
        The observed rows: as indices into the forward's rows, and as positions, int64 ``(M,)``.
    weights
        Regression weights ``(S, M)`` times the strength of the shift. Zero for heads of chunks and
        for rows outside stale chunks. Float32; on a CUDA device the KV's dtype, because such matrix
        products are many times faster (they accumulate in float32).
    rotary
        Rotations of the prompt's positions.
    slots, at_slots
        Slots of the rows of ``span`` and ``at``, if they are not their positions.
    """

    span: slice | Tensor
    picked: Tensor
    at: Tensor
    weights: Tensor
    rotary: Rotations
    slots: Tensor | None = None
    at_slots: Tensor | None = None

    def __call__(
        self,
        layer: int,
        keys: Tensor,
        values: Tensor,
        fresh_keys: Tensor,
        fresh_values: Tensor,
    ) -> None:
        """Shift keys and values in place.

        The forward writes its fresh rows afterwards, so repaired rows are not shifted.
        """
        if layer == 0:  # its keys and values depend on the token alone
            return
        table = self.rotary[layer]
        stored = self.at if self.at_slots is None else self.at_slots
        change = fresh_keys[0, :, self.picked].float() - keys[0, :, stored].float()
        parts = [
            table.unit_unrotate(change, self.at),
            fresh_values[0, :, self.picked].float() - values[0, :, stored].float(),
        ]
        if self.weights.dtype != torch.float32:
            # On a CUDA device, a wider product is cheaper than passes over all rows.
            parts.append(table.partner(parts[0]))
        by_row = torch.cat(parts, dim=-1).transpose(0, 1)
        found = (
            linear(self.weights, by_row.flatten(1).to(self.weights.dtype).T)
            .view(-1, *by_row.shape[1:])
            .transpose(0, 1)
        )
        widths = [change.shape[-1], fresh_values.shape[-1], parts[-1].shape[-1]]
        predicted, of_values, *partner = torch.split(found, widths[: len(parts)], dim=-1)
        slots = self.span if self.slots is None else self.slots
        shifted = keys[0, :, slots]
        table.add_unit_rotated(shifted, predicted, *partner, rows=self.span)
        if self.slots is not None:  # a copy
            keys[0, :, slots] = shifted
        values[0, :, slots] += of_values

    @property
    def num_shifted(self) -> int:
        """Number of rows from the first to the last stale chunk."""
        return len(self.weights)

    def fixed(
        self, start: int, places: Tensor, observed: int, shifted: int, spare: int
    ) -> ResidualShift:
        """Return the same shift over a pool of slots, with tensors of fixed shapes.

        Parameters
        ----------
        start, spare
            First slot of the request, and the slot that takes the shift of spare rows.
        places
            Places of the rows in the recorded forward, int64 ``(R,)`` on the host.
        observed, shifted
            Numbers of observed and of shifted rows: the last observed row is repeated with a weight
            of 0.
        """
        assert isinstance(self.span, slice)
        device = self.at.device
        padded = self.padded(observed - len(self.at), self.weights.dtype)
        picked = uploaded(places, device)[padded.picked]
        span = torch.zeros(shifted, dtype=torch.int64)
        span[: self.num_shifted] = torch.arange(self.span.start, self.span.stop)
        slots = span + start
        slots[self.num_shifted :] = spare
        span, slots = uploaded(torch.stack([span, slots]), device)
        weights = torch.nn.functional.pad(padded.weights, (0, 0, 0, shifted - self.num_shifted))
        at = padded.at
        return ResidualShift(span, picked, at, weights, self.rotary, slots, at + start)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that differ from request to request."""
        return [
            x
            for x in (self.span, self.picked, self.at, self.weights, self.slots, self.at_slots)
            if isinstance(x, Tensor)
        ]

    def clear(self) -> None:
        """Set the weights to zero, so that nothing is shifted."""
        self.weights.zero_()

    def padded(self, spare: int, dtype: torch.dtype) -> ResidualShift:
        """Return the same shift with weights of a dtype, and ``spare`` more observed rows.

        These repeat the last row with a weight of 0.
        """
        picked, at = (torch.cat([x, x[-1:].expand(spare)]) for x in (self.picked, self.at))
        return replace(
            self,
            picked=picked,
            at=at,
            weights=torch.nn.functional.pad(self.weights.to(dtype), (0, spare)),
        )


def may_shift(layout: Layout, selected: Tensor | None, strength: float) -> bool:
    """Whether repairing these rows may shift other rows, so that all rows must be stitched.

    ``selected`` is ``None`` if the rows are not known yet.
    """
    num_stale = layout.num_stale
    return strength > 0 and (num_stale > 0 if selected is None else 0 < len(selected) < num_stale)


def residual_shift(
    covariance: RowCovariance,
    layout: Layout,
    rows: Tensor,
    strength: float,
    rotary: Rotations,
) -> ResidualShift | None:
    """Return the residual shift for a forward over ``rows``, int64 on the host.

    ``None`` if no observed row is left: no selected row is outside the first :data:`SHIFT_SKIP`
    rows of a chunk.
    """
    counted = torch.zeros(layout.num_tokens, dtype=torch.bool)
    for chunk in layout.stale if strength > 0 else ():
        counted[chunk.start + SHIFT_SKIP : chunk.stop] = True
    picked = torch.nonzero(counted[rows])[:, 0]
    if not len(picked):
        return None
    picked = picked[:: -(-len(picked) // SHIFT_MAX_ROWS)]
    device = covariance.rows.device
    shifted = strength * counted[covariance.span, None].float()
    picked, at = uploaded(torch.stack([picked, rows[picked]]), device)
    shifted = uploaded(shifted, device)
    return ResidualShift(covariance.span, picked, at, covariance.weights(at).mul_(shifted), rotary)


def repair(
    model: CausalLM,
    buffer: KVBuffer,
    layout: Layout,
    token_ids: Tensor,
    selected: Tensor,
    *,
    shift: float,
    rotary: Rotations | None,
    covariance: RowCovariance | None = None,
    logits: int = 1,
) -> Tensor:
    """Recompute the selected rows of stale chunks and all live rows in a single forward.

    Parameters
    ----------
    selected
        Rows of stale chunks, int64, ascending.
    shift
        Strength of the residual shift; 0 is off.
    rotary
        Rotations of the prompt's positions, which the shift needs.
    covariance
        Covariance of the stitched rows. By default it is computed here, without the question's
        attention.
    logits
        1, or 0 if the prompt's KV alone is wanted: its last layer is then not computed to the end.

    Returns
    -------
    torch.Tensor
        Logits ``(vocab,)`` of the prompt's last row, in the model's dtype; empty if not wanted.
    """
    rows = torch.sort(torch.cat([selected, layout.live_rows])).values
    shifting = None
    if rotary is not None and may_shift(layout, selected, shift):
        shifting = residual_shift(
            covariance or RowCovariance.of(buffer, layout), layout, rows, shift, rotary
        )
        if shifting is not None and model.device.type == "cuda":
            # Tensor cores take rows by eight.
            shifting = shifting.padded(-len(shifting.at) % 8, model.dtype)
    at = Rows.span(0, len(rows)) if len(rows) == layout.num_tokens else Rows.at(rows)
    found, _ = model.forward(token_ids[rows], at, buffer, logits=logits, before_write=shifting)
    return found.flatten()
