"""Stitch: put stored KV at its final positions in one buffer. No model forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvrag.cache import KVBuffer
from kvrag.layout import Layout
from kvrag.quantise import read
from kvrag.rope import Rotations
from kvrag.types import ChunkKV


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
    for segment in layout.reused:
        rows = slice(segment.start, segment.stop)
        for index, layer in enumerate(kvs[segment.source].layers):
            all_keys, all_values = buffer.keys(index), buffer.values(index)
            keys, values = read(layer, segment.num_rows, device=all_keys.device, dtype=all_keys.dtype)
            all_keys[0, :, rows] = rotary[index].rotate(keys, rows)
            all_values[0, :, rows] = values
    buffer.length = layout.num_tokens
