"""Pages and files for operators: sizes are arithmetic that holds, and every name in them is one that kvrag has."""

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from fastapi.testclient import TestClient
from transformers import AutoConfig, AutoModelForCausalLM

from kvrag import KVRagEngine
from kvrag.cli.app import app as command_line
from kvrag.evaluate.estimate import PRESETS, kept_bytes_per_token, preset, shape_from_config
from kvrag_server import ServerConfig, create_app

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
sys.path.insert(0, str(ROOT))

memory = pytest.importorskip("docs.tables.memory")  # absent where only the package is


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", memory.MODELS)
def test_weights_and_kv_are_those_of_transformers_model(name):
    import torch

    given = dict(memory.MODELS[name])
    config = AutoConfig.for_model(given.pop("model_type"), **given, tie_word_embeddings=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sizes = {path: parameter.numel() for path, parameter in model.named_parameters()}
    matrices = sum(
        size for path, size in sizes.items() if "layers" in path and path.endswith("proj.weight")
    )
    assert memory.weights(memory.MODELS[name]) == (matrices, sum(sizes.values()) - matrices)
    shape = shape_from_config(config.to_dict() | {"dtype": "bfloat16"})
    assert shape == shape_from_config(memory.MODELS[name])
    assert shape == (preset(name) or PRESETS[name.lower().removesuffix("-v0.3")])


def test_cells_follow_from_the_shapes():
    page = (ROOT / "docs" / "how-to" / "sizing.md").read_text()
    for name, config in memory.MODELS.items():
        head = config["hidden_size"] // config["num_attention_heads"]
        token = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head
        line = next(line for line in page.splitlines() if line.startswith(f"| {name} |"))
        cells = [f"{token // 2**10} KiB", *(f"{token * n / 2**30:.1f} GiB" for n in memory.PROMPTS)]
        assert line.endswith(" | ".join(["", *cells]) + " |")
        left = 24 * 2**30 - sum(memory.weights(config)) * 2
        assert f"| {left / 2**30:.1f} GiB: {left / 2 / token / 1000:.0f}k tokens |" in next(
            line for line in page.splitlines() if line.startswith(f"| {name}, bf16 |")
        )
    qwen = kept_bytes_per_token(PRESETS["qwen2.5-7b"], "auto", chunk_tokens=512)
    assert "224 MiB" in page
    assert 8 * 512 * qwen == 224 * 2**20


@pytest.mark.parametrize("name", ["qwen2.5-7b", "llama-3.1-8b"])
def test_files_are_the_estimate_and_a_header(name):
    """Files of 250 tokens that the benchmark wrote, in each type."""
    path = ROOT / "benchmarks" / "results" / "store.json"
    written = json.loads(path.read_text())["sizes"]["shares"][name]
    for kind in ("auto", "int8", "fp8", "int4"):
        size = round(written["auto"] * (1 if kind == "auto" else written[kind]))
        header = size - 250 * kept_bytes_per_token(PRESETS[name], kind, chunk_tokens=250)
        assert 8 * 2**10 <= header <= 24 * 2**10


def test_a_store_has_the_files_that_the_formula_gives(tiny_dir, tmp_path):
    from texts import make_chunks

    chunks, count = make_chunks(6, words=40), 0
    for prefix in ("", "Be brief."):
        with_prefix = KVRagEngine.from_pretrained(tiny_dir, kv_dir=tmp_path / "kv", prefix=prefix)
        with_prefix.precompute(chunks)
        with_prefix.close()
        count += 1
    blobs = list((tmp_path / "kv" / "objects").rglob("*.safetensors"))
    assert len(chunks) * count <= len(blobs) <= (len(chunks) + 1) * count
    assert len(list((tmp_path / "kv").rglob("*"))) - len(blobs) < 300
    for blob in blobs:
        header = 8 + int.from_bytes(blob.read_bytes()[:8], "little")
        assert header % 4096 == 0


# -- alerts ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def web(tiny_dir):
    """The application, warm, without keys."""
    engine = KVRagEngine.from_pretrained(tiny_dir)
    with TestClient(create_app(engine, ServerConfig()), base_url="http://localhost") as client:
        yield client
    engine.close()


def test_alerts_ask_for_metrics_and_labels_that_a_server_has(web):
    from prometheus_client import Counter, Histogram

    registry = web.app.state.service.metrics.registry
    labels = {}
    for collector in registry._collector_to_names:
        if isinstance(collector, Counter | Histogram):
            for name in registry._collector_to_names[collector]:
                labels[name] = {*collector._labelnames, "le", "instance"}
    for family in registry.collect():
        for sample in family.samples:
            labels.setdefault(sample.name, {*sample.labels, "instance"})
    code = "".join(
        path.read_text()
        for folder in ("kvrag", "integrations")
        for path in (ROOT / folder).rglob("*.py")
    )
    groups = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        asked = re.findall(r"\b(kvrag_\w+)(?:\{([^}]*)\})?", rule["expr"])
        assert asked or rule["alert"] == "KVRagDown"
        for metric, matchers in asked:
            assert metric in labels, metric
            for label, value in re.findall(r'(\w+)[!=~]+"([^"]*)"', matchers):
                assert label in labels[metric], (metric, label)
                assert label == "code" or f'"{value}"' in code, value
        for by in re.findall(r"by \(([\w, ]+)\)", rule["expr"]):
            assert {*by.split(", ")} <= {"instance", "le", "tier"}
        assert rule["expr"].count("(") == rule["expr"].count(")")


def test_the_runbook_has_a_first_step_for_every_alert():
    alerts = set(re.findall(r"alert: (\w+)", (DEPLOY / "alerts.yaml").read_text()))
    runbook = (ROOT / "docs" / "how-to" / "operate.md").read_text()
    assert set(re.findall(r"`(KVRag[A-Z]\w+)`", runbook)) == alerts


# -- variables ---------------------------------------------------------------------------------------------------------


def in_code():
    """Variables that the code of kvrag reads; ``NAME_*`` where it looks at all of a beginning."""
    trees = {
        path: ast.parse(path.read_text())
        for folder in ("kvrag", "kernels", "integrations")
        for path in (ROOT / folder).rglob("*.py")
    }
    constants = {
        target.id: node.value.value
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.endswith("VARIABLE")
    }
    found, places = set(), set()
    for path, tree in trees.items():
        for node in ast.walk(tree):
            said = ast.unparse(node) if isinstance(node, ast.expr) else ""
            key = None
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "os.environ.get",
                "os.getenv",
                "environ.get",
                "getenv",
            ):
                key = node.args[0]
            elif isinstance(node, ast.Subscript) and said.startswith("os.environ["):
                key = node.slice
            elif isinstance(node, ast.Compare) and "os.environ" in ast.unparse(node.comparators[0]):
                key = node.left
            elif isinstance(node, ast.GeneratorExp) and "in os.environ" in said:
                found |= {f"{name}*" for name in re.findall(r"startswith\('(\w+)'\)", said)}
            if isinstance(key, ast.Constant):
                found.add(key.value)
            elif isinstance(key, ast.Name) and key.id in constants:
                found.add(constants[key.id])
            elif key is not None:
                places.add(path.name)
    assert places == {"crypto.py"}  # any name: StoreConfig(encryption_key="env:NAME")
    return found


def in_commands(command):
    """Variables of a command's options and of those below it."""
    found = {each for p in command.params for each in [p.envvar] if isinstance(each, str)}
    for below in getattr(command, "commands", {}).values():
        found |= in_commands(below)
    return found


def table_of(title):
    """Variables in the first column of a section's table."""
    page = (ROOT / "docs" / "environment.md").read_text()
    section = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([A-Z_]+\*?)`", row)]


def test_the_table_has_every_variable_that_is_read_and_no_other():
    told = table_of("Read by kvrag")
    assert len(told) == len(set(told))
    assert set(told) == in_code() | in_commands(typer.main.get_command(command_line))
    assert not set(told) & set(table_of("Read by libraries"))


def test_the_table_has_every_variable_of_the_compose_file():
    text = (DEPLOY / "compose.yaml").read_text() + (DEPLOY / "compose.cuda.yaml").read_text()
    told = table_of("Read by the Compose file")
    others = {*table_of("Read by kvrag"), *table_of("Read by libraries")}
    named = set(re.findall(r"\$\{([A-Z_]+)", text)) | {"KVRAG_IMAGE"}
    assert named - others == set(told)


# -- a unit, a cluster -------------------------------------------------------------------------------------------------


def serve_options(arguments):
    """Options of ``kvrag serve``, as its own parser reads them."""
    assert arguments[0] == "serve"
    serve = typer.main.get_command(command_line).commands["serve"]
    return serve.make_context("serve", list(arguments[1:])).params


def service():
    lines = (DEPLOY / "kvrag.service").read_text().splitlines()
    return [line.split("=", 1) for line in lines if "=" in line and not line.startswith("#")]


def manifests():
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def test_the_unit_starts_a_command_that_there_is(web, monkeypatch):
    monkeypatch.setenv("KVRAG_MODEL", "owner/model")
    unit = dict(service())
    program, *arguments = shlex.split(unit["ExecStart"])
    assert Path(program).name == "kvrag"
    options = serve_options(arguments)
    assert options["host"] == "127.0.0.1"
    after = shlex.split(unit["ExecStartPost"])
    compile(after[-1].replace("\\n", "\n"), "ExecStartPost", "exec")
    path = re.search(rf"http://127\.0\.0\.1:{options['port']}(/\w+)", after[-1])[1]
    assert web.get(path).status_code == 200
    named = {
        v for key, value in service() if key == "Environment" for v in re.findall(r"(\w+)=", value)
    }
    assert named <= {*table_of("Read by kvrag"), *table_of("Read by libraries")}
    drain = ServerConfig().drain_s
    assert int(unit["TimeoutStopSec"]) > drain + 5


def test_systemd_finds_no_other_fault_than_missing_programs():
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    done = subprocess.run(
        ["systemd-analyze", "verify", DEPLOY / "kvrag.service"], capture_output=True, text=True
    )
    faults = [line for line in done.stderr.splitlines() if line.startswith("kvrag.service")]
    assert all("is not executable: No such file or directory" in line for line in faults), faults


def test_the_pod_starts_a_command_that_there_is(web, monkeypatch):
    by_kind = {each["kind"]: each for each in manifests()}
    pod = by_kind["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    told = {each["name"]: each["value"] for each in container["env"]}
    secret = by_kind["Secret"]["stringData"]
    for name, value in (told | secret).items():
        assert name in table_of("Read by kvrag")
        monkeypatch.setenv(name, value)
    options = serve_options(container["args"])
    assert options["kv_dir"] == "/kv/store"
    assert options["disk_bytes"] == 90 * 10**9
    assert options["allowed_host"] == ["kvrag", "kvrag.default.svc.cluster.local"]
    (port,) = container["ports"]
    assert options["port"] == port["containerPort"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[probe]["httpGet"]
        assert asked["port"] == port["name"]
        assert web.get(asked["path"]).status_code == 200
    assert pod["spec"]["terminationGracePeriodSeconds"] > ServerConfig().drain_s + 5
    claims = {each["metadata"]["name"] for each in manifests() if "Claim" in each["kind"]}
    volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    used = [each.get("persistentVolumeClaim", {}).get("claimName") for each in volumes.values()]
    assert set(used) - {None} == claims
    labels = by_kind["Deployment"]["spec"]["selector"]["matchLabels"]
    assert labels == pod["metadata"]["labels"] == by_kind["Service"]["spec"]["selector"]
    image = (DEPLOY / "Dockerfile").read_text()
    assert f"--uid {pod['spec']['securityContext']['runAsUser']} kvrag" in image


def test_an_empty_secret_does_not_serve_everyone(monkeypatch):
    secret = next(each for each in manifests() if each["kind"] == "Secret")["stringData"]
    for name, value in secret.items():
        monkeypatch.setenv(name, value)
    from kvrag.errors import ConfigError
    from kvrag_server.command import keys_for

    with pytest.raises(ConfigError, match="set KVRAG_API_KEYS"):
        keys_for("0.0.0.0", is_insecure=False)


def test_the_manifests_have_kubernetes_own_fields():
    kinds = pytest.importorskip("kubernetes.client.models")

    def check(value, name, where):
        found = re.fullmatch(r"(list|dict)(?:\[|\(str, )(\w+)[\])]", name)
        if found:
            items = value if found[1] == "list" else value.values()
            for each in items:
                check(each, found[2], where)
        elif name in ("str", "int", "bool"):
            assert type(value).__name__ == name, where
        elif hasattr(kinds, name):
            kind = getattr(kinds, name)
            types = {kind.attribute_map[key]: of for key, of in kind.openapi_types.items()}
            for key, each in value.items():
                assert key in types, f"{where}.{key}"
                check(each, types[key], f"{where}.{key}")

    for each in manifests():
        check(each, f"V1{each['kind']}", each["kind"])


def test_probes_and_names_without_keys(web):
    """Without keys a server answers to its own names, and to a name that was allowed."""
    assert web.get("/ready", headers={"host": "kvrag"}).status_code == 421
    allowed = ServerConfig(allowed_hosts=("kvrag",))
    assert allowed.answers_to("kvrag", "10.1.2.3")
    assert allowed.answers_to("10.1.2.3", "10.1.2.3")  # as probes ask
    assert not allowed.answers_to("elsewhere", "10.1.2.3")
    with_keys = create_app(web.app.state.service.engine, ServerConfig(api_keys={"k": "app"}))
    client = TestClient(with_keys, base_url="http://anything")
    assert client.get("/health").status_code == 200


def test_commands_in_the_runbook_exist():
    page = (ROOT / "docs" / "how-to" / "operate.md").read_text()
    page += (ROOT / "docs" / "how-to" / "sizing.md").read_text()
    commands = typer.main.get_command(command_line).commands
    said = re.findall(r"(?:^|-- |bin/|`)kvrag ((?:\w+)(?: [^`\n#]+)?)", page, re.MULTILINE)
    checked = 0
    for line in said:
        name, *words = shlex.split(line.strip())
        options = {each for p in commands[name].params for each in p.opts}
        assert {word for word in words if word.startswith("--")} <= options, line
        checked += 1
    assert checked >= 5
