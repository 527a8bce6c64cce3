"""Translate a JSON schema to keywords that llguidance compiles, where the meaning is the same.

llguidance 1.9.1 does none of it: without any of these changes, a test of
``tests/generate/test_schemas.py`` fails.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from kvrag.errors import require
from kvrag.prompt.tools import JsonObject

# Schema, or a part of one, that is being rewritten.
Schema = dict[str, Any]

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# Enforced keywords that hold schemas: by name, or a single schema or a list.
_PARTS = (
    "items",
    "prefixItems",
    "additionalItems",
    "additionalProperties",
    "allOf",
    "anyOf",
    "oneOf",
)

# Formats that any string satisfies.
_ANY_TEXT = ("binary", "password", "path", "file-path", "directory-path")

# Beginning of pydantic's pattern of a decimal number.
_SOME_DIGIT = "^(?!^[-+.]*$)"

# Pattern of a UUID of a version, which llguidance does not know.
_UUID = "^[0-9a-f]{8}-[0-9a-f]{4}-%s[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$"


def enforceable(schema: JsonObject, missed: list[str]) -> Schema:
    """Return a schema of keywords that llguidance compiles.

    ``missed`` receives the names of keywords that had to be left out.
    """

    def change(part: Any) -> Any:
        if isinstance(part, list):
            return [change(each) for each in part]
        if not isinstance(part, Mapping):
            return part
        out = {**part}
        _take_names(out, schema.get("$defs", {}))
        for key, value in out.items():  # other values, such as an enum's, stay
            if key in _MAPS and isinstance(value, Mapping):
                out[key] = {name: change(each) for name, each in value.items()}
            elif key in _PARTS:
                out[key] = change(value)
        _take_formats(out)
        _take_patterns(out, missed)
        _take_counts(out, missed)
        return out

    changed: Schema = change(schema)
    return changed


def _take_names(out: Schema, definitions: JsonObject) -> None:
    """Write the names of a ``dict`` with enumerated keys as properties that may be left out."""
    names = out.get("propertyNames", {})
    name = str(names.get("$ref")).removeprefix("#/$defs/")
    allowed = definitions.get(name, names).get("enum")
    if allowed and "properties" not in out:
        out["properties"] = dict.fromkeys(map(str, allowed), out.get("additionalProperties", True))
        out["additionalProperties"] = False
        del out["propertyNames"]


def _take_counts(out: Schema, missed: list[str]) -> None:
    """Leave out limits on the number of properties where some are optional.

    llguidance does not count these.
    """
    limits = ("minProperties", "maxProperties")
    if set(out.get("properties", ())) - set(out.get("required", ())):
        missed += [f"{name} where some are optional" for name in limits if out.pop(name, None)]


def _take_formats(out: Schema) -> None:
    """Leave out keywords without effect, and write the version of a UUID as a pattern."""
    if out.get("uniqueItems") is False:
        del out["uniqueItems"]
    kind = out.get("format")
    version = re.fullmatch(r"uuid([1-8])", str(kind))
    if kind in _ANY_TEXT:
        del out["format"]
    elif version and "pattern" not in out:
        del out["format"]
        out["pattern"] = _UUID % version[1]


def _take_patterns(out: Schema, missed: list[str]) -> None:
    """Leave out patterns that can't be compiled: look-around and backreferences.

    The look-ahead of pydantic's decimal numbers is rewritten.
    """
    pattern = out.get("pattern")
    if isinstance(pattern, str) and pattern.startswith(_SOME_DIGIT):
        pattern = "^" + pattern.removeprefix(_SOME_DIGIT)
        out["pattern"] = pattern
        out["allOf"] = [*out.get("allOf", ()), {"pattern": "[0-9]"}]
    if isinstance(pattern, str) and not _is_compiled(pattern):
        missed.append(f"pattern {pattern!r}")
        del out["pattern"]


@lru_cache(maxsize=1024)
def _is_compiled(pattern: str) -> bool:
    matcher = require("llguidance", extra="structured", purpose="patterns in a schema").LLMatcher
    fault = matcher.validate_grammar(
        matcher.grammar_from_json_schema(json.dumps({"type": "string", "pattern": pattern}))
    )
    # An invalid pattern is left to the compiler of the whole schema, which refuses it by name.
    return not fault or re.search("look-around|backreference", fault) is None
