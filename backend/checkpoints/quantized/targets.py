"""Matches modules with a field of ``quantization_config``: by name, by class, or by a regular expression.

``re`` backtracks: ``(.+)+X`` takes time exponential in the length of the name, and no check of a pattern detects all
such cases. `Pattern` follows all ways through a pattern at the same time, as Thompson described (Communications of the
ACM 11:6, 1968), and counts its steps. The positions where a match may end are the bits of one integer.
"""

from __future__ import annotations

import importlib
import re
from collections import defaultdict
from typing import Any

from backend.checkpoints.tensor_store import decoder_name
from backend.models.json_fields import Fields

# re's own compiler uses them, nothing public has them, and type stubs disagree on whether they are there.
codes: Any = importlib.import_module("re._constants")
_parser: Any = importlib.import_module("re._parser")

_CLASS = "Linear"
"""Class of all modules looked up."""


class Targets:
    """A list of names, of patterns after ``re:``, and of classes. An absent field is an empty list.

    Raises:
        ModelError: the field is something else.
    """

    def __init__(self, fields: Fields, field: str) -> None:
        targets = fields.values.get(field) or []
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            raise fields.error(field, "a list of strings")
        self._names = {decoder_name(target) for target in targets if not target.startswith("re:")}
        self._patterns = [Pattern(target[3:], fields, field) for target in targets if target.startswith("re:")]

    def match(self, name: str) -> int:
        """The rank of a linear layer's match: 3 by name, 2 by a pattern, 1 by its class, 0 none.

        Raises:
            ModelError: a pattern takes too long.
        """
        if name in self._names:
            return 3
        if any(pattern.match(name) for pattern in self._patterns):
            return 2
        return int(_CLASS in self._names)


_LONGEST = 1000
"""Letters of a pattern; those that name every layer of a deep model have some hundreds."""
_DEEPEST = 20
_MAX_STEPS = 20_000
"""For one name; patterns of real files need some hundreds."""

_CLASSES = {
    codes.CATEGORY_DIGIT: r"\d",
    codes.CATEGORY_NOT_DIGIT: r"\D",
    codes.CATEGORY_SPACE: r"\s",
    codes.CATEGORY_NOT_SPACE: r"\S",
    codes.CATEGORY_WORD: r"\w",
    codes.CATEGORY_NOT_WORD: r"\W",
}
_PLACES = {
    codes.AT_BEGINNING: "^",
    codes.AT_BEGINNING_STRING: r"\A",
    codes.AT_END: "$",
    codes.AT_END_STRING: r"\Z",
    codes.AT_BOUNDARY: r"\b",
    codes.AT_NON_BOUNDARY: r"\B",
}
_LETTERS = (codes.LITERAL, codes.NOT_LITERAL, codes.ANY, codes.IN)
_REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT)
_ASSERTIONS = (codes.ASSERT, codes.ASSERT_NOT)
_AHEAD = 1


class Pattern:
    """A regular expression without references to groups, lookbehinds, possessive repeats and flags.

    Args:
        text: the expression, in Python's syntax.
        fields: its source, for messages.
        field: of these.

    Raises:
        ModelError: it is invalid, or has unsupported parts.
    """

    def __init__(self, text: str, fields: Fields, field: str) -> None:
        self._fields, self._field = fields, field
        if len(text) > _LONGEST:
            raise fields.error(field, f"regular expressions of at most {_LONGEST} letters")
        try:
            re.compile(text)
            self._tree: list[Any] = list(_parser.parse(text))
        except (re.error, RecursionError, OverflowError) as error:
            reason = " ".join(str(error).split())
            raise fields.error(field, f"regular expressions ({reason})") from error
        self._check(self._tree, re.compile(text).flags & ~re.UNICODE, 0)

    def match(self, name: str) -> bool:
        """Whether the expression matches at the start of the name, as ``re.match``.

        Raises:
            ModelError: it takes too many steps.
        """
        try:
            return bool(_Match(name).follow(self._tree, 1))
        except _TooManySteps as error:
            raise self._fields.error(self._field, "regular expressions with fewer repeats in repeats") from error

    def _check(self, tree: list[Any], flags: int, depth: int) -> None:
        """Rejects what `_Match` cannot match."""
        if flags:
            raise self._fields.error(self._field, "regular expressions without flags")
        if depth > _DEEPEST:
            raise self._fields.error(self._field, f"regular expressions nested at most {_DEEPEST} deep")
        for code, value in tree:
            if code in _REPEATS:
                self._check(value[2], 0, depth + 1)
            elif code == codes.SUBPATTERN:
                _, added, removed, inner = value
                self._check(inner, added | removed, depth + 1)
            elif code == codes.BRANCH:
                for branch in value[1]:
                    self._check(branch, 0, depth + 1)
            elif code in _ASSERTIONS and value[0] == _AHEAD:
                self._check(value[1], 0, depth + 1)
            elif code not in (*_LETTERS, codes.AT, codes.FAILURE):
                raise self._fields.error(self._field, f"regular expressions without {code.name.lower()}")


class _TooManySteps(Exception):
    """A match has taken more than `_MAX_STEPS`."""


class _Match:
    """For a name. Sets of positions are integers: bit p is the place before letter p."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._steps = 0
        self._all = (1 << len(name)) - 1
        self._letters: defaultdict[int, int] = defaultdict(int)
        for at, letter in enumerate(name):
            self._letters[ord(letter)] |= 1 << at
        self._found: dict[str, int] = {}

    def follow(self, tree: Any, places: int) -> int:
        """Places where a tree's elements, one after the other, may end if they begin at ``places``."""
        for code, value in tree:
            self._steps += 1
            if self._steps > _MAX_STEPS:
                raise _TooManySteps
            if not places:
                return 0
            if code in _LETTERS:
                places = (places & self._letters_of(code, value)) << 1
            elif code in _REPEATS:
                least, most, inner = value
                places = self._repeat(least, most, inner, places)
            elif code == codes.SUBPATTERN:
                places = self.follow(value[3], places)
            elif code == codes.BRANCH:
                ends = 0
                for branch in value[1]:
                    ends |= self.follow(branch, places)
                places = ends
            elif code in _ASSERTIONS:
                places = self._assert(code == codes.ASSERT, value[1], places)
            else:
                places &= self._where(_PLACES[value]) if code == codes.AT else 0
        return places

    def _letters_of(self, code: Any, value: Any) -> int:
        """Places before a letter that matches."""
        if code == codes.LITERAL:
            return self._letters[value]
        if code == codes.NOT_LITERAL:
            return self._all & ~self._letters[value]
        if code == codes.ANY:
            return self._all & ~self._letters[ord("\n")]
        meant, negated = 0, False
        for kind, of in value:
            if kind == codes.NEGATE:
                negated = True
            elif kind == codes.LITERAL:
                meant |= self._letters[of]
            elif kind == codes.RANGE:
                first, last = of
                meant |= sum(bits for letter, bits in self._letters.items() if first <= letter <= last)
            else:
                meant |= self._where(_CLASSES[of])
        return self._all & ~meant if negated else meant

    def _where(self, simple: str) -> int:
        """Places at which a class or an anchor of ``re`` matches."""
        if simple not in self._found:
            self._found[simple] = sum(1 << found.start() for found in re.finditer(simple, self._name))
        return self._found[simple]

    def _repeat(self, least: int, most: int, tree: Any, places: int) -> int:
        """Repeats until a round changes nothing; without backtracking, there are few rounds."""
        ends = 0 if least else places
        rounds = 0
        while places and rounds < most:
            before, places = places, self.follow(tree, places)
            rounds += 1
            if rounds >= least or places == before:
                ends |= places
            if places == before:
                break
        return ends

    def _assert(self, wanted: bool, tree: Any, places: int) -> int:
        held = 0
        while places:
            place = places & -places
            places ^= place
            if bool(self.follow(tree, place)) == wanted:
                held |= place
        return held
