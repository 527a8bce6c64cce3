"""What an application is made of, and what it refuses to be made of."""

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("ray.serve", reason="Ray Serve is not installed")

from texts import make_chunks
from typer.testing import CliRunner

from kvrag import ConfigError, KVRagEngine
from kvrag.cli.app import app
from kvrag_ray import ServingConfig, build
from kvrag_ray.replica import warm

CHUNKS = make_chunks(4, words=42)


@pytest.fixture
def options(tiny_dir, tmp_path):
    return {
        "model": tiny_dir,
        "kv_dir": str(tmp_path / "kv"),
        "server": {"model_name": "tiny"},
        "warm_s": 0.0,
    }


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"modell": "x"}, "did you mean 'model'"),
        ({"model": None}, "model"),
        ({"kv_dir": None}, "share nothing"),
        *[({"replicas": each}, "as 2-8") for each in (0, (3, 2), [1, 2, 3], "2-", "some")],
        ({"fronts": 0}, "from 1"),
        ({"engine": {"store_config": {}}}, "beside it"),
        ({"autoscaling": {"upscale_delay_s": 1}}, "without a range"),
        ({"server": {"max_running": 0}}, "max_running"),
        ({"store": {"disk_byte": 1}}, "disk_byte"),
        ({"repair": 3}, "repair"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(options, wrong, words):
    given = {
        name: value
        for name, value in {**options, **wrong}.items()
        if (name, value) != ("model", None)
    }
    with pytest.raises(ConfigError, match=words):
        build(given)


def test_the_application_is_what_was_asked_for(options):
    app = build(
        options
        | {
            "replicas": [1, 3],
            "fronts": 2,
            "server": {"max_waiting": 0},
            "autoscaling": {"upscale_delay_s": 1.0},
        }
    )
    assert app._bound_deployment.name == "Front"
    assert app._bound_deployment.num_replicas == 2
    replica = app._bound_deployment.init_args[0]._bound_deployment
    scaling = replica._deployment_config.autoscaling_config
    assert replica.max_queued_requests == 1  # Ray knows no 0
    assert (scaling.min_replicas, scaling.max_replicas, scaling.upscale_delay_s) == (1, 3, 1.0)
    assert scaling.policy.policy_function == "kvrag_ray.router:by_queue"
    for fixed in (2, "2", [2], (2, 2), "2-2"):
        app = build(ServingConfig(**options | {"replicas": fixed}))
        assert app._bound_deployment.init_args[0]._bound_deployment.num_replicas == 2
    assert ServingConfig(**options | {"replicas": "2-8"}).least_and_most == (2, 8)


def test_replicas_elsewhere_find_a_model_named_from_here_and_need_keys(
    options, tiny_dir, monkeypatch
):
    monkeypatch.chdir(Path(tiny_dir).parent)
    monkeypatch.setenv("KVRAG_API_KEYS", "app=k")
    app = build({**options, "model": f"./{Path(tiny_dir).name}"})
    replica = app._bound_deployment.init_args[0]._bound_deployment
    assert replica.init_args[0]["model"] == tiny_dir
    assert ServingConfig(**replica.init_args[0]).server_config.api_keys == {"k": "app"}
    monkeypatch.delenv("KVRAG_API_KEYS")
    with pytest.raises(ConfigError, match="this machine has no API keys"):
        ServingConfig(**replica.init_args[0])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["serve", "--replicas", "2"], "without --ray"),
        (["serve", "--ray", "--replicas", "some"], "2-8"),
        (["serve", "--ray", "--replicas", "4-2"], "as 2-8"),
        (["serve", "--ray", "--log-format", "json"], "--log-format"),
        (["precompute", ".", "--workers", "2"], "without --ray"),
        (["precompute", ".", "--report", "r"], "without --ray"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(
    tiny_dir, tmp_path, monkeypatch, given, words
):
    monkeypatch.setenv("KVRAG_MODEL", tiny_dir)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 2, done.output
    assert words in done.stderr


@pytest.mark.parametrize("gpus", [0.0, 1.0])
def test_a_signal_ends_what_was_started_on_a_cluster_that_serves_already(
    tiny_dir, tmp_path, monkeypatch, gpus
):
    def run(application, *, blocking):
        replica = application._bound_deployment.init_args[0]._bound_deployment
        assert replica.ray_actor_options.get("num_gpus", 0) == gpus
        raise SystemExit(15)

    ended = []
    status = SimpleNamespace(proxies={"a node": "HEALTHY"})
    for name, answer in {
        "ray.init": lambda **_: None,
        "ray.cluster_resources": lambda: {"GPU": gpus},
        "ray.serve.status": lambda: status,
        "ray.serve.run": run,
        "ray.serve.delete": ended.append,
    }.items():
        monkeypatch.setattr(name, answer)
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        options = ["--kv-dir", str(tmp_path), "--port", str(proxy.getsockname()[1])]
        done = CliRunner().invoke(app, ["serve", tiny_dir, "--ray", *options])
    assert (done.exit_code, ended) == (15, ["default"]), done.output


def test_a_port_in_use_is_found_before_replicas_start(tiny_dir, tmp_path, monkeypatch):
    for name, answer in {
        "ray.init": lambda **_: None,
        "ray.cluster_resources": dict,
        "ray.serve.status": lambda: SimpleNamespace(proxies={}),
        "ray.serve.start": lambda **_: pytest.fail("Serve started"),
    }.items():
        monkeypatch.setattr(name, answer)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        options = ["--kv-dir", str(tmp_path), "--port", port]
        done = CliRunner().invoke(app, ["serve", tiny_dir, "--ray", *options])
    assert done.exit_code == 2
    said = " ".join(done.output.split())
    assert f"127.0.0.1:{port}" in said
    assert "--port" in said


def test_a_new_replica_has_the_chunks_that_were_used_in_memory(options, tmp_path):
    engine = KVRagEngine.from_pretrained(options["model"], kv_dir=tmp_path)
    assert warm(engine, 5.0) == 0
    engine.precompute(CHUNKS)
    engine.generate(f"{CHUNKS[1]}\n\n{CHUNKS[2]}\n\nWho?", max_new_tokens=1, mode="stitch")
    engine.close()
    engine = KVRagEngine.from_pretrained(options["model"], kv_dir=tmp_path)
    assert engine.store.stats()["host"].chunks == 0
    assert warm(engine, 0.0) == 0
    assert warm(engine, 5.0) >= 2
    assert engine.store.stats()["host"].chunks >= 2
    engine.close()
    assert warm(engine, 5.0) == 0  # its store is closed
