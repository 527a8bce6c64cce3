"""The benchmarks: every script starts, and what is worked out from figures is in step with its recorded result."""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import latent_costs
import roofline
import sim_scale as sim
from kernel_targets import verdicts
from peers import environments

FOLDER = Path(__file__).parents[2] / "benchmarks"
RESULTS = FOLDER / "results"


@pytest.mark.parametrize("script", sorted(FOLDER.glob("*.py")), ids=lambda script: script.stem)
def test_benchmarks_find_what_they_measure(script, monkeypatch):
    monkeypatch.syspath_prepend(script.parent)
    assert runpy.run_path(str(script), run_name="imported")["__doc__"]


def test_the_kernels_verdicts_are_of_these_targets():
    result = json.loads((RESULTS / "kernels.json").read_text())
    assert verdicts(result) == result["targets"]


def test_the_predictions_are_of_these_figures(tmp_path):
    roofline.main(tmp_path)
    assert (tmp_path / "roofline.json").read_text() == (RESULTS / "roofline.json").read_text()


def test_the_simulation_is_of_these_constants():
    """A figure that is measured again elsewhere, or a constant that changes, asks for a new run."""
    result = json.loads((RESULTS / "scale.json").read_text())
    values = {name: value for name, value, *_ in result["constants"]}
    assert values == pytest.approx(sim.VALUES, rel=1e-3), "run `make bench-scale docs`"
    setups = [sim.Setup(shape, gpus, kind) for shape, gpus in sim.MODELS for kind in sim.KINDS]
    for row, setup in zip(result["loading"], setups, strict=True):
        now = sim.loading(setup)
        assert row["load_ms"] == pytest.approx(now["load_ms"], rel=1e-3)
        assert row["compute_ms"] == pytest.approx(now["compute_ms"], rel=1e-3)


def test_the_costs_of_latents_are_of_these_shapes():
    result = json.loads((RESULTS / "latent_costs.json").read_text())["models"]
    assert result.keys() == latent_costs.MODELS.keys()
    assert latent_costs.costs("MiniCPM3-4B") == result["MiniCPM3-4B"]


@pytest.mark.parametrize("workload", sim.WORKLOADS)
def test_every_chunk_of_a_simulated_request_comes_from_one_tier(workload):
    plan = sim.Plan(chunks=4000, replicas=8, requests=16_000, looked_at=8, window=400)
    setup = sim.Setup(sim.LLAMA_8B)
    for routing in sim.ROUTINGS:
        trace = sim.simulate(plan, workload, routing)
        assert sum(sim.outcome(trace, setup, plan)["hits"].values()) == pytest.approx(1)
        new = trace[0] == sim.NEVER
        assert set(np.unique(sim.tiers_of(trace, setup)[new])) == {sim.TIERS.index("objects")}


def test_a_peers_worker_replies_in_lines_whatever_its_libraries_print(tmp_path):
    script = tmp_path / "worker_echo.py"
    script.write_text(
        "from worker import serve\n"
        "class Echo:\n"
        "    def __init__(self, options): print('loading')\n"
        "    def answer(self, ids): print('noise'); return {'ids': ids}\n"
        "serve(Echo)\n"
    )
    worker = environments.Worker(
        environments.Peer("echo", str(script), {}), {}, 1, tmp_path / "log"
    )
    assert "rss" in worker.ready()
    assert worker.ask("answer", ids=[1, 2])["ids"] == [1, 2]
    with pytest.raises(environments.UnavailableError, match="unknown"):
        worker.ask("unknown")
    worker.close()
    assert "noise" in (tmp_path / "log").read_text()
