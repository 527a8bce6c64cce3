"""Many chunks behind one prefix in one forward: the KV of each is that of the chunk alone."""

import pytest
import torch
from kit import lm_of

from kvrag.model.attention import ragged_attention
from kvrag.model.rows import Limits
from kvrag.precompute.encode import encode_chunks, encode_prefix
from kvrag.testing.models import TINY
from kvrag.types import ChunkKV

PREFIX = list(range(20, 33))
CHUNKS = [
    [int(t) for t in torch.randint(5, 200, (n,), generator=torch.Generator().manual_seed(n))]
    for n in (19, 3, 24, 1)
]


def assert_same(found: list[ChunkKV], want: list[ChunkKV]) -> None:
    for one, other in zip(found, want, strict=True):
        for mine, theirs in zip(one.layers, other.layers, strict=True):
            torch.testing.assert_close(mine.keys, theirs.keys, atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(mine.values, theirs.values, atol=2e-5, rtol=1e-4)
            assert mine.keys.is_contiguous()
            assert mine.values.is_contiguous()


@pytest.mark.parametrize("with_prefix", [True, False])
@pytest.mark.parametrize("name", sorted(TINY))
def test_chunks_of_a_batch_are_those_encoded_alone(name, with_prefix):
    model = lm_of(name)
    prefix, _ = encode_prefix(model, PREFIX if with_prefix else [])
    before = [prefix.keys(layer).clone() for layer in range(model.num_layers)]
    alone = [encode_chunks(model, prefix, [ids])[0] for ids in CHUNKS]
    assert_same(encode_chunks(model, prefix, CHUNKS), alone)
    assert all(torch.equal(prefix.keys(layer), keys) for layer, keys in enumerate(before))


def test_a_chunk_does_not_see_its_neighbours():
    model = lm_of()
    prefix, _ = encode_prefix(model, PREFIX)
    first = encode_chunks(model, prefix, CHUNKS)
    changed = encode_chunks(model, prefix, [[7] * 19, CHUNKS[1], [9] * 24, CHUNKS[3]])
    assert_same([changed[1], changed[3]], [first[1], first[3]])


def test_rows_see_the_slots_from_their_first_on():
    """Rows of several requests in one buffer: each sees its own request's slots alone."""
    plan = Limits(torch.arange(3, 9), 9, first=torch.tensor([3, 3, 5, 5, 5, 5]))
    v = torch.eye(9)[None, None]
    q, k = torch.zeros(1, 1, 6, 9), torch.zeros(1, 1, 9, 9)
    seen = ragged_attention(q, k, v, plan, scale=1.0)[0, 0] > 0
    want = [
        [0, 0, 0, 1, 0, 0, 0, 0, 0],
        [0, 0, 0, 1, 1, 0, 0, 0, 0],
        *([0, 0, 0, 0, 0, *([1] * n), *([0] * (4 - n))] for n in (1, 2, 3, 4)),
    ]
    assert seen.int().tolist() == want
