"""A schema whose automaton would be too large is refused before it is compiled, and ordinary schemas are not."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from backend.chat.grammar import json_schema
from backend.chat.schema_limits import GrammarError
from tests.backend.api.test_bad_requests import USER
from tests.backend.conftest import CHAT, StartServer

PATTERNS = [{"pattern": f".*a.{{{count}}}b.*"} for count in range(1, 15)]
TEXT = {"type": "string"}
# Each level adds a pattern to the one inside it.
LADDER = {f"b{i}": {"properties": {"x": {"$ref": f"#/$defs/b{i + 1}"}}, **PATTERNS[i]} for i in range(8)}
STAIRS = {"allOf": [{"properties": {"x": {"$ref": "#/$defs/a"}}}, {"properties": {"x": {"$ref": "#/$defs/b0"}}}]}
CHAIN = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}", **PATTERNS[i]} for i in range(8)}
MAZE = {
    str(i): {
        "allOf": [
            {"properties": {"x": {"$ref": f"#/$defs/{(i * 7 + 3) % 97}"}, "y": {"$ref": f"#/$defs/{i * 5 % 97}"}}},
            {"properties": {"x": {"$ref": f"#/$defs/{(i * 3 + 2) % 97}"}}},
        ]
    }
    for i in range(97)
}
CHOICES = [{"anyOf": [{"title": f"{i}{side}", **TEXT} for side in "ab"]} for i in range(8)]

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("patterns", {**TEXT, "allOf": PATTERNS}, "pattern"),
    ("patterns in parts", {"allOf": [{"allOf": PATTERNS[:3]}, {"allOf": PATTERNS[3:6]}]}, "pattern"),
    ("patterns beside references", {"$ref": "#/$defs/a0", "$defs": {**CHAIN, "a8": TEXT}}, "pattern"),
    ("patterns of one property", {"allOf": [{"properties": {"x": one}} for one in PATTERNS]}, "pattern"),
    ("patterns of other properties", {"allOf": [{"additionalProperties": one} for one in PATTERNS]}, "pattern"),
    ("patterns of items", {"allOf": [{"items": one} for one in PATTERNS]}, "pattern"),
    ("patterns of a first item", {"allOf": [{"prefixItems": [one]} for one in PATTERNS]}, "pattern"),
    ("patterns in a loop", {"$ref": "#/$defs/a", "$defs": {"a": STAIRS, **LADDER, "b8": TEXT}}, "pattern"),
    ("patterns in a choice", {"allOf": PATTERNS[:4], "anyOf": [TEXT, PATTERNS[5]]}, "pattern"),
    ("places without number", {"$ref": "#/$defs/0", "$defs": MAZE}, "simpler"),
    ("choices at once", {"allOf": CHOICES}, "anyOf"),
    ("a long pattern", {**TEXT, "pattern": "(a?b?)" * 1000}, "pattern"),
    ("patterns of names", {"patternProperties": {f"^a{i}$": {} for i in range(40)}}, "patternProperties"),
    ("a long schema", {"enum": [f"v{number}" for number in range(40_000)]}, "bytes of schema"),
    ("an id inside", {"properties": {"x": {"$id": "http://example.org/x", "$ref": "#/$defs/a"}}}, "$id"),
    ("a divisor of a property called default", {"properties": {"default": {"multipleOf": 99_999_989}}}, "multipleOf"),
    ("a divisor of 4,200 digits", {"multipleOf": 10**4200}, "multipleOf"),
]
TAKEN: list[tuple[str, dict[str, Any]]] = [
    ("two patterns and a length", {**TEXT, "maxLength": 9, "allOf": PATTERNS[:2]}),
    ("many patterns of many properties", {"allOf": [{"properties": {str(i): one}} for i, one in enumerate(PATTERNS)]}),
    ("one of many patterns", {"anyOf": PATTERNS}),
    (
        "one of many objects, each with a pattern for its id",
        {"allOf": [{"anyOf": [{"properties": {"id": one}} for one in PATTERNS]}, {"required": ["id"]}]},
    ),
    ("a long enum", {"enum": [f"v{number}" for number in range(10_000)]}),
    ("many choices", {"anyOf": [{"const": number} for number in range(3000)]}),
    ("data that looks like schema", {"const": {"multipleOf": 30_000, "pattern": "a" * 9999}}),
    ("a default", {"properties": {"x": {"type": "integer", "default": {"multipleOf": 30_000}}}}),
    ("a tree", {"properties": {"kids": {"items": {"$ref": "#"}}}}),
    ("its own id", {"$id": "http://example.org/x", "$ref": "http://example.org/x#/$defs/a", "$defs": {"a": TEXT}}),
]


@pytest.mark.parametrize(("name", "schema", "keyword"), REFUSED, ids=[name for name, _, _ in REFUSED])
def test_schemas_that_multiply_states_are_refused(name: str, schema: dict[str, Any], keyword: str) -> None:
    """A schema whose parts multiply the states of its automaton is refused by its keyword in a short message."""
    with pytest.raises(GrammarError) as caught:
        json_schema(schema)
    assert keyword in str(caught.value)
    assert len(str(caught.value)) < 150


@pytest.mark.parametrize(("name", "schema"), TAKEN, ids=[name for name, _ in TAKEN])
def test_ordinary_schemas_are_accepted(name: str, schema: dict[str, Any]) -> None:
    """Large, repeated or recursive schemas are accepted if few constraints hold at once."""
    assert json_schema(schema).startswith("%json ")


async def test_tokenizing_does_not_wait_for_grammars(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`/tokenize` answers while more grammars are compiled than asyncio has threads."""
    served = await start_server()
    chats, held, released = served.state.reader.chats, asyncio.Event(), threading.Event()
    read, loop = chats.read, asyncio.get_running_loop()

    def slow(request: Any) -> Any:
        loop.call_soon_threadsafe(held.set)
        assert released.wait(60)
        return read(request)

    monkeypatch.setattr(chats, "read", slow)
    form = {"type": "json_object"}
    asked = [
        asyncio.create_task(served.post(CHAT, messages=USER, max_tokens=1, response_format=form)) for _ in range(16)
    ]
    try:
        async with asyncio.timeout(30):
            await held.wait()
            async with served.client.post("/tokenize", json={"prompt": "a b"}) as response:
                assert (await response.json())["count"] == 2
    finally:
        released.set()
    assert len(await asyncio.gather(*asked)) == 16
