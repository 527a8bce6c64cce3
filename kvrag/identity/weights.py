"""Digests of weights: by hub commit, by the files' content (hashed once), or by tensors in memory.

The names and the directory of the files don't count, so a copy of a model is the same model. The
same weights in other shards or another format are other files, and their KV is recomputed.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvrag.cache import cache_dir, keep
from kvrag.identity.fingerprint import digest, text_digest

# Files of a model's directory that are hashed.
# They are the weights, the indexes of shards, an adapter's config, and the model's own code.
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf", "*.index.json", "adapter_config.json", "*.py")

# Options of ``from_pretrained`` that don't choose weights.
# Some have an effect, but it is in the loaded model's config.
NEUTRAL = {
    "attn_implementation",
    "cache_dir",
    "config",
    "device_map",
    "force_download",
    "local_files_only",
    "max_memory",
    "low_cpu_mem_usage",
    "offload_buffers",
    "offload_folder",
    "proxies",
    "quantization_config",
    "token",
    "trust_remote_code",
}

# Bytes; for smaller files, reading takes no longer than looking up a remembered digest.
_LARGE = 2**20
# A file changed this recently may change again within a tick of the file system's clock.
_RACE_NS = 2_000_000_000


def source_identity(path: str, *, commit: str | None, options: Mapping[str, Any]) -> str | None:
    """Return a digest of the weights' origin, or ``None`` if it does not determine them.

    Without a digest of their origin, the weights must be hashed. ``path`` is a local file or
    directory, or a model's name on the hub with its ``commit``; ``options`` are options of
    ``from_pretrained``.
    """
    try:
        chosen = json.dumps(
            {k: v for k, v in options.items() if k not in NEUTRAL and v is not None}, sort_keys=True
        )
    except (TypeError, ValueError):  # an option is an object
        return None
    if os.path.isdir(path):
        folder = Path(path) / str(options.get("subfolder") or "")
        files = sorted({file for pattern in WEIGHT_FILES for file in folder.glob(pattern)})
        origin = files_digest(files) if files else None
    elif os.path.isfile(path):
        origin = files_digest([Path(path)])
    else:
        origin = f"commit:{commit}" if commit else None
    if origin:
        return digest("weights", {"origin": origin, "options": chosen})
    return None


def files_digest(files: Iterable[Path]) -> str:
    """Return a digest of the contents of files, regardless of their names and order."""
    return f"files:{text_digest(''.join(sorted(map(file_digest, files))))}"


def file_digest(file: Path) -> str:
    """Return the SHA-256 (hex) of a file's content.

    The digest is remembered under path, size, times and inode of the file.
    """
    stamp = _stamp(file)
    if stamp[0] >= _LARGE:
        with contextlib.suppress(OSError, ValueError):
            known = _digest_file(file, stamp).read_text("ascii")
            if re.fullmatch(r"[0-9a-f]{64}", known):
                return known
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    is_settled = time.time_ns() - max(stamp[1], stamp[2]) > _RACE_NS
    if is_settled and stamp[0] >= _LARGE and _stamp(file) == stamp:
        keep(_digest_file(file, stamp), found)
    return found


def _digest_file(file: Path, stamp: tuple[int, ...]) -> Path:
    """Return the file that a digest is remembered in."""
    return cache_dir() / "file-digests" / text_digest(json.dumps([os.path.realpath(file), *stamp]))


def _stamp(file: Path) -> tuple[int, ...]:
    """Return size, times, inode and device of a file.

    Unlike the time of its content, the time of its inode can't be set back.
    """
    status = file.stat()
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev)


def keep_name(fingerprint: str, name: str) -> None:
    """Remember the name that a model was loaded by, for later readers of a store."""
    if kept_name(fingerprint) != name:
        keep(_name_file(fingerprint), name)


def kept_name(fingerprint: str) -> str | None:
    """Return the name that a model was last loaded by, by its fingerprint, if it is known."""
    with contextlib.suppress(OSError, ValueError):
        return _name_file(fingerprint).read_text("utf-8")
    return None


def _name_file(fingerprint: str) -> Path:
    return cache_dir() / "models" / text_digest(fingerprint)


def is_packed(tensor: Tensor) -> bool:
    """Whether a tensor consists of several tensors, as quantised weights do."""
    return hasattr(tensor, "__tensor_flatten__")


def leaves(tensor: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain tensors that a tensor consists of, with their names.

    Packed tensors hold values, scales and zero points.
    """
    if is_packed(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from ((f"{name}.{inner}", leaf) for inner, leaf in leaves(getattr(tensor, name)))
    elif not tensor.is_quantized:
        yield "", tensor
    else:
        yield "codes", tensor.int_repr()
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            yield (
                "scale",
                torch.tensor([tensor.q_scale(), tensor.q_zero_point()], dtype=torch.float32),
            )
        else:
            yield "scales", tensor.q_per_channel_scales()
            yield "zeros", tensor.q_per_channel_zero_points()


def described(settings: Any) -> str:
    """Return settings as text that is the same in every process and on every device."""
    if isinstance(settings, Mapping):
        inner = [f"{key}={described(value)}" for key, value in settings.items()]
        return f"{{{','.join(sorted(inner))}}}"
    if isinstance(settings, (tuple, list, set, frozenset)):
        return f"[{','.join(map(described, settings))}]"
    if isinstance(settings, torch.device):
        return ""
    kind = type(settings).__qualname__
    if isinstance(settings, SIMPLE):
        return f"{kind} {settings!r}"
    return kind + described(getattr(settings, "__dict__", {}))


# Types of settings whose text is all of them.
SIMPLE = (bool, int, float, str, bytes, type(None), enum.Enum, torch.dtype)


def raw(tensor: Tensor) -> memoryview:
    """Return the bytes of a plain tensor, copied to the host if they are elsewhere."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    try:
        # In half the time of the general way below.
        return tensor.view(torch.uint8).numpy().data.cast("B")
    except (RuntimeError, TypeError):
        pass  # on a device, not contiguous, without dimensions or values
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def tensor_bytes(tensor: Tensor) -> bytes:
    """Return the SHA-256 of a tensor's type, shape and values.

    It is the same on every device and in every memory layout.
    """
    kind = ""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        # Settings count too: of torchao's, only they say whether activations are rounded.
        kind = type(tensor).__name__ + described(flatten()[1])
    total = hashlib.sha256(f"{kind}{tuple(tensor.shape)}".encode())
    for name, leaf in leaves(tensor):
        total.update(f"\0{name}{leaf.dtype}{tuple(leaf.shape)}".encode())
        total.update(raw(leaf))
    return total.digest()


def content_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 (hex) of named tensors in any order.

    A tensor with several names is read once.
    """
    seen = dict[object, bytes]()
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        place: object = name
        if not is_packed(tensor) and tensor.layout is torch.strided and tensor.numel():
            place = (
                tensor.device,
                tensor.data_ptr(),
                tensor.dtype,
                tuple(tensor.shape),
                tensor.stride(),
            )
        content = seen[place] = seen.get(place) or tensor_bytes(tensor)
        total.update(len(name).to_bytes(4, "little") + name.encode() + content)
    return total.hexdigest()
