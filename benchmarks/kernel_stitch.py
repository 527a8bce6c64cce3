"""The stitch of all layers and the shift's launches: time on the device, and apart from it the time from the call to the device's rest.

Codes are laid out as ``kvrag/kv/quantise.py`` keeps them. Bytes moved are what is read of the store and written to the buffer.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from kernel_attention import kernel_mode
from kernel_targets import STITCHED

from kvrag_kernels import stitch

TOKEN_GROUP = 32
RUNS = 5
CYCLES_PER_MS = 2_000_000
"""Of a device's clock: few are faster."""

Tensors = list[torch.Tensor]


def times_of(run: Callable[[], object], device: torch.device, calls: int = 1) -> dict[str, float]:
    """Median times of one of the ``calls`` that ``run`` makes.

    ``wall_ms`` is from the call to the device's rest, what the host does before a launch included. ``device_ms`` is between two events
    while the device is kept busy until the host has launched; of a chain with more launches than the device's queue takes, some of
    the host's time remains in it. On a CPU both are one.
    """
    wall = statistics.median(
        [_wall(run, device) for _ in range(RUNS + 1)][1:]
    )  # the first call compiles
    on_device = (
        wall
        if device.type != "cuda"
        else statistics.median(_on_device(run, wall) for _ in range(RUNS))
    )
    return {"device_ms": on_device / calls, "wall_ms": wall / calls}


def _wall(run: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def _on_device(run: Callable[[], object], wall: float) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(2 * wall * CYCLES_PER_MS))
    start.record()
    run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop)


def with_rate(times: dict[str, float], moved: int) -> dict[str, float]:
    """Add the bytes moved, and GB/s by device time."""
    return times | {"moved_bytes": moved, "gb_s": moved / times["device_ms"] / 1e6}


def stitch_row(device: torch.device, dtype: torch.dtype, is_dry: bool) -> dict[str, Any]:
    """Stitch 16 chunks, 16-bit or as codes, into all layers of an 8B shape in one call, beside the chain of torch operations."""
    layers, heads, dim, chunk, count = (2, 2, 64, 40, 2) if is_dry else (32, 8, 128, 512, 16)
    angles = torch.rand(1, chunk * count, dim // 2, device=device) * 6
    places = [
        [torch.empty(heads, chunk * count, dim, device=device, dtype=dtype) for _ in range(layers)]
        for _ in range(2)
    ]
    starts, tables = [i * chunk for i in range(count)], [0] * layers
    found: dict[str, Any] = {}
    for codec in STITCHED:
        keys, values, options = stored_parts(
            codec, count, (layers, heads, chunk, dim), device, dtype
        )
        read = [*keys, *values, *(x for side in options.values() for x in side)]
        moved = sum(x.nbytes for x in [*read, *(x for side in places for x in side)])
        for mode in ("auto", "torch"):
            run = functools.partial(
                stitch, keys, values, *places, starts, angles.cos(), angles.sin(), tables, **options
            )
            with kernel_mode(mode):
                found[f"{codec}, {mode}"] = with_rate(times_of(run, device), moved)
    return found


def stored_parts(
    codec: str,
    count: int,
    shape: tuple[int, int, int, int],
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Tensors, Tensors, dict[str, Tensors]]:
    """Return keys, values, and the scales and zeros of a codec, each chunk with its own."""
    *outer, rows, dim = shape

    def made(*size: int) -> Tensors:
        return [torch.rand(*outer, *size, device=device).half() for _ in range(count)]

    if codec == "16-bit":
        keys, values = (
            [torch.randn(shape, device=device, dtype=dtype) for _ in range(count)] for _ in range(2)
        )
        return keys, values, {}
    if codec.startswith("int4"):
        kind, low, high, width, groups, channels = (
            torch.uint8,
            0,
            256,
            dim // 2,
            -(-rows // TOKEN_GROUP),
            dim // 32,
        )
    else:
        kind, low, high, width, groups, channels = torch.int8, -127, 128, dim, 1, 1
    size = (*outer, rows, width)
    codes = [torch.randint(low, high, size, dtype=kind, device=device) for _ in range(2 * count)]
    beside = {"key_scales": made(groups, dim), "value_scales": made(rows, channels)}
    if codec.endswith("zeros"):
        beside["key_zeros"] = made(groups, dim)
    return codes[:count], codes[count:], beside


def shift_row(device: torch.device, dtype: torch.dtype, is_dry: bool) -> dict[str, Any]:
    """Time a layer's residual shift with 15% of the rows repaired, and what is computed for it once for all layers."""
    from kvrag.blend.covariance import RowCovariance
    from kvrag.blend.layout import place, rows_of
    from kvrag.blend.repair import residual_shift

    layers, heads, dim, chunk, count = (3, 2, 64, 40, 2) if is_dry else (8, 8, 128, 512, 16)
    model = _model_of(layers, heads, dim, chunk * (count + 1), device, dtype)
    live = (32, "live", False, -1, False)
    layout = place([live, *((chunk, "chunk", False, i, False) for i in range(count)), live])  # type: ignore[list-item]
    picked = torch.rand(layout.num_tokens, generator=torch.Generator().manual_seed(0)) < 0.15
    picked[rows_of(layout.live)] = True
    rows = picked.nonzero()[:, 0]
    fresh = torch.randn(2, 1, heads, len(rows), dim, device=device, dtype=dtype)
    buffer = model.buffer(layout.num_tokens)
    for tensors in buffer.layers:
        for tensor in tensors:
            tensor.normal_()
    with torch.inference_mode():
        shift = residual_shift(
            RowCovariance.of(buffer, layout), layout, rows, 1.0, model.rotary(layout.num_tokens)
        )
        assert shift is not None
        shift = shift.for_tensor_cores(dtype)

        def run() -> None:
            for i in range(1, layers):
                shift(i, buffer.keys(i), buffer.values(i), *fresh)

        return {
            "a layer": times_of(run, device, layers - 1),
            "weights": times_of(
                lambda: RowCovariance.of(buffer, layout).weights(shift.at), device, 1
            ),
        }


def _model_of(
    layers: int, heads: int, dim: int, rows: int, device: torch.device, dtype: torch.dtype
) -> Any:
    """A model with real heads and little else: for its rotation and the shape of its buffer."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from kvrag.model import CausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        vocab_size=400,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=dim,
        max_position_embeddings=2 * rows,
    )
    with torch.device(device):
        return CausalLM(AutoModelForCausalLM.from_config(config, dtype=dtype).eval())
