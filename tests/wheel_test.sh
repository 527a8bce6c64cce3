#!/usr/bin/env bash
# Install the wheel of `make wheel` with its own dependencies into a fresh environment outside the checkout, and run tests there: it finds what an
# editable install hides, a missing file or a missing dependency.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python="${BIN:-.venv/bin}/python"
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$work" ./packages/*-kvrag
wheel=$(ls "$PWD"/dist/kvrag-*.whl)  # `make wheel` builds it from the source distribution, in an environment with nothing else
echo "installing $(basename "$wheel") into a fresh environment"

"$python" -m venv "$work/env"
pip="$work/env/bin/python -m pip"
$pip install --quiet -c constraints.txt torch
$pip install --quiet -c constraints.txt "$wheel[all]" pytest pytest-asyncio pytest-xdist
$pip install --quiet "$work"/langchain_kvrag-*.whl "$work"/llama_index_*.whl # which need kvrag as it is there

cp tests/engine/test_engine.py tests/engine/test_equivalence.py tests/conftest.py tests/fake_driver.py tests/kit.py tests/texts.py "$work/"
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
for name in ("langchain-kvrag", "llama-index-llms-kvrag", "llama-index-vector-stores-kvrag"):
    told = importlib.metadata.distribution(name)
    extra = "langchain" if name == "langchain-kvrag" else "llama-index"
    assert (told.version, told.requires) == (kvrag.__version__, [f"kvrag[{extra}]=={kvrag.__version__}"]), name
    assert all(".dist-info" in str(path) for path in told.files), f"{name} has modules of its own"
from kvrag_server.page import NAMES, read

assert all(read(name) for name in NAMES)
print("kvrag", importlib.metadata.version("kvrag"), "imports from the wheel, beside llama_index.core")
PY
env/bin/kvrag --version
OMP_NUM_THREADS=1 env/bin/python -m pytest -q -n auto --maxprocesses 4 --dist worksteal -p no:cacheprovider -o asyncio_mode=auto -o asyncio_default_fixture_loop_scope=function \
  -W ignore::pytest.PytestUnknownMarkWarning test_engine.py test_equivalence.py
