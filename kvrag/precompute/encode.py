"""Encode chunks: token ids → position-free KV, several chunks per forward, behind a prefix.

A context is an optional, fixed run of ordinary passages between the prefix and the chunk. It
appears in no prompt and is not stored. Without it, a chunk is encoded as if it were the first
document of a prompt, with no other document to attend to; but in prompts it is nearly always a
later document.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor

from kvrag.errors import ConfigError
from kvrag.model import CausalLM
from kvrag.model.rows import KVBuffer, Rows
from kvrag.prompt.template import PromptEncoder
from kvrag.types import ChunkKV, LayerKV

_NAMED = re.compile(r"default(?::(\d+))?")
CONTEXT_TOKENS = 1000  # most tokens of a context
DEFAULT_TOKENS = 250  # tokens of the default context; docs/benchmarks.md compares other lengths
EncodedPrefix = tuple[KVBuffer, ChunkKV | None]  # result of :func:`encode_prefix`
KeptPrefix = dict[object, EncodedPrefix]  # the latest, by prefix and context
WINDOW_SHARE = 4  # a context takes at most 1 / WINDOW_SHARE of the model's context window


def check_context(context: object) -> str | None:
    """Check and return a context: ``"default"``, ``"default:1000"``, text or ``None``.

    Raises ``ConfigError`` for anything else, including a text that looks like a name.
    """
    is_name = isinstance(context, str) and re.fullmatch(r"[\w:.-]{0,40}", context.strip(), re.ASCII)
    if context is None or (isinstance(context, str) and (not is_name or _NAMED.fullmatch(context))):
        return context
    raise ConfigError(
        f"context is {context!r}; "
        "pass 'default', 'default:1000', passages of your own as text, or None"
    )


def context_ids(context: str | None, encoder: PromptEncoder, window: int) -> tuple[int, ...]:
    """Return the token ids of a context: the first tokens of its text, and a blank line.

    ``default`` has 250 tokens of the bundled text, ``default:1000`` 1000, with the blank line. The
    result has at most :data:`CONTEXT_TOKENS` tokens, and at most ``window // WINDOW_SHARE``.
    """
    if context is None:
        return ()
    named = _NAMED.fullmatch(context)
    most = min(CONTEXT_TOKENS, window // WINDOW_SHARE)
    if named:
        context = shipped()
        most = min(most, int(named[1] or DEFAULT_TOKENS))
    # A chunk that stands in the middle of another's sentence is read as its continuation.
    seam = encoder.live_ids("\n\n")
    ids = encoder.chunk_ids(context.strip())
    return (*ids[: max(0, most - len(seam))], *seam)[:most]


@cache
def shipped() -> str:
    """Return the bundled context text. A change of the text changes every chunk key."""
    return files("kvrag.precompute").joinpath("context.txt").read_text("utf-8")


@torch.inference_mode()
def encode_prefix(
    model: CausalLM, prefix_ids: Sequence[int], context_ids: Sequence[int] = ()
) -> EncodedPrefix:
    """Encode the prefix and the context behind it.

    Returns a buffer with both, for :func:`encode_chunks`, and the KV of the prefix alone (``None``
    if it is empty).
    """
    ids = [*prefix_ids, *context_ids]
    length = len(prefix_ids)
    buffer = model.buffer(len(ids))
    if not ids:
        return buffer, None
    found = _encode(model, [ids], buffer, [length])[0]
    return buffer, found if length else None


@torch.inference_mode()
def encode_chunks(
    model: CausalLM, prefix: KVBuffer, chunks: Sequence[Sequence[int]]
) -> list[ChunkKV]:
    """Encode chunks in a single forward, independently of each other, behind the same prefix.

    They form a batch, padded on the right. Attention is causal, so no row of a chunk sees padding.

    Parameters
    ----------
    prefix
        Buffer from :func:`encode_prefix`; it is not changed.
    chunks
        Token ids per chunk; not empty.

    Returns
    -------
    list[ChunkKV]
        KV in the order of ``chunks``, contiguous on the host, in the model's dtype.
    """
    lengths = [len(ids) for ids in chunks]
    longest = max(lengths)
    start = prefix.capacity
    buffer = model.buffer(start + longest, batch=len(chunks))
    for to, source in zip(buffer.layers, prefix.layers, strict=True):
        for mine, shared in zip(to, source, strict=True):
            mine[:, :, :start] = shared
    return _encode(
        model, [[*ids, *([0] * (longest - len(ids)))] for ids in chunks], buffer, lengths
    )


def _encode(
    model: CausalLM, ids: Sequence[Sequence[int]], buffer: KVBuffer, lengths: Sequence[int]
) -> list[ChunkKV]:
    """Compute a batch into the last rows of a buffer; return the KV of each one's first tokens."""
    num_rows = len(ids[0])
    start = buffer.capacity - num_rows
    with model.capture() as captured:
        model.forward(torch.tensor(ids), Rows.span(start, buffer.capacity), buffer, logits=0)
    found: list[list[LayerKV]] = [[] for _ in ids]
    for layer, (_, all_values) in enumerate(buffer.layers):
        # A model whose angles follow the prompt's length may have computed earlier rows again.
        keys = _on_host(captured[layer][:, -num_rows:]).transpose(1, 2)
        values = _on_host(all_values[:, :, start:])
        for item, (layers, length) in enumerate(zip(found, lengths, strict=True)):
            layers.append(
                LayerKV(keys[item, :, :length].contiguous(), values[item, :, :length].contiguous())
            )
    return [ChunkKV(tuple(layers)) for layers in found]


def _on_host(x: Tensor) -> Tensor:
    """Copy a tensor to the host, from a CUDA device into pinned memory if it can be allocated.

    Copies into pinned memory are faster.
    """
    if x.device.type == "cuda":
        with suppress(RuntimeError):
            return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x)
    return x.cpu()
