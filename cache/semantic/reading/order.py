"""The order of a prompt's words, and the roles that prepositions give them.

Reorderings that cannot change what is asked are undone first: "the capital of France" is "France's capital", and "cats
and dogs" is "dogs and cats".
"""

from collections.abc import Sequence

from cache.semantic.token import CARRIERS, Token, word


_DETERMINERS = frozenset("the a an my your our his her their its this that".split())
_PRONOUNS = frozenset("i you we they he she it".split())
_COORDINATORS = frozenset({"and", "or", "vs", "versus"})
# Directly after these words a coordination may start: "compare cats and dogs".
_SYMMETRIC = frozenset(word(form).stem for form in "compare difference combine mix merge connect".split())
# Whoever stands after one of these is not who stands after another.
DIRECTIONS = frozenset("from to than against by before after".split())
# These open a phrase that can stand at either end of a question.
OPENERS = frozenset("in on at for with if when while during within using because inside as".split())
_ROLE = {form: form for form in DIRECTIONS | OPENERS} | {
    "into": "to",
    "onto": "to",
    "towards": "to",
    "toward": "to",
    "until": "to",
    "till": "to",
}
# After these "to" begins an infinitive, which is no direction.
_BEFORE_INFINITIVE = frozenset(
    "how what where when why want wants wanted need needs needed like able unable going have has had try tries trying "
    "tried possible supposed allowed take takes order used start begin ready easy hard required safe able".split()
)


def sequence(tokens: Sequence[Token]) -> tuple[str, ...]:
    """The stems of the words that carry meaning, in an order that harmless rearrangements share."""
    stems: list[str] = []
    position = 0
    while position < len(tokens):
        token = tokens[position]
        if token.kind not in CARRIERS:
            position += 1
            continue
        following = tokens[position + 1].form if position + 1 < len(tokens) else ""
        partner = None
        if following == "of":
            partner = _owner_after_of(tokens, position)
            if partner is not None:
                stems += (tokens[partner].stem, token.stem)
        elif following in _COORDINATORS:
            partner = _coordinated(tokens, position)
            if partner is not None:
                stems += sorted((token.stem, tokens[partner].stem))
        if partner is None:
            stems.append(token.stem)
            partner = position
        position = partner + 1
    return tuple(stems)


def roles(tokens: Sequence[Token]) -> frozenset[tuple[str, str]]:
    """(word, preposition) for each word of the noun phrase after one of DIRECTIONS or OPENERS."""
    found: set[tuple[str, str]] = set()
    role, in_phrase, before = "", False, ""
    for token in tokens:
        form = token.form
        if token.kind in CARRIERS:
            if role:
                found.add((token.stem, role))
                in_phrase = True
        elif form in _ROLE and not (form == "to" and before in _BEFORE_INFINITIVE):
            role, in_phrase = _ROLE[form], False
        elif in_phrase or not (form in _DETERMINERS or form in _PRONOUNS):
            role = ""
        before = form
    return frozenset(found)


def _carries(tokens: Sequence[Token], position: int) -> bool:
    return 0 <= position < len(tokens) and tokens[position].kind in CARRIERS


def _after_determiner(tokens: Sequence[Token], position: int) -> int | None:
    """The position of a single word that carries meaning at `position` or behind a determiner there."""
    if position < len(tokens) and tokens[position].form in _DETERMINERS:
        position += 1
    return position if _carries(tokens, position) and not _carries(tokens, position + 1) else None


def _owner_after_of(tokens: Sequence[Token], position: int) -> int | None:
    """The position of X in "Y of (the) X", both single words."""
    return None if _carries(tokens, position - 1) else _after_determiner(tokens, position + 2)


def _coordinated(tokens: Sequence[Token], position: int) -> int | None:
    """The position of Y in "X and Y", both single words with no word that could belong to one of them beside."""
    if _carries(tokens, position - 1) and tokens[position - 1].stem not in _SYMMETRIC:
        return None
    return _after_determiner(tokens, position + 2)
