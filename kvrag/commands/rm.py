"""``kvrag rm``: erase documents and collections."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrag.commands.maintenance import existing_store
from kvrag.commands.options import DEFAULT_KV_DIR, AsJson, KVDir, Namespace
from kvrag.commands.output import console, print_json
from kvrag.errors import InputError


def rm(
    document: Annotated[
        list[str] | None, typer.Option("--document", help="Id of a document; may be given several times.")
    ] = None,
    collection: Annotated[
        list[str] | None,
        typer.Option("--collection", help="All documents whose ids begin with NAME/; several times too."),
    ] = None,
    kv_dir: KVDir = DEFAULT_KV_DIR,
    namespace: Namespace = "default",
    as_json: AsJson = False,
) -> None:
    """Erase documents with the KV that only they hold on to, for every model and prefix. Exit status 1 if none was known."""
    if not document and not collection:
        raise InputError("nothing is named to erase; pass --document ID or --collection NAME")
    with existing_store(kv_dir) as store:
        from kvrag.store.base import members

        space = store.keys.names.namespace(namespace)
        known = store.index.documents(space)
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
