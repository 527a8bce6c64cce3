"""Errors of loading keep their own reason and remedy; files are called damaged only if they may be."""

import errno
import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit import raising
from torch.nn.parallel import DataParallel

from kvrag import ConfigError, KVRagEngine, ModelError
from kvrag.config.address import answers
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
    (ValueError("pass trust_remote_code=True"), "--trust-remote-code is for vLLM alone"),
    (
        ValueError("model type `new` but Transformers does not recognize this architecture"),
        "update",
    ),
    (OSError("You are trying to access a gated repo."), "log in"),
    (OSError("401 Client Error: Unauthorized for url"), "log in"),
    (RuntimeError("Found no NVIDIA driver on your system."), "device='cpu'"),
    (RuntimeError("CUDA error: out of memory"), "memory ran out"),
    (ValueError("requires Triton: CUDA requires it. Please `pip install triton`"), "install it"),
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


def folder_of(place: Path, damage: Callable[[Path], object]) -> Path:
    """Return a model's directory after some damage."""
    tiny_model().save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    damage(place)
    return place


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])


def only_adapter(text: str) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        (folder / "config.json").unlink()
        (folder / "adapter_config.json").write_text(text)

    return damage


DAMAGES: dict[str, Callable[[Path], object]] = {
    "config": lambda folder: (folder / "config.json").write_text('{"model_type": "llama", '),
    "weights cut": cut,
    "weights empty": lambda folder: (folder / "model.safetensors").write_bytes(b""),
    "weights gone": lambda folder: (folder / "model.safetensors").unlink(),
    "tokenizer": lambda folder: (folder / "tokenizer.json").write_text("{"),
    "adapter": only_adapter("{"),
    "adapter nested": only_adapter("[" * 100_000),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["plain", "cuda", "flash_attn", "gated", "out of memory"])
def test_files_that_are_damaged_are_called_damaged(damage, name, tmp_path):
    """The words of a path are no reason."""
    folder = folder_of(tmp_path / name, DAMAGES[damage])
    with pytest.raises(ModelError, match="damaged"):
        _ = KVRagEngine.from_pretrained(folder).loaded


@pytest.mark.parametrize(
    "option",
    [
        {"variant": "fp16"},
        {"subfolder": "part"},
        {"attn_implementation": "fast"},
        {"use_safetensors": False},
    ],
    ids=str,
)
def test_an_option_that_does_not_go_with_the_files_is_named(option, tiny_dir):
    with pytest.raises(ModelError, match=f"do not go with {next(iter(option))}") as found:
        _ = KVRagEngine.from_pretrained(tiny_dir, **option).loaded
    assert "damaged" not in str(found.value)


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    """safetensors says of such a file that it does not exist."""
    folder = folder_of(tmp_path / "closed", lambda folder: (folder / "model.safetensors").unlink())
    (folder / "model.safetensors").write_bytes(b"")
    monkeypatch.setattr(os, "access", lambda path, _: Path(path).name != "model.safetensors")
    with pytest.raises(ModelError, match=r"'model\.safetensors' can't be read by this user"):
        _ = KVRagEngine.from_pretrained(folder).loaded


def test_a_tokenizers_fault_names_the_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(
        ModelError, match=r"could not load the tokenizer '.*': its files are damaged"
    ):
        _ = KVRagEngine.from_pretrained(tiny_model(), tokenizer=str(tmp_path)).loaded


def test_a_tokenizer_that_is_not_here_may_need_a_package(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer '.*not here.*sentencepiece"):
        _ = KVRagEngine.from_pretrained(tiny_model(), tokenizer=str(tmp_path)).loaded


def test_a_device_beyond_the_last_is_refused_before_the_weights_load(tiny_dir, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"'cuda:2'.* finds 2 CUDA"):
        source_module.resolve_device(source_module.ModelSource(tiny_dir, device="cuda:2"))


class Wrapper(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.inner = model


def compiled(model: torch.nn.Module) -> Any:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize(
    ("wrap", "inside"),
    [
        (compiled, "model._orig_mod,"),
        (DataParallel, "model.module,"),
        (lambda model: DataParallel(compiled(model)), "model.module._orig_mod,"),
        (Wrapper, "model.inner,"),
        (lambda model: SimpleNamespace(model=model), "model.model,"),
    ],
    ids=["compiled", "DataParallel", "both", "own", "pipeline"],
)
def test_a_model_inside_another_object_is_named(wrap, inside):
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


def test_an_adapter_whose_base_is_on_the_hub_does_not_wait_for_it(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    source_module._hub_answers.cache_clear()
    about = {"base_model_name_or_path": "owner/no-such-base", "peft_type": "LORA"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(about))
    asked = []
    monkeypatch.setattr(source_module, "_hub_answers", lambda _: False)
    monkeypatch.setattr(
        source_module.AutoConfig,
        "from_pretrained",
        lambda *_, **options: asked.append(options) or raising(OSError, "not in the cache")(),
    )
    with pytest.raises(ModelError, match=r"'owner/no-such-base'.*connection"):
        _ = KVRagEngine.from_pretrained(tmp_path).loaded
    assert asked[0]["local_files_only"]


def test_one_wait_holds_for_all_addresses_of_a_hub(monkeypatch):
    """A firewall that drops packets makes every address wait; so does a look-up of the name."""
    held = threading.Event()
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: held.wait())
    try:
        assert not answers("https://hub.example", 0.01)
    finally:
        held.set()


@pytest.mark.parametrize("options", [{"local_files_only": False}, {"proxies": {"https": "proxy"}}])
def test_a_hub_is_not_looked_up_where_the_caller_decides(options, monkeypatch):
    monkeypatch.setattr(source_module, "_hub_answers", raising(AssertionError, "looked up"))
    source = source_module.ModelSource("owner/model", hf_kwargs=options)
    assert source_module.loading_options(source).get("local_files_only", False) is False
