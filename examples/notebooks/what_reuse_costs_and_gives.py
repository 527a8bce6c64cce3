# ruff: noqa: D100
# %% [markdown]
# # What reuse costs and gives
#
# The time to the first token and the distance from a full prefill, by `recompute_ratio` and by the length of the
# prompt; what the index costs in time and disk; and where reuse does not pay. The engine alone, offline, on a CPU.

# %%
import math
import os
import sys
import tempfile
from statistics import median

sys.path.append(
    ".."
)  # the examples' folder: local.py has the paths of the model and of the documents

import matplotlib.pyplot as plt
import torch

from kvrag import KVRagEngine, RepairConfig
from kvrag.metrics import kl_divergence
from local import HANDBOOK, MODEL

print(
    f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f} before the first cell"
)

# %% [markdown]
# ## What the index costs
#
# Every chunk is prefilled once, and its KV is written to disk.

# %%
SYSTEM = {"role": "system", "content": "Answer the question with words from the documents."}


def prompt_of(sections, question="When was the last real flood?"):
    """Put chunks and a question into chat messages."""
    return [SYSTEM, {"role": "user", "content": "\n\n".join([*sections, question])}]


chunks = [f"## {part.strip()}" for part in HANDBOOK.read_text().split("\n## ")[1:]]
engine = KVRagEngine.from_pretrained(
    MODEL, kv_dir=tempfile.mkdtemp(), prefix=prompt_of(["{context}"])
)
model = engine.loaded  # read first: its time is not the index's
report = engine.precompute(chunks)
disk = engine.stats()["store"]["disk"]
print(f"{report.stored} chunks in {report.seconds:.1f} s, {disk.num_bytes / 2**20:.0f} MiB on disk")
print(f"{model.reusable.kv_bytes_per_token / 1024:.1f} KiB per token, in float32")

# %% [markdown]
# ## Time and distance by the share of rows that is repaired
#
# A prompt of eight chunks. Times are medians of three runs, all ways in turns, so that what else the machine does
# falls on all of them. KV comes from memory here; the benchmarks read it from a cold disk.

# %%
REPEATS = 3
long = prompt_of(chunks[:8])
ways = {
    "full prefill": {"mode": "full"},
    "nothing": {"mode": "stitch", "repair": RepairConfig(strategy="none")},
}
ways |= {
    f"{ratio:.0%}": {"mode": "stitch", "repair": RepairConfig(recompute_ratio=ratio)}
    for ratio in (0.01, 0.03, 0.1, 0.2, 0.4)
}


def times_of(prompt, ways):
    """Median milliseconds to the first token of each way, and its last result."""
    taken = {name: [] for name in ways}
    results = {}
    for turn in range(REPEATS + 1):
        for name, options in ways.items():
            results[name] = engine.prefill(prompt, **options)
            if turn:  # the first turn warms up
                taken[name].append(results[name].ttft_ms)
    return {name: median(ms) for name, ms in taken.items()}, results


times, results = times_of(long, ways)
own = engine.generate(long, mode="full", max_new_tokens=12).token_ids
reference = engine.score(long, own, mode="full").logits
distances = {
    name: float(kl_divergence(reference, engine.score(long, own, **way).logits).mean())
    for name, way in ways.items()
}
print(
    f"{results['full prefill'].prompt_tokens} tokens\n\nrepaired      first token   against full   KL, nats per token"
)
for name, ms in times.items():
    print(f"{name:<13} {ms:>8.0f} ms {times['full prefill'] / ms:>13.1f}× {distances[name]:>20.5f}")

# %%
shown = [name for name in ways if name != "full prefill"]
figure, axes = plt.subplots(figsize=(5, 3), dpi=80)
axes.plot([times[name] for name in shown], [distances[name] for name in shown], "o-")
for name in shown:
    axes.annotate(name, (times[name], distances[name]), textcoords="offset points", xytext=(6, 4))
axes.margins(0.15)
axes.axvline(times["full prefill"], color="grey", linestyle=":", label="full prefill")
axes.set(
    xlabel="milliseconds to the first token",
    ylabel="KL, nats per token",
    yscale="log",
    title="Repair buys quality with time",
)
axes.legend()
figure.tight_layout()

# %% [markdown]
# ## Where it does not pay
#
# The gain shrinks with the prompt, and with the share of its text that has KV. `mode="auto"`, the default, compares what
# both ways would cost here, and prefills in full where reuse can't pay; the result says why.

# %%
FOREIGN = (
    HANDBOOK.with_name("10-operating-a-service.md").read_text().split("\n## ")[1:]
)  # of these, there is no KV


def compare(known, foreign):
    """Time a prompt of so many chunks with KV, behind so many sections without, in three ways."""
    prompt = prompt_of([*FOREIGN[:foreign], *chunks[-known:][::-1]])
    by_way, made = times_of(prompt, {mode: {"mode": mode} for mode in ("full", "stitch", "auto")})
    auto = made["auto"]
    row = "   ".join(f"{by_way[mode]:>6.0f} ms" for mode in ("full", "stitch", "auto"))
    how = (
        f"{auto.exactness}, {auto.cached_tokens} tokens reused"
        + f" ({auto.fallback_reason})" * bool(auto.fallback_reason)
    )
    print(f"{known:>5} and {foreign} {auto.prompt_tokens:>8}    {row}   {how}")


print(
    "sections with\nand without KV  tokens         full      stitch        auto   how auto was made"
)
for known, foreign in ((13, 0), (4, 0), (1, 0), (4, 4), (1, 4)):
    compare(known, foreign)

# %% [markdown]
# More repair costs time, too: the first table shows how the gain shrinks.

# %% [markdown]
# ## When the index has paid for itself
#
# Precomputing takes about as long as prefilling the chunks. Each prompt of eight of them saves the difference above.

# %%
saved = (times["full prefill"] - times["3%"]) / 1e3
print(
    f"{report.seconds:.1f} s of precomputing are won back after {math.ceil(report.seconds / saved)} prompts of eight chunks"
)
engine.close()
