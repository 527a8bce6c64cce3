"""Precompute: token ids of chunks → position-free KV, several chunks per forward, each encoded behind the same prefix."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from kvrag.model import CausalLM
from kvrag.model.kv import KVBuffer
from kvrag.model.rows import Rows
from kvrag.types import ChunkKV, LayerKV


@torch.inference_mode()
def encode_prefix(model: CausalLM, prefix_ids: Sequence[int]) -> tuple[KVBuffer, ChunkKV | None]:
    """Run the prefix once.

    Parameters
    ----------
    model
        The model.
    prefix_ids
        Everything before the first chunk; may be empty.

    Returns
    -------
    buffer : KVBuffer
        The prefix's rows at positions ``0:P``, for :func:`encode_chunks`.
    kv : ChunkKV or None
        The same KV, position-free, for the store; ``None`` for an empty prefix.
    """
    buffer = model.buffer(len(prefix_ids))
    if not prefix_ids:
        return buffer, None
    with model.capture() as captured:
        model.forward(torch.tensor(prefix_ids), Rows.span(0, len(prefix_ids)), buffer, logits=0)
    layers = tuple(
        LayerKV(
            keys=captured[layer][0].transpose(0, 1).contiguous().cpu(),
            values=buffer.values(layer)[0].contiguous().cpu(),
        )
        for layer in range(model.num_layers)
    )
    return buffer, ChunkKV(layers)


@torch.inference_mode()
def encode_chunks(model: CausalLM, prefix: KVBuffer, chunks: Sequence[Sequence[int]]) -> list[ChunkKV]:
    """Encode several chunks in one forward, each as if it stood alone behind the prefix.

    On a CUDA device the chunks are packed one after the other behind one copy of the prefix, and limits per row keep them apart; elsewhere,
    and where a window cuts them, they are a padded batch (:func:`encode_padded`), which is faster on a CPU.

    Parameters
    ----------
    model
        The model.
    prefix
        Buffer of :func:`encode_prefix`, ``P`` rows; it is not changed.
    chunks
        Token ids of each chunk, none empty.

    Returns
    -------
    list of ChunkKV
        In the order given, contiguous on the host, in the model's dtype.
    """
    longest = max(len(ids) for ids in chunks)
    is_packed = len(chunks) > 1 and _has_kernel(model) and model.can_pack(prefix.capacity + longest)
    return (encode_packed if is_packed else encode_padded)(model, prefix, chunks)


def _has_kernel(model: CausalLM) -> bool:
    """Whether the attention that packing is made for is computed by a kernel; without one, a padded batch keeps torch's fused attention."""
    if model.device.type != "cuda":
        return False
    import kvrag_kernels

    return kvrag_kernels.tier(model.shapes[0].key_dim, model.dtype, model.device) != "torch"


def encode_padded(model: CausalLM, prefix: KVBuffer, chunks: Sequence[Sequence[int]]) -> list[ChunkKV]:
    """Encode chunks as a batch; see :func:`encode_chunks`.

    Shorter chunks are padded on the right: attention is causal and a row's index is its position, so no row of a chunk sees padding
    and the result is that of encoding one at a time.
    """
    start, longest = prefix.capacity, max(len(ids) for ids in chunks)
    buffer = _behind(model, prefix, start + longest, len(chunks))
    padded = torch.tensor([[*ids, *([0] * (longest - len(ids)))] for ids in chunks])
    with model.capture() as captured:
        model.forward(padded, Rows.span(start, start + longest), buffer, logits=0)
    return [_slice(model, buffer, captured, item, start, slice(0, len(ids))) for item, ids in enumerate(chunks)]


def encode_packed(model: CausalLM, prefix: KVBuffer, chunks: Sequence[Sequence[int]]) -> list[ChunkKV]:
    """Encode chunks as one run of rows after the other, without padding and with the prefix's KV once; see :func:`encode_chunks`."""
    start, lengths = prefix.capacity, [len(ids) for ids in chunks]
    buffer = _behind(model, prefix, start + sum(lengths), 1)
    with model.capture() as captured:
        token_ids = torch.tensor([token for ids in chunks for token in ids])
        model.forward(token_ids, Rows.packed(start, lengths, model.device), buffer, logits=0)
    ends = list(accumulate(lengths))
    rows = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    return [_slice(model, buffer, captured, 0, start, own) for own in rows]


def _behind(model: CausalLM, prefix: KVBuffer, capacity: int, batch: int) -> KVBuffer:
    """Return a buffer that begins with the prefix's rows."""
    buffer = model.buffer(capacity, batch=batch)
    for layer in range(model.num_layers):
        buffer.keys(layer)[:, :, : prefix.capacity] = prefix.keys(layer)
        buffer.values(layer)[:, :, : prefix.capacity] = prefix.values(layer)
    return buffer


def _slice(
    model: CausalLM, buffer: KVBuffer, captured: dict[int, torch.Tensor], item: int, start: int, rows: slice
) -> ChunkKV:
    """Take one chunk's KV out: batch entry ``item``, rows counted from the prefix's end."""
    layers = tuple(
        LayerKV(
            keys=captured[layer][item, rows].transpose(0, 1).contiguous().cpu(),
            values=buffer.values(layer)[item, :, start + rows.start : start + rows.stop].contiguous().cpu(),
        )
        for layer in range(model.num_layers)
    )
    return ChunkKV(layers)
