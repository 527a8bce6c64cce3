"""From the start of a process to the first token of a model in a GGUF file: at most 25 s.

Qwen2.5-Coder-0.5B, whose vocabulary has 151,936 entries, is written as a GGUF file of 8 bits; each start is a process of its own:

* transformers alone, from the file to the first token, as a reference;
* kvrag with an empty cache directory: it parses and dequantises the file, hashes it, proves the model and answers.

All files are in the page cache. Imports of torch and transformers count.

    KVRAG_EVAL_MODELS=... python benchmarks/bench_gguf.py [--repeats 3] [--threads 2]
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIMITS = {"kvrag": 25.0}
"""Seconds to the first token."""

MODEL = "qwen2.5-coder-0.5b"
PROMPT = "Who wrote Hamlet?"


def write(folder: Path, out: Path) -> None:
    """Write the model in a directory as a GGUF file."""
    import numpy as np
    from gguf_file import write_gguf
    from safetensors import safe_open

    def tensors() -> Iterator[tuple[str, Any]]:
        with safe_open(str(folder / "model.safetensors"), "np") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                yield name, file.get_tensor(name).astype(np.float32)

    config, tokenizer = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("config", "tokenizer")
    )
    template = (folder / "chat_template.jinja").read_text()
    write_gguf(out, config, tokenizer, tensors(), chat_template=template, is_quantised=True)


def child(file: str, how: str, threads: int) -> None:
    """Answer with one token in this process."""
    import torch

    torch.set_num_threads(threads)
    if how == "transformers":
        from transformers import AutoModelForCausalLM, AutoTokenizer

        where: dict[str, Any] = {"gguf_file": os.path.basename(file)}
        tokenizer = AutoTokenizer.from_pretrained(os.path.dirname(file), **where)
        model = AutoModelForCausalLM.from_pretrained(
            os.path.dirname(file), dtype=torch.float32, **where
        )
        ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
        token = int(model.generate(ids, max_new_tokens=1, do_sample=False)[0, -1])
        fingerprint = ""
    else:
        from kvrag import KVRagEngine

        engine = KVRagEngine.from_pretrained(file, dtype="float32")
        (token,) = engine.generate(PROMPT, max_new_tokens=1).token_ids
        fingerprint = engine.loaded.fingerprint
    print(json.dumps({"token": token, "fingerprint": fingerprint, "cpu_s": time.process_time()}))


def start(file: Path, how: str, threads: int, cache: Path) -> dict[str, Any]:
    """Time a process from its start to its first token."""
    command = [sys.executable, __file__, "--child", str(file), how, "--threads", str(threads)]
    environment = {**os.environ, "KVRAG_CACHE_DIR": str(cache), "OMP_NUM_THREADS": str(threads)}
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - begin
    if process.returncode:
        sys.exit(f"the start failed: {how}")
    return {"wall_s": seconds, **json.loads(line)}


def main() -> None:
    """Write the file, start all kinds in turns, and write the JSON; exits with 1 above a limit."""
    from common import machine, model_path, parser, write_result

    options = parser(__doc__, repeats=3, threads=os.cpu_count() or 1)
    options.add_argument("--child", nargs=2, metavar=("FILE", "HOW"))
    args = options.parse_args()
    if args.child:
        child(*args.child, args.threads)
        return
    rows: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        file, cache = Path(folder, "model", "model.gguf"), Path(folder, "cache")
        file.parent.mkdir()
        write(Path(model_path(MODEL)), file)
        time.sleep(3)  # the digest of a file that may still change is not remembered
        for _ in range(args.repeats):
            for name in ("transformers", "kvrag"):
                shutil.rmtree(cache, ignore_errors=True)
                found = start(file, name, args.threads, cache)
                rows.setdefault(name, []).append(found)
                print(name, found, flush=True)
        sizes = {"file": file.stat().st_size}
    made = [run for name, runs in rows.items() if name != "transformers" for run in runs]
    assert len({run["fingerprint"] for run in made}) == 1
    assert len({run["token"] for runs in rows.values() for run in runs}) == 1
    medians = {
        name: {key: statistics.median(run[key] for run in runs) for key in ("wall_s", "cpu_s")}
        for name, runs in rows.items()
    }
    about = machine() | {"threads": args.threads}
    result = {"machine": about, "model": f"{MODEL}, GGUF Q8_0", "bytes": sizes, "limits": LIMITS}
    write_result("gguf", {**result, "starts": medians, "repeats": rows}, args.out)
    late = [name for name, limit in LIMITS.items() if medians[name]["wall_s"] > limit]
    if late:
        sys.exit(f"above the limit: {', '.join(late)}")


if __name__ == "__main__":
    main()
