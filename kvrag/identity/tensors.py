"""The bytes of tensors, for digests: the same values give the same bytes, wherever they are kept and however they are packed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch


def leaves(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the plain tensors that a tensor is made of, with their names: quantised ones pack several (values, scales, zero points)."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield "", tensor
        return
    for name in flatten()[0]:
        for inner, leaf in leaves(getattr(tensor, name)):
            yield f"{name}.{inner}", leaf


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """SHA-256 of a tensor's type, shape and values."""
    total = hashlib.sha256(f"{type(tensor).__name__ if is_packed(tensor) else ''}{tuple(tensor.shape)}".encode())
    for name, leaf in leaves(tensor):
        total.update(f"\0{name}{leaf.dtype}{tuple(leaf.shape)}".encode())
        total.update(raw(leaf))
    return total.digest()


def raw(tensor: torch.Tensor) -> memoryview:
    """Bytes of a plain tensor, copied to the host if they are not there."""
    try:
        return tensor.view(torch.uint8).numpy().data.cast("B")  # the same in half the time: a chunk has many tensors
    except (RuntimeError, TypeError):
        pass  # on a device, not contiguous, without dimensions or values
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def is_packed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is made of several, as quantised weights are."""
    return hasattr(tensor, "__tensor_flatten__")


def content_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 (hex) of named tensors, whatever their order; what several names share is read once."""
    seen: dict[object, bytes] = {}
    total = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        place = _place(tensor)
        if place is None or place not in seen:
            content = tensor_bytes(tensor)
            if place is not None:
                seen[place] = content
        else:
            content = seen[place]
        total.update(len(name).to_bytes(4, "little") + name.encode() + content)
    return total.hexdigest()


def _place(tensor: torch.Tensor) -> object:
    """Where a plain tensor's values are in memory; ``None`` for packed and empty ones."""
    if is_packed(tensor) or not tensor.numel():
        return None
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


SAMPLES = 16
"""Values per tensor that :func:`sample` reads."""


def sample(tensors: Iterable[torch.Tensor]) -> bytes:
    """Read a few values of each plain tensor, spread evenly: enough to notice that a tensor was replaced or recomputed as a whole.

    One copy to the host for each dtype and device, so that it costs a millisecond where a digest would cost seconds.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            groups.setdefault((tensor.device, tensor.dtype), []).append(_spread(tensor.detach()))
    return b"".join(bytes(raw(torch.cat(group))) for group in groups.values())


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    count = min(SAMPLES, tensor.numel())
    flat = tensor if tensor.is_contiguous() else tensor.contiguous()
    return flat.as_strided((count,), (tensor.numel() // count,))


def version(tensor: torch.Tensor) -> int:
    """Count of the changes made to a tensor in place, as far as torch keeps it: changes through ``.data`` don't count."""
    return 0 if tensor.is_inference() else tensor._version
