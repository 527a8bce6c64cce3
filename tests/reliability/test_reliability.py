"""The short form of `make reliability`: every scenario, with fewer and shorter rounds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from run import SHORT, run
from world import warm_up


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process")
@pytest.mark.parametrize("name", SHORT)
def test_promises_are_kept(name: str) -> None:
    result = run(name, SHORT[name])
    if "skipped" in result:
        pytest.skip(result["skipped"])
    assert result["failures"] == []
