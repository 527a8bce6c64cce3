"""The two sides of a proof, for one prompt of random tokens: transformers alone, and kvrag's stages."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from kvrag.blend.layout import Layout, place
from kvrag.blend.repair import repair
from kvrag.blend.stitch import stitch
from kvrag.model import CausalLM
from kvrag.model.forward import evaluating as eval_mode, lock_of, running, switched
from kvrag.model.kv import KVBuffer
from kvrag.model.rows import Rows
from kvrag.precompute.encode import encode_chunks, encode_prefix
from kvrag.types import ChunkKV

COMPARED_ROWS = 32
"""Last rows whose logits are compared; the rows before them are compared by their keys and values."""

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer, ``(H_kv, N, D)``."""


@dataclass(frozen=True, slots=True)
class Noise:
    """How far transformers is from itself: logits (absolute), and keys and values (relative to the largest of their layer)."""

    logits: float
    kv: float


@dataclass(frozen=True, slots=True)
class Sample:
    """The proof's prompt: prefix, a chunk behind it, glue, a chunk that is moved, suffix; ids ``(N,)`` and their layout."""

    ids: torch.Tensor
    layout: Layout
    other: int
    """An id to change tokens to."""

    @property
    def prefix(self) -> list[int]:
        """Ids of the prefix."""
        return self._ids_of(0)

    @property
    def chunks(self) -> list[list[int]]:
        """Ids of both chunks."""
        return [self._ids_of(1), self._ids_of(3)]

    def _ids_of(self, segment: int) -> list[int]:
        s = self.layout.segments[segment]
        return [int(i) for i in self.ids[s.start : s.stop]]


@dataclass(frozen=True, slots=True)
class Run:
    """What a forward over the prompt gave: logits of its last rows, float32 on the host, and the KV of all rows."""

    logits: torch.Tensor
    kv: Pairs


def draw_sample(lm: CausalLM, seed: int, window: int) -> Sample:
    """Draw a prompt whose chunks are moved by more than the window, from ids that mean nothing special to the model."""
    lengths = [3, max(12, window + 8), 3, 10, 4]
    room = lm.context_window - 1
    while sum(lengths) > room and max(lengths) > 2:
        lengths = [max(2, length // 2) for length in lengths]
    random = torch.Generator().manual_seed(seed)
    allowed = torch.ones(lm.vocab_size)
    allowed[[i for i in _special_ids(lm.model) if 0 <= i < lm.vocab_size]] = 0
    drawn = torch.multinomial(allowed, sum(lengths) + 1, replacement=True, generator=random)
    kinds = (("prefix", True, 0), ("chunk", True, 1), ("live", False, -1), ("chunk", False, 2), ("live", False, -1))
    layout = place((n, kind, exact, source, False) for n, (kind, exact, source) in zip(lengths, kinds, strict=True))  # type: ignore[misc]
    other = int(drawn[-1])
    return Sample(drawn[:-1], layout, other)


def _special_ids(model: Any) -> set[int]:
    """Ids that a config names: ends of texts, and places for images, which a model may refuse without one."""

    def walk(values: Any) -> Iterator[int]:
        for name, value in values.items():
            if isinstance(value, dict):
                yield from walk(value)
            elif str(name).endswith(("_token_id", "_token_index")):
                yield from [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)]

    return set(walk(model.config.to_dict()))


@contextmanager
def evaluating(lm: CausalLM, attention: str | None = None) -> Iterator[Any]:
    """Give the model itself, alone, in evaluation mode and with its own attention, or another one of transformers'."""
    model = lm.model
    with lock_of(model), eval_mode(model) if attention is None else switched(model, attention):
        yield model


def run_own(lm: CausalLM, ids: torch.Tensor, *, pieces: int = 1, attention: str | None = None) -> Run:
    """Run a prompt through transformers alone, in one piece or more."""
    cache, batch = DynamicCache(), ids.to(lm.device)[None]
    with evaluating(lm, attention) as model:
        keep = taken_by(model, {"logits_to_keep": COMPARED_ROWS})
        parts = [
            model(input_ids=part, past_key_values=cache, use_cache=True, **keep).logits[0]
            for part in batch.tensor_split(pieces, dim=1)
        ]
    logits = torch.cat(parts)[-COMPARED_ROWS:].float().cpu()
    return Run(logits, [(layer.keys[0], layer.values[0]) for layer in cache.layers])


def taken_by(model: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return those options that a model's ``forward`` takes by name."""
    names = inspect.signature(type(model).forward).parameters
    return {name: value for name, value in options.items() if name in names}


def measure_noise(lm: CausalLM, ids: torch.Tensor, own: Run, attention: str | None) -> Noise:
    """Measure how far transformers is from itself."""
    others = [run_own(lm, ids, pieces=2, attention=attention)]
    with moved_embeddings(lm):
        others.append(run_own(lm, ids, attention=attention))
    return Noise(max(gap(o.logits, own.logits) for o in others), max(kv_distance(o.kv, own.kv) for o in others))


@contextmanager
def moved_embeddings(lm: CausalLM, seed: int = 0) -> Iterator[None]:
    """Move every embedding by one unit in the last place, up or down: a rounding that the model then amplifies."""
    random = torch.Generator().manual_seed(seed)

    def move(_: torch.nn.Module, __: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        signs = (torch.randint(0, 2, output.shape, generator=random) * 2 - 1).to(output.device)
        return (output.float() * (1 + torch.finfo(output.dtype).eps * signs)).to(output.dtype)

    with lock_of(lm.model):  # the hook would see the forwards of others too
        handle = lm.model.get_input_embeddings().register_forward_hook(move)
        try:
            yield
        finally:
            handle.remove()


def run_full(lm: CausalLM, ids: torch.Tensor) -> Run:
    """Run a prompt through kvrag's forward, without reuse."""
    buffer = lm.buffer(len(ids))
    logits, _ = lm.forward(ids, Rows.span(0, len(ids)), buffer, logits=min(COMPARED_ROWS, len(ids)))
    return Run(logits[0].float().cpu(), _pairs(lm, buffer))


def precompute_sample(lm: CausalLM, sample: Sample) -> list[ChunkKV]:
    """Precompute the prefix and, in one padded batch behind it, both chunks."""
    prefix, kv = encode_prefix(lm, sample.prefix)
    assert kv is not None
    return [kv, *encode_chunks(lm, prefix, sample.chunks)]


def run_blend(
    lm: CausalLM,
    ids: torch.Tensor,
    layout: Layout,
    stored: Sequence[ChunkKV],
    selected: torch.Tensor,
    *,
    plant: bool = False,
) -> Run:
    """Stitch and repair a prompt; ``plant`` puts the first chunk's keys one row off, as a mistake would."""
    buffer, rotary = lm.buffer(len(ids)), lm.rotary(len(ids))
    stitch(buffer, layout, stored, rotary)
    if plant:
        rows = slice(layout.segments[1].start, layout.segments[1].stop)
        for layer in range(lm.num_layers):
            buffer.keys(layer)[:, :, rows] = buffer.keys(layer)[:, :, rows].roll(1, dims=2)
    logits = repair(lm, buffer, layout, ids, selected, shift=0.0, rotary=rotary)
    return Run(logits[None].float().cpu(), _pairs(lm, buffer))


def _pairs(lm: CausalLM, buffer: KVBuffer) -> Pairs:
    return [(buffer.keys(layer)[0], buffer.values(layer)[0]) for layer in range(lm.num_layers)]


def gap(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest difference of logits."""
    return float((logits - reference).abs().max())


def kv_distance(kv: Pairs, reference: Pairs, rows: slice = slice(None)) -> float:
    """Largest difference of keys or values in some rows, relative to the largest magnitude of their layer."""
    worst = 0.0
    for pair, expected in zip(kv, reference, strict=True):
        for tensor, target in zip(pair, expected, strict=True):
            scale = float(target.abs().max()) or 1.0
            gap = float((tensor[:, rows].float() - target[:, rows].float()).abs().max()) / scale
            worst = max(worst, gap) if gap == gap else float("nan")
    return worst
