"""Look after a store, without a model.

``kvrag stats | documents | fsck | gc | rm | export | import``.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrag.cli.options import (
    DEFAULT_KV_DIR,
    LIMITS,
    AsJson,
    Given,
    KVDir,
    Namespace,
    Words,
    is_on_command_line,
    parse_bytes,
    store_options,
    takes,
)
from kvrag.cli.output import fail, grid, show
from kvrag.config import StoreConfig
from kvrag.config.address import address
from kvrag.errors import ConfigError, InputError, StoreError
from kvrag.evaluate.estimate import human_bytes

if TYPE_CHECKING:
    from kvrag.store import TieredStore

Documents = Annotated[Words, typer.Option(help="Id of a document; may be repeated.")]

# What a check finds and does, and what to do next.
_FINDS = {
    "checked": "{} chunk(s): the beginning of the file is intact. --verify-data reads every byte.",
    "verified": "{} chunk(s): every byte is intact.",
    "unknown_rows": "{} chunk(s) in the store's list had no file, and were taken off it. They "
    "are computed again when a prompt needs them, or by kvrag precompute.",
    "dormant": "{} file(s) that are not in the store's list were removed.",
    "other_versions": "{} file(s) of another version of kvrag are of no use to this one.",
    "foreign": "{} file(s) with another encryption key, or with none, were left unchecked. Set the "
    "key that they were written with, or remove them with kvrag gc --foreign.",
    "rejected": "{} chunk(s) are damaged or can't be read. Damaged ones were removed; they are "
    "computed again when a prompt needs them, or by kvrag precompute. For the others, make their "
    "files readable:",
}
# What a cleanup removes.
_REMOVALS = {
    "swept": "{} unfinished file(s) of killed processes were removed.",
    "pending": "{} unfinished chunk(s) of killed processes were removed.",
    "dormant": _FINDS["dormant"],
    "other_versions": "{} file(s) of another version of kvrag were removed.",
    "foreign": "{} file(s) with another encryption key, or with none, were removed.",
    "evicted": "{} chunk(s) beyond --disk-bytes were removed, the least useful first. They are "
    "computed again when a prompt needs them.",
}


def _check_is_store(kv_dir: str) -> None:
    """Raise :class:`StoreError` where there is no store; opening the directory would create it."""
    if "://" in kv_dir:
        return
    path = Path(kv_dir).expanduser()
    if path.exists() and not path.is_dir():
        raise StoreError(f"{kv_dir!r} is a file; --kv-dir must name the directory of a KV store")
    if not (path / "format.json").is_file():
        if path.exists():
            fault = f"{kv_dir!r} is not a KV store"
        else:
            fault = f"there is no KV store {kv_dir!r}"
        raise StoreError(f"{fault}; check --kv-dir, or run kvrag precompute first")


@contextmanager
def _existing_store(kv_dir: str, **options: Any) -> Iterator[TieredStore]:
    """Open an existing store with key and catalog of the environment; close it afterwards."""
    _check_is_store(kv_dir)
    from kvrag.store import open_store

    config = StoreConfig(ram_bytes=0, min_free_bytes=0, **options, **store_options(kv_dir))
    with closing(open_store(kv_dir, config)) as store:
        yield store


def _size(store: TieredStore) -> str:
    """Return the number and size of the stored chunks."""
    chunks, num_bytes = store.catalog.totals()
    return f"{chunks} chunk(s), {human_bytes(num_bytes)}"


def _told(words: Given, report: Given) -> list[str]:
    """Return sentences about the counts of a report that are not zero."""
    return [text.format(report[name]) for name, text in words.items() if report[name]]


def stats(kv_dir: KVDir = DEFAULT_KV_DIR, as_json: AsJson = False) -> None:
    """Show the size of every tier, and the stored chunks of every model and namespace.

    A model or namespace without a known name is shown by its digest.
    """
    with _existing_store(kv_dir) as store:
        tiers = store.stats()
        groups = _groups(store)
        name_of = {store.names.namespace("default"): "default"}
        spaces = {
            group["namespace"]: sorted(store.catalog.documents(group["namespace"]))
            for group in groups
        }
    for group in groups:
        group |= {
            "name": name_of.get(group["namespace"]),
            "documents": len(spaces[group["namespace"]]),
        }
    rows = [
        (
            group["model_name"] or group["model"][7:19],
            group["name"] or group["namespace"][-12:],
            group["documents"],
            group["prefix_tokens"] if group["prefix_tokens"] is not None else group["prefix"][7:19],
            group["chunks"],
            group["tokens"],
            human_bytes(group["num_bytes"]),
        )
        for group in groups
    ]
    show(
        {
            "tiers": {name: asdict(tier) for name, tier in tiers.items()},
            "groups": groups,
            "namespaces": [
                {"namespace": space, "name": name_of.get(space), "documents": ids}
                for space, ids in spaces.items()
            ],
        },
        grid(
            f"Tiers of {kv_dir}",
            "tier|>chunks|>size",
            [(name, tier.chunks, human_bytes(tier.num_bytes)) for name, tier in tiers.items()],
        ),
        grid(
            "What is stored (kvrag documents lists the documents of a namespace)",
            "model|namespace|>documents|>tokens of the prefix|>chunks|>tokens|>size",
            rows,
        ),
        as_json=as_json,
    )


def _groups(store: TieredStore) -> list[Given]:
    """Return the chunks, tokens and bytes stored per model, namespace and prefix."""
    from kvrag.identity.fingerprint import ids_digest
    from kvrag.identity.weights import kept_name

    nothing = ids_digest(())
    counts: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    lengths = {nothing: 0}
    for key, chunk in store.catalog.stored(store.catalog.keys()).items():
        record = chunk.record(key)
        counted = {"chunks": 1, "tokens": record.num_tokens, "num_bytes": record.num_bytes}
        counts[record.model, record.namespace, record.prefix].update(counted)
        is_prefix = record.prefix == nothing and not store.catalog.key_texts(record.key)
        if is_prefix and (identity := store.identity(record.key)):
            lengths[ids_digest(identity.token_ids)] = len(identity.token_ids)
    return [
        {
            "model": model,
            "model_name": kept_name(model),
            "namespace": space,
            "prefix": prefix,
            "prefix_tokens": lengths.get(prefix),
            **count,
        }
        for (model, space, prefix), count in sorted(counts.items())
    ]


def documents(
    kv_dir: KVDir = DEFAULT_KV_DIR,
    namespace: Namespace = "default",
    as_json: AsJson = False,
) -> None:
    """List the documents of a namespace, with their chunks, tokens and bytes.

    A chunk of several documents counts for all of them.
    """
    found = list[Given]()
    with _existing_store(kv_dir) as store:
        held = store.catalog
        space = store.names.namespace(namespace)
        for doc_id in sorted(held.documents(space)):
            records = [*filter(None, map(held.get, held.document_keys(space, doc_id)))]
            found.append(
                {
                    "document": doc_id,
                    "chunks": len(records),
                    "tokens": sum(r.num_tokens for r in records),
                    "num_bytes": sum(r.num_bytes for r in records),
                }
            )
    rows = [(d["document"], d["chunks"], d["tokens"], human_bytes(d["num_bytes"])) for d in found]
    show(
        {"namespace": namespace, "documents": found},
        grid(
            f"{len(found)} document(s) in the namespace {namespace!r} of {kv_dir}",
            "document|>chunks|>tokens|>size",
            rows,
        ),
        as_json=as_json,
    )


def fsck(
    kv_dir: KVDir = DEFAULT_KV_DIR,
    verify_data: Annotated[
        bool, typer.Option("--verify-data", help="Read every byte of every chunk.")
    ] = False,
    sample: Annotated[
        str,
        typer.Option(
            metavar="N/T", help="Read every byte of one of T parts: 1/30 today, 2/30 tomorrow."
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Look for damaged chunks, and remove them; prompts that need them compute them again.

    Reads the beginning of each chunk's file; --verify-data and --sample read every byte. Files that
    the store does not list are removed, and so are chunks in its list without a file. Exit status 1
    if a chunk is damaged or can't be read.
    """
    from kvrag.cli import check

    if sample and not re.fullmatch(r"\d+/\d+", sample):
        raise ConfigError(
            f"--sample is {sample!r}; give n/t, for instance 1/10, then 2/10 the next day"
        )
    with _existing_store(kv_dir) as store:
        head = f"Checked {kv_dir}: {_size(store)}."
        keys = None
        if sample:
            keys = check.sample(sorted(store.listed()), *map(int, sample.split("/")))
        report = check.fsck(store, keys, verify_data=verify_data)
    found = asdict(report)
    lines = _told(_FINDS, found | {"rejected": len(report.rejected)})
    lines += [f"  {key[:12]}: {reason}" for key, reason in report.rejected]
    show({**found, "ok": report.ok}, head, *lines, as_json=as_json, ok=report.ok)


def gc(
    kv_dir: KVDir = DEFAULT_KV_DIR,
    disk_bytes: Annotated[
        int | None,
        typer.Option(
            parser=parse_bytes,
            metavar="SIZE",
            help="Remove chunks, the least useful first, until the store is no larger than this.",
        ),
    ] = None,
    foreign: Annotated[
        bool,
        typer.Option(
            "--foreign",
            help="Remove files of other encryption keys too, even if another store uses them; "
            "where a key is set, also files without one.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove files that no prompt can use any more, and chunks beyond --disk-bytes.

    Such files are those of another version of kvrag, those that the store does not list, and what
    killed processes left unfinished. Removed chunks are computed again when a prompt needs them.
    Exit status 1 if the store can't be changed.
    """
    from kvrag.cli import check

    if disk_bytes is not None and "://" in kv_dir:
        raise ConfigError(
            "--disk-bytes is for a store in a directory; limit a shared store by Redis's eviction, "
            "or by the bucket's rules"
        )
    with _existing_store(kv_dir, disk_bytes=disk_bytes) as store:
        before = _size(store)
        try:
            report = asdict(check.gc(store, with_foreign=foreign))
        except StoreError as error:
            fail(f"nothing was removed: {error}")
        head = f"Cleaned {kv_dir}: {before} before; {_size(store)} now."
    show(
        report,
        head,
        *(_told(_REMOVALS, report) or ["Nothing was found to remove."]),
        as_json=as_json,
    )


def rm(
    context: typer.Context,
    document: Documents = None,
    collection: Annotated[
        Words, typer.Option(help="All documents whose ids begin with NAME/; may be repeated.")
    ] = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help="Everything of every namespace, or of --namespace if that is given."
        ),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Don't ask whether --all is meant.")
    ] = False,
    kv_dir: KVDir = DEFAULT_KV_DIR,
    namespace: Namespace = "default",
    as_json: AsJson = False,
) -> None:
    """Erase documents, and the KV that no other document refers to, for every model and prefix.

    Exit status 1 if no document was known.
    """
    if everything:
        if document or collection:
            raise InputError(
                "--all erases every document; pass it without the options that name some"
            )
        _rm_all(
            kv_dir,
            namespace if is_on_command_line(context, "namespace") else None,
            yes=yes,
            as_json=as_json,
        )
        return
    if not document and not collection:
        raise InputError(
            "nothing is named to erase; pass --document ID, --collection NAME or --all"
        )
    with _existing_store(kv_dir) as store:
        from kvrag.precompute.library import members

        space = store.names.namespace(namespace)
        known = dict.fromkeys(store.catalog.documents(space))
        below = [name for each in collection or () for name in members(known, each) or [f"{each}/"]]
        erased = {
            name: store.forget(space, name) for name in dict.fromkeys([*(document or ()), *below])
        }
    unknown = [name for name in erased if name not in known]
    lines = [
        f"{name}: {f'erased, with {chunks} chunk(s)' if name in known else 'is not known here'}"
        for name, chunks in erased.items()
    ]
    show(
        {"erased_chunks": erased, "unknown": unknown},
        *lines,
        as_json=as_json,
        ok=len(unknown) < len(erased),
    )


def _rm_all(kv_dir: str, namespace: str | None, *, yes: bool, as_json: bool) -> None:
    space = None
    of_what = "every namespace"
    with _existing_store(kv_dir) as store:
        if namespace is not None:
            space = store.names.namespace(namespace)
            of_what = f"the namespace {namespace!r}"
        chunks = len(store.catalog.known(store.catalog.present(space)))
        is_known = space is None or chunks > 0 or bool(store.catalog.documents(space))
        if not yes:
            typer.confirm(
                f"Erase everything in {kv_dir}, {chunks} chunk(s) of {of_what}?",
                abort=True,
                err=True,
            )
        erased = store.clear(space)
    state = f"erased, with {erased} chunk(s)" if is_known else "nothing is known here"
    show({"erased_chunks": erased}, f"{of_what}: {state}", as_json=as_json, ok=is_known)


def export(
    target: Annotated[
        str,
        typer.Argument(
            parser=address,
            help="Directory of the copy, a store by itself, made if absent; or a shared store's "
            "address.",
        ),
    ],
    kv_dir: KVDir = DEFAULT_KV_DIR,
    document: Documents = None,
    namespace: Namespace = "default",
    plain: Annotated[
        bool,
        typer.Option(
            "--plain",
            help="Write the copy without the key of the environment; of --namespace alone.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Copy all chunks, or the chunks of some documents; every byte is verified.

    The copy can be opened with read_only=True. Exit status 1 if a document is not known or a chunk
    can't be read; the rest is copied. If no document is known, no copy is made.
    """
    from kvrag.cli import check
    from kvrag.store import open_store

    with _existing_store(kv_dir) as store:
        space = store.names.namespace(namespace)
        known = set(store.catalog.documents(space))
        asked = list(dict.fromkeys(document or ()))
        unknown = [name for name in asked if name not in known]
        if asked and unknown == asked:
            fail(_no_such(unknown, namespace))
        keys = {key for name in asked for key in store.catalog.document_keys(space, name)}
        # As for an existing store: a full disk must be an error, not a reason to evict copies.
        with closing(
            open_store(
                target,
                StoreConfig(ram_bytes=0, min_free_bytes=0, **store_options(target, plain=plain)),
            )
        ) as other:
            counts = check.copy(store, other, keys if asked else None, namespaces=[namespace])
    _report_copy(
        f"Copied to {target}", counts, {"unknown": unknown} if asked else {}, as_json=as_json
    )
    if unknown:
        fail(_no_such(unknown, namespace))


@takes(limits=LIMITS)
def import_(
    limits: Given,
    source: Annotated[
        str,
        typer.Argument(
            parser=address,
            help="Directory of a store, such as kvrag export makes, or a shared store's address; "
            "it is not changed.",
        ),
    ],
    kv_dir: KVDir = DEFAULT_KV_DIR,
    namespace: Namespace = "default",
    plain: Annotated[
        bool,
        typer.Option(
            "--plain", help="The source was written without a key; imports --namespace alone."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Import the chunks of another store.

    The source need not be trusted: every byte is verified, and no code in it is run.
    """
    _check_is_store(source)
    from kvrag.cli import check
    from kvrag.store import open_store

    written = StoreConfig(ram_bytes=0, read_only=True, **store_options(source, plain=plain))
    with (
        closing(open_store(source, written)) as other,
        closing(
            open_store(
                kv_dir,
                StoreConfig(ram_bytes=0, **limits, **store_options(limits.get("shared") or kv_dir)),
            )
        ) as store,
    ):
        counts = check.copy(other, store, namespaces=[namespace])
    _report_copy(f"Imported into {kv_dir}", counts, {}, as_json=as_json)


def _report_copy(title: str, counts: tuple[int, ...], more: Given, *, as_json: bool) -> None:
    """Print the counts of a copy; exit status 1 if a chunk could not be read."""
    named = zip(("copied", "there_already", "unreadable", "evicted"), counts, strict=True)
    line = "{}: {} chunk(s); {} were there already, {} could not be read, {} were evicted again"
    show({**dict(named), **more}, line.format(title, *counts), as_json=as_json, ok=not counts[2])


def _no_such(names: list[str], namespace: str) -> str:
    return (
        f"{', '.join(map(repr, names))}: not in the namespace {namespace!r}; check --namespace and "
        "the id, which ends in #0, #1 ... for the chunks of a file that kvrag precompute has split"
    )
