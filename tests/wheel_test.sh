#!/usr/bin/env bash
# Build the wheel, install it into a fresh environment outside the checkout, and use it there: packaging faults that an editable
# install hides. torch and transformers come from the project's environment where one is active, to spare a second download.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python="${BIN:-.venv/bin}/python"
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$work" .
wheel=$(ls "$work"/kvrag-*.whl)
echo "built $(basename "$wheel")"

"$python" -m venv --system-site-packages "$work/env"
site=$("$python" -c 'import site; print(site.getsitepackages()[0])')
# The project's packages are visible, its checkout is not: .pth files of an editable install don't travel through PYTHONPATH.
export PYTHONPATH=$site HF_HUB_OFFLINE=1
"$work/env/bin/python" -m pip install --quiet --no-deps --force-reinstall "$wheel"
cp "$root/tests/test_equivalence.py" "$root/tests/test_engine.py" "$root/tests/conftest.py" "$root/tests/texts.py" "$work/"
cd "$work"
"$work/env/bin/python" - <<'PY'
import importlib.metadata, kvrag, kvrag_kernels, langchain_kvrag, llama_index.core, llama_index.llms.kvrag, llama_index.vector_stores.kvrag, sys
for module in (kvrag, kvrag_kernels, langchain_kvrag, llama_index.llms.kvrag, llama_index.vector_stores.kvrag):
    assert module.__file__.startswith(sys.prefix), f"{module.__name__} comes from {module.__file__}, not from the wheel"
print("kvrag", importlib.metadata.version("kvrag"), "imports from the wheel, beside llama_index.core")
PY
"$work/env/bin/kvrag" --version
"$work/env/bin/python" -m pytest -q -p no:cacheprovider -o asyncio_mode=auto -o asyncio_default_fixture_loop_scope=function \
  test_engine.py test_equivalence.py
