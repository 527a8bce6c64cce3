"""What a request costs the host: a model of 32 layers of width 64, whose arithmetic is next to nothing, and twelve stored chunks.

One warm request with the default repair, measured three ways:

* milliseconds of its stages on this machine's CPU, all repeats, medians with intervals, and the process's CPU time, which other
  processes do not stretch;
* calls of the host, of Python's functions and of built-in ones (``sys.setprofile``), in all and by the module that calls;
* on a device that isn't there (``tests/fake_cuda.py``): how often it would be asked to compute, how often it would copy, and how often the
  host would wait for it; launched, and by recordings whose replay costs nothing.

    python benchmarks/bench_host.py [--repeats 25] [--threads 1] [--out FOLDER]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_peers import interval
from bench_ttft import orders, random_chunks
from common import machine, parser, write_result
from transformers import AutoModelForCausalLM, LlamaConfig

from kvrag import KVRagEngine, RepairConfig, StoreConfig
from kvrag.generate.request import PrefillRequest
from kvrag.testing.tokenizers import tiny_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import fake_cuda
from fake_cuda import FakeCuda, install, move

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 400,
    "max_position_embeddings": 32768,
}
CHUNKS, CHUNK_TOKENS = 12, 500
ROOT = Path(__file__).parents[1]


def narrow_engine(folder: Path) -> KVRagEngine:
    """Return an engine with a narrow model of random weights, that keeps all KV in memory."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE), dtype=torch.float32).eval()
    config = StoreConfig(ram_bytes=2**32, durability="cache", load_timeout_s=60.0)
    return KVRagEngine.from_pretrained(
        model,
        tokenizer=tiny_tokenizer(),
        kv_dir=folder,
        repair=RepairConfig(),
        store_config=config,
    )


def module_of(file: str) -> str:
    """Name the module of a source file: a file of ours by its path, everything else by its package."""
    path = Path(file)
    if "site-packages" in path.parts:
        return path.parts[path.parts.index("site-packages") + 1]
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else "python"


def calls_of(action: Callable[[], object]) -> dict[str, Any]:
    """Count the calls of an action: Python's functions by their own module, built-in ones by the caller's.

    What the stand-in for a device does is left out, and so is all that it calls.
    """
    found = Counter[tuple[str, str]]()
    inside = 0

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal inside
        is_fake = frame.f_code.co_filename in (fake_cuda.__file__, torch.overrides.__file__)
        if is_fake and event in ("call", "return"):
            inside += 1 if event == "call" else -1
        elif event in ("call", "c_call") and not inside:
            found[frame.f_code.co_filename, event] += 1

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    modules, kinds = Counter[str](), Counter[str]()
    for (file, event), number in found.items():
        modules[module_of(file)] += number
        kinds[event] += number
    return {
        "calls": kinds.total(),
        "functions": kinds["call"],
        "builtins": kinds["c_call"],
        "modules": dict(modules.most_common()),
    }


def planned(engine: KVRagEngine, prompt: list[Any]) -> float:
    """Milliseconds of planning a prompt with no forward before."""
    start = time.perf_counter()
    engine._answering.plan(engine._resolved(PrefillRequest(prompt=prompt)))
    return (time.perf_counter() - start) * 1e3


def asked_of(fake: FakeCuda) -> dict[str, Any]:
    """Say what a device was asked for."""
    kinds = Counter[str]()
    for kind, _ in fake.log:
        kinds["event" if kind.startswith("event") else kind] += 1
    is_wait = {kind: kind.startswith("wait") or kind.endswith("waits") for kind in kinds}
    copies = [size for kind, size in fake.log if kind.startswith(("upload", "download"))]
    return {
        "launches": fake.num_launches,
        "copies": len(copies),
        "copied_bytes": sum(copies),
        "waits": sum(number for kind, number in kinds.items() if is_wait[kind]),
        "kinds": dict(kinds.most_common()),
        "operations": dict(fake.launches.counts.most_common()),
    }


def measure(folder: Path, repeats: int) -> dict[str, Any]:
    """Ask the same question of the chunks in orders that no request had before."""
    with closing(narrow_engine(folder)) as engine:
        chunks = random_chunks(engine.tokenizer, CHUNKS, CHUNK_TOKENS)
        engine.precompute(chunks, batch_size=4)
        prompts = iter(orders(engine.prefix_text, chunks, 2 * repeats + 11))

        def ask() -> Any:
            return engine.prefill(next(prompts), mode="stitch")

        for _ in range(3):
            ask()
        runs = list[dict[str, float]]()
        for _ in range(repeats):
            start = time.process_time()
            done = ask()
            cpu = (time.process_time() - start) * 1e3
            runs.append({**done.timings_ms, "total": done.ttft_ms, "CPU time": cpu})
        stages = {}
        for name in runs[0]:
            values = [run[name] for run in runs]
            stages[name] = {"ms": statistics.median(values), "ci": interval(values)}
        # On a CPU a forward takes the caches away; beside a device it does not.
        plans = [planned(engine, next(prompts)) for _ in range(repeats)]
        calls = calls_of(ask)
        with pytest.MonkeyPatch.context() as patch:
            fake = install(patch)
            move(engine.loaded.reusable)
            with fake:
                ask(), ask()
                fake.clear()
                ask()
                launched = asked_of(fake)
                engine.loaded.lm.record(8192, record=fake.record)
                ask(), ask()
                fake.clear()
                ask()
                recorded = asked_of(fake)
                recorded["python"] = calls_of(ask)
        return {
            "tokens": done.prompt_tokens,
            "chunks": CHUNKS,
            "repaired": done.repaired_tokens,
            "stages": stages,
            "plan_alone_ms": plans,
            "python": calls,
            "device": launched,
            "recorded": recorded,
            "runs": runs,
        }


def main() -> None:
    """Measure, and write ``host.json``."""
    made = parser(__doc__, repeats=25, threads=1)
    made.add_argument("--name", default="host", help="name of the result")
    args = made.parse_args()
    torch.set_num_threads(args.threads)
    head = {
        "machine": machine(),
        "model": f"a Llama of {SHAPE['num_hidden_layers']} layers of width {SHAPE['hidden_size']}, random weights",
    }
    with tempfile.TemporaryDirectory() as folder:
        found = head | measure(Path(folder), args.repeats)
    print(found["stages"], found["python"], found["device"], found["recorded"], sep="\n")
    write_result(args.name, found, args.out)


if __name__ == "__main__":
    main()
