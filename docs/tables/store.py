"""The store beside plain files, and stores that machines share."""

from __future__ import annotations

from .core import Result, Tables, machine_of, table


def store(result: Result) -> str:
    """Set writes and verified reads beside plain files; say how long look-ups and openings take."""
    places = ["8 MB/memory", "64 MB/memory", "8 MB/disk", "64 MB/disk"]
    rows = [
        [f"write, `{kind}`", *_ratios(result["writes"], places, kind, "file", "put")]
        for kind in ("durable", "cache")
    ]
    rows += [
        [f"read, {state} page cache", *_ratios(result["reads"], places, state, "layers", "get")]
        for state in ("warm", "cold")
    ]
    warm = [r["first_layer_ms"] for name, r in result["reads"].items() if "/warm/" in name]
    found, opening = result["index"]["diskcache"], result["opening"]
    said = f"\nThe first layer of a warm read came after {min(warm):.1f} to {max(warm):.1f} ms. "
    said += (
        f"A look-up among {found['rows']:,} rows took {found['lookup_us']:.0f} µs (target: 50); "
    )
    said += f"opening a store of {opening['chunks']:,} chunks took {opening['open_s']:.2f} s (target: 0.5), "
    said += f"{opening['read_only_s']:.2f} s for reading only.\n"
    header = ["", *(place.replace("/", ", ") for place in places)]
    return table(header, rows) + said + machine_of(result, "store.json")


def _ratios(runs: Result, places: list[str], state: str, part: str, whole: str) -> list[str]:
    """Return a cell per size and file system: the ratios of the part and of the whole."""
    cells = {}
    for name, r in runs.items():
        system, kind, _ = name.split("/")
        if kind == state:
            place = f"{r['bytes'] / 1e6:.0f} MB/{system}"
            cells[place] = f"{r[f'{part}_ratio']:.2f} / {r[f'{whole}_ratio']:.2f}"
    return [cells.get(place, "–") for place in places]


def shared(result: Result) -> str:
    """Set reading through kvrag beside the server's own client, for each kind of server."""
    names = {
        "redis": "redis-server, redis-py",
        "objects": "a directory in memory, obstore",
        "s3": "moto (S3), obstore",
    }
    rows = [
        [
            names[tier],
            f"{row['gb_per_s']['client']:.2f}",
            f"{row['gb_per_s']['kvrag']:.2f}",
            f"{row['ratio']:.2f}",
            # elsewhere the catalog was in a database that is no longer supported
            f"{row['lookup_ms']:.2f}" if tier == "redis" else "–",
        ]
        for tier, row in result["tiers"].items()
    ]
    header = ["server, client", "client, GB/s", "kvrag, GB/s", "ratio"]
    header.append("look-up of 20 chunks, ms")
    said = f"\n{result['chunks']} chunks of {result['bytes'] / 1e6:.0f} MB; the ratio's target is {result['target']}.\n"
    return table(header, rows) + said + machine_of(result, "shared.json")


def shared_catalog(result: Result) -> str:
    """Say what a catalog of many chunks costs its writers, the database and a new machine."""
    forms = {
        "written by one machine, chunks per second: first, slowest and last tenth": lambda found: (
            ", ".join(
                f"{rate:.0f}"
                for rates in [found["chunks_per_s"]]
                for rate in (rates[0], min(rates), rates[-1])
            )
        ),
        "by two machines at once": lambda found: f"{found['two_machines_chunks_per_s']:.0f}",
        "in the database": lambda found: f"{found['bytes'] / 1e6:.0f} MB",
        "until a new machine has begun": lambda found: f"{found['begin_ms']:.1f} ms",
        "its look-up of 20 chunks": lambda found: f"{found['lookup_ms']:.2f} ms",
        "a list of all keys": lambda found: f"{found['list_s']:.1f} s",
    }
    found = result["catalogs"]["redis"]
    rows = [["chunks", f"{result['chunks']:,}"]]
    rows += [[what, form(found)] for what, form in forms.items()]
    return table(["what", "Redis"], rows) + machine_of(result, "shared_catalog.json")


TABLES: Tables = {
    "store": ("store.json", store),
    "shared": ("shared.json", shared),
    "shared-catalog": ("shared_catalog.json", shared_catalog),
}
