"""vLLM's fields for structured outputs, as grammar rules: ``structured_outputs`` and ``guided_*``."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from backend.chat.grammar import GrammarError, json_schema, to_lark
from backend.errors import InvalidRequest
from backend.protocol import CommonFields

_MAX_CHOICES = 1024
_KINDS = ("json", "regex", "choice", "grammar", "json_object")


def structured_grammar(request: CommonFields) -> tuple[str, str] | None:
    """A Lark grammar of the answers that one of the fields allows, and the field's name; None: there is none.

    Raises:
        InvalidRequest: a field is wrong, or two of them are given.
    """
    given: dict[str, tuple[str, Any]] = {}
    for kind in ("json", "regex", "choice", "grammar"):
        if (value := getattr(request, f"guided_{kind}")) is not None:
            given[f"guided_{kind}"] = (kind, value)
    for kind, value in (request.structured_outputs or {}).items():
        field = f"structured_outputs.{kind}"
        if kind in _KINDS and value not in (None, False):
            given[field] = (kind, value)
        elif kind == "structural_tag" and value is not None:
            raise InvalidRequest(f"{field}: not supported, expected one of {', '.join(_KINDS)}", field)
    if not given:
        return None
    if len(given) > 1:
        raise InvalidRequest(f"{' and '.join(given)}: expected one of them", min(given))
    ((field, (kind, value)),) = given.items()
    try:
        return _grammar(kind, value, field), field
    except GrammarError as error:
        raise InvalidRequest(f"{field}: {error}", field) from error


def _grammar(kind: str, value: Any, field: str) -> str:
    match kind, value:
        case "json", dict():
            return f"start: {json_schema(value)}"
        case "json", str():
            try:
                schema = msgspec.json.decode(value, type=dict[str, Any])
            except (msgspec.DecodeError, RecursionError) as error:
                raise InvalidRequest(f"{field}: expected a JSON schema, which is an object", field) from error
            return f"start: {json_schema(schema)}"
        case "json_object", True:
            return f"start: {json_schema({'type': 'object'})}"
        case "regex", str():
            # A slash ends a pattern in Lark.
            return f"start: PATTERN\nPATTERN: /{value.replace('/', chr(92) + '/')}/"
        case "choice", list() if value and all(isinstance(text, str) and text for text in value):
            if len(value) > _MAX_CHOICES:
                raise InvalidRequest(f"{field}: {len(value)} choices, expected at most {_MAX_CHOICES}", field)
            return "start: " + " | ".join(json.dumps(text) for text in value)
        case "grammar", str():
            return to_lark(value)
    expected = {
        "json": "a JSON schema",
        "json_object": "true",
        "regex": "a regular expression",
        "choice": "a list of texts",
        "grammar": "a grammar in Lark's or in GBNF's notation",
    }
    raise InvalidRequest(f"{field}: expected {expected[kind]}", field)
