"""A real ``vllm serve`` that blends, under load and faults: every answer beside its own single run.

    KVRAG_VLLM=~/vllm python tests/reliability/vllm_load.py            # for `make load-check-vllm`
    KVRAG_VLLM=~/vllm python tests/reliability/vllm_load.py --short

A third of the requests is blended, a third has the same token ids with blending off, and a third others. ``KVRAG_VLLM`` is an
environment with vLLM. Exit status 1 if a promise was broken; figures go to benchmarks/results/vllm_load.json.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import run
from space import on_a_small_disk
from world import Outcome

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from texts import make_chunks  # noqa: E402 - of the tests

from kvrag import KVRagEngine  # noqa: E402
from kvrag.testing.models import TINY, save_tiny_model  # noqa: E402

TOKENS = 12
STORE = {"min_free_bytes": 2**20}  # a small disk has less than the default leaves free
START_S = 300.0
CHUNKS = [text.partition(": ")[2] for text in make_chunks(24, words=60)]
IDS = [str(number) for number in range(len(CHUNKS))]
PLACES = "kernels", "integrations/server", "integrations/vllm", ""


@dataclass
class Vllm:
    """A server of vLLM on a tiny model with a store, and kvrag's own engine on both."""

    folder: Path
    kv_dir: Path
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    engine: KVRagEngine = field(init=False)

    def __post_init__(self) -> None:
        model = self.folder / "model"
        if not model.exists():
            # vLLM's attention on CPUs has no head dim of 16.
            TINY["wide"] = {**TINY["llama"], "hidden_size": 128, "head_dim": 32}
            TINY["wide"]["model_type"] = "llama"
            save_tiny_model(model, "wide")
        self.engine = KVRagEngine.from_pretrained(model, kv_dir=self.kv_dir, store_config=STORE)

    def start(self) -> Vllm:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        transfer = {
            "kv_connector": "KVRagConnector",
            "kv_connector_module_path": "vllm_kvrag.connector",
            "kv_role": "kv_consumer",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "kv_dir": str(self.kv_dir),
                "mode": "blend",
                "store_config": STORE,
            },
        }
        python = Path(os.environ.get("KVRAG_VLLM", sys.prefix)).expanduser() / "bin" / "python"
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(self.folder / "model")]
        command += ["--port", str(self.port), "--dtype", "float32", "--max-model-len", "1024"]
        command += ["--enforce-eager", "--block-size", "32", "--max-num-seqs", "16"]
        command += ["--kv-cache-memory-bytes", str(2**23), "--load-format", "kvrag"]
        command += ["--kv-transfer-config", json.dumps(transfer)]
        # What an installed kvrag says of itself.
        about = self.folder / "plugin" / "kvrag_of_this_tree-0.dist-info"
        about.mkdir(parents=True, exist_ok=True)
        (about / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: kvrag-of-this-tree\nVersion: 0\n"
        )
        (about / "entry_points.txt").write_text(
            "[vllm.general_plugins]\nkvrag = vllm_kvrag.loader:register\n"
        )
        places = os.pathsep.join([*(str(ROOT / each) for each in PLACES), str(about.parent)])
        own = {"PYTHONPATH": places, "VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1"}
        own |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING"}
        log = (self.folder / "vllm.log").open("ab")
        self.process = subprocess.Popen(
            command, env=os.environ | own, stdout=log, stderr=log, start_new_session=True
        )
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return self
            except httpx.HTTPError:
                time.sleep(0.5)
        lines = (self.folder / "vllm.log").read_text().splitlines()
        raise RuntimeError("vLLM does not start: " + "\n".join(lines[-40:]))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def engine_process(self) -> int:
        """The process that schedules and computes."""
        assert self.process is not None
        tree = subprocess.run(
            ["ps", "-o", "pid=,args=", "--ppid", str(self.process.pid)],
            capture_output=True,
            text=True,
            check=False,
        )
        lines = [line.split(None, 1) for line in tree.stdout.splitlines()]
        found = [int(pid) for pid, args in lines if "EngineCore" in args]
        return found[0]

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            os.killpg(self.process.pid, how)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def prompt(self, *order: int) -> list[int]:
        encoder = self.engine.loaded.encoder
        text = "Answer from these notes.\n\n" + "\n\n".join(CHUNKS[i] for i in order)
        return [*encoder.bos_ids, *encoder.live_ids(text + "\n\nWho asks for a box?")]

    def reset(self) -> None:
        httpx.post(f"{self.url}/reset_prefix_cache", timeout=60)

    def metrics(self) -> dict[str, float]:
        lines = httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        found = {}
        for line in lines:
            name = re.match(r"vllm:kvrag_(\w+)_total.*(?:origin|exactness)=\"(\w+)\"", line)
            if name:
                found[" ".join(name.groups())] = float(line.split()[-1])
        return found


@dataclass(frozen=True)
class Ask:
    """A request, and what it asks of kvrag."""

    ids: tuple[int, ...]
    mode: str

    def body(self, model: str) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": list(self.ids),
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "kv_transfer_params": {"kvrag": {"mode": self.mode, "trace": True}},
        }


def send(vllm: Vllm, asks: list[Ask], *, leaving: float = 0.0) -> list[dict[str, Any] | None]:
    """Ask all at once; ``None``: no answer. Some clients leave."""
    return asyncio.run(_send(vllm, asks, leaving))


async def _send(vllm: Vllm, asks: list[Ask], leaving: float) -> list[dict[str, Any] | None]:
    rng = random.Random(0)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=1200, limits=limits) as client:

        async def one(ask: Ask, wait_s: float | None) -> dict[str, Any] | None:
            post = client.post(
                f"{vllm.url}/v1/completions", json=ask.body(str(vllm.folder / "model"))
            )
            try:
                answer = await asyncio.wait_for(post, wait_s)
            except (httpx.HTTPError, TimeoutError):
                return None
            return answer.json() if answer.status_code == 200 else None

        waits = [rng.uniform(0.05, 3.0) if rng.random() < leaving else None for _ in asks]
        return await asyncio.gather(*map(one, asks, waits))


def tokens(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def said(answer: dict[str, Any]) -> dict[str, Any]:
    return (answer.get("kv_transfer_params") or {}).get("kvrag") or {}


class Singles:
    """Every request alone: the blended ones before the others, with nothing in vLLM's prefix cache."""

    def __init__(self, vllm: Vllm, count: int, *, chunks: int = len(CHUNKS)) -> None:
        rng = random.Random(1)
        self.asks: list[Ask] = []
        for _ in range(count):
            ids = tuple(vllm.prompt(*rng.sample(range(chunks), 2)))
            others = (1, *[rng.randrange(5, 250) for _ in range(rng.randrange(40, 500))])
            self.asks += [Ask(ids, "stitch"), Ask(ids, "full"), Ask(others, "auto")]
        self.answers: dict[Ask, dict[str, Any]] = {}

    def run(self, vllm: Vllm, outcome: Outcome) -> Singles:
        for ask in self.asks:
            vllm.reset()
            (answer,) = send(vllm, [ask])
            outcome.check(answer is not None, f"{ask.mode}: no answer to a single request")
            if answer is not None:
                self.answers[ask] = answer
        blended = [said(self.answers[ask]) for ask in self.asks if ask.mode == "stitch"]
        outcome.check(
            all(each.get("exactness") == "repaired" for each in blended), "prompts are not blended"
        )
        return self

    def wrong(self, ask: Ask, answer: dict[str, Any]) -> str:
        """Say how an answer differs from its single run; blended ones may have found exact rows."""
        own = self.answers[ask]
        if ask.mode == "stitch":
            full = self.answers[Ask(ask.ids, "full")]
            exactness = said(answer).get("exactness")
            if exactness != "repaired":
                own = full
            elif said(answer)["sources"] != said(own)["sources"]:
                return ""  # behind exact rows, as no single run is
        if tokens(answer) == tokens(own):
            return ""
        return f"{ask.mode}: {tokens(answer)} instead of {tokens(own)} ({said(answer)})"


def judge(
    outcome: Outcome, singles: Singles, asks: list[Ask], got: list[dict[str, Any] | None], when: str
) -> None:
    for ask, answer in zip(asks, got, strict=True):
        if answer is None:
            outcome.add(f"{when}: no answer")
            continue
        outcome.add(f"{when}: {ask.mode}")
        exactness = said(answer).get("exactness")
        if ask.mode == "stitch":
            outcome.add(f"{when}: {exactness}")
        wrong = singles.wrong(ask, answer)
        outcome.check(not wrong, f"{when}: {wrong}")
        if ask.mode == "full":
            outcome.check(exactness != "repaired", f"{when}: approximate blocks with blending off")


def answers(folder: Path, *, requests: int, different: int, leaving: float = 0.05) -> Outcome:
    """So many requests at once, then the singles again."""
    outcome = Outcome()
    vllm = Vllm(folder, folder / "kv")
    outcome.check(not vllm.engine.precompute(CHUNKS, ids=IDS).failed, "precompute failed")
    vllm.start()
    try:
        singles = Singles(vllm, different).run(vllm, outcome)
        vllm.reset()
        asks = [random.Random(i).choice(singles.asks[i % 3 :: 3]) for i in range(requests)]
        start = time.monotonic()
        got = send(vllm, asks, leaving=leaving)
        outcome.counts["load_s"] = round(time.monotonic() - start, 1)
        judge(outcome, singles, asks, got, "load")
        left = sum(answer is None for answer in got)
        outcome.check(left <= 2 * leaving * requests + 5, f"{left} requests have no answer")
        again = [ask for ask in singles.asks if ask.mode == "full"]
        judge(outcome, singles, again, send(vllm, again), "afterwards")
        outcome.counts |= {name: int(value) for name, value in vllm.metrics().items()}
    finally:
        vllm.stop()
        vllm.engine.close()
    return outcome


def faults(folder: Path, *, requests: int, different: int) -> Outcome:
    """Kill -9 of vLLM's engine, documents that are erased, damaged chunks, a store that is gone: time only."""
    outcome = Outcome()
    vllm = Vllm(folder, folder / "kv")
    outcome.check(not vllm.engine.precompute(CHUNKS, ids=IDS).failed, "precompute failed")
    vllm.start()
    try:
        singles = Singles(vllm, different).run(vllm, outcome)
        asks = [singles.asks[i % len(singles.asks)] for i in range(requests)]

        def during(action: Callable[[], object], when: str) -> None:
            vllm.reset()

            async def both() -> list[dict[str, Any] | None]:
                sending = asyncio.create_task(_send(vllm, asks, 0.0))
                await asyncio.sleep(0.3)  # amid the first answers
                await asyncio.to_thread(action)
                return await sending

            judge(outcome, singles, asks, asyncio.run(both()), when)

        during(lambda: os.kill(vllm.engine_process(), signal.SIGKILL), "kill -9")
        vllm.stop()
        vllm.start()
        for ask in singles.asks:
            vllm.reset()
            judge(outcome, singles, [ask], send(vllm, [ask]), "after the kill")
        during(lambda: vllm.engine.delete(IDS[::2]), "erased")
        vllm.engine.precompute(CHUNKS, ids=IDS)
        during(lambda: damage(vllm.kv_dir), "damaged")
        got = send(vllm, asks)
        judge(outcome, singles, asks, got, "afterwards")
        outcome.check(all(each is not None for each in got), "requests have no answer")
    finally:
        vllm.stop()
        vllm.engine.close()
    return outcome


def damage(kv_dir: Path) -> None:
    """Change a byte in every second file of chunks."""
    files = [f for f in kv_dir.rglob("*") if f.is_file() and f.stat().st_size > 10_000]
    for file in [f for f in files if "sqlite" not in f.name][::2]:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.chmod(0o600)
        file.write_bytes(content)


def full_disk(folder: Path, *, different: int) -> Outcome:
    """Precompute in vLLM's worker on a disk that is full: a report or an error, and every prompt is answered as before."""

    def on(disk: Path) -> Outcome:
        outcome = Outcome()
        vllm = Vllm(folder, disk / "kv")
        few = 6
        report = vllm.engine.precompute(CHUNKS[:few], ids=IDS[:few])
        outcome.check(not report.failed, f"precompute failed: {report.failed[:1]}")
        vllm.start()
        try:
            singles = Singles(vllm, different, chunks=few).run(vllm, outcome)
            with (disk / "filler").open("wb") as filler:
                try:
                    while True:
                        filler.write(bytes(2**16))
                        filler.flush()
                except OSError:
                    pass
            more = make_chunks(8, words=60, seed=7)
            body = Ask((1, 5), "auto").body(str(folder / "model")) | {"max_tokens": 1}
            body["kv_transfer_params"] = {"kvrag": {"precompute": {"texts": more}}}
            answer = httpx.post(f"{vllm.url}/v1/completions", json=body, timeout=300).json()
            told = said(answer)
            outcome.check("precompute" in told or "error" in told, f"no report: {told}")
            failed = len(told.get("precompute", {}).get("failed", more))
            outcome.check(failed > 0, "the disk never was full")
            outcome.counts["chunks not stored"] = failed
            for ask in singles.asks:
                vllm.reset()
                judge(outcome, singles, [ask], send(vllm, [ask]), "full")
        finally:
            vllm.stop()
            vllm.engine.close()
        return outcome

    return on_a_small_disk(folder, on)


def scenarios(requests: int, different: int) -> dict[str, Callable[[Path], Outcome]]:
    return {
        "answers": lambda folder: answers(folder, requests=requests, different=different),
        "faults": lambda folder: faults(folder, requests=requests // 2, different=different // 2),
        "full disk": lambda folder: full_disk(folder, different=different // 4),
    }


if __name__ == "__main__":
    run.main(__doc__, scenarios(90, 4), scenarios(1000, 24), "vllm_load")
