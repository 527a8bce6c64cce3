"""Many chunks behind one prefix in one packed forward: the KV of each is that of the chunk alone."""

import pytest
import torch
from kit import lm_of

from kvrag.model import CausalLM
from kvrag.model.attention import ragged_attention
from kvrag.model.rows import Limits, Rows
from kvrag.precompute.encode import encode_chunks, encode_packed, encode_padded, encode_prefix
from kvrag.testing.models import TINY, tiny_model
from kvrag.types import ChunkKV

PREFIX = list(range(20, 33))
CHUNKS = [
    [int(t) for t in torch.randint(5, 200, (n,), generator=torch.Generator().manual_seed(n))]
    for n in (19, 3, 24, 1)
]
NOT_PACKED = {
    "bloom",
    "codegen",
    "falcon",
    "falcon-multi-head",
    "falcon-new",
    "gptj",
    "mpt",
    "jetmoe",
}
"""Attention that takes a mask and nothing else, or makes the keys it attends to from the cached ones."""


def assert_same(found: list[ChunkKV], want: list[ChunkKV]) -> None:
    for one, other in zip(found, want, strict=True):
        for mine, theirs in zip(one.layers, other.layers, strict=True):
            torch.testing.assert_close(mine.keys, theirs.keys, atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(mine.values, theirs.values, atol=2e-5, rtol=1e-4)
            assert mine.keys.is_contiguous()
            assert mine.values.is_contiguous()


@pytest.mark.parametrize("with_prefix", [True, False])
@pytest.mark.parametrize("name", sorted(TINY))
def test_packed_chunks_are_those_encoded_alone(name, with_prefix):
    model = lm_of(name)
    prefix, _ = encode_prefix(model, PREFIX if with_prefix else [])
    before = [prefix.keys(layer).clone() for layer in range(model.num_layers)]
    alone = [encode_padded(model, prefix, [ids])[0] for ids in CHUNKS]
    assert_same(encode_padded(model, prefix, CHUNKS), alone)
    is_cut = not all(trait.reach.is_whole(prefix.capacity + 24) for trait in model.traits)
    can_pack = model.can_pack(prefix.capacity + 24)
    assert can_pack or name in NOT_PACKED or is_cut or "llama4" in name
    if can_pack:
        assert_same(encode_packed(model, prefix, CHUNKS), alone)
    assert all(torch.equal(prefix.keys(layer), keys) for layer, keys in enumerate(before))


def test_a_window_that_cuts_a_chunk_or_the_prefix_is_not_packed():
    model = lm_of("mistral")
    window = model.traits[0].reach.window
    assert window is not None
    assert model.can_pack(window)
    assert not model.can_pack(window + 1)


def test_a_chunk_does_not_see_its_neighbours():
    model = lm_of()
    prefix, _ = encode_prefix(model, PREFIX)
    first = encode_packed(model, prefix, CHUNKS)
    changed = encode_packed(model, prefix, [[7] * 19, CHUNKS[1], [9] * 24, CHUNKS[3]])
    assert_same([changed[1], changed[3]], [first[1], first[3]])


@pytest.mark.parametrize(
    ("device", "path", "is_packed"),
    [("cpu", "torch", False), ("cuda", "mma", True), ("cuda", "torch", False)],
)
def test_the_device_and_its_kernel_say_which_way(device, path, is_packed, monkeypatch):
    import kvrag.precompute.encode as module

    monkeypatch.setattr("kvrag_kernels.tier", lambda *_: path)

    model = CausalLM(tiny_model())
    prefix, _ = encode_prefix(model, PREFIX)
    model.device = torch.device(device)
    used: list[str] = []
    for name in ("encode_packed", "encode_padded"):
        monkeypatch.setattr(module, name, lambda *_, name=name: used.append(name) or [])
    encode_chunks(model, prefix, CHUNKS)
    encode_chunks(model, prefix, CHUNKS[:1])
    assert used == ["encode_packed" if is_packed else "encode_padded", "encode_padded"]


def test_rows_see_the_prefix_and_their_own_run():
    rows = Rows.packed(3, [2, 4], torch.device("cpu"))
    assert rows.first is not None
    assert rows.positions is not None
    assert rows.first.tolist() == [3, 3, 5, 5, 5, 5]
    assert rows.positions.tolist() == [3, 4, 3, 4, 5, 6]
    plan = Limits(torch.arange(3, 9), 9, rows.positions, rows.first, rows.prefix)
    v = torch.eye(9)[None, None]
    seen = (
        ragged_attention(torch.zeros(1, 1, 6, 9), torch.zeros(1, 1, 9, 9), v, plan, scale=1.0)[0, 0]
        > 0
    )
    want = [
        [1, 1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0, 0],
        *([1, 1, 1, 0, 0, *([1] * n), *([0] * (4 - n))] for n in (1, 2, 3, 4)),
    ]
    assert seen.int().tolist() == want
