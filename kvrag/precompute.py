"""Precompute: token ids of chunks → position-free KV, several chunks per forward, each encoded behind the same prefix."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvrag.cache import KVBuffer
from kvrag.models import CausalLM
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
        model.forward(torch.tensor(prefix_ids), slice(0, len(prefix_ids)), buffer, logits=0)
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

    Shorter chunks are padded on the right: attention is causal and a row's index is its position, so no row of a chunk sees padding
    and the result is that of encoding one at a time.

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
    start, longest = prefix.capacity, max(len(ids) for ids in chunks)
    buffer = model.buffer(start + longest, batch=len(chunks))
    for layer in range(model.num_layers):
        buffer.keys(layer)[:, :, :start] = prefix.keys(layer)
        buffer.values(layer)[:, :, :start] = prefix.values(layer)
    padded = torch.tensor([[*ids, *([0] * (longest - len(ids)))] for ids in chunks])
    with model.capture() as captured:
        model.forward(padded, slice(start, start + longest), buffer, logits=0)
    return [_slice(model, buffer, captured, item, start, len(ids)) for item, ids in enumerate(chunks)]


def _slice(
    model: CausalLM, buffer: KVBuffer, captured: dict[int, torch.Tensor], item: int, start: int, length: int
) -> ChunkKV:
    layers = tuple(
        LayerKV(
            keys=captured[layer][item, :length].transpose(0, 1).contiguous().cpu(),
            values=buffer.values(layer)[item, :, start : start + length].contiguous().cpu(),
        )
        for layer in range(model.num_layers)
    )
    return ChunkKV(layers)
