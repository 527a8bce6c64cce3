"""``kvrag kernels info | build``: show the path of attention, and compile kernels ahead of use."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from kvrag.cli.options import AsJson
from kvrag.cli.output import facts, progress, show
from kvrag.errors import ConfigError, KVRagError

app = typer.Typer(
    name="kernels",
    no_args_is_help=True,
    help="The CUDA kernels: which path computes here, and building them ahead.",
)


@app.command()
def info(as_json: AsJson = False) -> None:
    """Show which path computes attention here, and why."""
    import kvrag_kernels

    try:
        found = kvrag_kernels.info()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    devices = [f"{d['name']} ({d['arch']}): {d['attention']}" for d in found["devices"]]
    rows = found | {
        "devices": "\n".join(devices) or "no CUDA device: torch computes",
        "failures": "\n".join(found["failures"]) or "none",
    }
    show(found, facts("Kernels", rows), as_json=as_json)


@app.command()
def build(
    arch: Annotated[
        list[str] | None,
        typer.Option(help="As sm_90; may be repeated. Default: those of common GPUs."),
    ] = None,
    head_dim: Annotated[
        list[int] | None,
        typer.Option(help="As 128; may be repeated. Default: every supported one."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compile all kernels into the cache, as for an image: attention, probe, stitch. Needs no GPU.

    An architecture takes about a minute of a core. The stitch kernel is compiled for heads of which
    all, half, a quarter or 0 channels rotate; its other variants compile at first use.
    """
    from kvrag_kernels import build as build_kernels
    from kvrag_kernels.geometry import ARCHS, HEAD_DIMS, OLDEST
    from kvrag_kernels.nvrtc import CompileError
    from kvrag_kernels.runtime import capability_of

    for name in arch or []:
        if not re.fullmatch(r"sm_\d{2,3}", name) or capability_of(name) < OLDEST:
            raise ConfigError(
                f"--arch is {name!r}; pass one of {', '.join(ARCHS)}, or another from compute "
                "capability 7.5 on"
            )
    for dim in head_dim or []:
        if dim not in HEAD_DIMS:
            raise ConfigError(
                f"--head-dim is {dim}; it must be one of {', '.join(map(str, HEAD_DIMS))}"
            )
    try:
        with progress("compiling kernels"):
            made = build_kernels(arch or ARCHS, head_dim or HEAD_DIMS)
    except CompileError as error:
        raise KVRagError(f"the kernels can't be built: {error}") from error
    show(made, facts("Variants in the cache", made), as_json=as_json)
