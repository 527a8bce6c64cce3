"""``kvrag demo``: run the demo of a checkout."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import typer

from kvrag.errors import InputError

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings of the command: its options, ``--help`` too, are the demo's own."""


def demo(context: typer.Context) -> None:
    """Answer questions about real documents twice, by full prefill and with reuse from disk, and compare time and answers."""
    for base in (Path(__file__).resolve().parents[2], Path.cwd()):
        if (base / "examples" / "demo" / "main.py").is_file():
            break
    else:
        raise InputError(
            "the demo was not found: it is in examples/demo of kvrag's source code, not in the installed package; run kvrag demo in a "
            "checkout"
        )
    sys.path.insert(0, str(base / "examples"))
    try:
        importlib.import_module("demo.main").command.main(context.args, prog_name="kvrag demo", standalone_mode=False)
    finally:
        sys.path.remove(str(base / "examples"))
