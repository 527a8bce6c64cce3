"""docs/grafana.json: Grafana can import it, and each metric in it is one that a server has."""

import json
import re
from itertools import combinations
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

FILE = Path(__file__).parents[2] / "docs" / "grafana.json"

pytestmark = pytest.mark.skipif(
    not FILE.is_file(), reason="the docs are not here: run from a checkout"
)


@pytest.fixture(scope="module")
def dashboard():
    return json.loads(FILE.read_text())


def expressions(dashboard):
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_every_metric_is_one_of_a_running_servers(dashboard, http):
    families = list(text_string_to_metric_families(http.get("/metrics").text))
    ours = {family.name for family in families if family.name.startswith("kvrag_")}
    ours = {name for name in ours if not name.endswith("_created")}  # the client library's own
    names = {sample.name for family in families for sample in family.samples}
    counters = {
        f"{family.name}_total" for family in families if family.type == "counter"
    }  # with no sample before the first
    asked = {name for text in expressions(dashboard) for name in re.findall(r"kvrag_\w+", text)}
    assert asked <= names | counters
    shown = {name for name in ours if any(text.startswith(name) for text in asked)}
    assert shown == ours  # and each metric has a panel


def test_labels_are_those_of_the_metrics(dashboard, app):
    from prometheus_client import Counter

    labels = {}
    for collector in app.state.service.metrics.registry._collector_to_names:
        if isinstance(collector, Counter):
            labels[f"{collector._name}_total"] = set(collector._labelnames)
    for text in expressions(dashboard):
        for by, name in re.findall(r"sum by \(([\w, ]+)\) \(rate\((\w+)", text):
            if name in labels:
                assert {each.strip() for each in by.split(",")} <= labels[name], name


def test_grafana_can_import_it(dashboard):
    assert isinstance(dashboard["title"], str)
    assert dashboard["schemaVersion"] >= 36
    assert "id" not in dashboard  # it is Grafana's to give
    variables = {each["name"] for each in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard["panels"]))) - {"__rate_interval"}
    assert used == variables == {"datasource", "job"}
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert {"type", "title", "gridPos", "targets", "datasource", "fieldConfig"} <= panel.keys()
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        assert all(text.count("(") == text.count(")") for text in expressions({"panels": [panel]}))
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        apart = [
            one[a] + one[s] <= other[a] or other[a] + other[s] <= one[a]
            for a, s in (("x", "w"), ("y", "h"))
        ]
        assert any(apart)
        assert one["x"] + one["w"] <= 24
