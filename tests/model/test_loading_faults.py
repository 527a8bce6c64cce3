"""Errors of loading keep their own reason and remedy; files are called damaged only if they may be."""

import errno
import socket

import pytest
import torch
from kit import raising
from torch.nn.parallel import DataParallel

from kvrag import ConfigError, KVRagEngine, ModelError
from kvrag.model import load as load_module
from kvrag.model import source as source_module
from kvrag.testing.models import tiny_model
from kvrag.testing.tokenizers import tiny_tokenizer

FAULTS = [
    (RuntimeError("Cannot access accelerator device when none is available."), "device='cpu'"),
    (AssertionError("Torch not compiled with CUDA enabled"), "device='cpu'"),
    (RuntimeError("No CUDA GPUs are available"), "device='cpu'"),
    (ImportError("FlashAttention2 ... the package doesn't seem to be installed."), "install it"),
    (ImportError("Using `bitsandbytes` 4-bit quantization requires bitsandbytes"), "install it"),
    (ModuleNotFoundError("No module named 'tiktoken'"), "install it"),
    (MemoryError(), "memory ran out"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "memory ran out"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "memory ran out"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), "memory ran out"),
    (PermissionError(errno.EACCES, "Permission denied", "model.safetensors"), "give access"),
    (OSError(errno.ENOSPC, "No space left on device"), "free space"),
    (ValueError("The repository contains custom code ... trust_remote_code=True"), "read it, and"),
    (
        ValueError("model type `new` but Transformers does not recognize this architecture"),
        "update",
    ),
    (OSError("You are trying to access a gated repo."), "log in"),
    (OSError("401 Client Error: Unauthorized for url"), "log in"),
]


@pytest.mark.parametrize(("fault", "remedy"), FAULTS, ids=lambda each: str(each)[:40])
def test_a_fault_that_is_not_the_files_keeps_its_reason(
    tiny_dir, tmp_path, monkeypatch, fault, remedy
):
    monkeypatch.setattr(
        load_module.AutoModelForCausalLM, "from_pretrained", raising(type(fault), *fault.args)
    )
    with pytest.raises(ModelError, match="could not load") as found:
        _ = KVRagEngine.from_pretrained(tiny_dir, cache_dir=str(tmp_path)).loaded
    assert remedy in str(found.value)
    assert "damaged" not in str(found.value)
    assert found.value.__cause__ is not None


def test_files_that_are_damaged_are_called_damaged(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", ')
    with pytest.raises(ModelError, match="damaged"):
        _ = KVRagEngine.from_pretrained(tmp_path).loaded


@pytest.mark.parametrize(
    ("wrap", "inside"),
    [
        (lambda model: torch.compile(model, backend="eager"), "model._orig_mod"),
        (DataParallel, "model.module"),
    ],
    ids=["compiled", "DataParallel"],
)
def test_a_model_inside_another_module_is_named(wrap, inside):
    with pytest.raises(ConfigError, match=inside):
        _ = KVRagEngine.from_pretrained(wrap(tiny_model()), tokenizer=tiny_tokenizer()).loaded


def test_a_hub_that_can_not_be_reached_is_not_asked_again_and_again(monkeypatch):
    """The client's own retries take half a minute."""
    source_module._hub_answers.cache_clear()
    asked = []
    monkeypatch.setattr(source_module.huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(source_module.urllib.request, "getproxies", dict)
    monkeypatch.setattr(socket, "create_connection", raising(OSError, errno.ENETUNREACH, "no net"))
    monkeypatch.setattr(
        source_module.AutoConfig,
        "from_pretrained",
        lambda *_, **options: asked.append(options) or raising(OSError, "not in the cache")(),
    )
    with pytest.raises(ModelError, match="check the name and the connection"):
        _ = KVRagEngine.from_pretrained("owner/no-such-model").loaded
    assert asked[0]["local_files_only"]
    source_module._hub_answers.cache_clear()


@pytest.mark.parametrize("proxies", [{}, {"https": "http://proxy:3128"}], ids=["direct", "proxy"])
def test_a_hub_that_answers_is_asked(monkeypatch, proxies):
    source_module._hub_answers.cache_clear()
    monkeypatch.setattr(source_module.huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(source_module.urllib.request, "getproxies", lambda: proxies)
    connections = []
    ours, theirs = socket.socketpair()
    with theirs:

        def connect(address, timeout):
            connections.append(address)
            return ours

        monkeypatch.setattr(socket, "create_connection", connect)
        assert source_module._hub_answers(0)
    assert len(connections) == (0 if proxies else 1)
    ours.close()
    source_module._hub_answers.cache_clear()
