"""Schemas of answers, and random answers in them: whatever a model prefers, only the grammar decides what it can say."""

import json
from functools import cache
from typing import Any

import torch

from kvrag.generate.grammar import Constraint, constraint_of
from kvrag.prompt.tools import answer_form
from kvrag.testing.tokenizers import tiny_tokenizer

EOS = 2


def wanted(schema: Any) -> dict[str, Any]:
    """A response format that asks for a schema."""
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}


@cache
def _tokens() -> tuple[Any, list[int]]:
    """A tokenizer, and its tokens that end something."""
    tokenizer = tiny_tokenizer()
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    return tokenizer, [token for token, text in enumerate(texts) if text[:1] in ('"', "}", "]")]


def constraint(schema: Any) -> Constraint:
    """The constraint of answers of a schema; no model is needed."""
    made = constraint_of(answer_form(None, None, wanted(schema)), _tokens()[0], frozenset({EOS}))
    assert made is not None
    return made


def said(schema: Any, seed: int = 0, limit: int = 800) -> Any:
    """What a random model says under a schema; it likes to come to an end."""
    grammar, luck, ids = constraint(schema), torch.Generator().manual_seed(seed), list[int]()
    tokenizer, ends = _tokens()
    while not grammar.is_complete and len(ids) < limit:
        scores = torch.randn(len(tokenizer), generator=luck)
        scores[[*ends, EOS]] += 2.0
        token = int(grammar.masked(scores[None])[0].argmax())
        if token == EOS:
            break
        grammar.take(token)
        ids.append(token)
    return json.loads(tokenizer.decode(ids))
