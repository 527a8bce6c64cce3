"""Products by oneDNN: they equal torch's own, and take part only where they are right."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from kvrag.model import linear as module
from kvrag.model.linear import MAX_ODD_ROWS, Linear, has_onednn, linear, use_onednn


@pytest.fixture
def counted(monkeypatch):
    """Rows of the products that oneDNN computes."""
    if not has_onednn():
        pytest.skip("torch has no oneDNN for this processor")
    rows = []
    real = torch.ops.mkldnn._linear_pointwise

    def multiply(x, *others):
        rows.append(x.shape[-2] if x.dim() > 1 else 1)
        return real(x, *others)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", multiply)
    return rows


@pytest.mark.parametrize("shape", [(5,), (1, 5), (7, 5), (1, 261, 5), (2, 259, 5), (0, 5)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_equal_torchs(shape, has_bias, counted):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(shape), torch.randn(3, 5), torch.randn(3)
    given = bias if has_bias else None
    with torch.inference_mode():
        out = linear(x, weight, given)
        other = linear(x, weight.T.contiguous().T, given)
    assert counted
    for found in (out, other):
        assert found.shape == (*shape[:-1], 3)
        assert torch.allclose(found, F.linear(x, weight, given), atol=1e-5)


def test_an_odd_number_of_many_rows_is_padded(counted):
    with torch.inference_mode():
        for rows in (3, MAX_ODD_ROWS, MAX_ODD_ROWS + 1):
            linear(torch.ones(1, rows, 4), torch.ones(2, 4))
    assert counted == [3, MAX_ODD_ROWS, MAX_ODD_ROWS + 8]


class Packed(torch.Tensor):
    """Weight of a type of its own, as quantised weights are."""


def test_other_tensors_are_left_to_torch(counted):
    x, weight = torch.randn(4, 6), torch.randn(2, 6)
    cases = {
        "of another dtype": (x.double(), weight.double()),
        "of two dtypes": (x, weight.bfloat16()),
        "of another device": (x.to("meta"), weight.to("meta")),
        "of another type": (x, weight.as_subclass(Packed)),
    }
    with torch.inference_mode():
        for name, case in cases.items():
            if name == "of two dtypes":
                with pytest.raises(RuntimeError, match="dtype"):
                    linear(*case)
            else:
                assert linear(*case).shape == (4, 2)
    assert not counted, "with gradients"
    own = torch.nn.Parameter(weight)
    linear(x, own).sum().backward()
    assert own.grad is not None
    assert not counted


def test_plain_layers_of_a_model_change_and_answer_as_before(tiny_dir, counted):
    class Adapted(torch.nn.Linear):
        pass

    model = AutoModelForCausalLM.from_pretrained(tiny_dir)
    model.extra = Adapted(2, 2)
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        before = model(ids).logits
        assert not counted
        use_onednn(model)
        after = model(ids).logits
    assert counted
    assert torch.allclose(before, after, atol=1e-5)
    assert type(model.extra) is Adapted
    assert type(model.lm_head) is Linear


def test_torchs_own_switch_is_heeded(monkeypatch):
    monkeypatch.setattr(module, "has_onednn", module.has_onednn.__wrapped__)
    with torch.backends.mkldnn.flags(enabled=False):
        assert not module.has_onednn()
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert not module.has_onednn()
