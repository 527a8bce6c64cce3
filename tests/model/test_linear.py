"""Products by oneDNN: they equal torch's own, and take part only where they are right."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvrag.identity.model import weights_digest
from kvrag.model import linear as module
from kvrag.model.linear import MAX_ODD_ROWS, Linear, has_onednn, linear, use_own_products
from kvrag.model.load import load
from kvrag.model.source import ModelSource


@pytest.fixture
def counted(monkeypatch):
    """Rows of the products that oneDNN computes."""
    if not has_onednn():
        pytest.skip("oneDNN is not used on this processor")
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


def test_odd_numbers_of_many_rows_are_padded(counted):
    with torch.inference_mode():
        for shape in ((1, 3), (1, MAX_ODD_ROWS), (1, MAX_ODD_ROWS + 1), (3, 101)):
            out = linear(torch.ones(*shape, 4), torch.ones(2, 4))
            assert out.shape == (*shape, 2)
            assert out.is_contiguous(), "models view what a layer returns"
    assert counted == [3, MAX_ODD_ROWS, MAX_ODD_ROWS + 8, 304]


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
    assert not counted
    own = torch.nn.Parameter(weight)
    linear(x, own).sum().backward()  # with gradients
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
        use_own_products(model)
        after = model(ids).logits
    assert counted
    assert torch.allclose(before, after, atol=1e-5)
    assert type(model.extra) is Adapted
    assert type(model.lm_head) is Linear


def test_torchs_own_settings_are_heeded(counted):
    x, weight = torch.randn(4, 6), torch.randn(2, 6)
    with torch.inference_mode():
        with torch.backends.mkldnn.flags(enabled=False):
            linear(x, weight)
        with torch.autocast("cpu", torch.bfloat16):
            assert linear(x, weight).dtype is torch.bfloat16
        assert not counted
        linear(x, weight)
    assert counted


def test_torchs_compiler_gets_its_own_operator(counted):
    """It refuses oneDNN's for weights that are not constants."""
    layer = Linear(6, 2)
    x = torch.randn(4, 6)
    with torch.inference_mode():
        compiled = torch.compile(layer, backend="eager", fullgraph=True)(x)
        assert not counted
        assert torch.allclose(compiled, layer(x), atol=1e-6)
    assert counted


@pytest.mark.parametrize("about", ["vendor_id : GenuineIntel", ""])
def test_other_processors_are_left_alone(about, monkeypatch):
    monkeypatch.setattr("platform.processor", lambda: about)
    monkeypatch.setattr(Path, "read_text", lambda _: about)
    assert not module._is_faster.__wrapped__()
    monkeypatch.setattr("platform.processor", lambda: "AMD64 Family 25, AuthenticAMD")
    assert module._is_amd()


def test_models_that_are_loaded_here_get_the_layers_and_given_models_keep_theirs(tiny_dir):
    given = AutoModelForCausalLM.from_pretrained(tiny_dir)
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    kept = load(ModelSource(given, tokenizer=tokenizer))
    own = load(ModelSource(tiny_dir))
    assert type(kept.lm.model.lm_head) is torch.nn.Linear
    assert type(own.lm.model.lm_head) is Linear
    for each in (kept, own):  # what tools leave on a linear layer is no weight
        each.lm.model.lm_head.left_behind = torch.ones(2)
    digests = {weights_digest(each.lm.model) for each in (kept, own)}
    assert len(digests) == 1
