"""Time to first token: stitched prefill with everything included, against transformers' own SDPA forward of the same token ids.

Every chunk is precomputed; blobs are read from disk (the memory tier is off) with the page cache dropped before each request, with
``--shape`` from the host's memory. Both are measured in one run, interleaved, medians over prompts. The full prefill is timed without
tokenising and planning: in its favour.

    KVRAG_EVAL_DATA=... python benchmarks/bench_ttft.py                  # SmolLM2-135M-Instruct, MuSiQue prompts
    KVRAG_EVAL_MODELS=... python benchmarks/bench_ttft.py --model qwen2.5-coder-0.5b --count 5
    python benchmarks/bench_ttft.py --shape qwen2.5-3b --tokens 6000 31000     # random weights, for a GPU
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from common import RESULTS, SMALL, items, machine, model_path, small_model, write_result

from kvrag import Chunk, KVRagEngine, RepairConfig, StoreConfig

REPAIRS = {
    "default": RepairConfig(),
    "fast": RepairConfig.fast(),
    "25%": RepairConfig(recompute_ratio=0.25),
    "careful": RepairConfig.careful(),
    "unrepaired": RepairConfig(strategy="none"),
}
KEPT: dict[str, dict[str, Any]] = {
    "auto": {},
    "int8": {"kv_dtype": "int8"},
    "auto, on the device": {"gpu_bytes": 2**34},
}
"""How the runs of a shape keep KV: as computed and rounded in the host's memory, and as computed in the device's."""
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-3b": {
        "model_type": "qwen2",
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 32768,
    },
}

DRY_RUN = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": 400,
    "head_dim": 16,
}
"""What makes a shape small enough to check this script in seconds: no measurement."""


def synchronise() -> None:
    """Wait for the device, so that a clock means what it says."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measured(action: Callable[[], Any]) -> tuple[dict[str, float], Any]:
    """Measure an action between two device synchronisations: wall time, the process's CPU and system time (ms), and page faults."""
    synchronise()
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    result = action()
    synchronise()
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    system = after.ru_stime - before.ru_stime
    cpu = after.ru_utime - before.ru_utime + system
    faults = after.ru_minflt - before.ru_minflt
    return {
        "ms": wall * 1e3,
        "cpu_ms": cpu * 1e3,
        "system_ms": system * 1e3,
        "faults": faults,
    }, result


def full_prefill(engine: KVRagEngine, ids: list[int]) -> int:
    """First greedy token by transformers alone, with its own SDPA attention and cache."""
    model = engine.loaded.lm.model
    assert model.config._attn_implementation == "sdpa"
    with torch.inference_mode():
        out = model(torch.tensor([ids], device=model.device), use_cache=True, logits_to_keep=1)
    return int(out.logits[0, -1].argmax())


def drop_page_cache(folder: Path) -> int:
    """Ask the kernel to forget the blobs; returns their bytes."""
    total = 0
    for blob in folder.rglob("*.safetensors"):
        descriptor = os.open(blob, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        total += blob.stat().st_size
    return total


def compare(
    engine: KVRagEngine,
    prompts: list[Any],
    configs: dict[str, dict[str, Any]],
    folder: Path | None,
    warm_up: int = 1,
) -> dict[str, Any]:
    """Time every configuration beside the full prefill, prompt by prompt."""
    rows: list[dict[str, Any]] = []
    for index, prompt in enumerate([*prompts[:warm_up], *prompts]):
        ids = engine.prefill(
            prompt, mode="full"
        ).prompt_ids  # also brings the weights back into the caches
        row: dict[str, Any] = {}
        before = measured(lambda ids=ids: full_prefill(engine, ids))[0]
        turn = index % len(
            configs
        )  # whoever comes first has the full prefill's data in the caches: take turns at that
        for name, options in [*list(configs.items())[turn:], *list(configs.items())[:turn]]:
            if folder is not None:
                drop_page_cache(folder)
            took, result = measured(
                lambda options=options, prompt=prompt: engine.prefill(prompt, **options)
            )
            assert result.prompt_ids == ids, "the comparison must be of the same token ids"
            row[name] = {
                "ttft_ms": took["ms"],
                **{name: took[name] for name in ("cpu_ms", "system_ms", "faults")},
                "stages_ms": {k: round(v, 2) for k, v in result.timings_ms.items()},
                "exactness": result.exactness,
                "cached": result.cached_tokens,
                "repaired": result.repaired_tokens,
                "computed": result.computed_tokens,
                "loaded_bytes": result.loaded_bytes,
            }
        after = measured(lambda ids=ids: full_prefill(engine, ids))[0]
        for (
            name
        ) in configs:  # the full prefill is timed on both sides of the configurations of its prompt
            row[name] |= {
                f"full_{what}": (before[what] + after[what]) / 2
                for what in ("ms", "cpu_ms", "system_ms")
            }
        row["full_prefills"] = [before, after]
        row["tokens"] = len(ids)
        if index >= warm_up:
            rows.append(row)
            line = ", ".join(f"{n} {row[n]['full_ms'] / row[n]['ttft_ms']:.2f}x" for n in configs)
            print(
                f"  prompt {len(rows)}/{len(prompts)}, {row['tokens']} tokens: {line}", flush=True
            )
    return {"prompts": rows, "summary": {name: summarise(name, rows) for name in configs}}


def summarise(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over prompts."""
    own = [row[name] for row in rows]
    stages = sorted({stage for row in own for stage in row["stages_ms"]})
    return {
        "tokens": statistics.median(row["tokens"] for row in rows),
        "full_ms": statistics.median(r["full_ms"] for r in own),
        "ttft_ms": statistics.median(r["ttft_ms"] for r in own),
        "ratio": statistics.median(r["full_ms"] / r["ttft_ms"] for r in own),
        "cpu_ratio": statistics.median(r["full_cpu_ms"] / r["cpu_ms"] for r in own),
        **{
            name: statistics.median(r[name] for r in own)
            for name in ("full_cpu_ms", "cpu_ms", "system_ms", "faults")
        },
        "stages_ms": {
            s: statistics.median(r["stages_ms"].get(s, 0.0) for r in own) for s in stages
        },
        "repaired": statistics.median(r["repaired"] for r in own),
        "exactness": sorted({r["exactness"] for r in own}),
    }


def show(title: str, summary: dict[str, Any]) -> None:
    """Print one table."""
    print(
        f"{title}\n  {'configuration':22} {'tokens':>6} {'full':>9} {'kvrag':>9} {'ratio':>6} {'CPU':>6}  stages (ms)"
    )
    for name, row in summary.items():
        stages = " ".join(f"{k} {v:.0f}" for k, v in row["stages_ms"].items())
        times = f"{row['full_ms']:7.0f}ms {row['ttft_ms']:7.0f}ms {row['ratio']:5.2f}x {row['cpu_ratio']:5.2f}x"
        print(f"  {name:22} {row['tokens']:6.0f} {times}  {stages}")


def real_model_run(path: str, name: str, count: int, folder: Path) -> dict[str, Any]:
    """A real model on MuSiQue prompts: all repairs at 2,500 tokens, then whole passages and short prompts."""
    engine = KVRagEngine.from_pretrained(
        path,
        dtype="float32",
        kv_dir=folder / "kv",
        repair=RepairConfig(),
        store_config=StoreConfig(ram_bytes=0),
    )
    out: dict[str, Any] = {"model": name, "dtype": "float32"}
    repairs: dict[str, dict[str, Any]] = {
        k: {"mode": "stitch", "repair": repair} for k, repair in REPAIRS.items()
    }
    modes = {mode: {"mode": mode} for mode in ("stitch", "auto")}
    kinds = (
        ("2500", 10, 250, repairs),
        ("5800", 10, 1000, repairs),
        ("1000", 6, 150, modes),
        ("500", 3, 150, modes),
    )
    for label, chunks, tokens, configs in kinds:
        few = max(1, count // 2) if label == "5800" else count
        todo = items(engine.tokenizer, count=few, num_chunks=chunks, chunk_tokens=tokens)
        report = engine.precompute([c for item in todo for c in item.chunks], show_progress=True)
        assert not report.failed
        print(f"prompts of about {label} tokens")
        out[label] = compare(engine, [item.messages for item in todo], configs, folder / "kv")
        show(
            f"prompts of about {label} tokens, blobs from disk, page cache dropped",
            out[label]["summary"],
        )
    engine.close()
    return out


class Shaped(NamedTuple):
    """Random weights of a real shape, a tokenizer, and what chunks are made of."""

    name: str
    model: Any
    tokenizer: Any

    @classmethod
    def of(cls, shape: str, *, is_dry: bool) -> Shaped:
        """Draw the weights; a dry run shrinks the shape."""
        from transformers import AutoConfig, AutoModelForCausalLM

        from kvrag.testing.tokenizers import tiny_tokenizer

        options = SHAPES[shape] | (DRY_RUN if is_dry else {})
        device, dtype = (
            ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
        )
        torch.manual_seed(0)
        with torch.device(device):
            config = AutoConfig.for_model(options.pop("model_type"), **options)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        return cls(shape, model, tiny_tokenizer())

    def engine(self, folder: Path, kept: str) -> KVRagEngine:
        """Make an engine with room for all in the host's memory, that keeps KV as :data:`KEPT` says.

        Its weights are named, not hashed: that would take tens of seconds for each engine, and no other run finds this store.
        """
        options = {"ram_bytes": 64 * 2**30, "durability": "cache", "load_timeout_s": 60.0} | KEPT[
            kept
        ]
        if not torch.cuda.is_available():
            options.pop("gpu_bytes", None)
        config = StoreConfig(**options)
        engine = KVRagEngine.from_pretrained(
            self.model,
            tokenizer=self.tokenizer,
            kv_dir=folder / kept,
            repair=RepairConfig(),
            store_config=config,
        )
        with mock.patch(
            "kvrag.model.load.weights_digest", return_value=f"random weights of {self.name}"
        ):
            engine.loaded  # noqa: B018 - loads
        return engine


def shape_run(
    shaped: Shaped,
    lengths: list[int],
    count: int,
    folder: Path,
    tell: Callable[[dict[str, Any]], None],
) -> None:
    """Time prompts of random words from the host's memory: honest timings, meaningless answers.

    All prompts of a length are orders of the same chunks. ``tell`` gets each result when it is there; one that fails says why.
    """
    chunks = random_chunks(shaped.tokenizer, max(lengths) // 500, 500)
    repairs = {"default": RepairConfig(), "unrepaired": RepairConfig(strategy="none")}
    repairs["fast"] = RepairConfig.fast()
    configs: dict[str, dict[str, Any]] = {
        name: {"mode": "stitch", "repair": r} for name, r in repairs.items()
    }
    for kept in KEPT:
        name = f"kept as {kept}"
        try:
            with closing(shaped.engine(folder, kept)) as engine:
                report = engine.precompute(chunks, batch_size=4)
                print(
                    f"{name}: precomputed {report.stored} chunks, {report.stored_bytes / 1e9:.2f} GB",
                    flush=True,
                )
                for tier in engine.store.tiers:
                    tier.release()  # what is read from the disk lands in pinned memory, what was put may not
                for length in lengths:
                    name = f"kept as {kept}, {length} tokens"
                    prompts = orders(engine.prefix_text, chunks[: length // 500], count)
                    found = compare(
                        engine, prompts, configs, None, warm_up=min(2, count)
                    )  # which promotes
                    show(f"{shaped.name}, {name}", found["summary"])
                    work = {
                        n: work_of(partial(engine.prefill, prompts[0], **c))
                        for n, c in configs.items()
                    }
                    tell(
                        {
                            "name": name,
                            "kept": kept,
                            "length": length,
                            **pinned(engine),
                            "work": work,
                            **found,
                        }
                    )
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            tell({"name": name, "failed": f"{type(error).__name__}: {str(error)[:300]}"})


def pinned(engine: KVRagEngine) -> dict[str, int]:
    """Bytes of the chunks in the host's memory tier, and how many of them are pinned."""
    tier = engine.store.tiers[-1]
    keys = tier.keys()
    kvs = [tier.get(key, identity) for key in keys if (identity := tier.identity(key))]
    tensors = [t for kv in kvs if kv for layer in kv.layers for t in layer.tensors]
    return {
        "memory_bytes": sum(t.nbytes for t in tensors),
        "pinned_bytes": sum(
            t.nbytes for t in tensors if torch.cuda.is_available() and t.is_pinned()
        ),
    }


def work_of(action: Callable[[], Any]) -> dict[str, Any]:
    """Count what a request has the device do: copies by kind with their ms, kernels with their ms, and synchronisations by kind.

    Empty on a CPU. Told by torch's profiler, whose own time is why this request is not among those that are timed.
    """
    from torch.profiler import ProfilerActivity, profile

    activities = [
        ProfilerActivity.CPU,
        *([ProfilerActivity.CUDA] if torch.cuda.is_available() else []),
    ]
    try:
        with profile(activities=activities) as profiler:
            action()
            synchronise()
        events = profiler.key_averages()
    except RuntimeError as error:  # another profiler, or no permission to count
        return {"failed": str(error)[:300]}
    work: dict[str, Any] = {"copies": {}, "synchronisations": {}, "kernels": 0, "kernels_ms": 0.0}
    for event in events:
        if event.key.startswith(("Memcpy", "Memset")):
            work["copies"][event.key] = {"count": event.count, "ms": event.device_time_total / 1e3}
        elif event.key.startswith("cuda") and "Synchronize" in event.key:
            work["synchronisations"][event.key] = event.count
        elif str(event.device_type).endswith("CUDA"):
            work["kernels"] += event.count
            work["kernels_ms"] += event.self_device_time_total / 1e3
    return work


def random_chunks(tokenizer: Any, count: int, tokens: int) -> list[str]:
    """Texts of random words, about ``tokens`` tiny tokens each."""
    words = [
        "river",
        "stone",
        "letter",
        "harbour",
        "winter",
        "lamp",
        "ledger",
        "garden",
        "copper",
        "signal",
        "thread",
    ]
    generator = torch.Generator().manual_seed(0)
    per_word = len(tokenizer(" ".join(words))["input_ids"]) / len(words)

    def text() -> str:
        picks = torch.randint(len(words), (round(tokens / per_word),), generator=generator).tolist()
        return " ".join(words[i] for i in picks)

    return [text() for _ in range(count)]


def orders(prefix: str, chunks: list[str], count: int) -> list[list[Any]]:
    """Return prompts that have the same chunks in another order each."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randperm(len(chunks), generator=generator).tolist() for _ in range(count)]
    return [[prefix, *_between([chunks[i] for i in order]), "\n\nWhich one?"] for order in drawn]


def _between(chunks: list[str]) -> list[Any]:
    return [part for chunk in chunks for part in (Chunk(chunk), "\n\n")]


def main() -> int:
    """Run and write JSON; returns 1 where a run failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=10, help="prompts")
    parser.add_argument(
        "--shape",
        choices=sorted(SHAPES),
        help="random weights of this shape instead of the real small model",
    )
    parser.add_argument("--model", help="a folder of $KVRAG_EVAL_MODELS instead of SmolLM2")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[6000], help="lengths of prompts with --shape"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="with --shape: a tiny one, to check this script"
    )
    parser.add_argument(
        "--out", type=Path, help="folder for the JSON; default: results/, or none after a dry run"
    )
    args = parser.parse_args()
    if args.dry_run and not args.shape:
        parser.error("--dry-run needs --shape")
    out = args.out or (None if args.dry_run else RESULTS)
    name = f"ttft-{args.model or SMALL}"
    name = (
        f"ttft-{args.shape}-{'cuda' if torch.cuda.is_available() else 'cpu'}"
        if args.shape
        else name
    )
    result: dict[str, Any] = {"machine": machine()}

    def write() -> None:
        if out is not None:
            print("written:", write_result(name, result, out).name, flush=True)

    def tell(found: dict[str, Any]) -> None:
        result["runs"].append(found)
        write()

    with tempfile.TemporaryDirectory(prefix="kvrag-bench-") as folder:
        if args.shape:
            shaped = Shaped.of(args.shape, is_dry=args.dry_run)
            result |= {
                "model": f"{args.shape} shape, random weights",
                "dtype": str(shaped.model.dtype),
            }
            result |= {"measured": not args.dry_run, "runs": []}
            lengths, count = ([1000, 1500], 1) if args.dry_run else (args.tokens, args.count)
            shape_run(shaped, lengths, count, Path(folder), tell)
        else:
            path, shown = (
                (model_path(args.model), args.model) if args.model else (small_model(), SMALL)
            )
            result |= real_model_run(path, shown, args.count, Path(folder))
            write()
    return int(any("failed" in run for run in result.get("runs", ())))


if __name__ == "__main__":
    raise SystemExit(main())
