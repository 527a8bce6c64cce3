"""Budgets of the way that a prompt and a chunk go through the code: counts of ``tests/hops.py``, the same on every machine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parents[1]

BUDGETS = {
    # Turns, the scheduler, loading, the clock, the totals and the prefix have modules of their own; a lock in Python costs two moves.
    # A linear layer that kvrag multiplies, and attention that it computes head by head, are calls of its own; linear layers are no moves.
    # Rows are chosen by masks, which layout.py makes: sorting took milliseconds of a long prompt.
    "generate, warm": {"modules": 41, "calls": 1_485, "moves": 295, "threads": 2},
    "generate, from disk": {"modules": 49, "moves": 475},
    "precompute, 4 chunks": {"modules": 36, "moves": 842},
    "delete one document": {"modules": 12},
}
KNOWN: dict[str, dict[str, int]] = {}
"""Counts that are over budget so far. They may only fall; the table goes when it is empty."""


@pytest.fixture(scope="module")
def hops() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, HERE / "hops.py"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("journey", BUDGETS)
def test_no_journey_is_longer_than_its_budget(hops: dict[str, Any], journey: str) -> None:
    limits = BUDGETS[journey] | KNOWN.get(journey, {})
    found = hops[journey]
    over = {what: (found[what], limit) for what, limit in limits.items() if found[what] > limit}
    assert not over, f"(found, budget): {over}; calls by module: {found['by_module']}"
