"""Serving with Ray Serve: what routing by chunks gives, and a replica that is killed under load.

    python benchmarks/bench_serving.py

SmolLM2, two replicas of one thread on one store, each with memory for 0.6 of the chunks, four clients, prompts of four chunks in changing
order. ``chunks``: the front tells the router which chunks a prompt has; ``load``: it doesn't, so Ray asks the replica with least to do. The
hit rate is that of the memory tiers, of both replicas together. ``kill``: after a third of the requests one replica gets SIGKILL.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from common import items, machine, parser, pids, small_model, write_result

from kvrag import KVRagEngine
from kvrag_ray import build
from kvrag_ray.front import Front

PORT, CLIENTS, CHUNKS, SHARE = 8_473, 4, 4, 0.6


class ByLoad(Front):
    """A front that tells the router nothing."""

    def keys(self, authorization: str, body: bytes) -> list[str]:
        """Return no keys."""
        return []


def call(path: str, body: dict[str, Any] | None = None) -> tuple[str, Any]:
    """Ask the application; return the replica that answered, and its answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}{path}", data, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        return response.headers["x-kvrag-replica"], json.load(response)


def memory_looks() -> dict[str, tuple[int, int]]:
    """Return the hits and misses of each replica's memory tier, by asking until both have answered."""
    found: dict[str, tuple[int, int]] = {}
    for _ in range(200):
        replica, stats = call("/v1/kv/stats")
        tier = stats["store"]["host"]
        found[replica] = tier["hits"], tier["misses"]
        if len(found) == 2:
            break
    return found


def load(
    prompts: list[str], at: int = -1, then: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """Ask all prompts by so many clients, and do something after ``at`` of them."""
    done: list[dict[str, Any]] = []

    def ask(prompt: str) -> None:
        start = time.perf_counter()
        body = {
            "model": "smollm2",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 16,
            "temperature": 0,
        }
        try:
            replica, answer = call(
                "/v1/chat/completions", body | {"kvrag": {"mode": "stitch", "trace": True}}
            )
        except OSError as error:
            done.append({"lost": str(error)})
            return
        made, usage = answer["kvrag"][0], answer["usage"]
        share = (made["cached_tokens"] + made["repaired_tokens"]) / usage["prompt_tokens"]
        done.append({"replica": replica, "s": time.perf_counter() - start, "reused": share})
        if len(done) == at:
            then()

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(ask, prompts))
    return done


def kill_one() -> None:
    """Send SIGKILL to a replica."""
    os.kill(random.choice(pids("ray::ServeReplica:default:Replica")), signal.SIGKILL)
    print("killed a replica", flush=True)


def serve_with(front: type[Front], options: dict[str, Any]) -> None:
    """Deploy the application, with another front."""
    from ray import serve

    app = build(options)
    if front is not Front:
        own = serve.deployment(front).options(
            name="Front", max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0}
        )
        app = own.bind(*app._bound_deployment.init_args)
    serve.run(app)


def hit_rate(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> float:
    """Hits over look-ups in memory since then."""
    hits, misses = (sum(after[r][n] - before.get(r, (0, 0))[n] for r in after) for n in (0, 1))
    return hits / max(1, hits + misses)


def main() -> None:
    """Run it, and write ``results/serving.json``."""
    options = parser(__doc__, items=16, rounds=3, seed=0)
    args = options.parse_args()
    import ray
    from ray import serve

    os.environ["OMP_NUM_THREADS"] = "1"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    serve.start(http_options={"port": PORT})
    rng, found = random.Random(args.seed), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        model, kv_dir = small_model(), str(Path(folder) / "kv")
        with closing(KVRagEngine.from_pretrained(model, dtype="float32", kv_dir=kv_dir)) as engine:
            questions = items(engine.tokenizer, count=args.items, num_chunks=CHUNKS)
            report = engine.precompute(sorted({text for item in questions for text in item.chunks}))
            store_bytes = report.stored_bytes
            engine.loaded  # noqa: B018 - its prefix is the chat template's

        def prompts() -> list[str]:
            made = [
                [*rng.sample(item.chunks, len(item.chunks)), item.question] for item in questions
            ]
            rng.shuffle(made)
            return ["\n\n".join(parts) for parts in made]

        application = {
            "model": model,
            "kv_dir": kv_dir,
            "engine": {"dtype": "float32"},
            "store": {"ram_bytes": int(SHARE * store_bytes)},
            "server": {"model_name": "smollm2"},
            "replicas": 2,
            "num_cpus": 0.5,
        }
        for name, front in (
            ("chunks", Front),
            ("load", ByLoad),
            ("chunks", Front),
            ("load", ByLoad),
        ):
            serve_with(front, application | {"warm_s": 0.0})
            load(prompts())  # memory fills
            before, start = memory_looks(), time.perf_counter()
            done = [each for _ in range(args.rounds - 1) for each in load(prompts())]
            rate, wall = hit_rate(before, memory_looks()), time.perf_counter() - start
            shares = [sum(each["replica"] == r for each in done) for r in before]
            figures = {
                "hit_rate": rate,
                "requests_per_s": len(done) / wall,
                "requests_by_replica": shares,
            }
            figures["median_s"] = statistics.median(each["s"] for each in done)
            print(name, figures, flush=True)
            found.setdefault(name, []).append(figures)
            serve.delete("default")
        serve_with(Front, application)
        before_kill = load(prompts())
        start = time.perf_counter()
        during = load(prompts() + prompts(), at=args.items // 3, then=kill_one)
        wall = time.perf_counter() - start
        while len(pids("ray::ServeReplica:default:Replica")) < 2 or len(memory_looks()) < 2:
            time.sleep(0.5)
        restarted_s = time.perf_counter() - start
        looks = memory_looks()
        after = load(prompts())
        found["kill"] = {
            "requests": len(before_kill) + len(during) + len(after),
            "lost": sum("lost" in each for each in (*before_kill, *during, *after)),
            "reused_before": statistics.mean(each["reused"] for each in before_kill),
            "reused_during": statistics.mean(
                each["reused"] for each in during if "lost" not in each
            ),
            "reused_after": statistics.mean(each["reused"] for each in after),
            "memory_hit_rate_after": hit_rate(looks, memory_looks()),
            "slowest_s": max(each["s"] for each in during if "lost" not in each),
            "seconds_during": wall,
            "both_up_after_s": restarted_s,
        }
        print(found["kill"])
    result = {
        "machine": machine(),
        "ray": ray.__version__,
        "seed": args.seed,
        "items": args.items,
        "rounds": args.rounds,
    }
    write_result(
        "serving",
        {
            **result,
            "store_bytes": store_bytes,
            "memory_share": SHARE,
            "chunks_per_prompt": CHUNKS,
            **found,
        },
        args.out,
    )
    serve.shutdown()


if __name__ == "__main__":
    main()
