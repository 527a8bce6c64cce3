"""Token ids of chunks → position-free KV, several chunks per forward, each encoded behind the same prefix and the same context.

A context is a fixed run of ordinary passages that stands in no prompt and is not stored. Right behind the prefix, a chunk is in the state
of a prompt's first document, with nothing else to attend to; in a prompt it is nearly always a later one.
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
CONTEXT_TOKENS = 1000  # of a context at most
DEFAULT_TOKENS = 250  # of the text that ships; docs/benchmarks.md has other lengths
Behind = tuple[KVBuffer, ChunkKV | None]  # what :func:`encode_prefix` returns
WINDOW_SHARE = 4  # and one of so many tokens of a model's context window


def check_context(context: object) -> str | None:
    """Return a valid context: ``"default"``, text or ``None``; raises ``ConfigError``, also for what looks like another name."""
    is_name = isinstance(context, str) and re.fullmatch(r"[\w:.-]{0,40}", context.strip(), re.ASCII)
    if context is None or (isinstance(context, str) and (not is_name or _NAMED.fullmatch(context))):
        return context
    raise ConfigError(
        f"context is {context!r}; pass 'default', 'default:1000', passages of your own as text, or None"
    )


def context_ids(context: str | None, encoder: PromptEncoder, window: int) -> tuple[int, ...]:
    """Return the token ids that chunks are encoded behind: the first of the text, and at most a share of the model's window.

    ``default`` means 250 tokens of the text that ships, ``default:1000`` as many as it says.
    """
    if context is None:
        return ()
    named = _NAMED.fullmatch(context)
    text, most = (
        shipped() if named else context,
        int(named[1] or DEFAULT_TOKENS) if named else CONTEXT_TOKENS,
    )
    return tuple(encoder.chunk_ids(f"{text.strip()}\n\n"))[
        : min(most, CONTEXT_TOKENS, window // WINDOW_SHARE)
    ]


@cache
def shipped() -> str:
    """Return the text that ships with the package; a change of it is a change of every key."""
    return files("kvrag.precompute").joinpath("context.txt").read_text("utf-8")


@torch.inference_mode()
def encode_prefix(
    model: CausalLM, prefix_ids: Sequence[int], context_ids: Sequence[int] = ()
) -> Behind:
    """Encode the prefix, ``P`` tokens, and a context behind it; return a buffer of both for :func:`encode_chunks`, and the prefix's KV.

    For an empty prefix the KV is ``None``.
    """
    ids, length = [*prefix_ids, *context_ids], len(prefix_ids)
    buffer = model.buffer(len(ids))
    if not ids:
        return buffer, None
    found = _encode(model, ids, Rows.span(0, len(ids)), buffer, [(0, 0, length)])[0]
    return buffer, found if length else None


@torch.inference_mode()
def encode_chunks(
    model: CausalLM, prefix: KVBuffer, chunks: Sequence[Sequence[int]]
) -> list[ChunkKV]:
    """Encode several chunks, none empty, in one forward, each as if it stood alone behind the prefix, whose buffer stays as it is.

    On a CUDA device the chunks are packed one after the other behind one copy of the prefix, and limits per row keep them apart. Elsewhere,
    and where a window cuts them, they are a padded batch, which is faster on a CPU.

    ``prefix`` is the buffer of :func:`encode_prefix`. The KV is in the given order, contiguous on the host, in the model's dtype.
    """
    longest = prefix.capacity + max(map(len, chunks))
    is_packed = (
        len(chunks) > 1
        and model.device.type == "cuda"
        and model.can_pack(longest)
        and _has_kernel(model)
    )
    return (encode_packed if is_packed else encode_padded)(model, prefix, chunks)


def _has_kernel(model: CausalLM) -> bool:
    """Whether a kernel computes the attention; without one, a padded batch keeps torch's fused attention."""
    import kvrag_kernels

    return kvrag_kernels.tier(model.shapes[0].key_dim, model.dtype, model.device) != "torch"


def encode_padded(
    model: CausalLM, prefix: KVBuffer, chunks: Sequence[Sequence[int]]
) -> list[ChunkKV]:
    """Encode chunks as a batch, padded on the right: attention is causal, so no row of a chunk sees padding; see :func:`encode_chunks`."""
    start, longest = prefix.capacity, max(map(len, chunks))
    padded = [[*ids, *([0] * (longest - len(ids)))] for ids in chunks]
    buffer = _behind(model, prefix, start + longest, len(chunks))
    runs = [(item, start, start + len(ids)) for item, ids in enumerate(chunks)]
    return _encode(model, padded, Rows.span(start, start + longest), buffer, runs)


def encode_packed(
    model: CausalLM, prefix: KVBuffer, chunks: Sequence[Sequence[int]]
) -> list[ChunkKV]:
    """Encode chunks one after the other in one sequence, without padding and with one copy of the prefix; see :func:`encode_chunks`."""
    ends = list(accumulate(map(len, chunks), initial=prefix.capacity))
    buffer = _behind(model, prefix, ends[-1], 1)
    rows = Rows.packed(prefix.capacity, [len(ids) for ids in chunks], model.device)
    runs = [(0, start, stop) for start, stop in pairwise(ends)]
    return _encode(model, [token for ids in chunks for token in ids], rows, buffer, runs)


def _behind(model: CausalLM, prefix: KVBuffer, capacity: int, batch: int) -> KVBuffer:
    """Return a buffer that begins with the prefix's rows."""
    buffer, length = model.buffer(capacity, batch=batch), prefix.capacity
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
    """Run a forward and take the KV of each run out: batch entry, first slot, one past the last one."""
    with model.capture() as captured:
        model.forward(torch.tensor(ids), rows, buffer, logits=0)
    offset = rows.stop - captured[0].shape[1]
    found: list[list[LayerKV]] = [[] for _ in runs]
    for layer, (_, all_values) in enumerate(buffer.layers):
        keys, values = (
            _on_host(captured[layer]).transpose(1, 2),
            _on_host(all_values[:, :, offset : rows.stop]),
        )
        for layers, (item, start, stop) in zip(found, runs, strict=True):
            own = slice(start - offset, stop - offset)
            layers.append(
                LayerKV(keys[item, :, own].contiguous(), values[item, :, own].contiguous())
            )
    return [ChunkKV(tuple(layers)) for layers in found]


def _on_host(x: torch.Tensor) -> torch.Tensor:
    """Return a layer's tensor on the host: from a CUDA device by page-locked memory, if there is enough, in one quick copy."""
    if x.device.type == "cuda":
        with suppress(RuntimeError):
            return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x)
    return x.cpu()
