"""How one operation is described."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Schema = Any
"""A type of which the schema is derived, a tuple of alternatives, or a JSON schema as a dict."""
Json = dict[str, Any]

JSON = "application/json"
FORM = "multipart/form-data"
TEXT: Json = {"type": "string"}
ANYTHING: Json = {}

CACHE_HEADERS = ("x-keepgate-cache", "x-keepgate-layer", "Cache-Status")
"""Of every answer that the cache took part in."""
COST_HEADERS = ("x-keepgate-cost", "x-keepgate-saving")
ENTRY_HEADERS = ("x-keepgate-entry", "Age", "x-keepgate-model", "x-keepgate-ignored-fields", *COST_HEADERS)
SEMANTIC_HEADERS = ("x-keepgate-similarity", "x-keepgate-risk", "x-keepgate-veto")

BODY_ERRORS = (400, 408, 413)
UPSTREAM_ERRORS = (502, 503, 504)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the query."""

    name: str
    description: str
    schema: Json = field(default_factory=lambda: TEXT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """`body` and `answer` are schemas by content type. `errors` are the statuses with which the gateway refuses.

    With `passes_on` any status of an upstream may come instead, with the upstream's body. `sent` and `told` name
    headers of the request and of an answer of status 200; those in `may_tell` may be missing.
    """

    tag: str
    summary: str
    description: str = ""
    query: tuple[Parameter, ...] = ()
    path: Mapping[str, Json] = field(default_factory=dict)
    """Schemas of parameters of the path that are more than text."""
    sent: tuple[str, ...] = ()
    body: Mapping[str, Schema] = field(default_factory=dict)
    answer: Mapping[str, Schema]
    told: tuple[str, ...] = ()
    may_tell: tuple[str, ...] = ()
    further: Mapping[int, Mapping[str, Schema]] = field(default_factory=dict)
    """Answers of other statuses that are no errors."""
    errors: tuple[int, ...] = ()
    passes_on: bool = False
    operator: bool = False
    """Whether it needs the admin key."""
