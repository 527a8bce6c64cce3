"""What weights of fewer bits do on a CPU: load, prefill, decode steps of one and of eight requests, and divergence from float32.

The kinds take turns in the same process: ``float32``; ``float16``, which is KVRAG_WEIGHTS=float16; torchao's int8 weights under float32;
with ``--kinds``, the model in ``bfloat16``, too, whose products are emulated where the processor has none. Times are wall and processor
seconds: on a shared machine the second disturb less. Divergence is of the last 128 rows of a prompt of passages, by full prefills. The
reading rate is that of a float32 sum, the least that a step which reads all weights needs. With ``--gguf``, llama.cpp computes with that
file as it is, in a process of its own.

    KVRAG_EVAL_MODELS=... python benchmarks/bench_cpu.py --model qwen2.5-coder-0.5b [--threads 1] [--repeats 5] [--kinds float32,bfloat16]
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import bootstrap, machine, model_path, parser, write_result
from peers.environments import Peer, Worker

from kvrag.metrics import kl_divergence
from kvrag.model.linear import WEIGHTS_VARIABLE
from kvrag.model.lm import CausalLM
from kvrag.model.load import load
from kvrag.model.rows import Rows
from kvrag.model.shared import Portion
from kvrag.model.source import ModelSource
from kvrag.precompute.encode import shipped

PROMPT, STEPS, STREAMS, BEHIND, JUDGED = 600, 12, 8, 16, 128


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Wall and processor seconds of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def source_of(kind: str, path: str) -> ModelSource:
    """The model in one kind; ``revision`` keeps the loaded kinds apart."""
    options: dict[str, Any] = {}
    os.environ.pop(WEIGHTS_VARIABLE, None)
    if kind == "float16":
        os.environ[WEIGHTS_VARIABLE] = "float16"
    if kind == "int8":
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        options["quantization_config"] = TorchAoConfig(Int8WeightOnlyConfig())
    dtype = "bfloat16" if kind == "bfloat16" else "float32"
    return ModelSource(path, dtype=dtype, revision=kind, hf_kwargs=options)


class Kind:
    """A loaded model, and its times."""

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        found: list[Any] = []
        self.load = timed(lambda: found.append(load(source_of(name, path))))
        assert isinstance(found[0].lm, CausalLM), "reuse is refused"
        self.loaded, self.lm = found[0], found[0].lm
        self.times: dict[str, list[tuple[float, float]]] = {"prefill": [], "step": [], "steps": []}

    def turn(self, ids: torch.Tensor) -> None:
        """A prefill, steps of one request, and steps of several requests behind short prompts."""
        lm, length = self.lm, len(ids)
        buffer = lm.buffer(length + STEPS)
        self.times["prefill"].append(
            timed(lambda: lm.forward(ids, Rows.span(0, length), buffer, logits=1))
        )

        def alone() -> None:
            for at in range(length, length + STEPS):
                lm.forward(ids[:1], Rows.span(at, at + 1), buffer)

        wall, cpu = timed(alone)
        self.times["step"].append((wall / STEPS, cpu / STEPS))
        buffers = [lm.buffer(BEHIND + STEPS) for _ in range(STREAMS)]
        for each in buffers:
            lm.forward(ids[:BEHIND], Rows.span(0, BEHIND), each, logits=0)

        def together() -> None:
            for at in range(BEHIND, BEHIND + STEPS):
                rows = Rows.span(at, at + 1)
                lm.step([Portion(ids[:1], rows, each, logits=1) for each in buffers])

        wall, cpu = timed(together)
        self.times["steps"].append((wall / STEPS, cpu / STEPS))

    def judged(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the last rows of a full prefill."""
        rows = Rows.span(0, len(ids))
        return self.lm.forward(ids, rows, self.lm.buffer(len(ids)), logits=JUDGED)[0][0].float()


class LlamaCpp:
    """llama.cpp with a GGUF file, and its times."""

    def __init__(self, path: str, threads: int) -> None:
        peer = Peer("llama.cpp", "worker_llamacpp.py", {}, "llamacpp")
        log = Path(tempfile.gettempdir()) / "bench-cpu-llamacpp.log"
        self.name, self.worker = peer.name, Worker(peer, {"gguf": path}, threads, log)
        self.worker.ready()
        self.times: dict[str, list[tuple[float, float]]] = {"prefill": [], "step": []}

    def turn(self, ids: torch.Tensor) -> None:
        """A prefill, and steps of one request."""
        took = self.worker.ask("steps", ids=ids.tolist(), count=STEPS)
        for name, times in self.times.items():
            times.append(tuple(took[name]))


def ratios(base: Kind, kind: Kind | LlamaCpp) -> dict[str, Any]:
    """Median ratios of base's to kind's times, turn by turn, with 95% intervals."""
    found = {}
    for name, times in kind.times.items():
        for index, clock in enumerate(("wall", "cpu")):
            each = [a[index] / b[index] for a, b in zip(base.times[name], times, strict=True)]
            found[f"{name}_{clock}"] = [statistics.median(each), *bootstrap(each)]
    return found


def reading_rate() -> float:
    """Bytes per second of a float32 sum over 256 MB."""
    data = torch.ones(2**26)
    return data.nbytes / min(timed(lambda: data.sum())[0] for _ in range(5))


def main() -> None:
    """Measure every kind in turns, and write the result."""
    made = parser(__doc__, threads=1, repeats=5)
    made.add_argument("--model", default="qwen2.5-coder-0.5b")
    made.add_argument("--kinds", default="float32,float16,int8", help="the first is the base")
    made.add_argument("--gguf", help="file for llama.cpp, which is built at first use")
    options = made.parse_args()
    torch.set_num_threads(options.threads)
    path = model_path(options.model)
    names = options.kinds.split(",")
    rates = [reading_rate()]
    kinds = [Kind(name, path) for name in names]
    ids = torch.tensor(kinds[0].loaded.encoder(shipped())["input_ids"][:PROMPT])
    assert len(ids) == PROMPT, "more text is needed"
    peers = [LlamaCpp(options.gguf, options.threads)] if options.gguf else []
    for turn in range(options.repeats + 1):
        for kind in (*kinds, *peers):
            kind.turn(ids)
            if not turn:  # the first turn warms up
                kind.times = {name: [] for name in kind.times}
        steps = {kind.name: kind.times["step"][-1:] for kind in (*kinds, *peers)}
        print(turn, steps, file=sys.stderr)
    rates.append(reading_rate())
    base, whole = kinds[0], kinds[0].judged(ids)
    rows = {
        peer.name: {
            "times_s": peer.times,
            "sooner": ratios(base, peer),
            "gguf": Path(options.gguf).name,
        }
        for peer in peers
    }
    for kind in kinds:
        logits = kind.judged(ids)
        apart = [float(kl_divergence(a, b)) for a, b in zip(whole, logits, strict=True)]
        rows[kind.name] = {
            "load_s": kind.load,
            "times_s": kind.times,
            "sooner": ratios(base, kind),
            "kl_mean": statistics.mean(apart),
            "kl_max": max(apart),
            "same_token": float((whole.argmax(-1) == logits.argmax(-1)).float().mean()),
        }
    result = {
        "model": options.model,
        "machine": machine(),
        "reading_bytes_per_s": rates,
        "weights_bytes": sum(p.nbytes for p in base.lm.model.parameters()),
        "prompt": PROMPT,
        "streams": STREAMS,
        "load_average": os.getloadavg(),
        "kinds": rows,
    }
    is_small = options.model == made.get_default("model")
    write_result("cpu" if is_small else f"cpu-{options.model}", result, options.out)


if __name__ == "__main__":
    main()
