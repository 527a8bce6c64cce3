"""Where a model's weights come from: a hub commit, or the content of the files, hashed once and remembered.

The files' content counts, not their names or their directory: a copy of a model under another path is the same model. The same weights
saved anew, in shards of another size or in another container, are other files, and so another model: their KV is computed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from kvrag.identity.fingerprint import digest

logger = logging.getLogger(__name__)

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf", "*.index.json", "adapter_config.json", "*.py")
"""What is hashed of a model's directory: the weights, how shards go together, and code that the model may bring with it."""

NEUTRAL = frozenset(
    {
        *(
            "attn_implementation",
            "cache_dir",
            "config",
            "device_map",
            "force_download",
            "local_files_only",
            "low_cpu_mem_usage",
        ),
        *(
            "max_memory",
            "offload_buffers",
            "offload_folder",
            "proxies",
            "quantization_config",
            "token",
            "trust_remote_code",
        ),
    }
)
"""Options of ``from_pretrained`` that don't choose weights, or that the loaded model's config tells."""

CACHE_VARIABLE = "KVRAG_CACHE_DIR"
"""Environment variable with the directory of what kvrag remembers for this user."""

_CACHE_FILE = "file-digests.json"
_MAX_ENTRIES = 1000
_LARGE = 2**20
"""Smaller files are hashed each time: looking them up would take as long."""
_RACE_NS = 2_000_000_000
"""A file changed this recently may change again within one tick of the file system's clock."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


def source_identity(path: str, *, commit: str | None, options: Mapping[str, Any]) -> str | None:
    """Say where the weights come from, or ``None`` if that is not known well enough and their content has to be hashed.

    Parameters
    ----------
    path
        Local file or directory, or the hub's name of the model.
    commit
        Commit that the hub's files are from, if any.
    options
        Options of ``from_pretrained``: some choose other weights from the same place.
    """
    chosen = _plain({name: value for name, value in options.items() if name not in NEUTRAL})
    if chosen is None:
        return None
    if os.path.isdir(path):
        folder = Path(path) / str(options.get("subfolder") or "")
        files = sorted({file for pattern in WEIGHT_FILES for file in folder.glob(pattern)})
        origin = files_digest(files) if files else None
    elif os.path.isfile(path):
        origin = files_digest([Path(path)])
    else:
        origin = f"commit:{commit}" if commit else None
    if origin is None:
        return None
    return digest("weights", {"origin": origin.encode(), "options": chosen.encode()})


def _plain(options: Mapping[str, Any]) -> str | None:
    """Spell options as JSON; ``None`` if one has no such form."""
    try:
        return json.dumps({name: value for name, value in options.items() if value is not None}, sort_keys=True)
    except (TypeError, ValueError):
        return None


def files_digest(files: Iterable[Path]) -> str:
    """Digest of the contents of files, whatever their names and order."""
    start, size = time.perf_counter(), 0
    remembered = _Remembered()
    contents = []
    for file in files:
        size += file.stat().st_size
        contents.append(remembered.digest(file))
    remembered.save()
    seconds = time.perf_counter() - start
    if remembered.hashed_bytes >= _LARGE:
        logger.info("hashed %.1f of %.1f MB of weights in %.2f s", remembered.hashed_bytes / 1e6, size / 1e6, seconds)
    return "files:" + hashlib.sha256("".join(sorted(contents)).encode()).hexdigest()


def cache_dir() -> Path:
    """Directory of what kvrag remembers for this user: ``$KVRAG_CACHE_DIR``, or ``kvrag`` in the user's cache directory.

    A user without a home, as in some containers, has one of this process alone.
    """
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "kvrag"
    try:
        return Path.home() / ".cache" / "kvrag"
    except RuntimeError:
        return Path(_own_folder().name)


@cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="kvrag-")  # nobody else's: what is remembered is believed


class _Remembered:
    """Digests of large files by real path, believed only while size, times and inode are those of the file that was read.

    The file that holds them may be lost, damaged or unwritable at any time; then they are computed again.
    """

    def __init__(self) -> None:
        self._new: dict[str, list[Any]] = {}
        self._old: dict[str, Any] | None = None
        self.hashed_bytes = 0

    def digest(self, file: Path) -> str:
        """SHA-256 (hex) of a file's content."""
        before = _stamp(file)
        if before[0] >= _LARGE:
            if self._old is None:
                self._old = _read()
            match self._old.get(os.path.realpath(file)):
                case [list(stamp), str(known)] if stamp == before and _DIGEST.fullmatch(known):
                    return known
        with file.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        self.hashed_bytes += before[0]
        is_settled = time.time_ns() - max(before[1], before[2]) > _RACE_NS
        if before[0] >= _LARGE and is_settled and _stamp(file) == before:
            self._new[os.path.realpath(file)] = [before, found]
        return found

    def save(self) -> None:
        """Remember what is new, whole or not at all; what other processes remembered meanwhile stays."""
        if not self._new:
            return
        entries = {**_read(), **self._new}
        kept = dict(list(entries.items())[-_MAX_ENTRIES:])
        try:
            _write(json.dumps({"version": 1, "files": kept}))
        except OSError as error:
            logger.debug("digests of weights can't be remembered: %s", error)


def _stamp(file: Path) -> list[int]:
    """Size, times and place of a file; the time of its inode's last change can't be set back, as that of its content can."""
    status = file.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]


def _read() -> dict[str, Any]:
    try:
        match json.loads((cache_dir() / _CACHE_FILE).read_text()):
            case {"version": 1, "files": dict(files)}:
                return files
    except (OSError, ValueError, RecursionError):
        pass  # absent or damaged
    return {}


def _write(text: str) -> None:
    """Replace the file in one step; only its owner may read or write it."""
    folder = cache_dir()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(dir=folder, prefix=_CACHE_FILE)
    try:
        with os.fdopen(fd, "w") as stream:
            stream.write(text)
        os.replace(name, folder / _CACHE_FILE)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
