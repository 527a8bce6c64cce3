"""Stitch: put stored KV at its final positions in one buffer. No model forward.

On a CUDA device :mod:`kvrag_kernels` does it for several layers and all segments in one launch, codes and all; elsewhere torch, layer by
layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvrag.blend.layout import Layout, Segment, mask_of
from kvrag.blend.quantise import unpack
from kvrag.layers import GROUP
from kvrag.model.rope import Rotations
from kvrag.model.rows import KVBuffer
from kvrag.types import ChunkKV, LayerKV, Scales

LAYERS_PER_LAUNCH = 8  # whose stored KV is on the device at once, beside the buffer: few launches, and little memory


@torch.inference_mode()
def stitch(
    buffer: KVBuffer, layout: Layout, kvs: Sequence[ChunkKV], rotary: Rotations, *, skip: torch.Tensor | None = None
) -> None:
    """Copy the KV of every reused segment into the buffer; codes are unpacked, and position-free keys rotated to their rows.

    Parameters
    ----------
    buffer, rotary
        At least ``layout.num_tokens`` rows. Rows of live segments hold nothing of use afterwards.
    kvs
        Loaded chunks, by ``segment.source``. A segment shorter than its chunk takes the chunk's first rows (causal: they stand alone).
    skip
        Rows that the next forward computes, int64: they may be left unwritten.
    """
    segments, (keys, values) = layout.reused, buffer.layers[0]
    has_kernel = bool(segments) and _has_kernel(keys, values, rotary) and _is_uniform(buffer, segments, kvs)
    angles = _angles(rotary) if has_kernel else None
    if angles is None:
        _stitch_by_torch(buffer, segments, kvs, rotary)
    else:
        computed = None if skip is None or not len(skip) else mask_of(skip.to(keys.device), layout.num_tokens)
        layers = range(len(buffer.layers))
        for group in (layers[i : i + LAYERS_PER_LAUNCH] for i in layers[::LAYERS_PER_LAUNCH]):
            _launch(buffer, group, segments, kvs, angles, computed)
    if keys.is_cuda:  # the next read may reuse the pinned memory that these copies are from
        torch.cuda.current_stream(keys.device).synchronize()


def _stitch_by_torch(buffer: KVBuffer, segments: Sequence[Segment], kvs: Sequence[ChunkKV], rotary: Rotations) -> None:
    """Copy what is stored, then rotate all keys of a layer at once; live rows between the segments are written later."""
    parts = [(kvs[s.source].layers, slice(s.start, s.stop), s.stop - s.start) for s in segments]
    for index, (table, (keys, values)) in enumerate(zip(rotary, buffer.layers, strict=True)):
        for layers, rows, count in parts:
            stored = layers[index].keys, layers[index].values
            if layers[index].scales is not None:
                stored = unpack(layers[index], count, device=keys.device, dtype=keys.dtype)
            keys[0, :, rows], values[0, :, rows] = stored[0][:, :count], stored[1][:, :count]
        if table.width and parts:
            span = slice(segments[0].start, segments[-1].stop)
            keys[0, :, span] = table.rotate(keys[0, :, span], span)


class Angles(NamedTuple):
    """Cosines and sines ``(kinds, N, R / 2)`` of all kinds of layers; each layer's kind, or -1 where it doesn't rotate; which are pairs."""

    cos: torch.Tensor
    sin: torch.Tensor
    kinds: list[int]
    is_neighbours: bool


def _launch(
    buffer: KVBuffer,
    layers: Sequence[int],
    segments: Sequence[Segment],
    kvs: Sequence[ChunkKV],
    angles: Angles,
    skip: torch.Tensor | None,
) -> None:
    """Place every segment in some layers with one call of :func:`kvrag_kernels.stitch`."""
    import kvrag_kernels

    found = [_moved(kvs[s.source].layers[i], s.num_rows, buffer.keys(i)) for i in layers for s in segments]
    scales = [part.scales for part in found if part.scales is not None]
    kvrag_kernels.stitch(
        [part.keys for part in found],
        [part.values for part in found],
        [buffer.keys(i)[0] for i in layers],
        [buffer.values(i)[0] for i in layers],
        [segment.start for segment in segments],
        angles.cos,
        angles.sin,
        [angles.kinds[i] for i in layers],
        interleaved=angles.is_neighbours,
        key_scales=[s.keys for s in scales] or None,
        value_scales=[s.values for s in scales] or None,
        key_zeros=[s.zeros for s in scales] or None,
        skip=skip,
    )


def _moved(kv: LayerKV, num_rows: int, like: torch.Tensor) -> LayerKV:
    """Return a part's first rows on the buffer's device: codes as they are, all else in the buffer's dtype."""
    if num_rows < kv.keys.shape[1]:  # rarely; views of hundreds of parts take longer than planning their launch
        kv = _first_rows(kv, num_rows)
    dtype = like.dtype if kv.scales is None else None
    return kv.map(lambda x: x.to(like.device, dtype or x.dtype, non_blocking=True))


def _first_rows(kv: LayerKV, num_rows: int) -> LayerKV:
    s, rows = kv.scales, slice(0, num_rows)
    if s is not None:
        groups = slice(0, -(-num_rows // GROUP) if s.keys.shape[1] > 1 else 1)
        values = s.values[:, rows] if s.values.shape[1] > 1 else s.values
        s = Scales(s.dtype, s.keys[:, groups], s.zeros[:, groups], values)
    return LayerKV(kv.keys[:, rows], kv.values[:, rows], s)


def _has_kernel(keys: torch.Tensor, values: torch.Tensor, rotary: Rotations) -> bool:
    """Whether the op's kernel has a form for the buffer. Where torch would compute in its place, it does so better from here."""
    if not keys.is_cuda:
        return False
    import kvrag_kernels

    width = max(table.width for table in rotary)
    return keys.shape == values.shape and kvrag_kernels.has_stitch(keys.shape[-1], width, keys.dtype, keys.device)


def _is_uniform(buffer: KVBuffer, segments: Sequence[Segment], kvs: Sequence[ChunkKV]) -> bool:
    """Whether one call of the op can say how all this KV is kept: of one kind, and scales for equal groups of channels."""
    layers = [(index, layer) for s in segments for index, layer in enumerate(kvs[s.source].layers)]
    odd = [i for i, x in layers if x.scales is not None and buffer.values(i).shape[-1] % x.scales.values.shape[2]]
    return not odd and len({None if x.scales is None else x.keys.dtype for _, x in layers}) == 1


def _angles(rotary: Rotations) -> Angles | None:
    """Return the angles of a prompt's positions, or ``None`` where no layer rotates, or one rotates otherwise than in pairs."""
    tables = {id(table): table for table in rotary if table.width}
    pairs = [table.pairs() for table in tables.values()]
    found = [pair for pair in pairs if pair is not None]
    if not found or len(found) < len(pairs) or len({(cos.shape, kind) for cos, _, kind in found}) > 1:
        return None
    kinds = [list(tables).index(id(table)) if table.width else -1 for table in rotary]
    return Angles(torch.stack([c for c, _, _ in found]), torch.stack([s for _, s, _ in found]), kinds, found[0][2])
