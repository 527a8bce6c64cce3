"""Compiled kernels on disk, keyed by everything that changes them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path


def folder() -> Path | None:
    """Return ``$KVRAG_CACHE/kernels``, ``$KVRAG_CACHE_DIR/kernels`` or ``~/.cache/kvrag/kernels``.

    ``None`` for a user without a home, as in some containers.
    """
    if root := os.environ.get("KVRAG_CACHE") or os.environ.get("KVRAG_CACHE_DIR"):
        return Path(root, "kernels")
    if root := os.environ.get("XDG_CACHE_HOME"):
        return Path(root, "kvrag", "kernels")
    try:
        return Path.home() / ".cache" / "kvrag" / "kernels"
    except RuntimeError:
        return None


def key_of(source: str, options: Sequence[str], version: tuple[int, int], arch: str) -> str:
    """Return the SHA-256 of source, options, compiler version and architecture; no two of them can run into each other."""
    digest = hashlib.sha256()
    for part in (source, *options, f"{version[0]}.{version[1]}", arch):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def get(key: str, make: Callable[[], bytes]) -> bytes:
    """Return the cubin of a key, made once; a folder that is not there, or can't be read or written, costs a compilation, never an error.

    A cubin is written to a temporary file and moved into place, with its own digest in front: a torn or damaged file is made anew.
    """
    root = folder()
    if root is None:
        return make()
    path = root / f"{key}.cubin"
    with contextlib.suppress(OSError):
        data = path.read_bytes()
        if data[:32] == hashlib.sha256(data[32:]).digest():
            return data[32:]
    cubin = make()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(cubin).digest() + cubin)
            Path(name).replace(path)
        finally:
            Path(name).unlink(missing_ok=True)
    return cubin
