"""``kvrag demo``: real documents and a real small model, every answer made twice."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from demo.parts import example_corpus, packaged_embeddings, packaged_model
from demo.progress import Progress
from demo.questions import Question, read_questions, spread
from kvrag.cli.documents import read_documents
from kvrag.cli.options import DEMO, REPAIR, Given, repair_of, takes
from kvrag.cli.output import console
from kvrag.errors import ConfigError, require

if TYPE_CHECKING:
    from demo.pipeline import DemoConfig, Pipeline

FRAMEWORKS = {
    "langchain": ("demo.langchain", "LangChainPipeline", "langchain_core", "langchain"),
    "llama-index": ("demo.llama_index", "LlamaIndexPipeline", "llama_index.core", "llama-index"),
    "none": ("demo.direct", "DirectPipeline", "faiss", "demo"),
}
"""Name → module and class of the pipeline, the package that it needs, and the extra that brings it."""

GENERAL_QUESTIONS = (
    "What are these documents about?",
    "Which names are mentioned, and what do they stand for?",
    "Which numbers are given, and what do they mean?",
    "What should a reader remember?",
)
"""For a corpus that comes without questions."""


@takes(engine=DEMO, repair=REPAIR)
def demo(
    engine: Given,
    repair: Given,
    framework: Annotated[
        str, typer.Option(help="langchain, llama-index, or none (the engine alone).")
    ] = "langchain",
    corpus: Annotated[
        Path | None, typer.Option(help="Folder of texts; default: the examples of the checkout.")
    ] = None,
    question: Annotated[
        list[str] | None, typer.Option(help="Ask this instead; may be repeated.")
    ] = None,
    questions: Annotated[
        int, typer.Option(min=1, help="How many of the corpus's questions to ask.")
    ] = 8,
    top_k: Annotated[int, typer.Option(min=1, help="Chunks per question.")] = 6,
    chunk_tokens: Annotated[
        int, typer.Option(min=32, help="Size of a chunk aimed for, in tokens.")
    ] = 300,
    kv_dir: Annotated[Path, typer.Option("--kv-dir", help="Where KV is kept between runs.")] = Path(
        ".kvrag-demo"
    ),
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Upper bound of answer tokens.")] = 24,
    repeats: Annotated[
        int, typer.Option(min=1, help="Time each prompt so often; the best counts.")
    ] = 2,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Forget the KV of earlier runs first.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Hub id, directory or .gguf; default: SmolLM2-135M of its package.",
        ),
    ] = None,
) -> None:
    """Answer questions about real documents twice, by full prefill and with reuse from disk, and compare time and answers."""
    _check_packages(framework)
    folder = corpus or example_corpus()
    documents = read_documents([folder])
    source = model or str(packaged_model())
    embeddings = str(packaged_embeddings())
    if fresh:
        _forget(kv_dir)
    out = console()
    progress = Progress(out)
    with progress.stage("importing torch and transformers"):
        from demo.pipeline import DemoConfig
        from demo.report import print_report
        from demo.run import Sizes, quiet, run_demo

        quiet()
        options = {**engine, "repair": repair_of(repair)}
        config = DemoConfig(source, embeddings, kv_dir, top_k, options)
    asked = _questions(folder, question, questions)
    sizes = Sizes(chunk_tokens, max_new_tokens, repeats)
    make = partial(_pipeline, framework, config)
    print_report(
        run_demo(make, documents, asked, kv_dir=kv_dir, sizes=sizes, progress=progress), out
    )


def _questions(corpus: Path, given: list[str] | None, count: int) -> list[Question]:
    """Take the questions given, else the corpus's own, else general ones."""
    if given:
        return [Question(text) for text in given]
    return spread(read_questions(corpus), count) or [
        Question(text) for text in GENERAL_QUESTIONS[:count]
    ]


def _pipeline(framework: str, config: DemoConfig) -> Pipeline:
    module, name, _, _ = FRAMEWORKS[framework]
    made: Pipeline = getattr(importlib.import_module(module), name)(config)
    return made


def _check_packages(framework: str) -> None:
    """See that a framework's packages are there before anything takes time."""
    if framework not in FRAMEWORKS:
        raise ConfigError(f"framework is {framework!r}; it must be one of {', '.join(FRAMEWORKS)}")
    _, _, package, extra = FRAMEWORKS[framework]
    require(package, extra=extra, purpose=f"kvrag demo --framework {framework}")
    for needed in ("faiss", "sentence_transformers"):
        if importlib.util.find_spec(needed) is None:
            require(needed, extra="demo", purpose="the demo's retrieval")


def _forget(kv_dir: Path) -> None:
    """Delete the demo's store, and nothing that is none."""
    if not kv_dir.exists():
        return
    if not (kv_dir / "format.json").is_file():
        raise ConfigError(
            f"--fresh would delete {str(kv_dir)!r}, which is not a KV store; choose another --kv-dir"
        )
    shutil.rmtree(kv_dir)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(demo)
command = typer.main.get_command(app)
"""What ``kvrag demo`` calls."""
