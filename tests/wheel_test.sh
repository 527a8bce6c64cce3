#!/usr/bin/env bash
# Install the wheel of `make wheel` with its own dependencies into a fresh environment outside the checkout, and run tests there: it finds what an
# editable install hides, a missing file or a missing dependency. Then take it out, and do the same with the wheels of `make wheels`.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python="${BIN:-.venv/bin}/python"
wheel=$(ls "$PWD"/dist/kvrag-*.whl)  # `make wheel` builds it from the source distribution, in an environment with nothing else
echo "installing $(basename "$wheel") into a fresh environment"

"$python" -m venv "$work/env"
pip="$work/env/bin/python -m pip"
$pip install --quiet -c constraints.txt torch
$pip install --quiet -c constraints.txt "$wheel[all]" pytest pytest-asyncio pytest-xdist

cp tests/engine/test_engine.py tests/engine/test_equivalence.py tests/conftest.py tests/fake_driver.py tests/kit.py tests/texts.py "$work/"
cd "$work"
export HF_HUB_OFFLINE=1
env/bin/python - "$root" <<'PY'
import importlib.metadata
import sys
from importlib.metadata import entry_points

import kvrag
import kvrag_kernels
import kvrag_ray
import kvrag_server
import kvrag_shared
import langchain_kvrag
import llama_index.core
import llama_index.llms.kvrag
import llama_index.vector_stores.kvrag
import vllm_kvrag

for module in (kvrag, kvrag_kernels, kvrag_ray, kvrag_server, kvrag_shared, vllm_kvrag, langchain_kvrag, llama_index.llms.kvrag, llama_index.vector_stores.kvrag):
    assert module.__file__.startswith(sys.prefix), f"{module.__name__} comes from {module.__file__}, not from the wheel"
assert "serve" in entry_points(group="kvrag.commands").names
from kvrag_server.page import NAMES, read

assert all(read(name) for name in NAMES)
print("kvrag", importlib.metadata.version("kvrag"), "imports from the wheel, beside llama_index.core")
PY
env/bin/kvrag --version
OMP_NUM_THREADS=1 env/bin/python -m pytest -q -n auto --maxprocesses 4 --dist worksteal -p no:cacheprovider -o asyncio_mode=auto -o asyncio_default_fixture_loop_scope=function \
  -W ignore::pytest.PytestUnknownMarkWarning test_engine.py test_equivalence.py

echo "installing the wheels of packages/ in its place"
$pip uninstall --quiet --yes kvrag
$pip install --quiet -c "$root/constraints.txt" --find-links "$root/dist/wheels" "kvrag[all,ray,vllm]"
env/bin/python - <<'PY'
from collections import Counter
from importlib.metadata import distributions

owners = Counter(
    str(path)
    for told in distributions()
    if "kvrag" in told.name
    for path in told.files or ()
    if ".dist-info" not in str(path)
)
assert owners and max(owners.values()) == 1, "two distributions have a file in common"
PY
env/bin/kvrag serve --help >/dev/null
for folder in "$root"/packages/*/; do
  [ "$(basename "$folder")" = langchain-kvrag ] || # its tests need LangChain's own: make -C packages/langchain-kvrag test
    (cd "$folder" && OMP_NUM_THREADS=1 "$work/env/bin/python" -m pytest -q -p no:cacheprovider)
done
