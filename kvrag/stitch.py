"""Stitch: put stored KV at its final positions in one buffer. No model forward.

On a CUDA device :mod:`kvrag_kernels` does it for several layers and all segments in one launch; elsewhere torch, layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvrag.cache import KVBuffer
from kvrag.layout import Layout
from kvrag.quantise import read
from kvrag.rope import Rotations
from kvrag.types import ChunkKV

LAYERS_PER_LAUNCH = 8
"""Layers whose stored KV is on the device at one time, beside the buffer: few launches, and little memory."""


@torch.inference_mode()
def stitch(buffer: KVBuffer, layout: Layout, kvs: Sequence[ChunkKV], rotary: Rotations) -> None:
    """Copy the KV of every reused segment into the buffer; codes are read, and keys turned from position-free to their rows.

    Parameters
    ----------
    buffer
        At least ``layout.num_tokens`` rows. Rows of live segments are left as they are.
    layout
        The prompt's segments; ``segment.source`` indexes ``kvs``.
    kvs
        Loaded chunks. A segment shorter than its chunk takes the chunk's first rows (causal: they don't depend on the rest).
    rotary
        Rotations for at least ``layout.num_tokens`` positions.
    """
    device = buffer.keys(0).device
    if device.type != "cuda" or not stitch_in_launches(buffer, layout, kvs, rotary):
        _stitch_by_torch(buffer, layout, kvs, rotary)
    if device.type == "cuda":  # what is read next may take the pinned memory that these copies are from
        torch.cuda.current_stream(device).synchronize()
    buffer.length = layout.num_tokens


def _stitch_by_torch(buffer: KVBuffer, layout: Layout, kvs: Sequence[ChunkKV], rotary: Rotations) -> None:
    for segment in layout.reused:
        rows = slice(segment.start, segment.stop)
        for index, layer in enumerate(kvs[segment.source].layers):
            all_keys, all_values = buffer.keys(index), buffer.values(index)
            keys, values = read(layer, segment.num_rows, device=all_keys.device, dtype=all_keys.dtype)
            all_keys[0, :, rows] = rotary[index].rotate(keys, rows)
            all_values[0, :, rows] = values


def stitch_in_launches(buffer: KVBuffer, layout: Layout, kvs: Sequence[ChunkKV], rotary: Rotations) -> bool:
    """Stitch with :func:`kvrag_kernels.stitch`; returns whether it can: not where KV is rounded, or the rotation can't be said in pairs."""
    import kvrag_kernels

    angles = _angles(rotary)
    is_rounded = any(kvs[segment.source].kv_dtype != "auto" for segment in layout.reused)
    if angles is None or not layout.reused or is_rounded:
        return False
    cos, sin, tables, is_neighbours = angles
    starts = [segment.start for segment in layout.reused]
    layers = range(len(rotary.kinds))
    for group in (layers[i : i + LAYERS_PER_LAUNCH] for i in layers[::LAYERS_PER_LAUNCH]):
        out_keys, out_values = [buffer.keys(i)[0] for i in group], [buffer.values(i)[0] for i in group]
        parts = [(i, s, kvs[s.source].layers[i]) for i in group for s in layout.reused]
        kvrag_kernels.stitch(
            [_moved(kv.keys[:, : s.num_rows], buffer.keys(i)) for i, s, kv in parts],
            [_moved(kv.values[:, : s.num_rows], buffer.values(i)) for i, s, kv in parts],
            out_keys,
            out_values,
            starts,
            cos,
            sin,
            [tables[i] for i in group],
            interleaved=is_neighbours,
        )
    return True


def _moved(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return x.to(like.device, like.dtype, non_blocking=True)


def _angles(rotary: Rotations) -> tuple[torch.Tensor, torch.Tensor, list[int], bool] | None:
    """Return the angles of all kinds of layers as one tensor ``(kinds, N, R / 2)``, and each layer's index (-1: it does not turn)."""
    turning = [table for table in rotary.tables if table.width]
    pairs = [table.pairs() for table in turning]
    found = [pair for pair in pairs if pair is not None]
    if not found or len(found) < len(pairs) or len({(cos.shape, kind) for cos, _, kind in found}) > 1:
        return None
    index = {id(table): i for i, table in enumerate(turning)}
    tables = [index.get(id(rotary.tables[kind]), -1) for kind in rotary.kinds]
    return torch.stack([cos for cos, _, _ in found]), torch.stack([sin for _, sin, _ in found]), tables, found[0][2]
