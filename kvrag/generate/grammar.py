"""Constrain decoding to the tokens that keep the requested form; llguidance keeps the grammar."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvrag.errors import ConfigError, InputError, require
from kvrag.generate.schema import enforceable
from kvrag.prompt.tools import ResponseFormat, name_of
from kvrag.runtime import RUNTIME

logger = logging.getLogger(__name__)

# JSON as ``json.dumps`` writes it: a small model that may write white space writes nothing else.
# Unknown keywords are left out.
_STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": True,
}

# Meaning of the keywords, whatever draft a schema names: older ones have no ``$id`` beside a
# ``$ref``.
_DRAFT = "https://json-schema.org/draft/2020-12/schema"

# Keywords whose schemas hold properties of the object, too.
_ELSEWHERE = ("$ref", "allOf", "anyOf", "oneOf")


class _Tables(dict[frozenset[int], Any]):
    """Tables of a tokenizer by the tokens that end an answer."""


class Constraint:
    """State of an answer in the grammar of its form."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def masked(self, scores: Tensor) -> Tensor:
        """Return scores ``(1, vocab)``, minus infinity for tokens that may not come next."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise InputError(
                f"the answer can't go on in its form: {self._matcher.get_error()[:500]}"
            )
        # ids beyond the tokenizer's are not allowed
        allowed = np.unpackbits(bits, count=scores.shape[-1], bitorder="little")
        return scores.masked_fill(torch.from_numpy(allowed == 0).to(scores.device), float("-inf"))

    def take(self, token: int) -> None:
        """Advance the grammar by the chosen token."""
        self._matcher.consume_token(token)

    @property
    def is_complete(self) -> bool:
        """Whether the answer's form is complete, so that no token may follow."""
        return bool(self._matcher.is_stopped() and not self._matcher.is_error())


def constraint_of(
    form: ResponseFormat, tokenizer: Any, eos_ids: frozenset[int]
) -> Constraint | None:
    """Return the constraint of an answer, unless any text is allowed.

    A warning, issued once per schema, names the keywords that decoding can't enforce: answers may
    break these.

    Raises ``MissingDependencyError`` without llguidance, ``ConfigError`` if llguidance can't use
    the schema or the tokenizer.
    """
    if form.schema is None and form.choice == "auto":
        return None
    library = require(
        "llguidance", extra="structured", purpose="response_format and required calls"
    )
    table = _table(tokenizer, eos_ids)
    missed = list[str]()
    try:
        schema = json.dumps(_schema(form, missed), allow_nan=False)
        matcher = library.LLMatcher(
            table, library.LLMatcher.grammar_from_json_schema(schema), log_level=0
        )
    except ValueError as error:  # the schema holds values that JSON lacks, such as NaN
        raise _unusable(str(error) or "it is no JSON") from None
    except (AttributeError, KeyError, TypeError) as error:
        raise _unusable(
            f"a keyword holds a value of another type than it takes ({error})"
        ) from None
    if matcher.is_error():
        raise _unusable(matcher.get_error())
    missed += matcher.get_grammar_warnings()
    if missed:
        _warn_once(hash(schema), "; ".join(dict.fromkeys(missed)))
    return Constraint(matcher)


def _unusable(reason: str) -> ConfigError:
    return ConfigError(f"the JSON schema of the answer can't be used; simplify it: {reason[:500]}")


@lru_cache(maxsize=1024)
def _warn_once(schema: int, missed: str) -> None:
    """Log the parts of a schema, given by its hash, that are not enforced."""
    del schema
    logger.warning(
        "a JSON schema asks for more than decoding can enforce (%s); "
        "answers may break that part, so validate them",
        missed,
    )


def _schema(form: ResponseFormat, missed: list[str]) -> dict[str, Any]:
    """Return the JSON schema of an answer: a tool call, or the requested schema.

    Keywords that are left out are added to ``missed``.
    """
    ways = list[Any]()
    if form.schema is not None and form.choice == "auto":
        ways.append(_part("kvrag:///answer", form.schema, missed))
    for tool in form.tools:
        if form.choice in ("auto", "required", name := name_of(tool)):
            given = tool["function"].get("parameters") or {}
            is_open = not given.keys().isdisjoint(_ELSEWHERE)
            closed = {"additionalProperties": is_open, **given, "type": "object"}
            call = {
                "name": {"const": name},
                "arguments": _part(f"kvrag:///{len(ways)}", closed, missed),
            }
            ways.append(
                {
                    "type": "object",
                    "properties": call,
                    "required": [*call],
                    "additionalProperties": False,
                }
            )
    return {"anyOf": ways, "x-guidance": _STYLE}


def _part(name: str, schema: Mapping[str, Any], missed: list[str]) -> dict[str, Any]:
    """Return a user's schema as a part of the answer's; its references start there.

    ``name`` has a path, so that relative names inside the schema have a base.
    """
    return enforceable(schema, missed) | {"$schema": _DRAFT, "$id": name}


def _table(tokenizer: Any, eos_ids: frozenset[int]) -> Any:
    """Return llguidance's table of a tokenizer; it is cached, as making it takes up to a second."""
    tables = RUNTIME.of(tokenizer, _Tables)
    if eos_ids not in tables:
        make = require(
            "llguidance.hf", extra="structured", purpose="answers in a given form"
        ).from_tokenizer
        try:
            tables[eos_ids] = make(tokenizer, eos_token=sorted(eos_ids))
        except ValueError as error:
            raise ConfigError(f"answers in a given form need a fast tokenizer ({error})") from error
    return tables[eos_ids]
