"""``kvrag rm``: erase documents."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrag.commands.maintenance import existing_store
from kvrag.commands.options import DEFAULT_KV_DIR, AsJson, KVDir, Namespace
from kvrag.commands.output import console, print_json


def rm(
    document: Annotated[list[str], typer.Option("--document", help="Id of a document; may be given several times.")],
    kv_dir: KVDir = DEFAULT_KV_DIR,
    namespace: Namespace = "default",
    as_json: AsJson = False,
) -> None:
    """Erase documents with the KV that only they hold on to, for every model and prefix. Exit status 1 if none was known."""
    with existing_store(kv_dir) as store:
        space = store.keys.names.namespace(namespace)
        known = set(store.index.documents(space))
        erased = {name: store.forget(space, name) for name in dict.fromkeys(document)}
    unknown = [name for name in erased if name not in known]
    if as_json:
        print_json({"erased_chunks": erased, "unknown": unknown})
    else:
        for name, chunks in erased.items():
            state = "is not known here" if name in unknown else f"erased, with {chunks} chunk(s)"
            console().print(f"{name}: {state}", markup=False, highlight=False)
    if len(unknown) == len(erased):
        raise typer.Exit(1)
