"""See a blob's bytes as tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvrag.blend.quantise import Part, layer_of
from kvrag.store.header import Header
from kvrag.types import LayerKV


class Views(Sequence[LayerKV]):
    """Layers that differ, or that are codes with scales, made one by one of bytes that are there."""

    def __init__(self, header: Header, buffer: torch.Tensor) -> None:
        self._dtype, self._tensors, self._buffer = header.dtype, header.tensors, buffer

    def __len__(self) -> int:
        return len(self._tensors.layers)

    def __getitem__(self, index: int) -> LayerKV:  # type: ignore[override]
        start, tensors = self._tensors.offsets[index], []
        for part in self._tensors.layers[index]:
            tensors.append(_typed(self._buffer[start : start + part.num_bytes], part))
            start += part.num_bytes
        return layer_of(self._dtype, tensors)


def _typed(flat: torch.Tensor, part: Part) -> torch.Tensor:
    """See bytes as a tensor; scales behind an odd number of codes are copied first."""
    if flat.storage_offset() % part.dtype.itemsize:
        flat = flat.clone()
    return flat.view(part.dtype).view(part.shape)
