"""Several requests in one arena: their prompts are stitched and repaired in views of it, and decoded together, one forward a step."""

import pytest
import torch
from kit import lm_of

from kvrag.blend.layout import Layout, place, rows_of
from kvrag.blend.repair import repair
from kvrag.blend.stitch import stitch
from kvrag.model import CausalLM
from kvrag.model.rows import KVBuffer, Rows
from kvrag.precompute.encode import encode_chunks, encode_prefix
from kvrag.testing.models import TINY
from kvrag.types import ChunkKV

STEPS = 6
ORDERS = [(0, 1, 2), (2, 0), (1, 2, 0, 1)]
ALONE = {"bloom", "codegen", "falcon", "falcon-multi-head", "falcon-new", "gptj", "mpt"} | {
    "llama4_text",
    "phi3-longrope",
}
"""Positions that are not told by ``position_ids`` alone, and angles that change with the prompt's length."""


def ids_of(seed: int, count: int) -> list[int]:
    return [int(t) for t in torch.randint(5, 200, (count,), generator=torch.Generator().manual_seed(seed))]


PREFIX, CHUNKS = ids_of(0, 7), [ids_of(1, 40), ids_of(2, 75), ids_of(3, 23)]


def prompt_of(order: tuple[int, ...]) -> tuple[Layout, torch.Tensor]:
    """Lay out a prompt of these chunks, with glue between them and a question of its own length."""
    pieces: list[tuple[int, str, bool, int, bool]] = [(len(PREFIX), "prefix", True, 0, False)]
    ids = list(PREFIX)
    for place_in_prompt, chunk in enumerate(order):
        glue = ids_of(10 + chunk, 2)
        pieces += [(len(CHUNKS[chunk]), "chunk", place_in_prompt == 0, chunk + 1, False), (2, "live", False, -1, False)]
        ids += CHUNKS[chunk] + glue
    question = ids_of(20 + len(order), 3 + len(order))
    pieces.append((len(question), "live", False, -1, False))
    return place(pieces), torch.tensor(ids + question)


def blend(lm: CausalLM, kv: KVBuffer, order: tuple[int, ...], stored: list[ChunkKV]) -> tuple[int, int]:
    """Stitch and repair a prompt in a buffer; returns its length and its first token."""
    layout, ids = prompt_of(order)
    rotary = lm.rotary(layout.num_tokens)
    stitch(kv, layout, stored, rotary)
    selected = rows_of(layout.stale)[::3]
    logits = repair(lm, kv, layout, ids, selected, shift=0.5, rotary=rotary)
    return layout.num_tokens, int(logits.argmax())


def decode_alone(lm: CausalLM, order: tuple[int, ...], stored: list[ChunkKV]) -> list[int]:
    kv = lm.buffer(400)
    length, token = blend(lm, kv, order, stored)
    extend, answer = lm.extension(kv, length), [token]
    for _ in range(STEPS):
        answer.append(int(extend(torch.tensor(answer[-1:]))[-1].argmax()))
    return answer


@pytest.mark.parametrize("name", sorted(set(TINY) - ALONE))
def test_three_prompts_decode_together_as_alone(name):
    lm = lm_of(name)
    assert lm.can_share_forwards
    prefix, kv = encode_prefix(lm, PREFIX)
    assert kv is not None
    stored = [kv, *encode_chunks(lm, prefix, CHUNKS)]
    arena = lm.arena(1000)
    for keys, values in arena.layers:  # what an earlier request left in its slots
        keys.normal_(), values.normal_()
    views = [arena.view(start, 300) for start in (20, 690, 350)]  # in no order of their slots
    begun = [blend(lm, view, order, stored) for view, order in zip(views, ORDERS, strict=True)]
    lengths, answers = [length for length, _ in begun], [[token] for _, token in begun]
    for _ in range(STEPS):
        running = [(Rows.span(length, length + 1), view.start) for length, view in zip(lengths, views, strict=True)]
        rows = Rows.together(running, lm.device)
        logits, _ = lm.forward(torch.tensor([answer[-1] for answer in answers]), rows, arena, logits=len(views))
        for answer, row in zip(answers, logits[0], strict=True):
            answer.append(int(row.argmax()))
        lengths = [length + 1 for length in lengths]
    assert answers == [decode_alone(lm, order, stored) for order in ORDERS]


def test_prompts_and_steps_share_a_forward():
    lm = lm_of("gemma2")
    ids, arena = torch.tensor(ids_of(5, 60)), lm.arena(200)
    long, short = arena.view(0, 100), arena.view(100, 100)
    lm.forward(ids[:10], Rows.span(0, 10), short, logits=0)
    rows = Rows.together([(Rows.span(0, 60), 0), (Rows.span(10, 11), 100)], lm.device)
    both, _ = lm.forward(torch.cat([ids, ids[10:11]]), rows, arena, logits=2)
    expected, _ = lm.forward(ids, Rows.span(0, 60), lm.buffer(60), logits=60)
    torch.testing.assert_close(both[0], expected[0, [59, 10]], atol=1e-4, rtol=1e-4)
    assert torch.equal(long.keys(0), arena.keys(0)[:, :, :100])


@pytest.mark.parametrize("name", sorted(ALONE))
def test_a_model_that_runs_one_request_at_a_time_says_so(name):
    lm = lm_of(name)
    assert not lm.can_share_forwards
    if name != "phi3-longrope":  # chunks of one length regime may still be packed
        rows = Rows.together([(Rows.span(0, 2), 0), (Rows.span(0, 2), 10)], lm.device)
        with pytest.raises(ValueError, match="one request at a time"):
            lm.forward(torch.tensor([5, 6, 7, 8]), rows, lm.arena(20))
