"""Command line of ``kvrag``: all commands together.

Errors that kvrag raises on purpose are printed as a sentence on standard error, with exit status 2.
``--debug`` or ``KVRAG_DEBUG=1`` shows their tracebacks instead.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from typing import Annotated, Any

from kvrag.config.address import redacted
from kvrag.errors import KVRagError

try:
    import typer

    from kvrag.cli.ask import ask, explain, verify
    from kvrag.cli.documents import example
    from kvrag.cli.estimate import estimate
    from kvrag.cli.kernels import app as kernels
    from kvrag.cli.measure import calibrate, evaluate
    from kvrag.cli.output import say, write_anything
    from kvrag.cli.plugins import EXTRA_OF, commands, missing
    from kvrag.cli.precompute import precompute
    from kvrag.cli.store import documents, export, fsck, gc, import_, rm, stats
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] not in ("typer", "rich"):
        raise
    # The console script imports this module before it calls main(), so the message belongs here.
    sys.stderr.write(
        f"the command line needs {error.name!r}; install kvrag[cli]: pip install 'kvrag[cli]'\n"
    )
    raise SystemExit(2) from None


class Commands(typer.core.TyperGroup):
    """A group that prints kvrag's errors as sentences, and takes ``--debug`` at any place."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Move ``--debug`` to the front, where the group's options are read."""
        return super().parse_args(ctx, sorted(args, key=lambda arg: arg != "--debug"))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; raise ``MissingDependencyError`` if its package is not installed."""
        found = super().get_command(ctx, cmd_name)
        if found is None and cmd_name in EXTRA_OF:
            raise missing(f"kvrag {cmd_name}", extra=EXTRA_OF[cmd_name])
        return found

    def invoke(self, ctx: Any) -> Any:
        """Run a command; an error of kvrag becomes a sentence and exit status 2."""
        try:
            return super().invoke(ctx)
        except (KVRagError, OSError, UnicodeError) as error:
            if (
                isinstance(error, BrokenPipeError)
                or ctx.params.get("debug")
                or os.environ.get("KVRAG_DEBUG", "") not in ("", "0")
            ):
                raise
            say(f"kvrag: {_sentence(error)}", err=True)
            raise typer.Exit(2) from None


_FIELD = re.compile(r"\b(?:Repair|Sampling|Server|Store)Config\.(\w+)")
"""Field of a config in a message; on the command line it is an option."""


def _sentence(error: Exception) -> str:
    """Return the message of an error; a system error names the file that it is about."""
    if (
        isinstance(error, OSError)
        and not isinstance(error, KVRagError)
        and error.filename is not None
    ):
        return f"{error.filename!r}: {error.strerror or error}; check the path and its rights"
    said = redacted(str(error)) or type(error).__name__
    return _FIELD.sub(lambda field: f"--{field[1].replace('_', '-')}", said)


def demo(context: typer.Context) -> None:
    """Answer questions about real documents twice, by full prefill and with reuse, and compare.

    Reuse loads the KV from disk. Shows times and answers.
    """
    examples = example("demo/main.py", otherwise="run it in a checkout").parent.parent
    sys.path.insert(0, str(examples))
    try:
        importlib.import_module("demo.main").command.main(
            context.args, prog_name="kvrag demo", standalone_mode=False
        )
    finally:
        sys.path.remove(str(examples))


app = typer.Typer(
    name="kvrag",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# All options of the demo, --help too, are read by the demo itself.
app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
)(demo)
for command in (
    precompute,
    ask,
    explain,
    evaluate,
    verify,
    calibrate,
    estimate,
    stats,
    documents,
    fsck,
    gc,
    rm,
    export,
):
    app.command()(command)
app.command("import")(import_)
app.add_typer(kernels)
for name, command in commands():
    app.command(name)(command)


def _show_version(wanted: bool) -> None:
    if wanted:
        from kvrag import __version__

        say(f"kvrag {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks (also KVRAG_DEBUG=1).")
    ] = False,
) -> None:
    """Prefill RAG chunks once, and reuse their KV in every prompt."""


def main() -> None:
    """Run the command line; this is the entry point of ``kvrag``."""
    write_anything()
    app()
