"""The distributions of packages/ follow kvrag; ``python tests/repository/test_packages.py`` writes its version into them."""

import ast
import importlib
import re
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

import kvrag

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / "packages"

pytestmark = pytest.mark.skipif(
    not PACKAGES.is_dir(), reason="the code is not here: run from a checkout"
)


class Expected(NamedTuple):
    """What a distribution has: an extra of kvrag that installs it, a class or function of its module, ours that it needs."""

    extra: str
    module: str
    name: str
    needs: tuple[str, ...] = ("kvrag",)


SHARED = "kvrag-shared"
OF_SHARED = ("objects", "redis")
"""Extras of kvrag that are those of :data:`SHARED`: an installation needs one service's library, not each."""
EXPECTED = {
    "kvrag-ray": Expected("ray", "kvrag_ray", "build", ("kvrag-server",)),
    "kvrag-server": Expected("server", "kvrag_server", "create_app"),
    "kvrag-vllm": Expected(
        "vllm", "vllm_kvrag.front.command", "serve", ("kvrag[cli]", "kvrag-server")
    ),
    "langchain-kvrag": Expected("langchain", "langchain_kvrag", "ChatKVRag"),
    "llama-index-llms-kvrag": Expected("llama-index", "llama_index.llms.kvrag", "KVRagLLM"),
    "llama-index-vector-stores-kvrag": Expected(
        "llama-index",
        "llama_index.vector_stores.kvrag",
        "KVRagVectorStore",
        ("llama-index-llms-kvrag",),
    ),
}
ONLY_HERE = {"demo", "dev", "docs", "examples"}
"""Extras that need a checkout."""


def project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text())


def shipped(folder: Path) -> dict[Path, str]:
    """Folders that a distribution takes from elsewhere, and their places in its wheel."""
    taken = project(folder)["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    return {(folder / source).resolve(): target for source, target in taken.items()}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_distribution_follows_kvrag(name):
    extra, module, cls, needs = EXPECTED[name]
    folder = PACKAGES / name
    told, ours = project(folder), project(ROOT)["project"]
    assert told["project"]["name"] == name
    assert told["project"]["version"] == kvrag.__version__
    packages = [each for each in ours["optional-dependencies"][extra] if each[:6] != "kvrag["]
    if needs == ("llama-index-llms-kvrag",):  # has them
        packages = []
    own = [f"{each}=={kvrag.__version__}" for each in needs]
    assert told["project"]["dependencies"] == own + packages
    for key in ("license", "requires-python", "authors"):
        assert told["project"][key] == ours[key]
    assert hasattr(importlib.import_module(module), cls)
    if extra == "llama-index":
        assert told["tool"]["llamahub"]["import_path"] == module
        assert cls in told["tool"]["llamahub"]["class_authors"]
    modules = [path for path in folder.rglob("*.py") if "tests" not in path.parts]
    assert modules == []
    assert f"pip install {name}" in (folder / "README.md").read_text()


def test_the_shared_stores_need_the_library_of_their_service_alone():
    told, ours = project(PACKAGES / SHARED)["project"], project(ROOT)["project"]
    assert told["dependencies"] == [f"kvrag=={kvrag.__version__}"]
    assert told["version"] == kvrag.__version__
    extras = ours["optional-dependencies"]
    assert told["optional-dependencies"] == {name: extras[name] for name in OF_SHARED}
    for key in ("license", "requires-python", "authors"):
        assert told[key] == ours[key]


def test_the_core_needs_what_the_whole_needs_and_offers_the_rest_as_extras():
    whole, core = project(ROOT)["project"], project(PACKAGES / "kvrag")["project"]
    assert core["version"] == kvrag.__version__
    for key in ("description", "license", "requires-python", "dependencies", "scripts"):
        assert core[key] == whole[key]
    beside: dict[str, list[str]] = {}
    for name, expected in EXPECTED.items():
        beside.setdefault(expected.extra, []).append(f"{name}=={kvrag.__version__}")
    beside |= {name: [f"{SHARED}[{name}]=={kvrag.__version__}"] for name in OF_SHARED}
    extras = {
        name: beside.get(name, packages)
        for name, packages in whole["optional-dependencies"].items()
        if name not in ONLY_HERE
    }
    assert core["optional-dependencies"] == extras


def test_every_folder_and_entry_point_of_the_whole_is_in_one_distribution():
    folders = [folder.parent for folder in PACKAGES.glob("*/pyproject.toml")]
    assert {folder.name for folder in folders} == {"kvrag", SHARED, *EXPECTED}
    whole = project(ROOT)
    sources = [source for folder in folders for source in shipped(folder)]
    assert len(set(sources)) == len(sources)
    for name in whole["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        package = ROOT / name
        inside = [source for source in sources if source.is_relative_to(package)]
        shown = {
            path
            for path in package.rglob("*")
            if path.suffix in (".py", ".cu", ".html", ".typed") and "__pycache__" not in path.parts
        }
        assert {
            path for path in shown if any(path.is_relative_to(each) for each in inside)
        } == shown
    found: dict[str, dict[str, str]] = {}
    for folder in folders:
        for group, points in project(folder)["project"].get("entry-points", {}).items():
            assert not points.keys() & found.setdefault(group, {}).keys()
            found[group] |= points
            places = [target.replace("/", ".") for target in shipped(folder).values()]
            assert all(value.startswith(tuple(places)) for value in points.values())
    assert found == whole["project"]["entry-points"]


def test_tests_of_the_wheel_take_their_helpers_along():
    tests = ROOT / "tests"
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


OURS = "|".join(["kvrag", SHARED, *EXPECTED])

if __name__ == "__main__":
    for path in PACKAGES.glob("*/pyproject.toml"):
        text = re.sub(
            rf'(?m)(^version = "|"(?:{OURS})(?:\[[a-z,-]+\])?==)[^"]+',
            rf"\g<1>{kvrag.__version__}",
            path.read_text(),
        )
        path.write_text(text)
        print(path, kvrag.__version__)
