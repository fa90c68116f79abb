"""The field ``response_format`` of a chat, as a grammar rule for the answer."""

from __future__ import annotations

import re
from typing import Any

from backend.chat.grammar import GrammarError, json_schema
from backend.errors import InvalidRequest

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FIELDS = frozenset({"name", "description", "schema", "strict"})


def response_rule(response_format: dict[str, Any] | None) -> str | None:
    """The body of a grammar rule for ``json_object`` and ``json_schema``; None for ``text``.

    The answer always conforms to the schema, whether ``strict`` is true or not.

    Raises:
        InvalidRequest: the field is not one of these.
    """
    if response_format is None:
        return None
    match response_format.get("type"):
        case "text":
            _refuse_other_fields(response_format, {"type"})
            return None
        case "json_object":
            _refuse_other_fields(response_format, {"type"})
            return json_schema({"type": "object"})
        case "json_schema":
            _refuse_other_fields(response_format, {"type", "json_schema"})
            schema = _schema(response_format.get("json_schema"))
            try:
                return json_schema(schema)
            except GrammarError as error:
                field = schema_field(response_format)
                raise InvalidRequest(f"{field}: {error}", field) from error
    raise InvalidRequest(
        "response_format.type: expected 'text', 'json_object' or 'json_schema'", "response_format.type"
    )


def schema_field(response_format: dict[str, Any] | None) -> str:
    """The field that errors in the schema name."""
    is_schema = response_format is not None and response_format.get("type") == "json_schema"
    return "response_format.json_schema.schema" if is_schema else "response_format"


def _schema(value: Any) -> dict[str, Any]:
    at = "response_format.json_schema"
    if not isinstance(value, dict):
        raise InvalidRequest(f"{at}: expected an object with 'name' and 'schema'", at)
    if unknown := set(value) - _FIELDS:
        field = f"{at}.{min(unknown)[:64]}"
        raise InvalidRequest(f"{field}: unknown field", field)
    name = value.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(f"{at}.name: expected 1 to 64 letters, digits, '_' or '-'", f"{at}.name")
    if not isinstance(value.get("description"), str | None):
        raise InvalidRequest(f"{at}.description: expected a string", f"{at}.description")
    if not isinstance(value.get("strict"), bool | None):
        raise InvalidRequest(f"{at}.strict: expected true or false", f"{at}.strict")
    if not isinstance(value.get("schema"), dict):
        raise InvalidRequest(f"{at}.schema: expected a JSON schema, which is an object", f"{at}.schema")
    schema: dict[str, Any] = value["schema"]
    return schema


def _refuse_other_fields(response_format: dict[str, Any], known: set[str]) -> None:
    if unknown := {name for name, value in response_format.items() if value is not None} - known:
        field = f"response_format.{min(unknown)[:64]}"
        raise InvalidRequest(f"{field}: unknown field for this type", field)
