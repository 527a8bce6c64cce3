"""Peak memory of one request: at most model + 2.2 × the prompt's KV + 300 MB.

Runs in a child process, whose peak resident size is read from the kernel (``VmHWM``), for the real small model and MuSiQue prompts of
about 2,500 tokens, with the default memory tier.

    KVRAG_EVAL_DATA=... python benchmarks/bench_memory.py
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from common import items, machine, parser, small_model, write_result

ALLOWED_KV = 2.2
ALLOWED_BYTES = 300 * 10**6


def status(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(field))


def reset_peak() -> None:
    """Let the peak start from here."""
    Path("/proc/self/clear_refs").write_text("5")


def child(folder: str, mode: str) -> None:
    """One request in this process; prints its measurements as JSON."""
    from kvrag import KVRagEngine, RepairConfig

    engine = KVRagEngine.from_pretrained(
        small_model(), dtype="float32", kv_dir=folder, repair=RepairConfig()
    )
    item = items(engine.tokenizer, count=1)[0]
    if mode == "precompute":
        engine.precompute(item.chunks, batch_size=4)
        return
    gc.collect()
    before = status("VmRSS")
    reset_peak()
    result = engine.prefill(item.messages, mode=mode)  # type: ignore[arg-type]
    kv = result.prompt_tokens * engine.loaded.lm.kv_bytes_per_token
    found = {"loaded": before, "peak": status("VmHWM"), "kv": kv, "tokens": result.prompt_tokens}
    print(json.dumps(found | {"made": result.exactness}))


def main() -> None:
    """Precompute, then one request per mode, each in its own process."""
    options = parser(__doc__)
    options.add_argument("--child", nargs=2, metavar=("FOLDER", "MODE"))
    args = options.parse_args()
    if args.child:
        child(*args.child)
        return
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for mode in ("precompute", "stitch", "full"):
            done = subprocess.run(
                [sys.executable, __file__, "--child", folder, mode],
                capture_output=True,
                text=True,
                check=True,
            )
            if mode == "precompute":
                continue
            row = json.loads(done.stdout.splitlines()[-1])
            row["above_model"] = row["peak"] - row["loaded"]
            row["allowed"] = int(ALLOWED_KV * row["kv"] + ALLOWED_BYTES)
            rows[mode] = row
            print(
                f"{mode}: {row['tokens']} tokens, KV {row['kv'] / 1e6:.0f} MB, peak above the loaded model "
                f"{row['above_model'] / 1e6:.0f} MB (allowed {row['allowed'] / 1e6:.0f} MB)"
            )
    write_result(
        "memory",
        {"machine": machine(), "model": "SmolLM2-135M-Instruct", "requests": rows},
        args.out,
    )
    if rows["stitch"]["above_model"] > rows["stitch"]["allowed"]:
        sys.exit("peak memory is above its limit")


if __name__ == "__main__":
    main()
