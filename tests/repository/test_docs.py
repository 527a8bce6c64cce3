"""The documents: tables come from results, code blocks run, the site is built without a warning, nothing points nowhere."""

import ast
import importlib
import inspect
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import yaml
from server_kit import served

from kvrag import KVRagEngine
from kvrag.generate.request import EngineStats
from kvrag.testing.models import tiny_model
from kvrag_server import ServerConfig

ROOT = Path(__file__).parents[2]
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "changes"]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *PAGES]

pytestmark = pytest.mark.skipif(
    not (ROOT / "docs").is_dir(), reason="the documents are not here: run from a checkout"
)


@pytest.mark.parametrize("script", [("-m", "docs.tables"), ("docs/plots.py",)], ids=lambda s: s[-1])
def test_tables_and_plots_are_in_step_with_the_results(script):
    done = subprocess.run(
        [sys.executable, *script, "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_pictures_are_there():
    for document in DOCUMENTS:
        for target in re.findall(r'(?:src|srcset)="([^"]+)"', document.read_text()):
            assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_inside_the_repository_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), target


def test_the_architecture_names_every_room_and_module_and_no_other():
    rows = [
        line.split("|")[1:3]
        for line in (ROOT / "docs" / "architecture.md").read_text().splitlines()
        if "|" in line
    ]
    facade = next(told for room, told in rows if room.strip() == "facade")
    code = [path for path in (ROOT / "kvrag").iterdir() if not path.name.startswith("_")]
    assert set(re.findall(r"`(\w+)`", facade)) == {
        path.stem for path in code if path.suffix == ".py"
    }
    rooms = {name for room, _ in rows for name in re.findall(r"`(\w+)/`", room)}
    assert rooms == {path.name for path in code if path.is_dir()}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_that_install_kvrag_work_before_there_is_a_release(document):
    """By its name alone kvrag is found where it is installed already; a line with such a command says so."""
    for line in document.read_text().splitlines():
        if re.search(r"pip install .*kvrag", line) and " @ " not in line:
            assert "installed" in line, line


def test_tests_named_as_promises_exist():
    text = (ROOT / "docs" / "promises.md").read_text()
    functions = {
        n
        for f in (ROOT / "tests").rglob("test_*.py")
        for n in re.findall(r"def (test_\w+)", f.read_text())
    }
    assert set(re.findall(r"::(test_\w+)", text)) <= functions
    for path in re.findall(r"`(tests/[\w/.]+)", text):
        assert (ROOT / path).exists(), path


def test_files_named_in_the_docs_exist():
    named = re.compile(
        r"\b(?:tests|kvrag|kernels|integrations|examples|deploy)/[\w/]+\.(?:py|sh)\b"
    )
    pages = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs/how-to").glob("*.md"),
    ]
    absent = {
        (page.name, file)
        for page in pages
        if page.name != "CHANGELOG.md"
        for file in named.findall(page.read_text())
        if not (ROOT / file).exists()
    }
    assert not absent


def test_the_support_table_has_every_architecture_of_the_tests():
    from kvrag.testing.models import REFUSED, TINY

    runs = json.loads((ROOT / "benchmarks" / "results" / "support.json").read_text())["runs"]
    newest = runs[max(runs, key=lambda version: [int(part) for part in version.split(".")[:3]])][
        "rows"
    ]
    assert set(TINY) | set(REFUSED) <= set(newest), "run `make docs`"
    exact = {name for name, row in newest.items() if row["reuse"] == "exact"}
    assert len(exact) >= 25
    assert not exact & set(REFUSED)
    assert all(newest[name]["why"] for name in set(newest) - exact)


# -- code blocks -------------------------------------------------------------------------------------------------------

BLOCK = re.compile(
    r"(?:<!-- not run: (?P<why>[^\n]+) -->\n)?```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<out>.*?)```)?",
    re.DOTALL,
)
"""A Python block, why it is not run, and what it must print; in that, ``…`` stands for anything."""
RUN = [
    page
    for page in DOCUMENTS
    if page.name in ("README.md", "migration.md") or page.parent.name == "how-to"
]
RUN = [page for page in RUN if "```python" in page.read_text()]
"""Pages whose blocks run from top to bottom in one namespace, on a tiny model in the place of the one they name."""
TUTORIALS = sorted((ROOT / "docs").glob("tutorial*.md"))
"""The same on the real small model, so that what is shown can be compared with what is printed."""
WITHOUT_ANSWERS = ("gpu.md", "limits.md", "ray.md")
NOT_RUN = 2
"""Blocks that are not run at most: one needs a GPU, one a corpus in a bucket."""

WORDS = "The archive opens at nine and closes at five. A reader asks for a box, and the keeper brings it to table {n}. "


def run_page(page, models, directory, monkeypatch, **names):
    """Run a page's blocks, with each model's name replaced, and return the tokens that its answers took from stored KV."""
    reused = []
    count = EngineStats.count
    monkeypatch.setattr(
        EngineStats, "count", lambda self, r: (reused.append(r.cached_tokens), count(self, r))[1]
    )
    monkeypatch.chdir(directory)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    text, engines = page.read_text(), set(KVRagEngine._recent)
    try:
        for block in BLOCK.finditer(text):
            if block["why"]:
                continue
            code = block["code"]
            for name, local in models.items():
                code = code.replace(f'"{name}"', repr(str(local)))
            code = code.replace("count=30", "count=3")  # questions to a tiny model
            code = compile(
                "\n" * text.count("\n", 0, block.start("code")) + code, page.name, "exec"
            )
            with redirect_stdout(StringIO()) as printed:
                exec(code, names)
            if block["out"]:
                wanted = re.escape(block["out"].strip()).replace("…", ".*")
                assert re.fullmatch(wanted, printed.getvalue().strip(), re.DOTALL), (
                    printed.getvalue()
                )
    finally:
        for engine in {
            *KVRagEngine._recent,
            *(v for v in names.values() if isinstance(v, KVRagEngine)),
        } - engines:
            engine.close()
    return sum(reused)


@pytest.fixture(scope="module")
def served_models(tiny_dir):
    """Local names of the model and of the addresses that the pages name."""
    name = "Qwen/Qwen2.5-3B-Instruct"
    engine = KVRagEngine.from_pretrained(tiny_dir)
    # The tiny model never ends an answer by itself.
    with served(engine, ServerConfig(model_name=str(tiny_dir), max_tokens=64)) as (_, url):
        yield {
            name: tiny_dir,
            "http://127.0.0.1:8000": url,
            "http://127.0.0.1:8000/v1": f"{url}/v1",
        }
    engine.close()


@pytest.mark.filterwarnings("ignore:chunks were encoded behind another prefix")
@pytest.mark.parametrize("page", RUN, ids=lambda p: str(p.relative_to(ROOT)))
def test_code_blocks_run(page, served_models, tokenizer, tmp_path, monkeypatch):
    from langchain_core.documents import Document
    from langchain_core.embeddings import DeterministicFakeEmbedding
    from llama_index.core import MockEmbedding, Settings

    for name in ("_llm", "_tokenizer", "_node_parser"):
        monkeypatch.setattr(Settings, name, None)
    monkeypatch.setattr(Settings, "_embed_model", MockEmbedding(8))
    (tmp_path / "data").mkdir()
    chunks = [WORDS.format(n=n) * 2 for n in range(4)]
    for n, chunk in enumerate(chunks):
        (tmp_path / "data" / f"{n}.txt").write_text(chunk)
    given = {
        "splits": [Document(chunk, id=f"split-{n}") for n, chunk in enumerate(chunks)],
        "chunks": chunks,
    }
    given |= {
        "embeddings": DeterministicFakeEmbedding(size=8),
        "model": tiny_model(),
        "tokenizer": tokenizer,
    }
    reused = run_page(page, served_models, tmp_path, monkeypatch, **given)
    assert reused > 0 or page.name in WITHOUT_ANSWERS, "no answer used stored KV"


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda p: p.stem)
def test_the_tutorial_prints_what_it_shows(page, tmp_path, monkeypatch):
    from demo.parts import packaged_embeddings, packaged_model

    models = {"HuggingFaceTB/SmolLM2-135M-Instruct": packaged_model()}
    models["sentence-transformers/all-MiniLM-L6-v2"] = packaged_embeddings()
    assert run_page(page, models, tmp_path, monkeypatch) > 0


def test_few_blocks_are_not_run():
    found = {
        (page.name, block["why"])
        for page in [*RUN, *TUTORIALS]
        for block in BLOCK.finditer(page.read_text())
    }
    left_out = sorted(each for each in found if each[1])
    print(*left_out, sep="\n")
    assert len(left_out) <= NOT_RUN


def test_other_blocks_parse():
    for page in {*DOCUMENTS} - {*RUN, *TUTORIALS}:
        for block in BLOCK.finditer(page.read_text()):
            ast.parse(block["code"])


# -- the site ----------------------------------------------------------------------------------------------------------


def test_the_site_is_built_without_a_warning_and_asks_no_other_host(tmp_path):
    """Strict: every page is in the navigation, every link and anchor leads somewhere, every docstring is understood."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_COLOR": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    loads = re.compile(
        r"""(?:<(?:script|img|iframe|source|use)\b[^>]*?\s(?:src|srcset|href)|<link\b[^>]*?\shref)=["']?(?:https?:)?//[^"'>\s]+"""
    )
    for file in tmp_path.rglob("*.html"):
        page = file.read_text()
        assert not loads.findall(page), file
        assert 'class="mermaid"' not in page, "the theme would fetch its renderer from elsewhere"
    for file in [*tmp_path.rglob("*.css"), *tmp_path.rglob("*.svg")]:
        assert not re.search(r"""(?:url\(|@import)\s*["']?(?:https?:)?//""", file.read_text()), file
    for page, module in (
        ("kvrag", "kvrag"),
        ("langchain", "langchain_kvrag"),
        ("llama-index", "llama_index.llms.kvrag"),
        ("llama-index", "llama_index.vector_stores.kvrag"),
    ):
        api, names = (
            (tmp_path / "api" / f"{page}.html").read_text(),
            importlib.import_module(module).__all__,
        )
        assert {name for name in names if f'id="{module}.{name}"' not in api} <= {"__version__"}
        assert not re.search(r":(?:class|meth|func):", api)


def test_a_release_gives_the_readme_links_that_lead_somewhere_from_an_index(tmp_path):
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    step = next(
        step["run"]
        for step in workflow["jobs"]["build"]["steps"]
        if "README.md" in step.get("run", "")
    )
    readme = Path(shutil.copy(ROOT / "README.md", tmp_path))
    place = {"GITHUB_REPOSITORY": "someone/kvrag", "GITHUB_REF_NAME": "v1.0"}
    subprocess.run(["bash", "-c", step], cwd=tmp_path, env=os.environ | place, check=True)
    links = re.findall(r"\]\(([^)]+)\)", readme.read_text())
    assert len(links) > 20
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    assert (
        "](https://raw.githubusercontent.com/someone/kvrag/v1.0/docs/pictures/overview.svg)"
        in readme.read_text()
    )


def test_the_fragments_that_are_there_go_into_the_changelog(tmp_path):
    changes = tmp_path / "docs" / "changes"
    changes.mkdir(parents=True)
    for fragment in (ROOT / "docs" / "changes").glob("*.md"):
        shutil.copy(fragment, changes)
    (changes / "made-up.fix.md").write_text("A change of\nthis test.\n")
    (tmp_path / "kvrag").mkdir()
    shutil.copy(ROOT / "kvrag" / "__init__.py", tmp_path / "kvrag")
    shutil.copy(ROOT / "CHANGELOG.md", tmp_path)
    words = [text.read_text().split() for text in (tmp_path / "docs" / "changes").iterdir()]
    run = runpy.run_path(str(ROOT / "docs" / "changelog.py"), run_name="imported")["main"]
    assert run(tmp_path) == 0
    assert list((tmp_path / "docs" / "changes").iterdir()) == []
    written = " ".join((tmp_path / "CHANGELOG.md").read_text().split())
    assert all(" ".join(text) in written for text in words)
    (tmp_path / "docs" / "changes" / "odd.changed.md").write_text("Odd.")
    with pytest.raises(SystemExit, match=r"odd\.changed\.md: .* one of feature, perf"):
        run(tmp_path)
    assert (tmp_path / "docs" / "changes" / "odd.changed.md").exists()


def test_the_site_shows_the_parameters_that_editors_show():
    griffe = pytest.importorskip("griffe")
    pages = runpy.run_path(str(ROOT / "docs" / "pages.py"))
    package = griffe.load(
        "kvrag", search_paths=[str(ROOT)], extensions=griffe.load_extensions(pages["Parameters"]())
    )
    for name in ("from_pretrained", "get", "generate", "astream", "prefill", "score", "explain"):
        shown = [each.name for each in package["engine.KVRagEngine"].functions[name].parameters][1:]
        assert shown == [
            each
            for each in inspect.signature(getattr(KVRagEngine, name)).parameters
            if each != "self"
        ]
