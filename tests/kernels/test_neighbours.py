"""Other libraries in the kernels' benchmark: what they are asked, and that a wrong answer is not timed.

FlashInfer and varlen FlashAttention need a GPU: stand-ins with their interfaces compute with torch.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import kernel_attention
import kernel_neighbours
from kernel_shapes import Shape

CPU = torch.device("cpu")
SHAPES = {
    "scattered rows": Shape(4, 2, 16, 100, 0.3),
    "a whole prompt": Shape(4, 2, 16, 80, 1.0),
    "a step of requests": Shape(4, 2, 16, 96, 0.0, requests=3),
}


def attend(q, k, v, mask):
    """Attention of tokens-first tensors, ``(tokens, heads, D)``."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(0, 1)


class Ragged:
    def __init__(self, workspace, layout):
        assert layout == "NHD"

    def plan(self, rows, keys, heads, kv_heads, dim, *, custom_mask, sm_scale, **_):
        assert (heads, kv_heads, dim, sm_scale) == (4, 2, 16, 0.25)
        self.mask = custom_mask.view(int(rows[1]), int(keys[1]))

    def run(self, q, k, v):
        return attend(q, k, v, self.mask)


class Paged:
    def __init__(self, workspace, layout, use_tensor_cores):
        assert layout == "NHD"

    def plan(self, ends, pages, filled, heads, kv_heads, dim, page, **_):
        assert filled.tolist() == [page] * (len(ends) - 1)
        self.ends, self.pages = ends, pages

    def run(self, q, kv):
        return torch.cat(
            [
                attend(q[n : n + 1], *(x[self.pages[a:b].long()].flatten(0, 1) for x in kv), None)
                for n, (a, b) in enumerate(zip(self.ends, self.ends[1:], strict=False))
            ]
        )


def varlen_attn(q, k, v, q_ends, k_ends, most_q, most_k, *, window_size, enable_gqa):
    assert enable_gqa
    parts = []
    for n in range(len(q_ends) - 1):
        rows, keys = slice(*q_ends[n : n + 2].tolist()), slice(*k_ends[n : n + 2].tolist())
        count, seen = rows.stop - rows.start, keys.stop - keys.start
        assert count <= most_q
        assert seen <= most_k
        mask = torch.ones(count, seen, dtype=torch.bool)
        if window_size == (-1, 0):
            mask = mask.tril(seen - count)
        parts.append(attend(q[rows], k[keys], v[keys], mask))
    return torch.cat(parts)


@pytest.fixture
def libraries(monkeypatch):
    stand_in = SimpleNamespace(
        BatchPrefillWithRaggedKVCacheWrapper=Ragged, BatchDecodeWithPagedKVCacheWrapper=Paged
    )
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in)
    monkeypatch.setitem(
        sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=varlen_attn)
    )


def row_of(shape):
    row = kernel_attention.attention_row(shape, CPU, torch.float32)
    kernel_attention.add_others(row, shape, CPU, torch.float32)
    return row


@pytest.mark.parametrize("name", SHAPES)
def test_every_neighbour_gives_the_exact_answer_and_a_time(name, libraries):
    row = row_of(SHAPES[name])
    own = [n for n in row["ms"] if not n.startswith(("kvrag", "sdpa"))]
    assert own == list(kernel_neighbours.neighbours_of(SHAPES[name]))
    assert [n for n in row["ms"] if not isinstance(row["ms"][n], float)] == []
    assert set(own) <= set(row["useful_tflops"])


def test_a_wrong_answer_is_not_timed(libraries, monkeypatch):
    monkeypatch.setattr(Ragged, "run", lambda self, q, k, v: attend(q, k, v, None))
    row = row_of(SHAPES["scattered rows"])
    assert row["ms"]["flashinfer ragged, mask"].startswith("not timed: its error is")
    assert "flashinfer ragged, mask" not in row["useful_tflops"]


def test_what_is_absent_or_refuses_says_so(libraries, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setattr(
        sys.modules["torch.nn.attention.varlen"], "varlen_attn", lambda *_, **__: 1 / 0
    )
    row = row_of(SHAPES["a step of requests"])
    assert row["ms"]["flashinfer paged decode"] == "not installed: flashinfer"
    assert row["ms"]["flash varlen"].startswith("ZeroDivisionError")
    assert isinstance(row["ms"]["flex attention"], float)
