"""The scenarios of `make reliability`: a few rounds of the quick ones, and the short form of all."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from run import QUICK, SHORT, run
from world import warm_up


@pytest.fixture(scope="module", autouse=True)
def warm():
    warm_up()


def kept(name, scenario):
    """Run a scenario; it must see no promise broken."""
    result = run(name, scenario)
    if "skipped" in result:
        pytest.skip(result["skipped"])
    assert result["failures"] == []


@pytest.mark.filterwarnings("ignore:This process")
@pytest.mark.parametrize("name", QUICK)
def test_promises_are_kept(name):
    kept(name, QUICK[name])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process")
@pytest.mark.parametrize("name", [name for name in SHORT if SHORT[name] is not QUICK.get(name)])
def test_promises_are_kept_for_long(name):
    kept(name, SHORT[name])
