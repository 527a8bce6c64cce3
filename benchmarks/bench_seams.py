"""What tokenising segment by segment changes: ids that differ from the whole text's, and how far the model's answer moves with them.

For MuSiQue prompts and several separators between chunks, counts the seams where the joined ids differ from those of the rendered text
(:func:`seams.count_seams`). For some of the prompts, the distance of a full prefill of the joined ids from one of
the whole text's ids: no stored KV is involved.

    KVRAG_EVAL_DATA=... python benchmarks/bench_seams.py
"""

from __future__ import annotations

from dataclasses import asdict
from statistics import mean
from typing import Any

import torch
from common import Item, eval_data, items, machine, parser, small_engine, write_result
from seams import SeamCount, count_seams

from kvrag import Chunk, KVRagEngine
from kvrag.metrics import kl_divergence
from kvrag.prompt.template import PromptEncoder

SEPARATORS = {
    "empty line": "\n\n",
    "line break": "\n",
    "numbered": "\n\n[{n}] ",
    "rule": "\n\n---\n\n",
    "space": " ",
}
"""Name → text between two chunks."""


def segments(item: Item, encoder: PromptEncoder, separator: str) -> list[str | Chunk]:
    """The rendered prompt as live text and chunks."""
    mark = "\u2063"
    head, tail = encoder.render([{"role": "user", "content": mark + item.tail}]).split(mark)
    out: list[str | Chunk] = [head]
    for n, chunk in enumerate(item.chunks):
        between = separator.format(n=n + 1)
        out += [between.lstrip("\n- ") if n == 0 else between, Chunk(chunk)]
    return [*[s for s in out if s != ""], tail]


def whole_text(prompt: list[str | Chunk]) -> str:
    """The same prompt as one text."""
    return "".join(s.text if isinstance(s, Chunk) else s for s in prompt)


def count(prompt: list[str | Chunk], encoder: PromptEncoder) -> SeamCount:
    """Compare the joined ids with those of the whole text."""
    ids = [
        encoder.chunk_ids(s.text) if isinstance(s, Chunk) else encoder.live_ids(s, at_start=n == 0)
        for n, s in enumerate(prompt)
    ]
    return count_seams(ids, encoder.live_ids(whole_text(prompt), at_start=True))


def distance(prompt: list[str | Chunk], item: Item, engine: KVRagEngine) -> dict[str, Any]:
    """KL(whole text's ids ‖ joined ids) at the first answer token and over the gold answer, and the loss of that answer under both."""
    whole = engine.score(whole_text(prompt), item.answers[0], mode="full")
    joined = engine.score(prompt, item.answers[0], mode="full")
    kl = kl_divergence(whole.logits, joined.logits)
    return {
        "kl_first": float(kl[0]),
        "kl_gold": float(kl.mean()),
        "top1_first": bool(whole.logits[0].argmax() == joined.logits[0].argmax()),
        "loss_whole": whole.loss,
        "loss_joined": joined.loss,
    }


def main() -> None:
    """Count over all questions; measure distances over some."""
    options = parser(__doc__)
    options.add_argument(
        "--prompts", type=int, default=10, help="prompts whose distance is measured"
    )
    options.add_argument(
        "--distances", nargs="*", default=["empty line", "space"], choices=SEPARATORS
    )
    args = options.parse_args()
    engine = small_engine(torch.get_num_threads())
    encoder = engine.loaded.encoder
    everything, some = (
        items(engine.tokenizer, count=len(eval_data())),
        items(engine.tokenizer, count=args.prompts),
    )
    rows: dict[str, Any] = {}
    for name, separator in SEPARATORS.items():
        counts = sum(
            (count(segments(item, encoder, separator), encoder) for item in everything), SeamCount()
        )
        rows[name] = {"separator": separator, **asdict(counts)}
        if name in args.distances:
            cases = [distance(segments(item, encoder, separator), item, engine) for item in some]
            rows[name] |= {
                "cases": cases,
                **{key: mean(case[key] for case in cases) for key in cases[0]},
            }
        print(name, {key: value for key, value in rows[name].items() if key != "cases"}, flush=True)
    result = {
        "machine": machine(),
        "model": "SmolLM2-135M-Instruct",
        "prompts": len(everything),
        "separators": rows,
    }
    write_result("seams", result, args.out)


if __name__ == "__main__":
    main()
