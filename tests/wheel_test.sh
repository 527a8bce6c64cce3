#!/usr/bin/env bash
# Build the wheel, install it with its own dependencies into a fresh environment outside the checkout, and run tests there: it finds what an
# editable install hides, a missing file or a missing dependency.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python="${BIN:-.venv/bin}/python"
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$work" .
wheel=$(ls "$work"/kvrag-*.whl)
echo "built $(basename "$wheel"); installing it into a fresh environment"

"$python" -m venv "$work/env"
pip="$work/env/bin/python -m pip"
$pip install --quiet -c constraints.txt torch
$pip install --quiet -c constraints.txt "$wheel[all]" pytest pytest-asyncio pytest-xdist

cp tests/test_engine.py tests/test_equivalence.py tests/conftest.py tests/kit.py tests/texts.py "$work/"
cd "$work"
export HF_HUB_OFFLINE=1
env/bin/python - "$root" <<'PY'
import importlib.metadata
import sys

import kvrag
import kvrag_kernels
import langchain_kvrag
import llama_index.core
import llama_index.llms.kvrag
import llama_index.vector_stores.kvrag

for module in (kvrag, kvrag_kernels, langchain_kvrag, llama_index.llms.kvrag, llama_index.vector_stores.kvrag):
    assert module.__file__.startswith(sys.prefix), f"{module.__name__} comes from {module.__file__}, not from the wheel"
print("kvrag", importlib.metadata.version("kvrag"), "imports from the wheel, beside llama_index.core")
PY
env/bin/kvrag --version
OMP_NUM_THREADS=1 env/bin/python -m pytest -q -n auto --maxprocesses 4 --dist worksteal -p no:cacheprovider -o asyncio_mode=auto -o asyncio_default_fixture_loop_scope=function \
  -W ignore::pytest.PytestUnknownMarkWarning test_engine.py test_equivalence.py
