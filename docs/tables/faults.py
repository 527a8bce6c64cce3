"""Scenarios of faults, and random inputs."""

from __future__ import annotations

from typing import Any

from .core import Result, Tables, machine_of

NOT_COUNTS = ("failures", "seconds", "form", "commit")
SHOWN = ("kills", "answers", "cases")
"""Counts that say how much a scenario did; without one of these, its first count does."""


def reliability(result: Result, file: str = "reliability.json") -> str:
    """List the scenarios with their counts, and what they saw broken."""
    said, broken = [], 0
    for name, r in result["scenarios"].items():
        if "skipped" in r:
            said.append(f"{name} (not run: {r['skipped']})")
            continue
        counts = [key for key in (*SHOWN, *r) if key in r and key not in NOT_COUNTS]
        said.append(f"**{name}** ({counts[0]}: {_said(r[counts[0]])})")
        broken += len(r["failures"])
    text = f"Broken promises: {broken}. Scenarios, with a count of each: {', '.join(said)}.\n"
    return text + machine_of(result, file)


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} by {name}" for name, count in value.items())
    return f"{value:,}"


def serve(result: Result) -> str:
    """List the scenarios on a server."""
    return reliability(result, "serve.json")


def fuzz_reader(result: Result) -> str:
    """Count inputs that a fuzzer made up."""
    accepted = sum(result["accepted"].values())
    said = f"{result['inputs']:,} inputs to {len(result['by_target'])} readers ({result['fuzzer']}, {result['covered_edges']} edges): "
    said += f"{accepted:,} accepted and proven, failures: {result['failures']}; "
    said += f"slowest: {result['slowest_cpu_ms']:.0f} ms of a processor.\n"
    return said + machine_of(result, "fuzz_reader.json")


def fuzz(result: Result) -> str:
    """Sum up the random cases."""
    repaired = sum(n for label, n in result["labels"].items() if label.endswith("repaired"))
    m = result["machine"]
    versions = ", ".join(
        f"{name} {version}" for name, version in m["versions"].items() if name != "kvrag"
    )
    said = f"{result['cases']:,} cases of {len(result['by_model'])} architectures: "
    said += (
        f"{result['comparisons']:,} prefills labelled exact or full, {result['failed']} failed; "
    )
    said += f"largest difference {result['largest']:.1e} (allowed: {result['tolerance']:g}). "
    said += f"{repaired:,} were labelled repaired; {result['ties']} had no result, because an expert's choice hung on a rounding.\n"
    said += f"\nSeed {result['seed']}; {m['cpu']}; {versions}; commit {m['commit'][:10]}.\n"
    return said


TABLES: Tables = {
    "reliability": ("reliability.json", reliability),
    "serve": ("serve.json", serve),
    "fuzz-reader": ("fuzz_reader.json", fuzz_reader),
    "fuzz": ("fuzz.json", fuzz),
}
