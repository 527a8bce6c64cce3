"""``kvrag rm``: erase documents and collections, or everything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvrag.cli.maintenance import existing_store
from kvrag.cli.options import DEFAULT_KV_DIR, AsJson, KVDir, Namespace
from kvrag.cli.output import console, print_json
from kvrag.errors import InputError


def rm(
    context: typer.Context,
    document: Annotated[
        list[str] | None, typer.Option("--document", help="Id of a document; may be given several times.")
    ] = None,
    collection: Annotated[
        list[str] | None,
        typer.Option("--collection", help="All documents whose ids begin with NAME/; several times too."),
    ] = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help="Everything of every namespace, or of --namespace if that is given, with and without ids."
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask whether --all is meant.")] = False,
    kv_dir: KVDir = DEFAULT_KV_DIR,
    namespace: Namespace = "default",
    as_json: AsJson = False,
) -> None:
    """Erase documents with the KV that only they hold on to, for every model and prefix. Exit status 1 if none was known."""
    if everything:
        source = context.get_parameter_source("namespace")
        if document or collection:
            raise InputError("--all erases every document; pass it without the options that name some")
        is_named = source is not None and source.name == "COMMANDLINE"
        _rm_all(kv_dir, namespace if is_named else None, yes=yes, as_json=as_json)
        return
    if not document and not collection:
        raise InputError("nothing is named to erase; pass --document ID, --collection NAME or --all")
    with existing_store(kv_dir) as store:
        from kvrag.store import members

        space = store.keys.names.namespace(namespace)
        known = store.catalog.documents(space)
        below = [name for each in collection or () for name in members(known, each)]
        erased = {name: store.forget(space, name) for name in dict.fromkeys([*(document or ()), *below])}
    unknown = [name for name in erased if name not in known]
    if as_json:
        print_json({"erased_chunks": erased, "unknown": unknown})
    else:
        for name, chunks in erased.items():
            state = "is not known here" if name in unknown else f"erased, with {chunks} chunk(s)"
            console().print(f"{name}: {state}", markup=False, highlight=False)
    if len(unknown) == len(erased):
        raise typer.Exit(1)


def _rm_all(kv_dir: Path, namespace: str | None, *, yes: bool, as_json: bool) -> None:
    of_what = "every namespace" if namespace is None else f"the namespace {namespace!r}"
    with existing_store(kv_dir) as store:
        space = None if namespace is None else store.keys.names.namespace(namespace)
        records = [store.catalog.get(key) for key in store.catalog.keys()]  # noqa: SIM118 - an index is no dict
        chunks = sum(record is not None and space in (None, record.namespace) for record in records)
        is_known = space is None or chunks > 0 or bool(store.catalog.documents(space))
        if not yes:
            typer.confirm(f"Erase everything in {kv_dir}, {chunks} chunk(s) of {of_what}?", abort=True, err=True)
        erased = store.clear(space)
    what = "everything" if namespace is None else f"everything of {of_what}"
    if as_json:
        print_json({"erased_chunks": erased})
    else:
        state = f"erased, with {erased} chunk(s)" if is_known else "nothing is known here"
        console().print(f"{what}: {state}", markup=False, highlight=False)
    if not is_known:
        raise typer.Exit(1)
