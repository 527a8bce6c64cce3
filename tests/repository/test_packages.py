"""The distributions of packages/ follow kvrag; ``python tests/repository/test_packages.py`` writes its version into them."""

import ast
import importlib
import re
import tomllib
from pathlib import Path

import pytest

import kvrag

PACKAGES = Path(__file__).parents[2] / "packages"
IMPORTS = {
    "langchain-kvrag": ("langchain", "langchain_kvrag", "ChatKVRag"),
    "llama-index-llms-kvrag": ("llama-index", "llama_index.llms.kvrag", "KVRagLLM"),
    "llama-index-vector-stores-kvrag": (
        "llama-index",
        "llama_index.vector_stores.kvrag",
        "KVRagVectorStore",
    ),
}


@pytest.mark.skipif(not PACKAGES.is_dir(), reason="the code is not here: run from a checkout")
@pytest.mark.parametrize("name", IMPORTS)
def test_a_distribution_follows_kvrag(name):
    extra, module, cls = IMPORTS[name]
    told = tomllib.loads((PACKAGES / name / "pyproject.toml").read_text())
    ours = tomllib.loads((PACKAGES.parent / "pyproject.toml").read_text())["project"]
    assert told["project"]["name"] == name
    assert told["project"]["version"] == kvrag.__version__
    assert told["project"]["dependencies"] == [f"kvrag[{extra}]=={kvrag.__version__}"]
    for key in ("license", "requires-python", "authors"):
        assert told["project"][key] == ours[key]
    assert extra in ours["optional-dependencies"]
    assert hasattr(importlib.import_module(module), cls)
    if extra == "llama-index":
        assert told["tool"]["llamahub"]["import_path"] == module
        assert cls in told["tool"]["llamahub"]["class_authors"]
    folder = PACKAGES / name
    modules = [path for path in folder.rglob("*.py") if "tests" not in path.parts]
    assert modules == []
    assert f"pip install {name}" in (folder / "README.md").read_text()


@pytest.mark.skipif(not PACKAGES.is_dir(), reason="the code is not here: run from a checkout")
def test_tests_of_the_wheel_take_their_helpers_along():
    tests = PACKAGES.parent / "tests"
    named = re.findall(r"tests/([\w/]+\.py)", (tests / "wheel_test.sh").read_text())
    here = {path.stem for path in tests.glob("*.py")}
    imported = {
        name
        for path in named
        for node in ast.walk(ast.parse((tests / path).read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (getattr(node, "module", None), *(alias.name for alias in node.names))
    }
    assert imported & here <= {Path(path).stem for path in named}


if __name__ == "__main__":
    for path in PACKAGES.glob("*/pyproject.toml"):
        text = re.sub(
            r'(?m)^(version = "|dependencies = \["kvrag\[[a-z-]+\]==)[^"]+',
            rf"\g<1>{kvrag.__version__}",
            path.read_text(),
        )
        path.write_text(text)
        print(path, kvrag.__version__)
