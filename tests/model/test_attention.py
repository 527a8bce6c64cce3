"""The attention op: every path equals a float64 reference with an exact limit per row."""

import pytest
import torch

from kvrag.model.attention import PRODUCT_ROWS, Mass, ragged_attention
from kvrag.model.linear import has_onednn
from kvrag.model.rows import BLOCK_ROWS, EVERYTHING, Limits, Reach
from kvrag_kernels.reference import mass as mass_of


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    hi: torch.Tensor,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Naive float64 attention; also the probabilities."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(groups, dim=1) for x in (k, v))
    scores = q.double() @ k.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    j = torch.arange(k.shape[2])
    visible = j <= hi[:, None]
    if window is not None:
        visible &= j > hi[:, None] - window
    if chunk is not None:
        visible &= j // chunk == hi[:, None] // chunk
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        extra = sinks.double().reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
        p = torch.softmax(torch.cat([scores, extra], -1), -1)[..., :-1]
    else:
        p = torch.softmax(scores, -1)
    return p @ v, p


def random_case(
    heads: int, kv_heads: int, rows: int, keys: int, batch: int = 1, dim: int = 16
) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(heads * 1000 + rows + keys)
    hi = torch.sort(torch.randperm(keys)[:rows]).values
    hi[-1] = keys - 1
    return (
        torch.randn(batch, heads, rows, dim),
        torch.randn(batch, kv_heads, keys, dim),
        torch.randn(batch, kv_heads, keys, dim),
        hi,
    )


def use_products(monkeypatch: pytest.MonkeyPatch, *, is_used: bool) -> None:
    for module in ("attention", "linear"):
        monkeypatch.setattr(f"kvrag.model.{module}.has_onednn", lambda: is_used)
    monkeypatch.setattr("kvrag.model.attention.MIN_SCORES", 0)


@pytest.fixture(params=["blocks", "products", "op"])
def path(request, monkeypatch):
    """Blocks by torch's fused attention, or by oneDNN's products, or the op of ``kvrag_kernels``: without a GPU it computes with torch."""
    if request.param == "products" and not has_onednn():
        pytest.skip("oneDNN is not used on this processor")
    monkeypatch.setattr("kvrag.model.attention._has_kernel", lambda *_: request.param == "op")
    use_products(monkeypatch, is_used=request.param == "products")
    with torch.inference_mode():
        yield str(request.param)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(
    ("window", "chunk"), [(None, None), (1, None), (17, None), (1000, None), (None, 23), (17, 40)]
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize(
    ("rows", "keys"), [(1, 1), (1, 50), (7, 64), (BLOCK_ROWS + 3, 400), (PRODUCT_ROWS + 44, 300)]
)
def test_rows_see_exactly_their_keys(rows, keys, heads, kv_heads, window, chunk, softcap):
    q, k, v, hi = random_case(heads, kv_heads, rows, keys, batch=2)
    out = ragged_attention(
        q, k, v, Limits(hi, keys), scale=0.3, reach=Reach(window, chunk), softcap=softcap
    )
    expected, _ = reference(q, k, v, hi, 0.3, window, chunk, softcap)
    assert torch.allclose(out.double(), expected, atol=1e-5)


@pytest.mark.usefixtures("path")
def test_values_may_be_narrower_and_cut_from_wider_rows():
    """Latent attention makes keys' parts and values in a product, and splits its rows."""
    q, k, _, hi = random_case(4, 4, 40, 90, batch=2)
    wide = torch.randn(2, 90, 4, 24).transpose(1, 2)
    out = ragged_attention(q, k, wide[..., 12:], Limits(hi, 90), scale=0.3)
    expected, _ = reference(q, k, wide[..., 12:], hi, 0.3)
    assert torch.allclose(out.double(), expected, atol=1e-5)


def test_products_take_large_blocks_alone(monkeypatch):
    """Far rows of a window are blocks of a row each, which torch's fused kernel takes."""
    if not has_onednn():
        pytest.skip("oneDNN is not used on this processor")
    calls = []
    monkeypatch.setattr(
        "kvrag.model.attention.linear", lambda *x: calls.append(x) or torch.nn.functional.linear(*x)
    )
    monkeypatch.setattr("kvrag.model.attention.MIN_SCORES", 1000)
    q, k, v, _ = random_case(6, 2, 20, 400)
    near, far = torch.arange(380, 400), torch.arange(19, 400, 20)
    for hi, is_large in ((near, True), (far, False)):
        out = ragged_attention(q, k, v, Limits(hi, 400), scale=0.3, reach=Reach(12))
        expected, _ = reference(q, k, v, hi, 0.3, window=12)
        assert torch.allclose(out.double(), expected, atol=1e-5)
        assert len(calls) == (4 if is_large else 0)
        calls.clear()


@pytest.mark.usefixtures("path")
def test_sinks_take_probability_away():
    q, k, v, hi = random_case(4, 2, 20, 60)
    sinks = torch.randn(4)
    out = ragged_attention(q, k, v, Limits(hi, 60), scale=0.25, sinks=sinks)
    expected, _ = reference(q, k, v, hi, 0.25, sinks=sinks)
    assert torch.allclose(out.double(), expected, atol=1e-5)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("mass_rows", [1, 5, 140])
def test_mass_is_the_most_that_one_of_the_last_rows_pays(mass_rows):
    q, k, v, hi = random_case(6, 2, 150, 400)
    mass = Mass(torch.zeros(400), mass_rows)
    out = ragged_attention(q, k, v, Limits(hi, 400), scale=0.25, mass=mass)
    expected, p = reference(q, k, v, hi, 0.25)
    assert torch.allclose(out.double(), expected, atol=1e-5)
    assert torch.allclose(
        mass.total.double(), mass_of(p[:, :, -mass_rows:], k.shape[1]).sum(dim=0), atol=1e-4
    )


def test_fast_paths_equal_the_general_path(monkeypatch):
    """One fused causal call where the rows are the whole prompt; blocks otherwise."""
    use_products(monkeypatch, is_used=False)
    q, k, v, _ = random_case(6, 2, 200, 200)
    whole = Limits(torch.arange(200), 200)
    fast = [
        ragged_attention(q, k, v, whole, scale=0.25, reach=reach)
        for reach in (EVERYTHING, Reach(200))
    ]
    assert not whole.kept
    for reach in (Reach(chunk=64), Reach(199)):
        assert not torch.allclose(
            ragged_attention(q, k, v, whole, scale=0.25, reach=reach), fast[0], atol=1e-5
        )
    general = ragged_attention(q, k, v, whole, scale=0.25, mass=Mass(torch.zeros(200), 200))
    assert torch.allclose(fast[0], general, atol=1e-5)
    assert torch.equal(*fast)


@pytest.mark.parametrize(("head", "is_padded"), [(1, True), (25, True), (26, False)])
def test_a_long_prompt_but_for_its_short_head_is_one_fused_call(head, is_padded, monkeypatch):
    use_products(monkeypatch, is_used=False)
    assert Limits(torch.arange(head, 200), 200).padding is None, "a short prompt"
    monkeypatch.setattr("kvrag.model.rows.MAX_BLOCKED", 1000)
    q, k, v, _ = random_case(6, 2, 200 - head, 200)
    rest, hi = Limits(torch.arange(head, 200), 200), torch.arange(head, 200)
    out = ragged_attention(q, k, v, rest, scale=0.25)
    assert (not rest.kept) == is_padded
    assert torch.allclose(out.double(), reference(q, k, v, hi, 0.25)[0], atol=1e-5)
    assert Limits(torch.cat([hi[:1] - 1, hi[1:]]), 200).padding is None, "rows with a gap"


def test_large_masks_are_not_kept(monkeypatch):
    q, k, v, hi = random_case(6, 2, 150, 400)
    kept, made = Limits(hi, 400), Limits(hi, 400)
    one = ragged_attention(q, k, v, kept, scale=0.25)
    monkeypatch.setattr("kvrag.model.rows.MAX_CACHED_MASK", 1000)
    assert torch.equal(ragged_attention(q, k, v, made, scale=0.25), one)
    assert kept.kept
    assert not made.kept


def test_blocks_cut_keys_at_their_last_limit():
    plan = Limits(torch.arange(0, 4000, 10), 3991)
    blocks = list(plan.blocks(EVERYTHING))
    assert [b.keys.stop for b in blocks[:2]] == [BLOCK_ROWS * 10 - 9, BLOCK_ROWS * 20 - 9]
    assert blocks[-1].keys.stop == 3991
    assert blocks[1].sure == BLOCK_ROWS * 10 + 1
    assert list(plan.blocks(Reach(100)))[1].keys.start == BLOCK_ROWS * 10 - 99
    assert next(iter(plan.blocks(EVERYTHING))) is blocks[0]
    packed = blocks[1].packed_mask(3, torch.float64)
    assert packed.shape == (3 * BLOCK_ROWS, blocks[1].keys.stop)
    assert packed is blocks[1].packed_mask(3, torch.float64)
