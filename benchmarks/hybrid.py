"""Reuse of chunks in hybrids: is composing exact, and what do answers lose when chunks were computed without what stands before them?

    make bench-hybrid

First, on tiny random models of five families in float32: the state that stored pairs (A, B) give beside the state that transformers'
own forward leaves, and reuse with every row computed anew beside a full prefill. Then, on two small hybrids that ``hybrid_model.py``
trains here for minutes, answers to questions of three kinds by full prefill, by reuse with nothing repaired, and by reuse with chosen
rows repaired through attention and linear layers alike. Writes ``results/hybrid.json``. Half an hour of one core, most of it training.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from common import bootstrap, machine, parser, write_result
from hybrid_compose import (
    Hybrid,
    Stored,
    chunk_map,
    compose,
    cut,
    delta_rows,
    mixers,
    scan_rows,
    stitch,
)
from hybrid_model import (
    BEGIN,
    DOCUMENTS,
    FACTS,
    KINDS,
    Prompt,
    accuracy,
    build,
    load,
    make_prompt,
    save,
    train,
)
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

SHARES = (0.10, 0.15, 0.25, 0.5)
"""Of the rows of all documents, computed anew."""
DOCUMENT = 1 + 4 * FACTS
ROWS = DOCUMENT * DOCUMENTS
TINY: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "num_experts": 0,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
    },
    "qwen3_5_text": {
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
    },
    "bamba": {"attn_layer_indices": [3], "mamba_n_heads": 8, "mamba_d_state": 16},
    "granitemoehybrid": {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
        "num_local_experts": 2,
        "shared_intermediate_size": 64,
    },
    "falcon_h1": {
        "mamba_d_ssm": 128,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "head_dim": 16,
    },
}
"""Options of tiny models, beside those that all share."""


def tiny(kind: str) -> Any:
    """Make a random model whose states last for many rows."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind,
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        **TINY[kind],
    )
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.3 if "conv" in name else 0.15)
    for part in mixers(model).values():
        part.dt_bias.data.uniform_(-6.0, -2.0)
    return model


@torch.no_grad()
def states(kind: str, length: int = 60, seams: tuple[int, ...] = (17, 18, 41)) -> dict[str, float]:
    """Compose the state of every linear layer from pairs of four stretches of rows; compare with what transformers' forward keeps."""
    model = tiny(kind)
    parts, seen = mixers(model), {}
    hooks = [
        part.register_forward_pre_hook(
            lambda _, args, named, n=n: seen.__setitem__(n, (*args, *named.values())[0]),
            with_kwargs=True,
        )
        for n, part in parts.items()
    ]
    out = model(torch.randint(0, 96, (1, length)), use_cache=True)
    cache = out.cache if "cache" in out else out.past_key_values
    for hook in hooks:
        hook.remove()
    worst = scale = kept = 0.0
    for number, part in parts.items():
        rows_of = delta_rows if hasattr(part, "head_k_dim") else scan_rows
        put, _ = rows_of(part, seen[number])
        edges = [0, *seams, length]
        maps = [chunk_map(part, put, *pair) for pair in pairwise(edges)]
        ours = compose(maps, torch.zeros_like(maps[0][1]))
        theirs = cache.layers[number].recurrent_states[0]
        if not hasattr(part, "head_k_dim"):
            theirs = theirs.mT
        worst = max(worst, float((ours - theirs).abs().max()))
        scale = max(scale, float(theirs.abs().max()))
        alone = compose(maps[1:], torch.zeros_like(maps[0][1]))
        kept = max(kept, float((alone - theirs).abs().max()))
    return {"error": worst, "largest": scale, "without_first": kept, "layers": len(parts)}


@torch.no_grad()
def reuse_errors(kind: str) -> dict[str, float]:
    """Largest differences of logits between reuse and full prefill, by what is computed anew."""
    torch.manual_seed(1)
    model = build(kind).eval()
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and "conv" not in name:
            weight.normal_(0, 0.15)
    hybrid = Hybrid(model)
    ids = torch.randint(0, 48, (2, 60))
    want = model(ids, use_cache=False).logits[:, -1]
    first = hybrid.run(ids[:, :20]).stored
    second = cut(hybrid.run(torch.cat([ids[:, :1], ids[:, 20:45]], 1)).stored, 1, 26)
    stored = stitch([first, second, hybrid.run(ids[:, 45:]).stored])
    rows = {
        "nothing": [0, *range(45, 60)],
        "every row": list(range(60)),
        "all behind the first chunk": list(range(20, 60)),
    }
    out = {}
    for name, chosen in rows.items():
        got = hybrid.run(ids, torch.tensor([chosen, chosen]), stored).logits
        out[name] = float((got - want).abs().max())
    alone = stitch([first, hybrid.run(ids[:, 20:]).stored])
    got = hybrid.run(ids, torch.tensor([range(20, 60)] * 2), alone).logits
    out["one chunk behind its own prefix"] = float((got - want).abs().max())
    return out


@dataclass(frozen=True)
class Asked:
    """One question of every prompt, with what is stored of the prompts' documents."""

    ids: Tensor
    """``[prompts, length]``; the question is the last three."""
    answers: Tensor
    stored: Stored
    needed: list[list[int]]
    """Rows of the facts that answer together."""
    wanted: Tensor
    """Logits of full prefill."""
    mass: Tensor
    """Attention of the question to every row, under reuse with nothing repaired."""
    reordered: Tensor
    """Logits of full prefill with the documents in another order."""


LIVE = [0, ROWS + 1, ROWS + 2, ROWS + 3]


def store(hybrid: Hybrid, prompts: list[Prompt]) -> Stored:
    """Compute every document behind the first token alone, and join what is stored in the prompts' order."""
    alone = torch.tensor([[BEGIN, *document] for p in prompts for document in p.documents])
    documents = cut(hybrid.run(alone).stored, 1, 1 + DOCUMENT)
    joined = [
        {name: t.reshape(len(prompts), ROWS, *t.shape[2:]) for name, t in layer.items()}
        for layer in documents
    ]
    begin = hybrid.run(torch.full((len(prompts), 1), BEGIN)).stored
    asking = hybrid.run(torch.zeros(len(prompts), 3, dtype=torch.long)).stored
    return stitch([begin, joined, asking])


def ask(hybrid: Hybrid, prompts: list[Prompt], kind: str, seed: int) -> Asked:
    """Ask one question of a kind about every prompt that has one."""
    prompts = [p for p in prompts if p.asked[kind]]
    rng = random.Random(seed)
    ids, other, answers = [], [], []
    for p in prompts:
        asked, answer = p.question(kind, 0)
        order = p.documents[:]
        while order == p.documents:
            rng.shuffle(order)
        ids.append([*p.context, *asked])
        other.append([BEGIN, *(i for document in order for i in document), *asked])
        answers.append(answer)
    stored = store(hybrid, prompts)
    tokens = torch.tensor(ids)
    return Asked(
        ids=tokens,
        answers=torch.tensor(answers),
        stored=stored,
        needed=[[r + n for r in p.asked[kind][0][2] for n in range(4)] for p in prompts],
        wanted=hybrid.run(tokens).logits,
        mass=hybrid.run(tokens, torch.tensor([LIVE] * len(ids)), stored, asking=3).mass,
        reordered=hybrid.run(torch.tensor(other)).logits,
    )


def with_live(chosen: Tensor) -> Tensor:
    """Chosen rows of documents, with the rows that are always computed, in order."""
    live = torch.tensor(LIVE).expand(len(chosen), -1)
    return torch.cat([chosen, live], 1).sort(1).values


def by_mass(asked: Asked, count: int) -> Tensor:
    """Rows that the question attends to most, as kvrag chooses; the first document is exact and is left out."""
    return 1 + DOCUMENT + asked.mass[:, 1 + DOCUMENT : 1 + ROWS].topk(count, 1).indices


def by_chance(asked: Asked, count: int) -> Tensor:
    """Random rows behind the first document."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(len(asked.ids), ROWS - DOCUMENT, generator=generator)
    return 1 + DOCUMENT + scores.topk(count, 1).indices


def first_rows(asked: Asked, count: int) -> Tensor:
    """Rows at the beginning of every document but the first, as many of each."""
    order = [1 + d * DOCUMENT + n for n in range(DOCUMENT) for d in range(1, DOCUMENTS)]
    return torch.tensor([order[:count]]).expand(len(asked.ids), -1)


def logits_of(hybrid: Hybrid, asked: Asked) -> dict[str, Tensor]:
    """Logits at the answer by every way of prefill."""
    live = torch.tensor([LIVE] * len(asked.ids))

    def run(rows: Tensor, **named: Any) -> Tensor:
        return hybrid.run(asked.ids, rows, asked.stored, **named).logits

    everything = torch.arange(ROWS + 4).expand(len(asked.ids), -1)
    out = {
        "full": asked.wanted,
        "reordered": asked.reordered,
        "no states": run(live, forget=ROWS),
        "unrepaired": run(live),
        "all rows": run(everything),
    }
    ways: dict[str, Callable[[Asked, int], Tensor]] = {
        "attention": by_mass,
        "first": first_rows,
        "random": by_chance,
    }
    for share in SHARES:
        count = round(share * ROWS)
        for name, choose in ways.items():
            out[f"{name} {share:.0%}"] = run(with_live(choose(asked, count)))
    kept = with_live(by_mass(asked, round(0.15 * ROWS)))
    out["attention 15%, states kept"] = run(kept, asking=3, kept="linear")
    width = max(map(len, asked.needed))
    needed = torch.tensor([rows + [rows[0]] * (width - len(rows)) for rows in asked.needed])
    out["rows of the facts"] = run(with_live(needed))
    return out


def outcome(logits: Tensor, asked: Asked) -> dict[str, Any]:
    """Right answers, the same answers as full prefill's, and the divergence from it, with intervals."""
    wanted = asked.wanted.log_softmax(-1)
    kl = (wanted.exp() * (wanted - logits.log_softmax(-1))).sum(-1).clamp(min=0)
    got = logits.argmax(-1)
    values = {
        "right": (got == asked.answers).double(),
        "same": (got == asked.wanted.argmax(-1)).double(),
        "kl": kl.double(),
    }
    made: dict[str, Any] = {"prompts": len(asked.ids), "kl_median": float(kl.median())}
    for name, each in values.items():
        made[name] = float(each.mean())
        made[f"{name}_interval"] = bootstrap(each.tolist())
    return made


def quality(model: Any, prompts: int, seed: int = 2) -> dict[str, dict[str, Any]]:
    """Measure every way of prefill on questions of every kind."""
    hybrid = Hybrid(model)
    rng = random.Random(seed)
    made = [make_prompt(rng) for _ in range(prompts)]
    out: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        asked = ask(hybrid, made, kind, seed)
        for name, logits in logits_of(hybrid, asked).items():
            out.setdefault(name, {})[kind] = outcome(logits, asked)
    return out


def main() -> None:
    """Check exactness, train, and measure."""
    options = parser(__doc__, prompts=400)
    options.add_argument(
        "--weights", type=Path, help="folder of weights: taken if they are there, else kept there"
    )
    options.add_argument(
        "--kinds", nargs="*", default=["delta", "mamba"], help="with one, the other's figures stay"
    )
    given = options.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "states": {kind: states(kind) for kind in TINY},
        "reuse": {kind: reuse_errors(kind) for kind in ("delta", "mamba")},
        "models": {},
    }
    written = given.out / "hybrid.json"
    if written.exists() and len(given.kinds) == 1:
        result["models"] = json.loads(written.read_text())["models"]
    for kind in given.kinds:
        weights = given.weights and given.weights / f"{kind}.safetensors"
        if weights and weights.exists():
            model, facts = load(kind, weights)
        else:
            model, facts = train(kind)
            if weights:
                save(model, facts, weights)
        result["models"][kind] = {
            "training": facts,
            "accuracy": accuracy(model),
            "ways": quality(model, given.prompts),
        }
        for name, row in result["models"][kind]["ways"].items():
            shown = " ".join(f"{k} {v['right']:.3f} kl {v['kl']:.3f}" for k, v in row.items())
            print(f"{kind} {name:28s} {shown}", flush=True)
    print(write_result("hybrid", {"machine": machine(), **result}, given.out))


if __name__ == "__main__":
    main()
