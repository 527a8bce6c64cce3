"""Feed everything that reads stored bytes with inputs that a coverage-guided fuzzer (atheris) makes up.

    python tests/reliability/fuzz_reader.py --runs 1000000        # make fuzz-reader

An exception other than a refusal, a header that is accepted and not written again to the same bytes, wrong bits, a hang of
two minutes and more than 2 GiB of memory end it with status 1, and the input is left in the working directory. Figures go to
benchmarks/results/fuzz_reader.json. The same targets run under hypothesis in tests/store/test_reader_fuzz.py.
"""

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_WORDS = """
__metadata__ layer_digests header_digest token_ids data_offsets shape dtype version BF16
kv_dtype context int8 key_scales cipher_key sealed salt 9223372036854775808 null
"""
WORDS = tuple(_WORDS.split())


def fuzz(runs: int, corpus: Path, report: Path, seed: int) -> None:
    """Run the fuzzer in this process, which it ends."""
    import atheris

    sys.path.insert(0, str(HERE.parent / "store"))
    with atheris.instrument_imports(
        include=["kvrag.store", "kvrag.identity.fingerprint", "kvrag.kv"]
    ):
        import reader_target
    counts: dict[str, Any] = {
        "inputs": 0,
        "by_target": Counter(),
        "accepted": Counter(),
        "slowest_cpu_ms": 0.0,
    }

    def one(data: bytes) -> None:
        start = time.process_time()
        name, is_accepted = reader_target.run(data[0] if data else 0, data[1:])
        counts["slowest_cpu_ms"] = max(
            counts["slowest_cpu_ms"], round((time.process_time() - start) * 1e3, 1)
        )
        counts["inputs"] += 1
        counts["by_target"][name] += 1
        counts["accepted"][name] += is_accepted
        if counts["inputs"] >= runs:
            report.write_text(json.dumps(counts))

    for number, seeds in enumerate(reader_target.SEEDS.values()):
        for index, content in enumerate(seeds):
            (corpus / f"seed-{number}-{index}").write_bytes(bytes([number]) + content)
    words = corpus.parent / "words"
    words.write_text("".join(f'"{word}"\n' for word in WORDS))
    limits = ["-timeout=120", "-rss_limit_mb=2048", "-max_len=6000", "-len_control=0"]
    atheris.Setup(
        [sys.argv[0], f"-runs={runs}", f"-seed={seed}", f"-dict={words}", *limits, str(corpus)], one
    )
    atheris.Fuzz()


def main() -> None:
    """Run the fuzzer in a process of its own, and write down what it did."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--in-folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.in_folder:
        fuzz(args.runs, args.in_folder / "corpus", args.in_folder / "report.json", args.seed)
        return
    sys.path.insert(0, str(HERE.parents[1] / "benchmarks"))
    from common import RESULTS, machine, write_result

    with tempfile.TemporaryDirectory(prefix="kvrag-") as name:
        folder, start = Path(name), time.monotonic()
        (folder / "corpus").mkdir()
        command = [
            sys.executable,
            __file__,
            f"--runs={args.runs}",
            f"--seed={args.seed}",
            f"--in-folder={folder}",
        ]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if done.returncode or not (folder / "report.json").exists():
            sys.exit(done.stderr[-8000:] + "\nthe reader failed on an input; see above")
        result = json.loads((folder / "report.json").read_text())
        covered = re.findall(r"DONE +cov: (\d+)", done.stderr)
        corpus = len(list((folder / "corpus").iterdir()))
    result["by_target"] = dict(sorted(result["by_target"].items(), key=lambda each: -each[1]))
    result |= {
        "failures": 0,
        "covered_edges": int(covered[-1]) if covered else None,
        "corpus": corpus,
    }
    result |= {
        "seconds": round(time.monotonic() - start),
        "fuzzer": f"atheris {importlib.metadata.version('atheris')}",
    }
    print(result)
    write_result("fuzz_reader", {"machine": machine(), **result}, args.out or RESULTS)


if __name__ == "__main__":
    main()
