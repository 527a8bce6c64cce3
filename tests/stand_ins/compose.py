"""``docker compose`` without containers: each service of the Compose file is a process of this machine, run by the file's own command.

    python compose.py FOLDER compose up --detach --wait

Environment, commands, dependencies and health checks are those of the file, and of the image's ``ENV``, ``ENTRYPOINT`` and ``CMD``. Others
are only what containers would keep apart: each service has a port of its own, and paths of volumes are folders of ``FOLDER``. It knows the
commands that docs/how-to/operate.md uses, and what Compose does with them: a service whose definition has changed is started again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

VARIABLE = re.compile(r"\$(?:\$|\{(\w+)(?:(:-|:\?)([^}]*))?\})")
PORTS = {"redis": 6379, "kvrag-1": 8000, "kvrag-2": 8000, "balancer": 8000}
PATIENCE_S = 120.0


def variables(env_file: Path) -> dict[str, str]:
    """What the file's variables are: the shell's go before those of ``.env``."""
    lines = [line.partition("=") for line in env_file.read_text().splitlines() if "=" in line]
    return {name: value for name, _, value in lines} | dict(os.environ)


def filled(value: Any, given: dict[str, str]) -> Any:
    """Put variables in, as Compose does."""

    def one(match: re.Match[str]) -> str:
        name, what, text = match.groups()
        if name is None:
            return "$"
        if what == ":?" and not given.get(name):
            sys.exit(f"required variable {name} is missing a value: {text}")
        return given.get(name) or (text if what == ":-" else "")

    if isinstance(value, dict):
        return {name: filled(each, given) for name, each in value.items()}
    if isinstance(value, list):
        return [filled(each, given) for each in value]
    return VARIABLE.sub(one, value) if isinstance(value, str) else value


def image(dockerfile: Path) -> tuple[dict[str, str], list[str], list[str]]:
    """Return the environment, the entry point and the command of a Dockerfile's last stage."""
    last = dockerfile.read_text().rpartition("\nFROM ")[2]
    found = dict(re.findall(r"^(ENV|ENTRYPOINT|CMD) (.+)$", last, re.MULTILINE))
    env = dict(
        pair.partition("=")[::2] for pair in found["ENV"].split() if not pair.startswith("PATH=")
    )
    return env, json.loads(found["ENTRYPOINT"]), json.loads(found["CMD"])


class Compose:
    """A project: its file, and a folder for volumes, logs and what runs."""

    def __init__(self, file: Path, folder: Path) -> None:
        self.folder, given = folder, variables(folder / ".env")
        raw = yaml.safe_load(file.read_text())
        self.file = filled(
            {name: part for name, part in raw.items() if not name.startswith("x-")}, given
        )
        self.services: dict[str, Any] = self.file["services"]
        self.image = image(file.parent / "Dockerfile")
        self.ports = self._kept("ports", lambda: {name: free_port() for name in self.services})
        self.running: dict[str, Any] = self._kept("running", dict)

    def _kept(self, name: str, make: Any) -> dict[str, Any]:
        path = self.folder / f"{name}.json"
        if not path.exists():
            path.write_text(json.dumps(make()))
        return dict(json.loads(path.read_text()))

    def save(self) -> None:
        """Note what runs."""
        (self.folder / "running.json").write_text(json.dumps(self.running))

    def here(self, name: str, text: str) -> str:
        """Return a text of a service with this machine's ports and folders."""
        for other, port in PORTS.items():
            text = text.replace(f"{other}:{port}", f"127.0.0.1:{self.ports[other]}")
        text = text.replace("127.0.0.1:8000", f"127.0.0.1:{self.ports[name]}")
        text = re.sub(r"^:8000\b", f":{self.ports[name]}", text)
        for volume in self.services[name].get("volumes", ()):
            source, inside = volume.removesuffix(":ro").rsplit(":", 1)
            outside = self.volume(source)
            outside.mkdir(parents=True, exist_ok=True)
            text = re.sub(rf"^{inside}(?=/|$)", str(outside), text)
        return text

    def volume(self, source: str) -> Path:
        """Return the folder of a volume."""
        return (
            self.folder / source
            if source.startswith((".", "/"))
            else self.folder / "volumes" / source
        )

    def process(
        self, name: str, *arguments: str, entrypoint: str = ""
    ) -> tuple[list[str], dict[str, str], Path]:
        """Return the command, the environment and the directory of a service's process."""
        service = self.services[name]
        env, (own_env, entry, command) = {}, self.image
        if "build" not in service:
            own_env, entry, command = {}, [], ["caddy", "run", "--config", "/etc/caddy/Caddyfile"]
        for variable, value in (own_env | service.get("environment", {})).items():
            env[variable] = self.here(name, str(value))
        entry = [entrypoint] if entrypoint else entry
        full = [*entry, *(arguments or service.get("command") or command)]
        if name in PORTS and name != "balancer":
            full += ["--port", str(self.ports[name])]
        config = self.folder / "Caddyfile"
        if name == "balancer":
            content = self.file["configs"]["caddyfile"]["content"]
            config.write_text(
                "\n".join(self.here(name, line) for line in content.splitlines()) + "\n"
            )
        cwd = self.volume("redis") if name == "redis" else self.folder
        shell = {
            v: value
            for v, value in os.environ.items()
            if not v.startswith(("KVRAG_", "REDIS", "HF_HOME"))
        }
        argv = [
            str(config) if each == "/etc/caddy/Caddyfile" else self.here(name, each)
            for each in full
        ]
        return argv, shell | env, cwd

    def is_healthy(self, name: str) -> bool:
        """Run a service's health check; one without any is healthy."""
        check = [
            self.here(name, each)
            for each in self.services[name].get("healthcheck", {"test": ["CMD", "true"]})["test"][
                1:
            ]
        ]
        if check[0] == "redis-cli":
            check[1:1] = ["-p", str(self.ports[name])]
        if check[0] == "python":
            check[0] = sys.executable
        _, env, _ = self.process(name)
        done = subprocess.run(check, env=env, capture_output=True, text=True)
        return done.returncode == 0 and "NOAUTH" not in done.stdout

    def up(self, names: list[str]) -> None:
        """Start services whose definition is new, after those that they depend on, and wait until they are healthy."""
        for name in names:
            depends = self.services[name].get("depends_on", ())
            self.up([each for each in depends if each not in self.running])
            argv, env, cwd = self.process(name)
            cwd.mkdir(parents=True, exist_ok=True)
            state = {
                "argv": argv,
                "env": {v: value for v, value in env.items() if os.environ.get(v) != value},
            }
            if name in self.running:
                if self.running[name]["state"] == state and is_alive(self.running[name]["pid"]):
                    continue
                self.stop(name)
            if not shutil.which(argv[0]):
                print(f"{argv[0]} is not installed; {name} is left out", file=sys.stderr)
                continue
            with (self.folder / f"{name}.log").open("a") as log:
                made = subprocess.Popen(
                    argv,
                    env=env,
                    cwd=cwd,
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            self.running[name] = {"pid": made.pid, "state": state}
            self.save()
        deadline = time.monotonic() + PATIENCE_S
        for name in set(names) & set(self.running):
            while not self.is_healthy(name):
                log = (self.folder / f"{name}.log").read_text()[-2000:]
                if time.monotonic() > deadline or not is_alive(self.running[name]["pid"]):
                    sys.exit(f"{name} is not healthy: {log}")
                time.sleep(0.2)

    def stop(self, name: str) -> None:
        """End a service in the time that it is given."""
        if (running := self.running.pop(name, None)) is None:
            return
        self.save()
        grace_s = float(self.services[name].get("stop_grace_period", "10s").removesuffix("s"))
        deadline = time.monotonic() + grace_s
        if is_alive(running["pid"]):
            os.kill(running["pid"], signal.SIGTERM)
        while is_alive(running["pid"]):
            if time.monotonic() > deadline:
                os.kill(running["pid"], signal.SIGKILL)
                sys.exit(f"{name} did not end within {grace_s} s")
            time.sleep(0.05)


def free_port() -> int:
    """Return a port that nobody listens to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has asked about is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def main(folder: Path, words: list[str]) -> int:
    """Do what a line of the shell says."""
    project = Compose(Path(os.environ["COMPOSE_FILE"]), folder)
    flags, names = (
        [word for word in words if word.startswith("--")],
        [word for word in words if word[0] != "-"],
    )
    match words:
        case ["volume", "rm", name]:
            shutil.rmtree(project.volume(name.removeprefix("kvrag_")))
        case ["compose", "up", *_]:
            every = [
                name for name, service in project.services.items() if not service.get("profiles")
            ]
            assert set(flags) <= {"--build", "--detach", "--wait", "--no-deps"}, flags
            project.up(names[2:] or every)
        case ["compose", "rm", "--stop", "--force", name]:
            project.stop(name)
        case ["compose", "down", *_]:
            assert set(flags) <= {"--volumes"}, flags
            for name in list(project.running):
                project.stop(name)
            if flags:
                shutil.rmtree(folder / "volumes", ignore_errors=True)
        case ["compose", "run", "--rm", "--entrypoint", program, name, *arguments]:
            argv, env, cwd = project.process(name, *arguments, entrypoint=program)
            return subprocess.run(argv, env=env, cwd=cwd).returncode
        case ["compose", "run", "--rm", name, *arguments]:
            argv, env, cwd = project.process(name, *arguments)
            return subprocess.run(argv, env=env, cwd=cwd).returncode
        case _:
            sys.exit(f"unknown here: docker {' '.join(words)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
