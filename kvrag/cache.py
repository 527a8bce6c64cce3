"""Cache directory of this user: proofs, prices, profiles, verdicts, digests and weights."""

from __future__ import annotations

import logging
import os
import tempfile
from functools import cache
from pathlib import Path

from kvrag.config.address import absolute

logger = logging.getLogger(__name__)

VARIABLE = "KVRAG_CACHE_DIR"  # environment variable with the directory


def cache_dir() -> Path:
    """Return this user's cache directory of kvrag.

    It is ``$KVRAG_CACHE_DIR``, else ``kvrag`` in the user's cache directory; without a home, a
    temporary directory.
    """
    own = os.environ.get(VARIABLE)
    if own:
        return _once(own)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "kvrag"
    try:
        return Path.home() / ".cache" / "kvrag"
    except RuntimeError:
        return Path(_private_folder().name)


@cache
def _once(own: str) -> Path:
    # Resolved once: a change of the working directory must not change the place.
    return Path(absolute(own))


@cache
def _private_folder() -> tempfile.TemporaryDirectory[str]:
    # Private, because remembered digests are trusted.
    return tempfile.TemporaryDirectory(prefix="kvrag-")


def keep(file: Path, text: str) -> bool:
    """Write a file below :func:`cache_dir` whole or not at all, readable by its owner only.

    Returns whether it could be written.
    """
    try:
        for folder in (cache_dir(), file.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=file.parent, suffix=".tmp", delete=False, encoding="utf-8"
        ) as part:
            try:
                part.write(text)
                part.flush()
                os.replace(part.name, file)
            except OSError:
                os.unlink(part.name)
                raise
    except OSError as error:
        logger.debug("%s could not be written: %s", file, error)
        return False
    return True
