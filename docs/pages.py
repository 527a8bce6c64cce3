"""What MkDocs does to the pages besides building them: files outside docs/ as pages, plots by theme, docstrings as Markdown.

A hook of MkDocs and an extension of Griffe (``mkdocs.yml``). The Markdown files themselves read as they are on a forge.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from griffe import ExprCall, ExprSubscript, ExprTuple, Extension, Parameter, ParameterKind
from griffe import Parameters as Signature
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OF_ROOT = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
    "packages/README.md": "packages.md",
}
"""Files outside docs/, and the pages that they become."""

LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?\)")
PICTURE = re.compile(r'<picture>.*?<img alt="([^"]*)" src="([^"]*)-light\.svg"></picture>')
ROLE = re.compile(r":(?:py:)?(?:class|meth|func|data|mod|attr|exc):`(~?)([\w.]+)`")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/ as pages."""
    for source, page in OF_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Lead links to and from the files outside docs/ to their pages, and show each plot in the site's theme rather than the system's."""
    sources = {page_name: source for source, page_name in OF_ROOT.items()}
    path = page.file.src_uri
    folder = posixpath.dirname(sources.get(path, f"docs/{path}"))

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        at = OF_ROOT.get(target, target.removeprefix("docs/"))
        return f"{match[1]}{posixpath.relpath(at, posixpath.dirname(path) or '.')}{match[3] or ''})"

    plots = r"![\1](\2-light.svg#only-light)![\1](\2-dark.svg#only-dark)"
    return LINK.sub(link, PICTURE.sub(plots, markdown))


class Docstrings(Extension):
    """Turn the roles and literal blocks of docstrings, which Python's help shows as they are, into Markdown."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rewrite one object's docstring before it is parsed."""
        if obj.docstring is None:
            return
        owner = obj if obj.is_class or obj.is_module else obj.parent

        def reference(match: re.Match[str]) -> str:
            name = match[2].rpartition(".")[2] if match[1] else match[2]
            of = owner.path if match[2].partition(".")[0] in owner.members else "kvrag"
            target = match[2] if match[2].startswith("kvrag") else f"{of}.{match[2]}"
            return f'<autoref identifier="{target}" optional><code>{name}</code></autoref>'

        text = ROLE.sub(reference, obj.docstring.value)
        obj.docstring.value = re.sub(r"^::$|(?<=\w:):$", "", text, flags=re.MULTILINE)

    def on_module(self, *, mod: Any, **_: Any) -> None:
        """Rewrite a module's docstring; Griffe asks for these apart."""
        self.on_object(obj=mod)


class Parameters(Extension):
    """Show the parameters of functions that take ``**options`` and have those of a class (``kvrag.config.parameters_of``)."""

    def on_package(self, *, pkg: Any, **_: Any) -> None:
        """Rewrite the functions of a package once all classes of options are known."""
        self._rewrite(pkg, pkg)

    def _rewrite(self, owner: Any, module: Any) -> None:
        for each in owner.members.values():
            if each.is_alias:
                continue
            if each.is_module or each.is_class:
                self._rewrite(each, each if each.is_module else module)
            elif each.is_function:
                named = [NAMED.match(str(decorator.value)) for decorator in each.decorators]
                for found in filter(None, named):
                    own = [] if owner.is_module else [each.parameters[0]]
                    rest = [each.parameters[-1]] if "**options" in _described(owner, each) else []
                    each.parameters = Signature(*own, *_declared(module, found[1]), *rest)


NAMED = re.compile(r"parameters_of(?:_function)?\(([\w.]+)\)")


def _described(owner: Any, function: Any) -> str:
    """Return what documents a function; a class's docstring does its constructor."""
    docstring = owner.docstring if function.name == "__init__" else function.docstring
    return docstring.value if docstring else ""


def _default(value: Any) -> Any:
    """Return a default without what pydantic is told beside it."""
    if isinstance(value, ExprCall) and str(value.function) == "Field":
        return next(each.value for each in value.arguments if each.name == "default")
    return value


def _shown(annotation: Any) -> Any:
    """Return a type without what pydantic is told beside it."""
    while isinstance(annotation, ExprSubscript) and str(annotation.left) in (
        "Annotated",
        "SkipValidation",
    ):
        inner = annotation.slice
        annotation = inner.elements[0] if isinstance(inner, ExprTuple) else inner
    return annotation


def _declared(module: Any, name: str) -> list[Parameter]:
    """Return the parameters of the constructor of a class in a module, or imported there."""
    first, *rest = name.split(".")
    cls = module.modules_collection[".".join([module.resolve(first), *rest])]
    if cls.is_alias:
        cls = cls.final_target
    if "__init__" in cls.functions:
        return list(cls.functions["__init__"].parameters)[1:]
    fields: dict[str, Any] = {}
    for base in [*reversed(cls.mro()), cls]:
        fields |= {
            n: each
            for n, each in base.attributes.items()
            if each.annotation is not None and "property" not in each.labels
        }
    keywords = [
        Parameter(
            n,
            annotation=_shown(each.annotation),
            default=_default(each.value),
            kind=ParameterKind.keyword_only,
        )
        for n, each in fields.items()
    ]
    required = [
        Parameter(
            each.name, annotation=_shown(each.annotation), kind=ParameterKind.positional_or_keyword
        )
        for each in keywords
        if each.default is None
    ]
    return [*required, *(each for each in keywords if each.default is not None)]
