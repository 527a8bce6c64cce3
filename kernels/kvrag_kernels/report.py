"""Report of the path that computes attention, for ``kvrag kernels info`` and bug reports."""

from __future__ import annotations

from typing import Any

import torch

from kvrag_kernels import nvrtc, runtime
from kvrag_kernels.geometry import ARCHS, DTYPES, HEAD_DIMS, supports
from kvrag_kernels.runtime import arch_of, mode, takes_hopper


def info() -> dict[str, Any]:
    """Return the path that computes attention here, and the reason.

    Asks the compiler whether it knows the devices; compiles and loads no kernel. ``failures`` lists
    the failures of this process.

    Raises
    ------
    ValueError
        If ``KVRAG_KERNEL`` is not a known mode.
    """
    compiler = None
    missing = ""
    try:
        compiler = nvrtc.find()
    except nvrtc.CompileError as error:
        missing = str(error)
    devices = []
    for i in range(torch.cuda.device_count() if torch.version.cuda else 0):
        capability = torch.cuda.get_device_capability(i)
        path = _path(capability, compiler, missing)
        devices.append(
            {"name": torch.cuda.get_device_name(i), "arch": arch_of(capability), "attention": path}
        )
    return {
        "mode": mode(),
        "devices": devices,
        "attention_elsewhere": "torch",
        "nvrtc": f"{compiler.version[0]}.{compiler.version[1]} ({compiler.path})"
        if compiler
        else missing,
        "cache": str(nvrtc.cache_folder() or "none: this user has no home; set KVRAG_CACHE"),
        "failures": list(runtime.modules.failures),
    }


def _path(capability: tuple[int, int], compiler: nvrtc.Nvrtc | None, missing: str) -> str:
    """Return the best available kernel for a device with its dtypes, or torch.

    Says why no better kernel is available, if there is a reason.
    """
    arch = arch_of(capability)
    kinds = [str(d).removeprefix("torch.") for d in DTYPES if supports(HEAD_DIMS[0], d, capability)]
    if mode() == "torch":
        return "torch, because KVRAG_KERNEL is torch"
    if not kinds:
        return f"torch, because the kernels need {ARCHS[0]} or newer and this is {arch}"
    if compiler is None:
        return f"torch, because {missing}"
    kernels = [("ragged_mma", arch)]
    if takes_hopper(capability):
        kernels.insert(0, ("ragged_sm90", f"{arch}a"))
    reasons = []
    for kernel, wanted in kernels:
        try:
            compiler.nearest(wanted)
        except nvrtc.CompileError as error:
            reasons.append(str(error))
        else:
            return ", because ".join([f"{kernel} ({', '.join(kinds)})", *reasons])
    return f"torch, because {reasons[-1]}"
