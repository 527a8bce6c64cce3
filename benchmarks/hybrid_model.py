"""The task and the small hybrid language models of the benchmark ``hybrid.py``, trained here for minutes.

A prompt is six documents of three facts and questions over them. A fact is ``subject is object``. Three kinds of questions need
more and more of the context:

``one``     one fact answers: ``? a is`` → b.
``two``     facts of two documents, in either order, answer together: ``a is b``, ``b is c``, ``? a via`` → c.
``carried`` a document opens with ``it has d``, and *it* is the last subject of the document before: ``? a has`` → d. The document
            alone does not say whose fact this is.

Two models have three linear layers to one of attention, as Qwen3-Next (gated delta rule) and Bamba, Granite 4 and Falcon-H1 (Mamba-2)
have. Training is seeded and runs on one thread; weights are made anew by ``make bench-hybrid`` and are no part of the repository.

    python benchmarks/hybrid_model.py --kind delta --weights delta.safetensors
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import BambaConfig, BambaForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

DOCUMENT, IS, HAS, VIA, IT, STOP, ASK, BEGIN = range(8)
NAMES = 64
"""Distinct names; their ids follow the eight words above."""
WORDS = 8
DOCUMENTS, FACTS = 6, 3
READY = 0.8
"""Share of right answers (a running mean) at which training goes on with a document more."""
KINDS = ("one", "two", "carried")
STEPS = {"delta": 1500, "mamba": 3000}
"""Of 32 prompts, each with twelve questions."""
RELATIONS = {"one": IS, "two": VIA, "carried": HAS}


@dataclass(frozen=True)
class Prompt:
    """Documents as ids, and for every kind of question its ``(subject, answer, rows of the facts)``."""

    documents: list[list[int]]
    asked: dict[str, list[tuple[int, int, list[int]]]]

    @property
    def context(self) -> list[int]:
        """All ids before the questions."""
        return [BEGIN, *(i for document in self.documents for i in document)]

    def question(self, kind: str, number: int) -> tuple[list[int], int]:
        """Ids of a question, and its answer."""
        subject, answer, _ = self.asked[kind][number]
        return [ASK, subject, RELATIONS[kind]], answer


def make_prompt(rng: random.Random, documents: int = DOCUMENTS) -> Prompt:
    """Write one prompt: every name is the subject of at most one fact, and the object of at most one."""
    names = rng.sample(range(WORDS, WORDS + NAMES), NAMES)
    carried = [n > 0 and rng.random() < 0.6 for n in range(documents)]
    if documents > 1 and not any(carried):
        carried[rng.randrange(1, documents)] = True
    slots = [(d, f) for d in range(documents) for f in range(FACTS) if not (f == 0 and carried[d])]
    subjects = {slot: names.pop() for slot in slots}
    objects: dict[tuple[int, int], int] = {}
    chains = []
    free = slots[:]
    rng.shuffle(free)
    while len(free) >= 2 and len(chains) < 3:
        first = free.pop()
        second = next((s for s in free if s[0] != first[0]), None)
        if second is None:
            break
        free.remove(second)
        objects[first] = subjects[second]
        chains.append((first, second))
    for slot in slots:
        objects.setdefault(slot, names.pop())
    rows = {
        (d, f): 1 + d * (1 + 4 * FACTS) + 1 + 4 * f for d in range(documents) for f in range(FACTS)
    }
    asked: dict[str, list[tuple[int, int, list[int]]]] = {kind: [] for kind in KINDS}
    written = []
    for d in range(documents):
        ids = [DOCUMENT]
        for f in range(FACTS):
            if (d, f) in subjects:
                ids += [subjects[d, f], IS, objects[d, f], STOP]
                asked["one"].append((subjects[d, f], objects[d, f], [rows[d, f]]))
            else:
                before, thing = (d - 1, FACTS - 1), names.pop()
                ids += [IT, HAS, thing, STOP]
                asked["carried"].append((subjects[before], thing, [rows[before], rows[d, f]]))
        written.append(ids)
    for first, second in chains:
        asked["two"].append((subjects[first], objects[second], [rows[first], rows[second]]))
    for each in asked.values():
        rng.shuffle(each)
    return Prompt(written, asked)


def batch(rng: random.Random, size: int, questions: int, documents: int) -> tuple[Tensor, Tensor]:
    """Ids ``[size, length]`` and labels, -100 but at answers; every prompt is followed by some questions of every kind."""
    rows, labels = [], []
    for _ in range(size):
        prompt = make_prompt(rng, documents)
        ids = prompt.context
        label = [-100] * len(ids)
        drawn = [kind for kind in KINDS if prompt.asked[kind] for _ in range(questions)]
        rng.shuffle(drawn)
        count = dict.fromkeys(KINDS, 0)
        for kind in drawn:
            asked, answer = prompt.question(kind, count[kind] % len(prompt.asked[kind]))
            count[kind] += 1
            ids = [*ids, *asked, answer]
            label += [-100, -100, answer, -100]
        rows.append(ids)
        labels.append(label)
    length = max(map(len, rows))
    ids = torch.tensor([r + [STOP] * (length - len(r)) for r in rows])
    return ids, torch.tensor([r + [-100] * (length - len(r)) for r in labels])


def slow(model: Any) -> Any:
    """Start every step between 0.001 and 0.1, as Mamba-2 and Gated DeltaNet were trained: states then last for many rows."""
    for module in model.modules():
        if hasattr(module, "dt_bias"):
            start = torch.empty_like(module.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp()
            module.dt_bias.data = start + torch.log(-torch.expm1(-start))
    return model


def build(kind: str, *, layers: int = 4, width: int = 64, vocab: int = WORDS + NAMES) -> Any:
    """Make a hybrid with random weights: ``delta`` as Qwen3-Next, ``mamba`` as Bamba; every fourth layer is attention."""
    torch.manual_seed(0)
    shared: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "attn_implementation": "eager",
    }
    if kind == "delta":
        config = Qwen3NextConfig(
            **shared,
            head_dim=width // 4,
            num_experts=0,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=32,
            linear_value_head_dim=32,
        )
        return slow(Qwen3NextForCausalLM(config).float())
    config = BambaConfig(
        **shared,
        attn_layer_indices=[n for n in range(layers) if n % 4 == 3],
        mamba_n_heads=8,
        mamba_d_head="auto",
        mamba_n_groups=1,
        mamba_d_state=32,
        mamba_chunk_size=32,
    )
    return slow(BambaForCausalLM(config).float())


@torch.no_grad()
def accuracy(model: Any, prompts: int = 100, seed: int = 1) -> dict[str, float]:
    """Share of right answers to one question of every kind, after full prefill."""
    rng = random.Random(seed)
    right: dict[str, list[bool]] = {kind: [] for kind in KINDS}
    for _ in range(prompts):
        prompt = make_prompt(rng)
        for kind in KINDS:
            if prompt.asked[kind]:
                asked, answer = prompt.question(kind, 0)
                ids = torch.tensor([[*prompt.context, *asked]])
                right[kind].append(
                    int(model(ids, use_cache=False).logits[0, -1].argmax()) == answer
                )
    return {kind: sum(each) / len(each) for kind, each in right.items()}


def train(
    kind: str, *, steps: int | None = None, rate: float = 2e-3, size: int = 32, seed: int = 0
) -> tuple[Any, dict[str, Any]]:
    """Train from a seed; prompts get a document more whenever the questions about fewer are answered, and the rate falls to 2%."""
    torch.set_num_threads(1)
    model = build(kind).train()
    rng, steps = random.Random(seed), steps or STEPS[kind]
    several = [p for p in model.parameters() if p.dim() >= 2]
    single = [p for p in model.parameters() if p.dim() < 2]
    optimiser = torch.optim.AdamW(
        [{"params": several, "weight_decay": 0.05}, {"params": single, "weight_decay": 0.0}],
        lr=rate,
        betas=(0.9, 0.98),
    )
    begun = time.process_time()
    mean, documents = dict.fromkeys(KINDS, 0.0), 2
    for step in range(steps):
        fall = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 50) * fall
        ids, labels = batch(rng, size, 4, documents)
        logits = model(ids, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        for name, word in RELATIONS.items():
            at = (labels != -100) & (ids == word)
            share = float((logits.detach()[at].argmax(-1) == labels[at]).float().mean())
            mean[name] = 0.9 * mean[name] + 0.1 * share
        if documents < DOCUMENTS and min(mean["one"], mean["carried"]) > READY:
            documents += 1
            mean = dict.fromkeys(KINDS, 0.0)
        if step % 50 == 0:
            shares = " ".join(f"{name} {share:.2f}" for name, share in mean.items())
            used = time.process_time() - begun
            print(
                f"{step:5d} {used:6.0f}s {documents} documents, loss {loss:.3f} {shares}",
                flush=True,
            )
    parameters = sum(p.numel() for p in model.parameters())
    spent = round(time.process_time() - begun)
    facts = {
        "steps": steps,
        "prompts": steps * size,
        "processor_s": spent,
        "parameters": parameters,
    }
    return model.eval(), facts


def save(model: Any, facts: dict[str, Any], weights: Path) -> None:
    """Keep the weights and how they were made, outside the repository."""
    kept = {n: t.contiguous() for n, t in model.state_dict().items() if n != "lm_head.weight"}
    save_file(kept, weights, {"training": json.dumps(facts)})


def load(kind: str, weights: Path) -> tuple[Any, dict[str, Any]]:
    """Take the model of an earlier training."""
    model = build(kind)
    with safe_open(weights, "pt") as file:
        model.load_state_dict({n: file.get_tensor(n) for n in file.keys()}, strict=False)  # noqa: SIM118
        facts = json.loads(file.metadata()["training"])
    return model.eval(), facts


def main() -> None:
    """Train and keep one model."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--kind", choices=["delta", "mamba"], default="delta")
    options.add_argument("--steps", type=int)
    options.add_argument("--weights", type=Path, required=True)
    given = options.parse_args()
    model, facts = train(given.kind, steps=given.steps)
    save(model, facts, given.weights)
    print(facts, accuracy(model))


if __name__ == "__main__":
    main()
