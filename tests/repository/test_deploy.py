"""What ``deploy/`` and its runbook say, done: the Compose file's services are processes here, and the runbook's lines are run by bash."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from texts import make_chunks

from kvrag.testing.models import save_tiny_model

yaml, openai = pytest.importorskip("yaml"), pytest.importorskip("openai")
ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
RUNBOOK = ROOT / "docs" / "how-to" / "operate.md"
STAND_IN = Path(__file__).parents[1] / "stand_ins" / "compose.py"
CHUNKS = make_chunks(6, words=40, seed=5)

pytestmark = pytest.mark.skipif(
    not DEPLOY.is_dir(), reason="the files are not here: run from a checkout"
)
needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="redis-server is not installed"
)


# -- files -------------------------------------------------------------------------------------------------------------


def test_the_image_file_has_no_faults():
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([hadolint, DEPLOY / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_image_is_made_of_all_that_the_package_is_built_from():
    copied = re.findall(r"^COPY ([^-].*)", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    sources = {source for line in copied for source in line.split()[:-1]}
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == sources
    assert all((ROOT / source).exists() for source in sources)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    needed += [project["project"]["readme"], *project["project"]["license-files"]]
    assert {Path(path).parts[0] for path in needed} <= sources
    extras = re.search(r'"\.\[([\w,]+)\]"', (DEPLOY / "Dockerfile").read_text())[1].split(",")
    assert set(extras) <= set(project["project"]["optional-dependencies"])


def test_gpus_are_given_to_services_that_there_are():
    base, cuda = (
        yaml.safe_load((DEPLOY / name).read_text())
        for name in ("compose.yaml", "compose.cuda.yaml")
    )
    assert set(cuda["services"]) == {
        name for name, service in base["services"].items() if "build" in service
    }


# -- processes ---------------------------------------------------------------------------------------------------------


class Project:
    """A checkout's ``deploy/``, with documents and a ``.env``, and ``docker`` as the stand-in."""

    def __init__(self, folder, model):
        self.folder = folder
        (folder / "documents").mkdir(parents=True)
        for number, chunk in enumerate(CHUNKS):
            (folder / "documents" / f"{number}.txt").write_text(chunk)
        secrets = {
            "KVRAG_API_KEYS": "app=opensesame",
            "KVRAG_ENCRYPTION_KEY": "5a" * 32,
            "REDIS_PASSWORD": "hush",
        }
        settings = {"KVRAG_MODEL": model, **secrets}
        (folder / ".env").write_text(
            "".join(f"{name}={value}\n" for name, value in settings.items())
        )
        (folder / "bin").mkdir()
        docker = folder / "bin" / "docker"
        docker.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STAND_IN}" "{folder}" "$@"\n')
        docker.chmod(0o755)
        path = f"{docker.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KVRAG_")}
        self.env = kept | {
            "PATH": path,
            "COMPOSE_FILE": str(DEPLOY / "compose.yaml"),
            "OMP_NUM_THREADS": "1",
        }

    def bash(self, script):
        """Run lines in a shell that stops at the first fault."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr + script
        return done.stdout

    def pid(self, service):
        return json.loads((self.folder / "running.json").read_text())[service]["pid"]

    def port(self, service):
        return json.loads((self.folder / "ports.json").read_text())[service]

    def ask(self, service, path, body=None, key="opensesame"):
        """Ask a server of OpenAI's API."""
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port(service)}{path}", data, headers
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)

    def answer(self, service, numbers=(0, 1, 2)):
        """Ask about some documents; return the text and how many tokens were reused."""
        found = self.ask(
            service, "/v1/chat/completions", question(numbers) | {"kvrag": {"mode": "stitch"}}
        )
        return found["choices"][0]["message"]["content"], found["kvrag"][0]["cached_tokens"]


def question(numbers):
    """A request about some documents."""
    content = "\n\n".join([*(CHUNKS[number] for number in numbers), "What is it about?"])
    return {
        "model": "kvrag",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 8,
        "temperature": 0,
    }


@pytest.fixture
def project(tmp_path, tiny_dir):
    made = Project(tmp_path / "deploy", tiny_dir)
    yield made
    made.bash("docker compose down --volumes")


def blocks(title):
    """The shell blocks of a section of the runbook."""
    section = re.search(
        rf"^## {title}\n(.*?)(?=^## |\Z)", RUNBOOK.read_text(), re.MULTILINE | re.DOTALL
    )
    return re.findall(r"```bash\n(.*?)```", section[1], re.DOTALL)


@needs_redis
@pytest.mark.slow
def test_two_servers_share_kv_and_each_loss_costs_time_only(project):
    project.bash(blocks("Start")[0].replace("cd deploy\n", ""))
    with pytest.raises(urllib.error.HTTPError, match="401"):
        project.ask("kvrag-1", "/v1/models", key="guessed")
    text, reused = project.answer("kvrag-1")
    assert reused > 0
    assert project.answer("kvrag-2") == (text, reused)  # which has computed none of it

    project.ask("kvrag-1", "/v1/kv/delete", {"ids": [document_of(project, 0)]})
    assert 0 < project.answer("kvrag-2")[1] < reused

    if shutil.which("caddy") is not None:
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{project.port('balancer')}/v1", api_key="opensesame"
        )
        numbers = [tuple(random.Random(seed).sample(range(1, 6), 3)) for seed in range(24)]
        with ThreadPoolExecutor(4) as pool:
            asked = [
                pool.submit(
                    client.chat.completions.create,
                    **question(each),
                    extra_body={"kvrag": {"mode": "stitch"}},
                )
                for each in numbers
            ]
            asked[4].result()
            os.kill(project.pid("kvrag-1"), signal.SIGKILL)
            # What was under way is asked again, by the client.
            answers = [each.result() for each in asked]
        assert all(each.usage.prompt_tokens_details.cached_tokens > 0 for each in answers)
    else:
        os.kill(project.pid("kvrag-1"), signal.SIGKILL)
    before = project.answer("kvrag-2", (1, 2))
    os.kill(project.pid("redis"), signal.SIGKILL)
    time.sleep(0.5)
    assert project.answer("kvrag-2", (1, 2, 3))[1] == 0  # nobody knows what was erased
    project.bash("docker compose up --detach --wait")
    time.sleep(6.0)
    for server in ("kvrag-2", "kvrag-1"):  # Redis has kept it
        text, reused = project.answer(server, (1, 2))
        assert text == before[0]
        assert reused > 0


def document_of(project, number):
    """Id of a document that the command line has stored."""
    return next(
        name
        for name in project.ask("kvrag-1", "/v1/kv/documents")["data"]
        if f"{number}.txt" in name
    )


@needs_redis
@pytest.mark.slow
def test_the_runbook_does_what_it_says(project, tmp_path):
    other = tmp_path / "other-model"
    save_tiny_model(other, seed=1)
    project.bash(blocks("Start")[0].replace("cd deploy\n", ""))
    watched = project.bash(blocks("Watch")[0])
    assert "6 document" in watched
    before = project.answer("kvrag-1")
    assert before[1] > 0

    backup, restore = blocks("Backup and restore")
    project.bash(backup)
    project.bash("docker compose down")
    shutil.rmtree(project.folder / "volumes" / "redis")
    project.bash("docker compose up --detach --wait")
    assert project.answer("kvrag-1")[1] == 0  # copies of a store that was lost are not used
    project.bash(restore)
    assert project.answer("kvrag-1") == before

    old_key = "5a" * 32
    begin, finish = blocks("Rotate the encryption key")
    project.bash(begin + finish)
    assert old_key not in (project.folder / ".env").read_text()
    assert not (project.folder / "volumes" / "backup" / "plain").exists()
    for server in ("kvrag-1", "kvrag-2"):
        assert project.answer(server) == before
    gone = f"KVRAG_ENCRYPTION_KEY={old_key} docker compose run --rm cli stats --json"
    assert json.loads(project.bash(gone))["groups"] == []

    upgrade = (
        blocks("Upgrade the model")[0]
        .replace("Qwen\\/Qwen3-4B", str(other).replace("/", "\\/"))
        .replace("Qwen/Qwen3-4B", str(other))
    )
    project.bash(upgrade)
    upgraded = [project.answer(server) for server in ("kvrag-1", "kvrag-2")]
    assert upgraded[0] == upgraded[1]
    assert upgraded[0][1] > 0
    assert upgraded[0][0] != before[0]
    erased = "KVRAG_DATABASE=0 docker compose run --rm cli stats --json"
    assert json.loads(project.bash(erased))["groups"] == []
