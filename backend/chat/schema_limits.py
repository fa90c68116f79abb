"""Limits on the cost of a JSON schema, checked before it is compiled.

The compiler turns schemas that must all hold (``allOf``, a ``$ref`` beside other keywords) into one automaton, whose
size is the product of its parts: some hundred bytes of schema can become gigabytes of states. So the schema is walked
as the compiler does: for every place of a value, the schemas that must all hold there are collected, and their
combinations are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from decimal import Decimal
from itertools import product
from math import lcm
from typing import Any
from urllib.parse import unquote

from backend.errors import BackendError

# An intersection of n patterns may take 2^n time and memory: 8 take hundredths of a second, 14 half a minute and
# gigabytes.
_MAX_STRING_RULES = 4
# Time and memory are quadratic: 100,000 characters take seconds and hundreds of megabytes.
_MAX_PATTERN_LENGTH = 4096
# Each is compared with each other one.
_MAX_PATTERN_PROPERTIES = 32
# Combinations of branches of several anyOf that must hold at once; each becomes a schema.
_MAX_COMBINATIONS = 128
_MAX_STEPS = 100_000
# Multiples of n take an automaton of n states, of several numbers one of their least common multiple: 100,000 states
# take a second and 60 MB.
_MAX_DIVISOR = 20_000

_IDS = ("$id", "id")

Place = frozenset[int]
"""``id()`` of the schemas that must all hold for one value."""


class GrammarError(BackendError):
    """A schema or grammar is wrong or asks for something that is not supported."""


def check_schema(schema: dict[str, Any]) -> None:
    """Refuses a schema that would take too much time or memory to compile.

    Raises:
        GrammarError: names the keyword and the limit.
        RecursionError: the schema is nested too deeply.
    """
    walk = _SchemaWalk(schema)
    walk.all_places()
    divisors = [divisor for node in walk.nodes.values() for divisor in _divisor(node)]
    if sum(divisors) > _MAX_DIVISOR or lcm(*divisors) > _MAX_DIVISOR:
        raise GrammarError(
            f"multipleOf: all of them together, without their decimal points, may come to {_MAX_DIVISOR} at most"
        )


class _SchemaWalk:
    """One walk over a schema. Values of ``const``, ``enum`` and ``default`` are not schemas and are skipped."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self.nodes: dict[int, dict[str, Any]] = {}
        self._root = schema
        self._alternatives: dict[int, list[Place]] = {}
        self._steps = 0

    def all_places(self) -> None:
        seen = {self._place([self._root])}
        todo = list(seen)
        while todo:
            for way in self._combined([self._alternatives_of(node) for node in todo.pop()]):
                nodes = [self.nodes[node] for node in way]
                _check_strings(nodes)
                for schemas in _inner(nodes):
                    self._step(len(schemas))
                    place = self._place(schemas)
                    if place not in seen:
                        seen.add(place)
                        todo.append(place)

    def _place(self, schemas: Iterable[Any]) -> Place:
        found = [schema for schema in schemas if isinstance(schema, dict)]
        self.nodes.update((id(schema), schema) for schema in found)
        return frozenset(map(id, found))

    def _alternatives_of(self, node_id: int) -> list[Place]:
        """The alternatives of a schema: sets of schemas that must all hold, including the schema itself."""
        if (known := self._alternatives.get(node_id)) is not None:
            return known
        self._alternatives[node_id] = [frozenset()]  # a cycle of references adds nothing
        node = self.nodes[node_id]
        self._check_id(node)
        parts = [[frozenset([node_id])]]
        together = [*_schemas(node.get("allOf"))]
        if (reference := node.get("$ref")) is not None:
            together.append(self._target(reference))
        parts += [self._alternatives_of(inner) for inner in sorted(self._place(together))]
        for choice in (node.get("anyOf"), node.get("oneOf")):
            if branches := sorted(self._place(_schemas(choice))):
                parts.append([way for inner in branches for way in self._alternatives_of(inner)])
        self._alternatives[node_id] = self._combined(parts)
        return self._alternatives[node_id]

    def _combined(self, parts: list[list[Place]]) -> list[Place]:
        ways = [frozenset[int]()]
        for part in parts:
            if len(ways) > 1 and len(part) > 1 and len(ways) * len(part) > _MAX_COMBINATIONS:
                raise GrammarError(
                    f"anyOf: several of them hold at once, in more than {_MAX_COMBINATIONS} combinations"
                )
            self._step(len(part) * sum(map(len, ways)) + len(ways) * sum(map(len, part)))
            ways = list(dict.fromkeys(one | other for one, other in product(ways, part)))
        return ways

    def _step(self, count: int) -> None:
        self._steps += count
        if self._steps > _MAX_STEPS:
            raise GrammarError("the schema has too many parts that hold at once; expected a simpler one")

    def _check_id(self, value: Any) -> None:
        """Refuses a nested ``$id``: references below it would resolve relative to it."""
        if isinstance(value, dict) and value is not self._root and any(isinstance(value.get(k), str) for k in _IDS):
            raise GrammarError("$id: not supported inside a schema; refer with #/$defs/name")

    def _target(self, reference: Any) -> Any:
        """The target of a JSON pointer (RFC 6901) into the schema."""
        own = self._root.get("$id")
        if isinstance(reference, str) and isinstance(own, str):
            reference = reference.removeprefix(own.removesuffix("#"))
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise GrammarError("$ref: expected a place in the schema itself, such as #/$defs/name")
        value: Any = self._root
        for part in unquote(reference[1:]).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and name in value:
                value = value[name]
                self._check_id(value)
            elif isinstance(value, list) and name.isascii() and name.isdecimal() and int(name[:9]) < len(value):
                value = value[int(name[:9])]
            else:
                raise GrammarError("$ref: it leads to nothing in the schema")
        return value


def _inner(nodes: list[dict[str, Any]]) -> Iterator[list[Any]]:
    """For each property, all other properties and each item: the schemas that must hold for it."""
    named = [_named(node.get("properties")) for node in nodes]
    patterned = [_named(node.get("patternProperties")) for node in nodes]
    others = [node.get("additionalProperties") for node in nodes]
    for name in dict.fromkeys(name for names in named for name in names):
        yield [
            schema
            for names, patterns, other in zip(named, patterned, others, strict=True)
            for schema in (*patterns.values(), names.get(name, other))
        ]
    for index, patterns in enumerate(patterned):
        _check_pattern_properties(patterns)
        beside = [schema for at, some in enumerate(patterned) if at != index for schema in (*some.values(), others[at])]
        for schema in patterns.values():
            yield [schema, *beside]
    yield others
    prefixes = [_prefix(node) for node in nodes]
    rests = [node.get("additionalItems" if isinstance(node.get("items"), list) else "items") for node in nodes]
    for index in range(max(map(len, prefixes), default=0)):
        yield [prefix[index] if index < len(prefix) else rest for prefix, rest in zip(prefixes, rests, strict=True)]
    yield rests


def _named(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _schemas(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _prefix(node: dict[str, Any]) -> list[Any]:
    return _schemas(node.get("prefixItems")) or _schemas(node.get("items"))


def _check_strings(nodes: list[dict[str, Any]]) -> None:
    patterns = {node["pattern"] for node in nodes if isinstance(node.get("pattern"), str)}
    for pattern in patterns:
        _check_pattern("pattern", pattern)
    formats = {node["format"] for node in nodes if isinstance(node.get("format"), str)}
    rules = len(patterns) + len(formats)
    if rules and any("minLength" in node or "maxLength" in node for node in nodes):
        rules += 1
    if rules > _MAX_STRING_RULES:
        raise GrammarError(
            f"pattern, format, minLength or maxLength: {rules} rules for one string, expected at most "
            f"{_MAX_STRING_RULES}"
        )


def _check_pattern_properties(patterns: dict[str, Any]) -> None:
    if len(patterns) > _MAX_PATTERN_PROPERTIES:
        raise GrammarError(f"patternProperties: {len(patterns)} patterns, expected at most {_MAX_PATTERN_PROPERTIES}")
    for pattern in patterns:
        _check_pattern("patternProperties", pattern)


def _check_pattern(keyword: str, pattern: str) -> None:
    if len(pattern) > _MAX_PATTERN_LENGTH:
        raise GrammarError(f"{keyword}: {len(pattern)} characters, expected at most {_MAX_PATTERN_LENGTH}")


def _divisor(node: dict[str, Any]) -> Iterator[int]:
    """``multipleOf`` of a schema, scaled by a power of ten to an integer: the states of its automaton."""
    divisor = node.get("multipleOf")
    if isinstance(divisor, int | float) and not isinstance(divisor, bool) and divisor > 0:
        number = Decimal(str(divisor)).normalize()
        yield int(number.scaleb(-min(0, int(number.as_tuple().exponent))))
