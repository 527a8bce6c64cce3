"""Stitching by the kernels' op gives what stitching with the model's own rotation gives, on every architecture that it can say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import kvrag.stitch as module
import kvrag_kernels
from kvrag.cache import KVBuffer
from kvrag.layout import Layout, place
from kvrag.models import CausalLM
from kvrag.precompute import encode_padded, encode_prefix
from kvrag.stitch import stitch, stitch_in_launches
from kvrag.testing.models import TINY, tiny_model
from kvrag.types import ChunkKV

CHUNKS = [list(range(30, 42)), list(range(60, 69)), list(range(100, 117))]
NOT_SAID = {"bloom", "mpt"}
"""Keys that no layer turns."""


def layout_of(model: CausalLM) -> tuple[Layout, list[ChunkKV]]:
    """Live text around three chunks, the last of which gives up its last row to be computed."""
    prefix, _ = encode_prefix(model, [1, 2, 3])
    segments = [(3, "live", -1), (17, "chunk", 2), (5, "live", -1), (12, "chunk", 0), (9, "chunk", 1)]
    return place((n, kind, False, source, False) for n, kind, source in segments), encode_padded(model, prefix, CHUNKS)  # type: ignore[misc]


def filled(model: CausalLM, layout: Layout) -> KVBuffer:
    buffer = model.buffer(layout.num_tokens)
    for layer in range(model.num_layers):
        buffer.keys(layer).fill_(7.0), buffer.values(layer).fill_(7.0)
    return buffer


@pytest.mark.parametrize("name", sorted(TINY))
def test_both_ways_write_the_same_rows(name: str) -> None:
    model = CausalLM(tiny_model(name))
    layout, kvs = layout_of(model)
    rotary = model.rotary(layout.num_tokens)
    buffers = [filled(model, layout) for _ in range(2)]
    stitch(buffers[0], layout, kvs, rotary)
    assert stitch_in_launches(buffers[1], layout, kvs, rotary) == (name not in NOT_SAID)
    if name in NOT_SAID:
        return
    for layer in range(model.num_layers):
        torch.testing.assert_close(buffers[1].keys(layer), buffers[0].keys(layer), atol=2e-6, rtol=1e-6)
        assert torch.equal(buffers[1].values(layer), buffers[0].values(layer))


def test_a_launch_takes_several_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAYERS_PER_LAUNCH", 3)
    model = CausalLM(tiny_model())
    layout, kvs = layout_of(model)
    sizes: list[tuple[int, Sequence[int]]] = []
    real = kvrag_kernels.stitch

    def noting(*given: object, **options: object) -> None:
        sizes.append((len(given[2]), given[4]))  # type: ignore[arg-type]
        real(*given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(kvrag_kernels, "stitch", noting)
    whole, parts = filled(model, layout), filled(model, layout)
    stitch(whole, layout, kvs, model.rotary(layout.num_tokens))
    assert stitch_in_launches(parts, layout, kvs, model.rotary(layout.num_tokens))
    assert sizes == [(3, [3, 25, 37]), (1, [3, 25, 37])]
    torch.testing.assert_close(parts.keys(3), whole.keys(3), atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "is_neighbours"), [("llama", False), ("gptj", True), ("cohere", True), ("phi", False)]
)
def test_pairs_are_read_off_the_rotation(name: str, is_neighbours: bool) -> None:
    pairs = CausalLM(tiny_model(name)).rotary(9)[0].pairs()
    assert pairs is not None
    cos, sin, found = pairs
    assert found is is_neighbours
    torch.testing.assert_close(cos.square() + sin.square(), torch.ones_like(cos))


def test_a_rotation_of_another_kind_is_left_to_torch() -> None:
    table = CausalLM(tiny_model()).rotary(9)[0]
    odd = replace(table, apply=lambda keys, cos, sin: keys * cos[:, None] + keys.flip(-1) * sin[:, None])
    assert odd.pairs() is None
    assert replace(table, start=1, width=table.width - 2).pairs() is None
