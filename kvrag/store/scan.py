"""Find NaN and infinity before they are stored, exactly, at the speed of memory.

torch compares half-precision numbers by converting each. As integers they need none of that: of all bit patterns those of
the positive numbers that are not finite are the largest with a sign, and those of the negative ones without.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from kvrag.blend.quantise import FP8

INFINITY = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80}
"""Bits of positive infinity; NaN has more. With the sign bit, 0x8000, they are those of the negative ones."""


def all_finite(view: memoryview, dtype: torch.dtype) -> bool:
    """Whether every value is finite.

    Parameters
    ----------
    view
        Writable bytes of whole values.
    dtype
        Of a number, whole numbers included.
    """
    if dtype == FP8:
        # No infinity, and NaN in either sign: all bits but that of the sign.
        return bool(((np.frombuffer(view, np.uint8) & 0x7F) != 0x7F).all())
    infinity = INFINITY.get(dtype)
    if infinity is None:
        return all_finite_on_device(torch.from_numpy(np.frombuffer(view, np.uint8)).view(dtype))
    signed = np.frombuffer(view, np.int16)
    return bool(signed.max() < infinity and signed.view(np.uint16).max() < 0x8000 | infinity)


def all_finite_on_device(tensor: torch.Tensor) -> bool:
    """Whether every value is finite, for tensors anywhere, of any shape and dtype."""
    if tensor.dtype == FP8:  # torch compares none of them
        return bool(((tensor.detach().view(torch.uint8) & 0x7F) != 0x7F).all())
    low, high = torch.aminmax(tensor.detach())
    return math.isfinite(low.item()) and math.isfinite(high.item())
