"""Every causal LM of the installed transformers, built tiny and random: is its KV reused, and if not, why not?

Every entry of transformers' own list of causal LMs is built in float32 with a few layers: by the options of
:mod:`kvrag.testing.models`, where it has the entry, else by its default config with every size made small. A verdict is
"accepted" (its structure is understood, and the proof of :mod:`kvrag.model.proof` passed), "refused" (with kvrag's sentence)
or "not built" (with the error). "wrong" would be a fault of kvrag: a model is accepted, and then decoded otherwise together
with another request than alone. Each entry runs in a process of its own, so none can end the sweep.

    python benchmarks/sweep.py                         # all; minutes on two cores
    python benchmarks/sweep.py --only afmoe jetmoe     # prints verdicts, and writes nothing
    python benchmarks/sweep.py --compare OLD.json      # then, what changed since another sweep
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import re
import resource
import time
import warnings
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import transformers
from common import RESULTS, machine, write_result
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_LMS

from kvrag.errors import ModelError
from kvrag.model import CausalLM
from kvrag.model.load import accept
from kvrag.model.lock import text_model_of
from kvrag.model.plain import PlainLM, check_generates
from kvrag.model.proof import LIMIT, gap, prove
from kvrag.model.rows import Rows
from kvrag.model.shared import Portion
from kvrag.testing.models import REFUSED, TINY, random_model, tiny_model
from kvrag.testing.tokenizers import VOCAB_SIZE

IDS = torch.arange(100, 200)  # no special tokens
LAYERS = 4
CONTEXT = 4096
MEMORY = 4 << 30  # bytes that a process may take beyond those that it starts with
SECONDS = 120  # a model that takes longer was not made small

SIZES: tuple[tuple[str, int], ...] = (
    (r"(unpadded_)?vocab_size.*|ngram_vocab_size_base|encoder_hash_byte_group_vocab", VOCAB_SIZE),
    (
        r"(num_hidden|n|num|encoder|decoder|num_encoder|num_decoder|num_global)_layers?"
        r"|depth|num_blocks",
        LAYERS,
    ),
    (r"num_layers_per_stack|n_(in|out)put_layers|n_recurrent_layers", 1),
    (r"split_ngram_parts", 8),
    (r".*(key_value|kv(_n)?|key)_heads|num_query_groups", 2),
    (r".*(n|num)_(attention_|value_|mamba_)?heads?|.*attention_heads|index_n_heads", 4),
    (r"(n_routed|num|num_local|moe_num)_experts|zero_expert_num", 4),
    (r".*(experts_per_tok(en)?|moe_top_?k)|n_group|num_expert_group", 2),
    (r"topk_group|first_k_dense_replace|num_dense_layers", 1),
    (r"(qk_)?rope_head_dim|rotary_dim|time_step_rank|mamba_dt_rank|d_rel", 8),
    (r"qk_head_dim", 24),
    (r".*head_?dim|.*head_size|d_kv|d_head|dim_head|kv_channels|mamba_d_head|.*state_size", 16),
    (r"mamba_d_state|hidden_size_per_layer_input|n_groups|o_groups", 4),
    (r".*_lora_rank|adapter_rank|.*_lowrank|laurel_rank|loop_gate_rank", 32),
    (r".*window(_size|_len)?|index_topk|local_attention|.*chunk_length|block_size", 48),
    (r".*chunk_size|index_block_size|rel_extent", 64),
    (r".*intermediate_size(_mlp)?|.*ffn_dim|(d|dim_)?ffn?|dff|d_ff|ffn_hidden_size|mlp_dim", 96),
    (r".*hidden_size(_global)?|d_model|n_embd|emb_dim|embed(ding)?_(dim|size)|lru_width", 64),
    (r".*embedding_size|ple_embed_dim|dim_model_base|d_inner|.*embed_dim|.*out_channel", 64),
)
"""Options of configs, by pattern, and the largest size that each keeps."""
CONTEXTS = (
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length|max_target_positions"
)
SAME = (("head_dim", "qk_rope_head_dim"), ("num_key_value_heads", "num_attention_heads"))
"""Options of which the first is as large as the second, where it is so by default: latent attention needs that."""
KINDS = ("layer_types", "layers_block_type", "attention_layers", "attn_layers", "indexer_types")
"""Lists with the kind of every layer: those layers stay that have all kinds."""

MIXED = ["linear_attention", "full_attention"] * 2
INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 32,
    "indexer_compress_ratio": 4,
}
PER_LAYER = {"head_dim": 24, "num_key_value_heads": 4, "per_layer_config": None}
OPTIONS: dict[str, dict[str, Any]] = {
    "blenderbot": {"encoder_layers": LAYERS},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "dory": {
        "num_hidden_layers": 8,
        "n_input_layers": 2,
        "n_recurrent_layers": 4,
        "n_output_layers": 2,
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp"] * 2,
    },
    "dots3_note": {
        "text_config": PER_LAYER,
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "dots3_note_text": PER_LAYER,
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "intermediate_size": [96] * LAYERS,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": MIXED},
    "hrm_text": {"num_hidden_layers": 8},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    "reformer": {"axial_pos_embds_dim": [32, 32]},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_head_dim": 32,
        "attention_hidden_size": 128,
        "use_mamba_kernels": False,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zamba2": {"mamba_headdim": 32, "attention_head_dim": 32, "attention_hidden_size": 128},
}
"""Options of those that are not small, or don't fit together, by :data:`SIZES` alone."""


def shrunk(config: PreTrainedConfig, room: int = VOCAB_SIZE) -> dict[str, Any]:
    """Options that make a model of this config small; a nested config becomes a dict of all its options."""
    given = config.to_dict()
    options: dict[str, Any] = {}
    ids = iter(range(10, room))
    for name, value in given.items():
        nested = vars(config).get(name)
        if isinstance(nested, PreTrainedConfig):
            options[name] = {**nested.to_dict(), **shrunk(nested)}
        elif re.fullmatch(r".*_token_(id|index)", name) and isinstance(value, int):
            first = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
            options[name] = first.get(name, next(ids)) if value >= 0 else value
        elif re.fullmatch(CONTEXTS, name):
            options[name] = CONTEXT
        elif name == "is_decoder":
            options[name] = True
        elif small(name, value) != value:
            options[name] = small(name, value)
    for one, other in SAME:
        if one in given and given[one] is not None and given.get(other) == given[one]:
            options[one] = options[other]
    return {**options, **_few_layers(given)}


def _few_layers(given: dict[str, Any]) -> dict[str, Any]:
    """Cut lists with an item per layer: the first layer of every kind stays, and the first ones."""
    total = next(
        (n for name in ("num_hidden_layers", "num_layers", "n_layer") if (n := given.get(name))), 0
    )
    lists = {
        name: value
        for name, value in given.items()
        if isinstance(value, list | tuple) and total > LAYERS and len(value) == total
    }
    kinds = [tuple(str(lists[name][i]) for name in KINDS if name in lists) for i in range(total)]
    kept = sorted({kinds.index(kind) for kind in kinds})[:LAYERS] if lists else []
    kept = sorted([*kept, *(i for i in range(total) if i not in kept)][:LAYERS])
    options: dict[str, Any] = {name: [value[i] for i in kept] for name, value in lists.items()}
    own = {int(layer): sizes for layer, sizes in (given.get("per_layer_config") or {}).items()}
    if own:
        options["per_layer_config"] = {
            kept.index(layer): {name: small(name, size) for name, size in sizes.items()}
            for layer, sizes in own.items()
            if layer in kept
        }
    return options


def small(name: str, size: Any) -> Any:
    """Make the size small, where an option is one."""
    if not isinstance(size, int) or isinstance(size, bool):
        return size
    return min(size, next((most for form, most in SIZES if re.fullmatch(form, name)), size))


def _merged(options: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Put an entry's own options over the general ones, into nested configs, too."""
    found = dict(options)
    for name, value in own.items():
        inner = found.get(name)
        is_nested = isinstance(value, dict) and isinstance(inner, dict)
        found[name] = _merged(inner, value) if is_nested else value
    return found


def built(name: str) -> Any:
    """Build the model of an entry."""
    if name in TINY or name in REFUSED:
        return tiny_model(name)
    own = OPTIONS.get(name, {})
    kind = CONFIG_MAPPING[name]
    return random_model(kind(**_merged(shrunk(kind()), own)))


def said(error: Exception) -> str:
    """An error in a line: kvrag's own sentence as it is, another one with its kind."""
    text = re.sub(r"\s+", " ", str(error)).strip()
    return text if isinstance(error, ModelError) else f"{type(error).__name__}: {text[:200]}"


def judged(name: str) -> dict[str, Any]:
    """Return the verdict on an entry."""
    row: dict[str, Any] = {"options": "of the tests" if name in {*TINY, *REFUSED} else "shrunk"}
    try:
        model = built(name)
        with torch.inference_mode():
            text_model_of(model)(input_ids=IDS[None, :8], use_cache=True)
    except Exception as error:  # transformers may raise anything
        return {**row, "verdict": "not built", "why": said(error)}
    row["class"] = type(model).__name__
    try:
        check_generates(model)
        lm = accept(model)
        proof = None if isinstance(lm, PlainLM) else prove(lm)
    except Exception as error:
        return {**row, "verdict": "refused", "why": said(error)}
    if isinstance(lm, PlainLM):
        why = lm.refusal.removeprefix("KV of this model is not reused: ")
        return {**row, "verdict": "refused", "why": why}
    if proof.failure is not None:
        return {**row, "verdict": "refused", "why": proof.failure}
    error = max(proof.max_error, together(lm))
    if error > LIMIT:
        return {**row, "verdict": "wrong", "why": f"decoded with another request, by {error:.2g}"}
    return {**row, "verdict": "accepted", "error": error}


@torch.inference_mode()
def together(lm: CausalLM) -> float:
    """Largest difference of logits between the next rows of two requests computed together and apart."""
    rows = []
    apart = []
    for length in (12, 70) if lm.can_share_forwards else ():
        kv = lm.buffer(length + 1)
        token = IDS[:1]
        lm.forward(IDS[:length], Rows.span(0, length), kv, logits=0)
        row = Portion(token, Rows.span(length, length + 1), kv, logits=1)
        apart.append(lm.launch(row)[0][0])
        rows.append(row)
    return max(map(gap, lm.step(rows), apart), default=0.0) if rows else 0.0


def _work(name: str, pipe: Any) -> None:
    """Judge an entry in a process of its own, and send the verdict."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    pipe.send(judged(name))


def swept(names: list[str], processes: int) -> dict[str, dict[str, Any]]:
    """Judge entries, each in a process of its own, several at a time."""
    context = multiprocessing.get_context("fork")
    rows: dict[str, dict[str, Any]] = {}
    left = list(names)
    running: dict[Any, tuple[str, Any, float]] = {}
    while left or running:
        while left and len(running) < processes:
            name = left.pop(0)
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(name, theirs))
            process.start()
            theirs.close()
            running[ours] = (name, process, time.monotonic() + SECONDS)
        ready = wait(list(running), timeout=1)
        for pipe, (name, process, deadline) in list(running.items()):
            if pipe not in ready and time.monotonic() < deadline:
                continue
            row = {"verdict": "not built", "why": f"it takes more than {SECONDS} s"}
            if pipe in ready:
                try:
                    row = pipe.recv()
                except EOFError:
                    row = {"verdict": "not built", "why": "its process died"}
            process.kill()
            process.join()
            rows[name] = row
            del running[pipe]
    return {name: rows[name] for name in names}


def changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Say what is new, gone or judged otherwise than in an older sweep, a line each."""
    before, after = old["rows"], new["rows"]
    lines = [f"gone: {name} ({before[name]['verdict']})" for name in before if name not in after]
    for name, row in after.items():
        now = f"{row['verdict']}{': ' + row['why'] if 'why' in row else ''}"
        if name not in before:
            lines.append(f"new: {name} is {now}")
        elif before[name]["verdict"] != row["verdict"]:
            lines.append(f"changed: {name} was {before[name]['verdict']}, is {now}")
        elif before[name].get("why") != row.get("why"):
            lines.append(f"reworded: {name} is {now}")
    return lines


def main() -> None:
    """Sweep all and write the result, or print some verdicts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="entries to judge")
    parser.add_argument("--compare", type=Path, metavar="OLD.json", help="another sweep's result")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    given = parser.parse_args()
    old = json.loads(given.compare.read_text()) if given.compare else None
    rows = swept(given.only or list(CAUSAL_LMS), given.processes)
    counts = dict.fromkeys(("accepted", "refused", "not built", "wrong"), 0)
    for name, row in rows.items():
        counts[row["verdict"]] += 1
        note = f"{row['error']:.1e}" if row["verdict"] == "accepted" else row["why"]
        print(f"{name:24} {row['verdict']:10} {note}")
    print(f"transformers {transformers.__version__}: {counts}")
    if given.only:
        return
    result = {"machine": machine(), "counts": counts, "rows": rows}
    write_result("sweep", result, given.out)
    for line in changes(old, result) if old else ():
        print(line)


if __name__ == "__main__":
    main()
