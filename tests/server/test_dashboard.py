"""docs/grafana.json: each metric in it is one that a server has, and each metric has a panel."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

FILE = Path(__file__).parents[2] / "docs" / "grafana.json"

pytestmark = pytest.mark.skipif(
    not FILE.is_file(), reason="the docs are not here: run from a checkout"
)


def test_every_metric_is_one_of_a_running_servers(http):
    families = list(text_string_to_metric_families(http.get("/metrics").text))
    ours = {family.name for family in families if family.name.startswith("kvrag_")}
    ours = {name for name in ours if not name.endswith("_created")}  # the client library's own
    names = {sample.name for family in families for sample in family.samples}
    # With no sample before the first.
    counters = {f"{family.name}_total" for family in families if family.type == "counter"}
    panels = json.loads(FILE.read_text())["panels"]
    texts = [target["expr"] for panel in panels for target in panel["targets"]]
    asked = {name for text in texts for name in re.findall(r"kvrag_\w+", text)}
    assert asked <= names | counters
    shown = {name for name in ours if any(text.startswith(name) for text in asked)}
    assert shown == ours  # and each metric has a panel
