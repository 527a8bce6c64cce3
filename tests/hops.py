"""How far a prompt and a chunk travel: modules entered, Python calls, moves from one file to another, and threads, of kvrag's own code.

    python tests/hops.py        # prints JSON: {"generate, warm": {"modules": 28, "calls": 790, …, "by_module": {…}}, …}

Calls of linear layers are no moves.
Counts, no times: they are the same on every machine. tests/repository/test_hops.py holds their budgets.
It measures in a process of its own, so that
no thread that another test left behind is counted.
"""

import json
import os
import random
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

FOLDERS = [
    Path(spec.origin).parent
    for name in ("kvrag", "kvrag_kernels")
    if (spec := find_spec(name)) and spec.origin
]
OWN = tuple(f"{folder}{os.sep}" for folder in FOLDERS)
_WORDS = """
alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu
"""
WORDS = _WORDS.split()


class Hops:
    """Counts calls in all threads that start after it is made, and in the thread that makes it."""

    def __init__(self) -> None:
        self._is_on = False
        self._last = threading.local()
        self._calls: Counter[str] = Counter()
        self._moves = 0
        self._threads: set[int] = set()
        # From the start, and not for each measurement: the threads of a pool stay, and must be seen in later measurements too.
        threading.setprofile(self._watch)
        sys.setprofile(self._watch)

    def _watch(self, frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event != "call" or not self._is_on or not name.startswith(OWN):
            return
        self._calls[name] += 1
        self._threads.add(threading.get_ident())
        # A linear layer that kvrag multiplies is a call of the model's own forward.
        if name.endswith(f"model{os.sep}linear.py"):
            return
        if getattr(self._last, "file", None) != name:
            self._last.file = name
            self._moves += 1

    def measure(self, action: Callable[[], object]) -> dict[str, Any]:
        """Run an action and return its counts."""
        self._calls.clear()
        self._threads.clear()
        self._moves, self._last.file = 0, None
        self._is_on = True
        try:
            action()
        finally:
            self._is_on = False
        by_module = {
            "/".join(Path(name).parts[-3:]): count for name, count in self._calls.most_common()
        }
        counts = {"modules": len(by_module), "calls": self._calls.total(), "moves": self._moves}
        return counts | {"threads": len(self._threads), "by_module": by_module}


def main() -> dict[str, dict[str, Any]]:
    """Measure one prompt of three chunks, and its chunks, on a tiny model."""
    import torch

    from kvrag import KVRagEngine
    from kvrag.testing.models import save_tiny_model

    hops = Hops()
    torch.set_num_threads(1)
    found, luck = {}, random.Random(0)
    texts = [" ".join(luck.choice(WORDS) for _ in range(120)) for _ in range(4)]
    prompt = [
        {"role": "user", "content": "\n\n".join([texts[2], texts[0], texts[1]]) + "\n\nWhich?"}
    ]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["KVRAG_CACHE_DIR"] = f"{folder}/cache"
        model = save_tiny_model(Path(folder) / "model")

        def opened() -> KVRagEngine:
            engine = KVRagEngine.from_pretrained(model, kv_dir=f"{folder}/kv")
            assert engine.loaded
            return engine

        def generate() -> None:
            result = engine.generate(prompt, max_new_tokens=2, mode="stitch")
            assert result.cached_tokens > 0

        engine = opened()
        found["precompute, 4 chunks"] = hops.measure(
            lambda: engine.precompute(texts, ids=list("abcd"))
        )
        generate()
        found["generate, warm"] = hops.measure(generate)
        engine.close()
        engine = opened()
        found["generate, from disk"] = hops.measure(generate)
        found["delete one document"] = hops.measure(lambda: engine.delete(["a"]))
        engine.close()
    return found


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ["TQDM_DISABLE"] = "1"  # the thread that shows progress is no part of a journey
    print(json.dumps(main(), indent=2))
