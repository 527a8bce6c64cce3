"""Commands that packages built on kvrag add, and engines that they add to commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Any

from kvrag.cli.output import say
from kvrag.errors import MissingDependencyError

COMMANDS = "kvrag.commands"
"""Entry points of commands: the name is the command's, the value a function for typer."""

BACKENDS = "kvrag.backends"
"""Entry points of engines of commands: the name is the engine's, the value a module with a function
for each command that can use it."""

EXTRA_OF = {"serve": "server"}
"""Extras that install commands."""


def commands() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the commands of installed packages, by name; say which ones can't be loaded."""
    for plugin in sorted(entry_points(group=COMMANDS), key=lambda plugin: plugin.name):
        try:
            yield plugin.name, plugin.load()
        except Exception as error:  # whatever a package raises, the other commands work
            say(
                f"kvrag {plugin.name}: {plugin.value} can't be loaded ({error}); reinstall the "
                "package that registers it",
                err=True,
            )


def backend(name: str, *, purpose: str) -> Any:
    """Return the module that runs a command on another engine.

    ``purpose`` is the command. Raises ``MissingDependencyError``, which names the extra, without
    the engine's package.
    """
    for plugin in entry_points(group=BACKENDS, name=name):
        return plugin.load()
    raise missing(purpose, extra=name)


def missing(purpose: str, *, extra: str) -> MissingDependencyError:
    """Return the error for a command of a package that is not installed."""
    return MissingDependencyError(
        f"{purpose} is not part of this installation; add it with: pip install 'kvrag[{extra}]'"
    )
