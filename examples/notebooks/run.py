"""Make the notebooks from their sources, run them from top to bottom, and keep their outputs (``make notebooks``).

A source is Python with ``# %%`` before each cell of code and ``# %% [markdown]`` before each text. Times of cells, what libraries write to
standard error, and the machine's paths are no results: the first two are left out, and of the last there must be none.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
PATHS = re.compile(r"/(?:home|tmp|root|usr|var|work|private|Users)/|site-packages|[A-Z]:\\\\")
"""What a path of the machine that ran a notebook looks like."""


def notebook_of(source: str) -> Any:
    """Return a source as a notebook that has not been run."""
    cells = []
    for number, part in enumerate(re.split(r"^# %%", source, flags=re.MULTILINE)[1:]):
        head, _, body = part.partition("\n")
        is_text = head.strip() == "[markdown]"
        text = re.sub(r"^# ?", "", body.strip(), flags=re.MULTILINE) if is_text else body.strip()
        make = nbformat.v4.new_markdown_cell if is_text else nbformat.v4.new_code_cell
        cells.append(make(text, id=f"cell-{number}"))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})


def run(source: Path) -> None:
    """Run one notebook and write it beside its source.

    Raises
    ------
    SystemExit
        If an output names a path of this machine.
    """
    notebook = notebook_of(source.read_text("utf-8"))
    where = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(
        notebook,
        timeout=1800,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources=where,
    ).execute()
    notebook.metadata.pop("language_info", None)
    for cell in notebook.cells:
        cell.metadata.clear()
        if cell.cell_type == "code":
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
            if found := PATHS.search(str(cell.outputs)):
                raise SystemExit(
                    f"{source.name}: an output holds {found[0]!r}, a path of this machine: {cell.outputs}"
                )
    nbformat.write(notebook, source.with_suffix(".ipynb"))


if __name__ == "__main__":
    for each in sorted(FOLDER.glob("*.py")) if len(sys.argv) < 2 else map(Path, sys.argv[1:]):
        if each.name != Path(__file__).name:
            print(f"running {each.name}")
            run(each)
