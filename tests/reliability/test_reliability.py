"""The short form of `make reliability`: every scenario, with fewer and shorter rounds."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from run import SHORT, run
from world import warm_up


@pytest.fixture(scope="module", autouse=True)
def warm():
    warm_up()


QUICK = ("bit flips, rounded KV", "identities", "clocks")
"""Those that take a second or two; the others are slow."""


@pytest.mark.filterwarnings("ignore:This process")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SHORT]
)
def test_promises_are_kept(name):
    result = run(name, SHORT[name])
    if "skipped" in result:
        pytest.skip(result["skipped"])
    assert result["failures"] == []
