"""Run the public test suites of LangChain, and write what came of them: ``make suites``.

The suites are those of ``langchain-tests``, as the files below apply them: to the chat model, to vector stores whose KV must be that of
their documents after each test, and to retrievers. Stores of other packages are also run bare: what they fail by themselves is seen.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
FILES = ("test_lc_standard_chat.py", "test_lc_standard_qwen.py", "test_lc_vectorstores.py")
CLASSES = {
    "TestChatKVRagUnit": "chat model, unit",
    "TestChatKVRagIntegration": "chat model, integration",
    "TestQwenUnit": "chat model, unit, Qwen2.5-Coder-1.5B",
    "TestQwenIntegration": "chat model, integration, Qwen2.5-Coder-1.5B",
    "TestStores": "vector store",
    "TestRetrievers": "retriever",
}
PACKAGES = (
    "langchain-core",
    "langchain-tests",
    "langchain-chroma",
    "langchain-qdrant",
    "faiss-cpu",
)
OUTCOMES = ("passed", "failed", "skipped", "xfailed")


class Outcomes:
    """A plugin of pytest that counts outcomes by suite, and keeps the reasons of those that did not pass."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self.reasons: dict[str, Counter[str]] = defaultdict(Counter)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        suite = suite_of(report.nodeid)
        if suite is None or (report.when != "call" and report.passed):
            return
        outcome = "xfailed" if report.skipped and hasattr(report, "wasxfail") else report.outcome
        self.counts[suite][outcome] += 1
        if outcome != "passed":
            self.reasons[suite][reason_of(report)] += 1


def suite_of(nodeid: str) -> str | None:
    """Name the suite that a test belongs to, with the store that it was applied to."""
    match = re.search(r"::(\w+)::\w+(?:\[(.+?)\])?$", nodeid)
    if match is None or match[1] not in CLASSES:
        return None
    is_store = match[1] in ("TestStores", "TestRetrievers")
    return (
        f"{CLASSES[match[1]]}: {match[2] or 'no test left out'}" if is_store else CLASSES[match[1]]
    )


def reason_of(report: pytest.TestReport) -> str:
    """Return why a test did not pass, in a line."""
    if hasattr(report, "wasxfail"):
        return str(report.wasxfail).removeprefix("reason: ")
    told = (
        report.longrepr[2]
        if isinstance(report.longrepr, tuple)
        else str(report.longreprtext).splitlines()[-1]
    )
    return str(told).removeprefix("Skipped: ").removeprefix("E ").strip()[:200]


def main() -> int:
    """Run all, write the result, and fail where a store fails that is not bare."""
    sys.path[:0] = [str(HERE), str(HERE.parent / "benchmarks")]
    os.environ["KVRAG_BARE_STORES"] = "1"
    from common import machine, write_result

    seen = Outcomes()
    files = [str(HERE / "langchain" / file) for file in FILES]
    pytest.main(
        [
            *files,
            "-q",
            "--benchmark-disable",
            "--no-cov",
            "-p",
            "no:xdist",
            "-k",
            " or ".join(CLASSES),
        ],
        [seen],
    )
    suites: dict[str, Any] = {
        name: {
            **{outcome: counts[outcome] for outcome in OUTCOMES},
            "reasons": dict(seen.reasons[name]),
        }
        for name, counts in sorted(seen.counts.items())
    }
    packages = {name: importlib.metadata.version(name) for name in PACKAGES}
    write_result("suites", {"machine": machine(), "packages": packages, "suites": suites})
    for name, row in suites.items():
        print(f"{name:45}", *(f"{outcome} {row[outcome]:3}" for outcome in OUTCOMES))
    return any(row["failed"] for name, row in suites.items() if not name.endswith("bare"))


if __name__ == "__main__":
    sys.exit(main())
