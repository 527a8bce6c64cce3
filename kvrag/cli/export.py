"""``kvrag export``: copy chunks to a store of their own, to ship with an image or to another machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from kvrag.cli.keys import key_options
from kvrag.cli.maintenance import existing_store, report_copy
from kvrag.cli.options import DEFAULT_KV_DIR, AsJson, KVDir, Namespace


def export(
    target: Annotated[Path, typer.Argument(help="Directory of the copy: a store by itself, made if absent.")],
    kv_dir: KVDir = DEFAULT_KV_DIR,
    document: Annotated[
        list[str] | None, typer.Option("--document", help="Only this document; may be repeated.")
    ] = None,
    namespace: Namespace = "default",
    plain: Annotated[
        bool, typer.Option("--plain", help="Write the copy without the keys of the environment; of --namespace alone.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Copy all chunks, or those of some documents; every byte is proven. The copy can be opened with read_only=True.

    Exit status 1 if a document is not known, or a chunk can't be read; the rest is copied. Without any, no copy is made.
    """
    from kvrag.config import StoreConfig
    from kvrag.store import check as checks
    from kvrag.store import open_store

    with existing_store(kv_dir) as store:
        space = store.keys.names.namespace(namespace)
        keys, unknown = None, None
        if document:
            known = set(store.catalog.documents(space))
            unknown = [name for name in dict.fromkeys(document) if name not in known]
            if len(unknown) == len(set(document)):
                raise_unknown(unknown, namespace)
            keys = sorted({key for name in document for key in store.catalog.document_keys(space, name)})
        other = open_store(target, StoreConfig(ram_bytes=0, **({} if plain else key_options())))
        try:
            counts = checks.copy(store, other, keys, namespaces=[namespace])
        finally:
            other.close()
    report_copy(f"Copied to {target}", counts, as_json=as_json, unknown=unknown)
    if unknown:
        raise_unknown(unknown, namespace)


def raise_unknown(names: list[str], namespace: str) -> NoReturn:
    """Say that no document has these ids, and end with status 1."""
    are = "documents are" if len(names) > 1 else "document is"
    called = ", ".join(map(repr, names))
    typer.echo(
        f"kvrag: {called}: no such {are} in the namespace {namespace!r}; check the id, which ends in #0, #1 ... for the chunks of "
        "a file that kvrag precompute has split, and --namespace",
        err=True,
    )
    raise typer.Exit(1)
