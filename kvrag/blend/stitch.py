"""Stitch: place stored KV at its final positions in a buffer, without a model forward.

On a CUDA device, :mod:`kvrag_kernels` dequantises, rotates and places the KV of several layers and
all segments in a single launch. Elsewhere, torch does so layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from kvrag.blend.layout import Layout, Segment, mask_of
from kvrag.kv.buffers import copy_stream, held, let_go
from kvrag.kv.layers import CODES, GROUP, runs_alike, together
from kvrag.kv.quantise import unpack
from kvrag.kv.snapshot import Layers, Snapshot
from kvrag.model.rope import Rotations
from kvrag.model.rows import KVBuffer
from kvrag.types import ChunkKV, LayerKV, Scales

# Few launches, yet little memory: the stored KV of a launch is on the device beside the buffer.
LAYERS_PER_LAUNCH = 8


@dataclass(frozen=True, slots=True)
class HistoryMatch:
    """Rows of earlier requests that are a prefix of the prompt.

    The first ``num_exact`` of ``num_rows`` equal a full prefill's. For a model that keeps a state,
    ``snapshot`` is the state behind them, and ``num_common`` tokens are a prefix of the prompt.
    """

    parts: tuple[tuple[Layers, int], ...]
    num_exact: int
    num_rows: int
    snapshot: Snapshot | None = None
    num_common: int = 0

    def rows(self) -> Layers:
        """Return a copy of the rows."""
        own = cast(
            Layers,
            [
                tuple(
                    side.new_empty(*side.shape[:2], self.num_rows, side.shape[3]) for side in pair
                )
                for pair in self.parts[0][0]
            ],
        )
        self.fill(own, self.num_rows)
        return own

    def fill(self, layers: Layers, num_rows: int) -> None:
        """Copy the first ``num_rows`` rows into the buffer of a request."""
        at = 0
        for part, count in self.parts:
            count = min(count, num_rows - at)
            for own, kept in zip(layers, part, strict=True):
                for side, rows in zip(own, kept, strict=True):
                    side[:, :, at : at + count] = rows[:, :, :count]
            at += count


@torch.inference_mode()
def stitch(
    buffer: KVBuffer,
    layout: Layout,
    kvs: Sequence[ChunkKV],
    rotary: Rotations,
    *,
    skip: Tensor | None = None,
) -> None:
    """Copy the KV of every reused segment into the buffer: dequantise, and rotate the keys.

    On a CUDA device, this is asynchronous; with the kernel, later layers are copied and placed
    while earlier layers compute. ``buffer.arrivals`` then holds the events to wait for, and what
    the copies read is held until they are done (:func:`~kvrag.kv.buffers.held`). Raises
    ``RuntimeError`` or ``MemoryError`` if memory is short; use :func:`filling` around it.

    Parameters
    ----------
    buffer, rotary
        At least ``layout.num_tokens`` rows. Afterwards, rows of live segments are undefined.
    kvs
        Loaded chunks, indexed by ``segment.source``. A segment takes the chunk's rows from its
        offset on; they don't depend on later rows (attention is causal).
    skip
        Rows that the next forward computes, int64. They may stay unwritten.
    """
    segments, keys = list(_cut_at_groups(layout.reused, kvs)), buffer.layers[0][0]
    angles: Sequence[Angles | None] = ()
    if segments and _has_kernel(buffer, rotary) and _is_uniform(buffer, segments, kvs):
        runs = ranges(buffer)
        angles = _angles(rotary, runs, layout.num_tokens)
    if not angles:
        runs, angles = [range(len(buffer.layers))], [None]
    computed = None
    # Only the kernel skips rows; torch copies whole segments.
    if angles[0] and skip is not None and len(skip):
        computed = mask_of(skip.to(keys.device, non_blocking=True), layout.num_tokens)
    stream = copy_stream(keys.device) if keys.is_cuda else None
    if stream is not None:
        # Work that is queued may still use the memory of the buffer.
        stream.wait_stream(torch.cuda.current_stream(keys.device))
    arrivals = list[torch.cuda.Event]()
    with nullcontext() if stream is None else held((*kvs, angles, computed), stream):
        for layers, turning in zip(runs, angles, strict=True):
            if turning is None:
                _stitch_by_torch(buffer, segments, kvs, rotary)
            else:
                moved = move(layers, segments, kvs, keys.device)
                place(buffer, layers, segments, moved, turning, computed)
            if stream is not None:
                # Without events to record again, a new one stands for all of these layers.
                arrivals += [
                    *map(stream.record_event, buffer.events[layers.start : layers.stop])
                ] or len(layers) * [stream.record_event()]
    buffer.arrivals = arrivals


@contextmanager
def filling(buffer: KVBuffer) -> Iterator[None]:
    """Release the buffer's events at exit.

    On an exception, wait for the device first: the copy stream may still write to the buffer, which
    is freed then, and a replay may wait for its events.
    """
    try:
        yield
    # Ctrl-C, too: whoever leaves this block frees the buffer.
    except BaseException:
        device = buffer.layers[0][0].device
        copies = copy_stream(device)
        if copies is not None:
            copies.synchronize()
            torch.cuda.current_stream(device).synchronize()
        raise
    finally:
        if buffer.arrivals:
            let_go()
        buffer.arrivals = buffer.events = ()


def ranges(buffer: KVBuffer) -> list[range]:
    """Split the layers into runs of equal shape that are moved and placed together."""
    return runs_alike(
        [(keys.shape, values.shape) for keys, values in buffer.layers], LAYERS_PER_LAUNCH
    )


def move(
    layers: range, segments: Sequence[Segment], kvs: Sequence[ChunkKV], device: torch.device
) -> list[LayerKV]:
    """Copy the KV of some layers to the device, on the current stream, without conversion.

    Every contiguous piece of a chunk is a single copy. Copies from pinned memory are asynchronous,
    so ``kvs`` must live until they are done (:func:`~kvrag.kv.buffers.held`).

    Returns
    -------
    list[LayerKV]
        Per segment, ``(L, H_kv, T, D)`` and scales with the same first dimension.
    """
    # Segments of the same chunk share its rows: it is moved once, up to the last row of any.
    longest: dict[int, int] = {}
    for s in segments:
        longest[s.source] = max(longest.get(s.source, 0), s.offset + s.num_rows)
    moved = {}
    for source, num_rows in longest.items():
        kv = kvs[source]
        stored = kv.layers[layers.start : layers.stop]
        if 2 * num_rows < kv.num_tokens:  # else the unused rows are copied too
            stored = tuple(_rows(layer, 0, num_rows) for layer in stored)
        moved[source] = together(stored, device)
    return [_rows(moved[s.source], s.offset, s.num_rows) for s in segments]


def place(
    buffer: KVBuffer,
    layers: range,
    segments: Sequence[Segment],
    moved: Sequence[LayerKV],
    angles: Angles,
    skip: Tensor | None,
) -> None:
    """Write the result of :func:`move` to its rows, by :func:`kvrag_kernels.stitch`.

    A single call, on the current stream. ``skip``, bool ``(N,)``, marks rows to leave unchanged.
    """
    import kvrag_kernels

    scales = [part.scales for part in moved if part.scales is not None]
    kvrag_kernels.stitch(
        [part.keys for part in moved],
        [part.values for part in moved],
        [buffer.keys(i)[0] for i in layers],
        [buffer.values(i)[0] for i in layers],
        [segment.start for segment in segments],
        angles.cos,
        angles.sin,
        angles.kinds,
        interleaved=angles.is_neighbours,
        key_scales=[s.keys for s in scales] or None,
        value_scales=[s.values for s in scales] or None,
        key_zeros=[s.zeros for s in scales] or None,
        skip=skip,
    )


def _cut_at_groups(segments: Iterable[Segment], kvs: Sequence[ChunkKV]) -> Iterator[Segment]:
    """Cut segments that begin inside a group of rows at the group's end.

    4-bit keys have a scale per group, and the op takes whole groups, or a single scale.
    """
    for segment in segments:
        left = -segment.offset % GROUP
        is_packed = kvs[segment.source].layers[0].keys.dtype == CODES["int4"]
        if is_packed and 0 < left < segment.num_rows:
            yield segment.head(left)
            segment = replace(segment, start=segment.start + left, offset=segment.offset + left)
        yield segment


def _rows(kv: LayerKV, offset: int, num_rows: int) -> LayerKV:
    """Return rows of a layer, or of several stacked layers, from a row on."""
    if num_rows == kv.keys.shape[-2]:
        return kv
    rows = slice(offset, offset + num_rows)
    s = kv.scales
    if s is not None:
        has_groups = s.keys.shape[-2] > 1
        groups = slice(offset // GROUP, -(-rows.stop // GROUP)) if has_groups else slice(0, 1)
        values = s.values[..., rows, :] if s.values.shape[-2] > 1 else s.values
        s = Scales(s.dtype, s.keys[..., groups, :], s.zeros[..., groups, :], values)
    return LayerKV(kv.keys[..., rows, :], kv.values[..., rows, :], s)


def _stitch_by_torch(
    buffer: KVBuffer, segments: Sequence[Segment], kvs: Sequence[ChunkKV], rotary: Rotations
) -> None:
    """Copy the stored KV layer by layer, and rotate all keys of a layer at once.

    Live rows between the segments are rotated too; a later forward overwrites them.
    """
    parts = [
        (kvs[s.source].layers, slice(s.start, s.stop), slice(s.offset, s.offset + s.stop - s.start))
        for s in segments
    ]
    for index, (table, (keys, values)) in enumerate(zip(rotary, buffer.layers, strict=True)):
        for layers, rows, own in parts:
            stored = layers[index].keys, layers[index].values
            if layers[index].scales is not None:
                # From the chunk's first row on: groups of 4-bit rows are counted from there.
                stored = unpack(layers[index], own.stop, device=keys.device, dtype=keys.dtype)
            keys[0, :, rows] = stored[0][:, own]
            values[0, :, rows] = stored[1][:, own]
        if table.width and parts:
            span = slice(segments[0].start, segments[-1].stop)
            keys[0, :, span] = table.rotate(keys[0, :, span], span)


class Angles(NamedTuple):
    """Rotation angles of a run of layers, as the kernel takes them.

    Attributes
    ----------
    cos, sin
        Tables of all kinds of layers in the run, ``(kinds, N, R / 2)``.
    kinds
        Kind of every layer; -1 if it does not rotate.
    is_neighbours
        Whether the rotated pairs are neighbouring dimensions, rather than halves.
    """

    cos: Tensor
    sin: Tensor
    kinds: list[int]
    is_neighbours: bool


def _has_kernel(buffer: KVBuffer, rotary: Rotations) -> bool:
    """Whether the kernel supports this buffer.

    If not, the op would fall back to torch, and :func:`_stitch_by_torch` is better at that.
    """
    keys = buffer.layers[0][0]
    if not keys.is_cuda:
        return False
    import kvrag_kernels

    kinds = {
        (k.shape == v.shape, k.shape[-1], table.width)
        for (k, v), table in zip(buffer.layers, rotary, strict=True)
    }
    return all(
        is_alike and kvrag_kernels.has_stitch(dim, width, keys.dtype, keys.device)
        for is_alike, dim, width in kinds
    )


def _is_uniform(buffer: KVBuffer, segments: Sequence[Segment], kvs: Sequence[ChunkKV]) -> bool:
    """Whether a single call of the op can describe all this KV.

    That needs one supported dtype throughout, and scales for groups of channels of equal size.
    """
    dtype = buffer.keys(0).dtype
    kinds = {(x.keys.dtype, x.values.dtype) for s in segments for x in kvs[s.source].layers}
    known = {*CODES.values(), torch.bfloat16, torch.float16, dtype}
    firsts = [run.start for run in ranges(buffer)]  # a run's layers have equal shapes
    odd = [
        i
        for s in segments
        for i in firsts
        if (scales := kvs[s.source].layers[i].scales)
        and buffer.values(i).shape[-1] % scales.values.shape[2]
    ]
    return not odd and len(kinds) == 1 and kinds <= {(each, each) for each in known}


def _angles(rotary: Rotations, runs: Sequence[range], count: int) -> list[Angles]:
    """Return the angles of a prompt's positions for each run of layers.

    Empty if no layer rotates, or if a rotation is not of pairs, or if the tables of a run differ
    in shape or pairing.
    """
    tables = {id(table): table for table in rotary if table.width}
    pairs = {
        name: pair for name, table in tables.items() if (pair := table.pairs(count)) is not None
    }
    if not pairs or len(pairs) < len(tables):
        return []
    stacked: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
    made = []
    for layers in runs:
        # The op takes a table even for a run in which no layer rotates.
        own = {id(rotary[i]) for i in layers} & pairs.keys() or {next(iter(pairs))}
        names = tuple(name for name in pairs if name in own)
        found = [pairs[name] for name in names]
        if len({(cos.shape, kind) for cos, _, kind in found}) > 1:
            return []
        if names not in stacked:
            stacked[names] = (
                torch.stack([cos for cos, _, _ in found]),
                torch.stack([sin for _, sin, _ in found]),
            )
        kinds = [names.index(id(rotary[i])) if rotary[i].width else -1 for i in layers]
        made.append(Angles(*stacked[names], kinds, found[0][2]))
    return made
