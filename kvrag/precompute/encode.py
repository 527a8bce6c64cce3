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
from itertools import accumulate, pairwise

import torch

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
    """Return the token ids of a context: the first tokens of its text.

    ``default`` is the first 250 tokens of the bundled text, ``default:1000`` the first 1000. The
    result has at most :data:`CONTEXT_TOKENS` tokens, and at most ``window // WINDOW_SHARE``.
    """
    if context is None:
        return ()
    named = _NAMED.fullmatch(context)
    most = CONTEXT_TOKENS
    if named:
        context = shipped()
        most = int(named[1] or DEFAULT_TOKENS)
    return tuple(encoder.chunk_ids(f"{context.strip()}\n\n"))[
        : min(most, CONTEXT_TOKENS, window // WINDOW_SHARE)
    ]


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
    found = _encode(model, ids, Rows.span(0, len(ids)), buffer, [(0, 0, length)])[0]
    return buffer, found if length else None


@torch.inference_mode()
def encode_chunks(
    model: CausalLM, prefix: KVBuffer, chunks: Sequence[Sequence[int]]
) -> list[ChunkKV]:
    """Encode chunks in a single forward, independently of each other, behind the same prefix.

    On a CUDA device with a kernel, the chunks are packed into a sequence behind a single copy of
    the prefix, and attention limits per row keep them apart. Elsewhere, and where an attention
    window would cut them, they form a padded batch, which is faster on a CPU.

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
    longest = prefix.capacity + max(map(len, chunks))
    if (
        len(chunks) > 1
        and model.device.type == "cuda"
        and model.can_pack(longest)
        and _has_kernel(model)
    ):
        return encode_packed(model, prefix, chunks)
    return encode_padded(model, prefix, chunks)


def _has_kernel(model: CausalLM) -> bool:
    """Whether a kernel computes the attention; else a padded batch keeps torch's fused kernel."""
    import kvrag_kernels

    shapes = {trait.attended for trait in model.traits}
    return all(
        shape.key_dim == shape.value_dim
        and kvrag_kernels.tier(shape.key_dim, model.dtype, model.device) != "torch"
        for shape in shapes
    )


def encode_padded(
    model: CausalLM, prefix: KVBuffer, chunks: Sequence[Sequence[int]]
) -> list[ChunkKV]:
    """Encode chunks as a batch, padded on the right; see :func:`encode_chunks`.

    Attention is causal, so no row of a chunk sees padding.
    """
    start = prefix.capacity
    longest = max(map(len, chunks))
    padded = [[*ids, *([0] * (longest - len(ids)))] for ids in chunks]
    buffer = _behind(model, prefix, start + longest, len(chunks))
    runs = [(item, start, start + len(ids)) for item, ids in enumerate(chunks)]
    return _encode(model, padded, Rows.span(start, start + longest), buffer, runs)


def encode_packed(
    model: CausalLM, prefix: KVBuffer, chunks: Sequence[Sequence[int]]
) -> list[ChunkKV]:
    """Encode chunks packed into a sequence, without padding; see :func:`encode_chunks`."""
    ends = list(accumulate(map(len, chunks), initial=prefix.capacity))
    buffer = _behind(model, prefix, ends[-1], 1)
    rows = Rows.packed(prefix.capacity, [len(ids) for ids in chunks], model.device)
    runs = [(0, start, stop) for start, stop in pairwise(ends)]
    return _encode(model, [token for ids in chunks for token in ids], rows, buffer, runs)


def _behind(model: CausalLM, prefix: KVBuffer, capacity: int, batch: int) -> KVBuffer:
    """Allocate a buffer of ``batch`` sequences and copy the prefix to its first rows."""
    buffer = model.buffer(capacity, batch=batch)
    length = prefix.capacity
    for (keys, values), (prefix_keys, prefix_values) in zip(
        buffer.layers, prefix.layers, strict=True
    ):
        keys[:, :, :length] = prefix_keys
        values[:, :, :length] = prefix_values
    return buffer


def _encode(
    model: CausalLM,
    ids: Sequence[int] | Sequence[Sequence[int]],
    rows: Rows,
    buffer: KVBuffer,
    runs: Sequence[tuple[int, int, int]],
) -> list[ChunkKV]:
    """Run a forward and return the KV of ``runs``: ``(batch entry, first slot, last slot + 1)``."""
    with model.capture() as captured:
        model.forward(torch.tensor(ids), rows, buffer, logits=0)
    offset = rows.stop - captured[0].shape[1]
    found: list[list[LayerKV]] = [[] for _ in runs]
    for layer, (_, all_values) in enumerate(buffer.layers):
        keys = _on_host(captured[layer]).transpose(1, 2)
        values = _on_host(all_values[:, :, offset : rows.stop])
        for layers, (item, start, stop) in zip(found, runs, strict=True):
            own = slice(start - offset, stop - offset)
            layers.append(
                LayerKV(keys[item, :, own].contiguous(), values[item, :, own].contiguous())
            )
    return [ChunkKV(tuple(layers)) for layers in found]


def _on_host(x: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the host, from a CUDA device into pinned memory if it can be allocated.

    Copies into pinned memory are faster.
    """
    if x.device.type == "cuda":
        with suppress(RuntimeError):
            return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x)
    return x.cpu()
