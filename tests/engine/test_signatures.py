"""Signatures of what users call, as their editors read them: of the running program, and from its text alone."""

import ast
import inspect
import re
import typing
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import jedi
import pytest
from mypy import api

from kvrag import ConfigError, KVRagEngine, SamplingConfig
from kvrag.config import IndexOptions
from kvrag.testing.models import tiny_model

REUSE = {
    *("mode", "repair", "namespace", "max_context", "tools", "tool_choice", "response_format"),
    *("chat_template_kwargs", "continue_final_message"),
}
ANSWER = REUSE | {field.name for field in fields(SamplingConfig)}
INDEX = {field.name for field in fields(IndexOptions)}
ENGINE = {
    *("tokenizer", "revision", "dtype", "device", "prove", "extra_keys"),
    *("kv_dir", "prefix", "context", "repair", "namespace", "store_config", "chat_template_kwargs"),
}

CALLS: dict[str, tuple[str, set[str]]] = {
    **{
        f"KVRagEngine.get('x').{name}": ("kvrag", ANSWER)
        for name in ("generate", "stream", "agenerate", "astream")
    },
    **{
        f"KVRagEngine.get('x').{name}": ("kvrag", REUSE) for name in ("prefill", "score", "explain")
    },
    **{f"KVRagEngine.{name}": ("kvrag", ENGINE) for name in ("get", "from_pretrained")},
    "KVRagEngine.get('x').precompute": ("kvrag", INDEX | {"ids"}),
    "KVRagClient.precompute": ("kvrag_server", INDEX | {"ids"}),
    "precompute_kv": ("kvrag", INDEX | {"llm", "server", "ids", "content", "on_error"}),
    "sync_kv": ("kvrag", INDEX | {"llm", "server", "ids", "content"}),
    "KVRagVectorStore": ("langchain_kvrag", INDEX | {"llm", "embedding", "metric", "on_error"}),
    "KVPrecompute": ("llama_index.llms.kvrag", INDEX | {"llm", "content", "on_error"}),
}
"""What users call, the module that the name before the first dot is imported from, and the keywords that it must show."""

MYPY = """\
[mypy]
follow_imports = skip
[mypy-kvrag.*,kvrag_server.*,langchain_kvrag.*,llama_index.llms.kvrag.*]
follow_imports = silent
"""
"""Reads our own packages alone: torch takes a minute."""


@pytest.fixture(scope="module")
def checked(tmp_path_factory) -> dict[str, str]:
    """What mypy says that each call takes; it reads type hints as Pylance and PyCharm do."""
    lines = [
        f"from {module} import {name.partition('.')[0]}" for name, (module, _) in CALLS.items()
    ]
    path = tmp_path_factory.mktemp("typed") / "calls.py"
    path.write_text("\n".join([*lines, *[f"reveal_type({name})" for name in CALLS]]))
    config = path.with_name("mypy.ini")
    config.write_text(MYPY)
    out, errors, _ = api.run(
        [f"--config-file={config}", f"--cache-dir={path.parent / 'cache'}", str(path)]
    )
    found = re.findall(r'Revealed type is "(.*)"', out)
    assert len(found) == len(CALLS), out + errors
    return dict(zip(CALLS, found, strict=True))


@pytest.mark.parametrize("name", CALLS)
def test_a_type_checker_reads_every_option(name, checked):
    assert set(re.findall(r"(\w+): ", checked[name])) >= CALLS[name][1]
    # The engine takes what from_pretrained takes, too.
    assert "**" not in checked[name] or CALLS[name][1] == ENGINE


@pytest.mark.parametrize("name", CALLS)
def test_an_editor_that_only_reads_finds_every_option(name):
    module, wanted = CALLS[name]
    if name == "KVPrecompute":
        pytest.skip("jedi reads the fields of a pydantic model alone, not its constructor")
    script = jedi.Script(f"from {module} import {name.partition('.')[0]}\n{name}(")
    (found,) = script.get_signatures()
    assert {parameter.name for parameter in found.params} >= wanted
    kept = [
        parameter for parameter in found.params if parameter.kind == inspect.Parameter.VAR_KEYWORD
    ]
    assert not kept or wanted == ENGINE


def method_of(name: str) -> Callable[..., Any]:
    return typing.cast("Callable[..., Any]", getattr(KVRagEngine, name.rpartition(".")[2]))


@pytest.mark.parametrize("name", [name for name in CALLS if name.startswith("KVRagEngine")])
def test_the_running_program_shows_every_option_with_its_type(name):
    parameters = inspect.signature(method_of(name)).parameters
    wanted = CALLS[name][1]
    assert set(parameters) >= wanted
    hints = typing.get_type_hints(method_of(name))
    assert set(hints) >= wanted | {"return"}
    kinds = {parameter.kind for parameter in parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds or wanted == ENGINE


def test_what_a_method_returns_is_its_own():
    returned = {
        name: inspect.signature(method_of(name)).return_annotation
        for name in ("stream", "astream", "explain")
    }
    assert returned == {
        "stream": "TokenStream",
        "astream": "AsyncTokenStream",
        "explain": "Explanation",
    }
    assert inspect.iscoroutinefunction(KVRagEngine.agenerate)


def test_the_defaults_that_are_shown_are_those_of_the_config():
    shown = {
        name: p.default for name, p in inspect.signature(KVRagEngine.generate).parameters.items()
    }
    assert (
        SamplingConfig(**{field.name: shown[field.name] for field in fields(SamplingConfig)})
        == SamplingConfig()
    )


ROOT = Path(__file__).parents[2]
SPELT = {"min_p": 4, "top_k": 5, "frequency_penalty": 4, "max_context": 12, "extra_keys": 6}
"""Files of the package and of the adapters that may spell an option as a name or a string: those that declare it and use it. The
classes of LangChain and LlamaIndex, and the API, have fields of their own, which their users' editors and clients read."""


def spelt(tree: ast.Module) -> set[str]:
    """Names, arguments, attributes, and strings that are a single word."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.arg | ast.keyword):
            found.add(node.arg or "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


@pytest.mark.skipif(not (ROOT / "kvrag").is_dir(), reason="the code is not here")
def test_an_option_is_written_in_few_files():
    sources = [path for root in ("kvrag", "integrations") for path in (ROOT / root).rglob("*.py")]
    words = {path: spelt(ast.parse(path.read_text())) for path in sources}
    for name, most in SPELT.items():
        places = sorted(str(path.relative_to(ROOT)) for path in sources if name in words[path])
        assert 0 < len(places) <= most, f"{name}: {places}"


@pytest.mark.parametrize(
    "name", ["generate", "stream", "agenerate", "astream", "prefill", "score", "explain"]
)
async def test_an_option_that_does_not_exist_is_refused_by_name(name, tokenizer):
    engine = KVRagEngine.from_pretrained(tiny_model("llama"), tokenizer=tokenizer)
    given = ("a", "b") if name == "score" else ("a",)

    async def call() -> None:
        await getattr(engine, name)(*given, max_contxt="slide")

    with pytest.raises(ConfigError, match="has no option 'max_contxt'; did you mean 'max_context'"):
        await call()
