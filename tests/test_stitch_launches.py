"""Stitching by the kernels' op gives what stitching with the model's own rotation gives, on every architecture that it can say."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit import lm_of

import kvrag.blend.stitch as module
import kvrag_kernels
from kvrag.blend.layout import Layout, place, rows_of
from kvrag.blend.quantise import pack
from kvrag.blend.stitch import stitch
from kvrag.model import CausalLM
from kvrag.model.rows import KVBuffer
from kvrag.precompute.encode import encode_padded, encode_prefix
from kvrag.testing.models import TINY
from kvrag.types import ChunkKV

CHUNKS = [list(range(30, 42)), list(range(60, 69)), list(range(100, 117))]
NOT_SAID = {"bloom", "mpt"}
"""Keys that no layer turns."""


def prompt_on(name: str = "llama") -> tuple[CausalLM, Layout, list[ChunkKV]]:
    """Live text around three chunks, the last of which gives up its last row to be computed."""
    model = lm_of(name)
    prefix, _ = encode_prefix(model, [1, 2, 3])
    segments = [(3, "live", -1), (17, "chunk", 2), (5, "live", -1), (12, "chunk", 0), (9, "chunk", 1)]
    layout = place((n, kind, False, source, False) for n, kind, source in segments)
    return model, layout, encode_padded(model, prefix, CHUNKS)


def filled(model: CausalLM, layout: Layout) -> KVBuffer:
    buffer = model.buffer(layout.num_tokens)
    for layer in range(model.num_layers):
        buffer.keys(layer).fill_(7.0), buffer.values(layer).fill_(7.0)
    return buffer


def stitched(model: CausalLM, layout: Layout, kvs: Sequence[ChunkKV], **options: Any) -> KVBuffer:
    buffer = filled(model, layout)
    stitch(buffer, layout, kvs, model.rotary(layout.num_tokens), **options)
    return buffer


Launches = list[dict[str, Any]]


@pytest.fixture
def launches(monkeypatch):
    """Let the op stitch, as on a CUDA device, and note what it is given; here its torch path computes."""
    noted: Launches = []
    real = kvrag_kernels.stitch

    def noting(*given, **options):
        noted.append({"keys": given[0], "layers": len(given[2]), "starts": given[4], **options})
        real(*given, **options)

    monkeypatch.setattr(kvrag_kernels, "stitch", noting)
    monkeypatch.setattr(module, "_has_kernel", lambda *_: True)
    return noted


def by_torch(model: CausalLM, layout: Layout, kvs: Sequence[ChunkKV]) -> KVBuffer:
    buffer = filled(model, layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_has_kernel", lambda *_: False)
        stitch(buffer, layout, kvs, model.rotary(layout.num_tokens))
    return buffer


def assert_same(model: CausalLM, buffer: KVBuffer, expected: KVBuffer, rows: Any = slice(None)) -> None:
    for layer in range(model.num_layers):
        torch.testing.assert_close(
            buffer.keys(layer)[:, :, rows], expected.keys(layer)[:, :, rows], atol=2e-6, rtol=1e-6
        )
        assert torch.equal(buffer.values(layer)[:, :, rows], expected.values(layer)[:, :, rows])


@pytest.mark.parametrize("name", sorted(TINY))
def test_both_ways_write_the_same_rows(name, launches):
    model, layout, kvs = prompt_on(name)
    buffer = stitched(model, layout, kvs)
    assert bool(launches) == (name not in NOT_SAID)
    assert_same(model, buffer, by_torch(model, layout, kvs), rows_of(layout.reused))


@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("name", ["llama", "llama-yarn", "gptj", "gpt_neox", "smollm3"])
def test_rounded_kv_travels_as_codes(name, kv_dtype, launches):
    model, layout, kvs = prompt_on(name)
    kvs = [pack(kv, kv_dtype) for kv in kvs]
    buffer = stitched(model, layout, kvs)
    assert {x.dtype for launch in launches for x in launch["keys"]} == {kvs[0].layers[0].keys.dtype}
    assert_same(model, buffer, by_torch(model, layout, kvs), rows_of(layout.reused))


def test_long_chunks_of_int4_have_several_groups_of_tokens(launches):
    model = lm_of()
    prefix, _ = encode_prefix(model, [1, 2, 3])
    kvs = [pack(kv, "int4") for kv in encode_padded(model, prefix, [list(range(30, 130)), list(range(40, 80))])]
    segments = [(3, "live", False, -1, False), (70, "chunk", False, 0, False), (40, "chunk", False, 1, False)]
    layout = place([*segments, (2, "live", False, -1, False)])
    buffer = stitched(model, layout, kvs)
    assert [x.shape[1] for x in launches[0]["key_scales"][:2]] == [3, 2]
    assert_same(model, buffer, by_torch(model, layout, kvs), rows_of(layout.reused))


def test_what_one_call_can_not_say_is_left_to_torch(launches):
    """Chunks of two kinds in one prompt, and groups of channels of which the last is shorter."""
    model, layout, kvs = prompt_on()
    mixed = [pack(kvs[0], "int8"), *kvs[1:]]
    buffer = stitched(model, layout, mixed)
    assert_same(model, buffer, by_torch(model, layout, mixed), rows_of(layout.reused))
    odd = pack(kvs[0], "int4")
    scales = odd.layers[0].scales
    assert scales is not None
    layers = tuple(
        replace(layer, scales=replace(scales, values=scales.values.expand(-1, -1, 3))) for layer in odd.layers
    )
    assert not module._is_uniform(buffer, layout.reused, [ChunkKV(layers, "int4")] * 3)
    assert launches == []


def test_a_launch_takes_several_layers(monkeypatch, launches):
    monkeypatch.setattr(module, "LAYERS_PER_LAUNCH", 3)
    model, layout, kvs = prompt_on()
    buffer = stitched(model, layout, kvs)
    assert [(x["layers"], x["starts"]) for x in launches] == [(3, [3, 25, 37]), (1, [3, 25, 37])]
    assert_same(model, buffer, by_torch(model, layout, kvs), rows_of(layout.reused))


def test_rows_that_will_be_computed_are_not_stitched(launches):
    model, layout, kvs = prompt_on()
    skipped = torch.tensor([3, 4, 30, 45])
    buffer = stitched(model, layout, kvs, skip=skipped)
    others = [i for i in rows_of(layout.reused).tolist() if i not in skipped.tolist()]
    assert_same(model, buffer, by_torch(model, layout, kvs), others)
    for layer in range(model.num_layers):
        assert bool((buffer.keys(layer)[:, :, skipped] == 7.0).all())
        assert bool((buffer.values(layer)[:, :, skipped] == 7.0).all())


@pytest.mark.parametrize(
    ("device", "key_dim", "value_dim", "width", "found"),
    [
        ("cuda", 64, 64, 32, True),
        ("cuda", 64, 32, 32, False),
        ("cuda", 72, 72, 32, False),
        ("cuda", 64, 64, 24, False),
        ("cpu", 64, 64, 32, False),
    ],
)
def test_the_op_stitches_where_it_has_a_kernel(device, key_dim, value_dim, width, found, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    x, y = (
        SimpleNamespace(
            device=torch.device(device), is_cuda=device == "cuda", shape=(1, 2, 9, dim), dtype=torch.float16
        )
        for dim in (key_dim, value_dim)
    )
    rotary: Any = [SimpleNamespace(width=0), SimpleNamespace(width=width)]
    assert module._has_kernel(x, y, rotary) is found


@pytest.mark.parametrize(
    ("name", "is_neighbours"), [("llama", False), ("gptj", True), ("cohere", True), ("phi", False)]
)
def test_pairs_are_read_off_the_rotation(name, is_neighbours):
    pairs = lm_of(name).rotary(9)[0].pairs()
    assert pairs is not None
    cos, sin, found = pairs
    assert found is is_neighbours
    torch.testing.assert_close(cos.square() + sin.square(), torch.ones_like(cos))


def test_a_rotation_of_another_kind_is_left_to_torch():
    rotation = lm_of().traits[0].rotation
    odd = replace(rotation, apply=lambda keys, cos, sin: keys * cos[:, None] + keys.flip(-1) * sin[:, None])
    inner = replace(rotation, start=1, width=rotation.width - 2)
    positions = torch.arange(9)
    assert rotation.at(positions).pairs() is not None
    assert odd.at(positions).pairs() is None
    assert inner.at(positions).pairs() is None
