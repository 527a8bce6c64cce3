"""The benchmarks: every script starts, and what is worked out from figures is in step with its recorded result."""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import transformers
from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import latent_costs
import roofline
import sim_scale as sim
import sweep
from kernel_targets import verdicts
from peers import environments

from kvrag.testing.models import REFUSED, TINY

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


SWEEP = json.loads((RESULTS / "sweep.json").read_text())
SWEPT = SWEEP["machine"]["versions"]["transformers"]
of_this_version = pytest.mark.skipif(
    transformers.__version__ != SWEPT, reason=f"the recorded sweep is of transformers {SWEPT}"
)


@of_this_version
def test_the_sweep_has_every_causal_lm():
    assert list(SWEEP["rows"]) == list(sweep.CAUSAL_LMS), "run `make bench-sweep docs`"


def test_the_sweep_agrees_with_the_tests():
    verdicts = {name: row["verdict"] for name, row in SWEEP["rows"].items()}
    assert {verdicts[name] for name in TINY if name in verdicts} == {"accepted"}
    assert {verdicts[name] for name in REFUSED if name in verdicts} == {"refused"}
    assert "wrong" not in verdicts.values()
    assert {name: list(verdicts.values()).count(name) for name in SWEEP["counts"]} == SWEEP[
        "counts"
    ]


@of_this_version
@pytest.mark.parametrize("name", ["afmoe", "diffllama", "jetmoe", "doge", "marian", "blt"])
def test_a_verdict_of_the_sweep_is_found_again(name):
    found, row = sweep.judged(name), SWEEP["rows"][name]
    assert (found["verdict"], found.get("why")) == (row["verdict"], row.get("why"))
    assert found.get("error", 0) <= sweep.LIMIT


def test_a_model_decoded_otherwise_in_company_is_no_accepted_one(monkeypatch):
    """A proof runs one request at a time; the sweep looks at two."""
    from kvrag.model import CausalLM

    monkeypatch.setattr(CausalLM, "can_share_forwards", True)
    assert sweep.judged("jetmoe")["verdict"] == "wrong"


def test_a_config_made_small_keeps_a_layer_of_every_kind():
    config = AutoConfig.for_model("olmo3", num_hidden_layers=16)
    config.layer_types = ["sliding_attention"] * 15 + ["full_attention"]
    options = sweep.shrunk(config)
    assert options["layer_types"] == ["sliding_attention"] * 3 + ["full_attention"]
    assert options["num_hidden_layers"] == sweep.LAYERS
    assert options["vocab_size"] == sweep.VOCAB_SIZE
    assert options["max_position_embeddings"] == sweep.CONTEXT


def test_what_a_release_changes_is_said():
    accepted, refused = {"verdict": "accepted"}, {"verdict": "refused", "why": "it can't"}
    old = {"rows": {"a": accepted, "b": refused, "c": accepted, "d": refused}}
    new = {"rows": {"a": refused, "b": {**refused, "why": "it won't"}, "d": refused, "e": accepted}}
    assert sweep.changes(old, new) == [
        "gone: c (accepted)",
        "changed: a was accepted, is refused: it can't",
        "reworded: b is refused: it won't",
        "new: e is accepted",
    ]


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
