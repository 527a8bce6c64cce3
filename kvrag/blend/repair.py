"""Repair: recompute chosen rows against the whole stitched prompt, and carry their change to the rows left alone.

All strategies share one forward (:meth:`kvrag.model.CausalLM.forward`) over the chosen rows, the glue and the suffix, each at its own
position, with an exact causal limit per row. Its last row's logits choose the first answer token: no other forward stands before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvrag.blend.layout import Layout, num_rows_of, rows_of
from kvrag.blend.likeness import Likeness
from kvrag.model import CausalLM, StopForward
from kvrag.model.rope import Rotations
from kvrag.model.rows import KVBuffer, Rows

CHECK_LAYER = 1  # where changes are measured, as in CacheBlend's code; layer 0 can't change
SHIFT_SKIP = 4  # head rows of a chunk, former sinks that change in their own way: neither learned from nor shifted
SHIFT_MAX_ROWS = 1024  # that are counted, evenly spread: more would cost memory
REREAD = 128  # last rows of the prompt that the probe reads a second time, at most; a buffer has so many rows behind its prompt


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

    The suffix stands twice in the probe: when its first words are read again, they have seen its last ones, and find more of what the
    answer needs. Live rows of the buffer, and up to :data:`REREAD` rows behind the prompt, are written on the way; the repair and the
    decoding write them again. ``token_ids`` are those of the whole prompt, int64 ``(N,)``; ``span`` names the layers that count, as
    fractions of all: :attr:`kvrag.RepairConfig.probe_span`.

    Returns
    -------
    torch.Tensor
        Float32 ``(N,)`` on the host: attention mass per row (:class:`~kvrag.model.attention.Mass`), summed over layers.
    """
    live, total, suffix = rows_of(layout.live), layout.num_tokens, layout.num_suffix
    num_again = max(0, min(suffix, REREAD, model.reuse_window - total))
    again = torch.arange(total, total + num_again)
    rows = torch.cat([live, again])
    ids = token_ids[torch.cat([live, again - num_again])]
    layers = probed_layers(span, model.num_layers)
    _, mass = model.forward(
        ids, Rows.at(rows), buffer, logits=0, mass_rows=suffix + num_again, mass_layers=layers
    )
    assert mass is not None
    return mass[:total].cpu()


def deviation(
    model: CausalLM, buffer: KVBuffer, layout: Layout, token_ids: torch.Tensor
) -> torch.Tensor:
    """Measure how far stored values are from fresh ones at the check layer (CacheBlend's HKVD signal).

    All rows pass the layers before the check layer; its fresh keys and values stay in the buffer for all rows, as in the authors' code.

    Returns
    -------
    torch.Tensor
        Float32 ``(N,)`` on the host: squared difference of V, summed over heads and head dim.
    """
    layer_index = min(CHECK_LAYER, model.num_layers - 1)
    found: list[torch.Tensor] = []

    def compare(
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        fresh_keys: torch.Tensor,
        fresh_values: torch.Tensor,
    ) -> None:
        if layer == layer_index:
            found.append((fresh_values.float() - values.float()).square().sum(dim=(0, 1, 3)))
            keys.copy_(fresh_keys)
            values.copy_(fresh_values)
            raise StopForward

    model.forward(
        token_ids, Rows.span(0, layout.num_tokens), buffer, logits=0, before_write=compare
    )
    return found[0].cpu()


@dataclass(frozen=True, slots=True)
class ResidualShift:
    """Shift unrepaired rows by what the change of the repaired ones says of theirs, layer by layer, before attention.

    The changes of rows that are left alone are predicted from those of the rows that are computed, by Gaussian process regression: see
    :class:`~kvrag.blend.likeness.Likeness`. (The nearest published idea, AgentKVShift, arXiv 2607.21604, takes a chunk's mean.) Changes
    of keys are position-free, and rotated back to each row.

    Parameters
    ----------
    span
        Rows from the first to the last of the stale chunks, ``S`` of them: the ones that may be shifted.
    picked, at
        The repaired rows that count: as indices into the forward's rows and as positions, int64 ``(M,)``.
    weights
        ``(S, M)``: from the changes of the picked rows to those of the span's. Zero for heads of chunks, and for rows that are not a
        stale chunk's. Float32; on a device the KV's dtype, in which products are many times quicker, summed in float32.
    rotary
        Rotations of the prompt's positions.
    """

    span: slice
    picked: torch.Tensor
    at: torch.Tensor
    weights: torch.Tensor
    rotary: Rotations

    def __call__(
        self,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        fresh_keys: torch.Tensor,
        fresh_values: torch.Tensor,
    ) -> None:
        """Shift the buffers in place; the fresh rows land afterwards, so repaired rows are not shifted."""
        if layer == 0:  # its keys and values depend on the token alone
            return
        table = self.rotary[layer]
        change = fresh_keys[0, :, self.picked].float() - keys[0, :, self.at].float()
        parts = [
            table.unit_unrotate(change, self.at),
            fresh_values[0, :, self.picked].float() - values[0, :, self.at].float(),
        ]
        if self.weights.dtype != torch.float32:
            # On a device passes over all rows cost more than a wider product.
            parts.append(table.partner(parts[0]))
        by_row = torch.cat(parts, dim=-1).transpose(0, 1)
        found = (
            (self.weights @ by_row.flatten(1).to(self.weights.dtype))
            .view(-1, *by_row.shape[1:])
            .transpose(0, 1)
        )
        predicted, of_values, *partner = torch.split(
            found, [part.shape[-1] for part in parts], dim=-1
        )
        table.add_unit_rotated(keys[0, :, self.span], predicted, *partner, rows=self.span)
        values[0, :, self.span] += of_values

    def for_tensor_cores(self, dtype: torch.dtype) -> ResidualShift:
        """Return the same shift with weights of this dtype, and a multiple of 8 picked rows: the last one again, with a weight of 0."""
        spare = -len(self.at) % 8
        weights = torch.nn.functional.pad(self.weights.to(dtype), (0, spare))
        picked, at = (torch.cat([x, x[-1:].expand(spare)]) for x in (self.picked, self.at))
        return replace(self, picked=picked, at=at, weights=weights)


def may_shift(layout: Layout, selected: torch.Tensor | None, strength: float) -> bool:
    """Whether a repair of these rows (``None``: not known yet) may shift others, and so needs the stored values of all."""
    num_stale = num_rows_of(layout.stale)
    return strength > 0 and (num_stale > 0 if selected is None else 0 < len(selected) < num_stale)


def residual_shift(
    likeness: Likeness, layout: Layout, rows: torch.Tensor, strength: float, rotary: Rotations
) -> ResidualShift | None:
    """Make the residual shift for a forward over ``rows``, on the host; ``None`` where no repaired row says anything of others."""
    counted = torch.zeros(layout.num_tokens, dtype=torch.bool)
    for chunk in layout.stale if strength > 0 else ():
        counted[chunk.start + SHIFT_SKIP : chunk.stop] = True
    picked = torch.nonzero(counted[rows])[:, 0]
    if not len(picked):
        return None
    picked = picked[:: -(-len(picked) // SHIFT_MAX_ROWS)]
    device, shifted = likeness.rows.device, strength * counted[likeness.span, None].float()
    picked, at, shifted = (x.to(device, non_blocking=True) for x in (picked, rows[picked], shifted))
    return ResidualShift(likeness.span, picked, at, likeness.weights(at).mul_(shifted), rotary)


def repair(
    model: CausalLM,
    buffer: KVBuffer,
    layout: Layout,
    token_ids: torch.Tensor,
    selected: torch.Tensor,
    *,
    shift: float,
    rotary: Rotations | None,
    likeness: Likeness | None = None,
) -> torch.Tensor:
    """Recompute the selected rows of stale chunks (int64, ascending) and all live rows in one forward.

    ``shift`` is the strength of the residual shift, 0 is off; it needs the prompt's rotations, ``rotary``. ``likeness`` is that of the
    stitched rows (``None``: found here, without the question's attention).

    Returns
    -------
    torch.Tensor
        Logits ``(vocab,)`` of the prompt's last row, in the model's dtype.
    """
    rows = torch.sort(torch.cat([selected, rows_of(layout.live)])).values
    if len(rows) == layout.num_tokens:
        return model.forward(token_ids, Rows.span(0, len(rows)), buffer)[0][0, -1]
    shifting = None
    if rotary is not None and may_shift(layout, selected, shift):
        shifting = residual_shift(
            likeness or Likeness.of(buffer, layout), layout, rows, shift, rotary
        )
        if shifting is not None and model.device.type == "cuda":
            shifting = shifting.for_tensor_cores(model.dtype)
    return model.forward(token_ids[rows], Rows.at(rows), buffer, before_write=shifting)[0][0, -1]
