"""Peers in one run: transformers, vLLM, KVBoost, llama.cpp, published methods and kvrag answer the same prompts, each in its own process.

All processes are up from the start, and take turns in an order drawn anew for each prompt; everyone has the same number of threads and the
same token ids. Measured: wall and CPU seconds to the first token, reuse, KL and top-1 agreement at the first token against
transformers' full prefill, token F1 where there are gold answers, memory, and after how many requests an index has paid.

    KVRAG_EVAL_DATA=... python benchmarks/bench_peers.py [--quick] [--threads 2] [--only NAME ...]
    KVRAG_EVAL_MODELS=... python benchmarks/bench_peers.py --model qwen2.5-coder-0.5b --workloads rag chat

Foreign peers get virtual environments in ``$KVRAG_PEERS`` (default ``~/.cache/kvrag-peers``) at first use. Who can't run
is in the JSON with the reason.
"""

from __future__ import annotations

import random
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, eval_data, machine, model_path, parser, small_model, write_result
from peers.environments import FOREIGN, Peer, UnavailableError, Worker
from peers.workloads import Prompt, Words, Workload, all_workloads
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvrag.evaluate.questions import normalised
from kvrag.metrics import kl_divergence
from kvrag.prompt.template import PromptEncoder

FULL = "transformers, full prefill"
KVRAG, ALONE = "worker_kvrag.py", {"prefix": "", "mode": "stitch", "context": None}
PEERS = [
    Peer(FULL, "worker_transformers.py", {"keeps": False}),
    Peer("transformers, prefix cache", "worker_transformers.py", {"keeps": True}),
    *(
        Peer(f"KVBoost, {s}", "worker_kvboost.py", {"strategy": s}, "kvboost")
        for s in ("none", "selective", "cacheblend")
    ),
    Peer("llama.cpp, prompt cache", "worker_llamacpp.py", {}, "llamacpp"),
    Peer("vLLM, prefix cache", "worker_vllm.py", {}, "vllm"),
    Peer("CacheBlend, 15%", KVRAG, {"repair": "cacheblend", **ALONE}, index="alone"),
    Peer("EPIC, 32 rows", KVRAG, {"repair": "epic", **ALONE}, index="alone"),
    Peer("ProphetKV's signal, 20%", KVRAG, {"repair": "prophetkv", **ALONE}, index="alone"),
    Peer("kvrag, the default", KVRAG, {"repair": "default"}, index="context"),
    Peer("kvrag, fast", KVRAG, {"repair": "fast"}, index="context"),
    Peer("kvrag, 10%", KVRAG, {"repair": "10%"}, index="context"),
    Peer("kvrag, unrepaired behind a context", KVRAG, {"repair": "none"}, index="context"),
    Peer(
        "kvrag, stored at first use",
        KVRAG,
        {"repair": "default", "on_miss": "store"},
        index="first use",
    ),
]
NOT_COMPARED = ("llama.cpp, prompt cache",)
"""Computes with quantised weights and activations: its distance from float32 says nothing about reuse."""
LARGE = (
    "transformers, prefix cache",
    "vLLM, prefix cache",
    "KVBoost, cacheblend",
    "CacheBlend, 15%",
    "kvrag, the default",
    "kvrag, fast",
)
"""Peers beside the full prefill with a larger model, which is in memory once for each."""
COUNTS = {"rag": 12, "chat": 6, "shots": 6, "code": 6}
QUICK = {"rag": 2, "chat": 2, "shots": 1, "code": 1}
ANSWER_TOKENS = 10
WARM_UP = "Say in one word whether the sky is blue. " * 12


def float32_model(folder: Path) -> Path:
    """Write the small model's weights in float32, once for all peers, in the format that transformers loads quickest."""
    source = Path(small_model())
    options = {"gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **options)
    model.hf_quantizer = None  # the weights are dequantised: it only keeps them from being saved
    del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, **options).save_pretrained(folder)
    return folder


def words_of(model: Path) -> tuple[Words, PromptEncoder]:
    """The model's tokenizer, for the workloads, and as kvrag uses it."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    encoder = PromptEncoder(tokenizer)
    return Words(
        lambda text: tokenizer(text)["input_ids"], tokenizer.decode, encoder.render
    ), encoder


def ids_of(prompt: Prompt, encoder: PromptEncoder) -> list[int]:
    """Ids of the segments, joined."""
    ids: list[int] = []
    for index, segment in enumerate(prompt.segments):
        own = (
            encoder.chunk_ids
            if segment.is_chunk
            else lambda text, at=not index: encoder.live_ids(text, at_start=at)
        )
        ids += own(segment.text)
    return ids


class Run:
    """The workers that are up, and what they measured."""

    def __init__(
        self, peers: Sequence[Peer], threads: int, folder: Path, seed: int, model: str | None
    ) -> None:
        self.model = Path(model_path(model)) if model else float32_model(folder / "model")
        self.threads, self.folder = threads, folder
        self.rng = random.Random(seed)
        self.words, self.encoder = words_of(self.model)
        self.head = self.words.render([{"role": "user", "content": "\0"}]).partition("\0")[0]
        self.workers: dict[str, Worker] = {}
        self.loaded: dict[str, int | None] = {}
        self.missing: dict[str, str] = {}
        for number, peer in enumerate(peers):
            self.attempt(peer.name, lambda peer=peer, number=number: self.start(peer, number))
        for name, worker in list(self.workers.items()):
            self.attempt(name, lambda worker=worker: self.warm_up(worker))

    def attempt(self, name: str, action: Callable[[], Any]) -> Any:
        """Do something with a peer; one that fails is out from then on, with the reason."""
        try:
            return action()
        except (UnavailableError, BrokenPipeError) as error:
            if name == FULL:
                raise
            self.missing[name] = str(error)
            self.workers.pop(name, None)
            print(f"not available: {name}: {error}", flush=True)
            return None

    def start(self, peer: Peer, number: int) -> None:
        """Start a process, which loads the model."""
        log = self.folder / f"{number}.log"
        self.workers[peer.name] = Worker(
            peer, {"model": str(self.model), "gguf": small_model()}, self.threads, log
        )

    def warm_up(self, worker: Worker) -> None:
        """Wait until the model is loaded, and let it answer once untimed."""
        name, text = worker.peer.name, self.head + WARM_UP
        self.loaded[name] = worker.ready()["rss"]
        self.begin(worker, Workload(f"warm-up {worker.peer.index or name}", [], []))
        worker.ask("answer", ids=self.words.ids(text), text=text, segments=[(text, False)], count=2)
        print(f"ready: {name}", flush=True)

    def begin(self, worker: Worker, workload: Workload) -> dict[str, Any]:
        """Let a peer forget the last workload and index the chunks of the next."""
        place = self.folder / f"{workload.name}-{worker.peer.index}"
        head = {"head": self.words.ids(self.head), "head_text": self.head}
        return worker.ask(
            "begin", chunks=workload.used, **head, kv_dir=str(place), forget_peak=True
        )

    def measure(self, workload: Workload) -> dict[str, Any]:
        """Index a workload's chunks with every peer, then let all answer each prompt in turns."""
        indexed = {
            name: self.attempt(name, lambda w=w: self.begin(w, workload))
            for name, w in list(self.workers.items())
        }
        rows = []
        for number, prompt in enumerate(workload.prompts):
            start, row = time.perf_counter(), self.compare(prompt)
            rows.append(row)
            full = row["peers"][FULL]["wall_s"]
            took = ", ".join(
                f"{name} {full / r['wall_s']:.2f}x"
                for name, r in row["peers"].items()
                if name != FULL
            )
            said = f"{workload.name} {number + 1}/{len(workload.prompts)}, {row['tokens']} tokens, {full:.2f} s"
            print(f"{said}: {took} [{time.perf_counter() - start:.0f} s]", flush=True)
        count = {
            what: sum(len(self.encoder.chunk_ids(c)) for c in getattr(workload, what))
            for what in ("used", "pool")
        }
        found = {"prompts": rows, "index": {n: i for n, i in indexed.items() if i}, "tokens": count}
        found["chunks"] = {"used": len(workload.used), "pool": len(workload.pool)}
        return found | {"summary": summarise(found, self.loaded, {p.name: p.index for p in PEERS})}

    def compare(self, prompt: Prompt) -> dict[str, Any]:
        """Let all answer one prompt, in an order drawn anew, and compare their first token with the full prefill's."""
        ids = ids_of(prompt, self.encoder)
        request = {
            "ids": ids,
            "text": prompt.text,
            "segments": [(s.text, s.is_chunk) for s in prompt.segments],
        }
        request["count"] = ANSWER_TOKENS if prompt.golds else 1
        order, row = list(self.workers), dict[str, dict[str, Any]]()
        self.rng.shuffle(order)
        for name in order:
            path = str(self.folder / f"{order.index(name)}.npy")
            reply = self.attempt(
                name, lambda n=name, p=path: self.workers[n].ask("answer", **request, logits=p)
            )
            if reply:
                row[name] = reply | {"path": path}
        reference = torch.from_numpy(np.load(row[FULL]["path"]))
        for name, reply in row.items():
            path, answer = reply.pop("path"), reply.pop("text").strip().split("\n")[0]
            if prompt.golds:
                reply["f1"] = token_f1(answer, prompt.golds)
            if reply.get("same_ids", True) and name not in NOT_COMPARED:
                logits = torch.from_numpy(np.load(path))
                reply["kl"] = max(0.0, float(kl_divergence(reference, logits)))
                reply["top1"] = float(reference.argmax() == logits.argmax())
        same = self.words.ids(prompt.text) == ids
        return {
            "tokens": len(ids),
            "same_ids": same,
            "order": order,
            "peers": {n: row[n] for n in self.workers if n in row},
        }

    def close(self) -> None:
        """End all processes."""
        for worker in self.workers.values():
            worker.close()


def token_f1(answer: str, golds: Sequence[str]) -> float:
    """Largest word F1 with any gold answer."""
    words, best = normalised(answer), 0.0
    for gold in map(normalised, golds):
        same = (Counter(words) & Counter(gold)).total()
        best = max(best, 2 * same / max(1, len(words) + len(gold)))
    return best


def interval(values: Sequence[float], repeats: int = 2000) -> tuple[float, float]:
    """95% bootstrap interval of the median."""
    data = np.asarray(values)
    picks = np.random.default_rng(0).integers(len(data), size=(repeats, len(data)))
    low, high = np.quantile(np.median(data[picks], axis=1), (0.025, 0.975))
    return float(low), float(high)


def summarise(
    found: dict[str, Any], loaded: dict[str, int | None], indexes: dict[str, str]
) -> dict[str, Any]:
    """Medians with intervals of times, ratios and KL; means of shares; memory; and when the index of the whole pool has paid."""
    out: dict[str, Any] = {}
    scale = found["tokens"]["pool"] / max(1, found["tokens"]["used"])
    for name in found["prompts"][0]["peers"]:
        pairs = [
            (p["peers"][name], p["peers"][FULL], p["tokens"])
            for p in found["prompts"]
            if name in p["peers"]
        ]
        own = [mine for mine, _, _ in pairs]
        row: dict[str, Any] = {}
        for key in ("wall_s", "cpu_s"):
            ratios = [full[key] / mine[key] for mine, full, _ in pairs]
            row |= {
                key: statistics.median(r[key] for r in own),
                f"{key}_ci": interval([r[key] for r in own]),
            }
            row |= {f"{key}_ratio": statistics.median(ratios), f"{key}_ratio_ci": interval(ratios)}
        row["reuse"] = statistics.mean(mine["reused"] / tokens for mine, _, tokens in pairs)
        for key in ("top1", "f1", "said_ttft_s"):
            if given := [
                r[key] for r in own if key in r
            ]:  # not where a peer made other ids of the text
                row[key] = statistics.mean(given)
        if kls := [r["kl"] for r in own if "kl" in r]:
            row |= {
                "kl": statistics.mean(kls),
                "kl_median": statistics.median(kls),
                "kl_median_ci": interval(kls),
            }
        if loaded[name] is not None:
            row["memory"] = max(r["peak"] for r in own) - loaded[name]
        index = index_of(name, found["index"], indexes)
        saved = statistics.mean(full["cpu_s"] - mine["cpu_s"] for mine, full, _ in pairs)
        if index is not None:
            row["index_cpu_s"] = index["cpu_s"] * scale
            row["break_even"] = row["index_cpu_s"] / saved if saved > 0 else None
        out[name] = row
    return out


def index_of(
    name: str, replies: dict[str, Any], indexes: dict[str, str]
) -> dict[str, float] | None:
    """What precomputing took: the peer's own, or that of the peer that made the index which it shares."""
    shared = indexes[name]
    for other in (name, *(n for n in replies if shared and indexes[n] == shared)):
        if found := replies.get(other, {}).get("index"):
            return dict(found)
    return None


def show(name: str, workload: dict[str, Any]) -> None:
    """Print one workload's table."""
    print(
        f"{name}\n  {'':36} {'wall':>7} {'CPU':>7} {'ratio':>6} {'CPU':>6} {'reuse':>6} {'KL':>7} {'top-1':>6} {'F1':>5}"
    )
    for peer, row in workload["summary"].items():
        times = f"{row['wall_s']:6.2f}s {row['cpu_s']:6.2f}s {row['wall_s_ratio']:6.2f} {row['cpu_s_ratio']:6.2f}"
        kl = f"{row['kl']:7.3f} {row['top1']:6.2f}" if "top1" in row else f"{'–':>7} {'–':>6}"
        print(f"  {peer:36} {times} {row['reuse']:6.2f} {kl} {row.get('f1', float('nan')):5.2f}")


def main() -> None:
    """Start everyone, run all workloads, and write the JSON."""
    options = parser(__doc__, threads=torch.get_num_threads(), seed=0)
    options.add_argument(
        "--quick",
        action="store_true",
        help="few short prompts, to see that all works; no JSON without --out",
    )
    options.add_argument(
        "--only", nargs="+", choices=[p.name for p in PEERS], help="peers besides the full prefill"
    )
    options.add_argument(
        "--model", help="a folder of $KVRAG_EVAL_MODELS, in float32, instead of SmolLM2"
    )
    options.add_argument("--workloads", nargs="+", choices=list(COUNTS), default=list(COUNTS))
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    where = machine()
    only = args.only or (LARGE if args.model else [p.name for p in PEERS])
    peers = [p for p in PEERS if p.name in (FULL, *only)]
    folder = Path(tempfile.mkdtemp(prefix="kvrag-peers-"))
    try:
        run = Run(peers, args.threads, folder, args.seed, args.model)
        counts = {
            name: n
            for name, n in (QUICK if args.quick else COUNTS).items()
            if name in args.workloads
        }
        todo = all_workloads(eval_data(), run.words, counts, args.seed, is_short=args.quick)
        shown = "SmolLM2-135M-Instruct, float32 from Q4_1; llama.cpp: the Q4_1 file itself"
        about = {"machine": where, "model": f"{args.model}, float32" if args.model else shown}
        about |= {"threads": args.threads, "seed": args.seed, "counts": counts, "packages": FOREIGN}
        found = dict[str, Any]()
        for workload in todo:
            found[workload.name] = run.measure(workload)
            if not args.quick or args.out != RESULTS:
                result = {**about, "missing": run.missing, "workloads": found}
                print(
                    "written:",
                    write_result(
                        f"peers-{args.model}" if args.model else "peers", result, args.out
                    ).name,
                    flush=True,
                )
            show(workload.name, found[workload.name])
        run.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
