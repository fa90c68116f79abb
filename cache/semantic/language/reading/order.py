"""The order of a prompt's words, and the roles that prepositions give them.

Reorderings that cannot change what is asked are undone first: "the capital of France" is "France's capital", "cats and
dogs" is "dogs and cats", and one prepositional phrase may stand anywhere.
"""

from collections.abc import Sequence
from typing import NamedTuple

from cache.semantic.language.lexicon import words
from cache.semantic.language.lexicon.calendar import ZONES
from cache.semantic.language.token import CARRIERS, Kind, Token, word

_DETERMINERS = words("the a an my your our his her their its this that")
_PRONOUNS = words("i you we they he she it")
_COORDINATORS = frozenset({"and", "or", "vs", "versus"})
# Directly after these words a coordination may start: "compare cats and dogs".
_SYMMETRIC = frozenset(word(form).stem for form in words("compare difference combine mix merge connect"))
# They may stand before what they are said of or after it: "the best laptop", "which laptop is best".
_FREE = frozenset(
    word(form).stem
    for form in words(
        "best good worst fastest cheapest largest biggest smallest highest lowest longest shortest tallest oldest "
        "youngest newest richest poorest safest strongest weakest easiest hardest deepest heaviest lightest hottest "
        "coldest important difference"
    )
)
# Whoever stands after one of these is not who stands after another.
DIRECTIONS = words("from to than against by before after")
# These open a phrase that may stand anywhere.
OPENERS = words("in on at for with if when while during within using because inside as about")
_ROLE = {form: form for form in DIRECTIONS | OPENERS} | {
    "into": "to",
    "onto": "to",
    "towards": "to",
    "toward": "to",
    "until": "to",
    "till": "to",
}
# After these "to" begins an infinitive, which is no direction.
_BEFORE_INFINITIVE = words(
    "how what where when why want wants wanted need needs needed like able unable going have has had try tries "
    "trying tried possible supposed allowed take takes order used start begin ready easy hard required safe able"
)
# A word after one of these is a verb, or what the subject is or has become.
_BEFORE_VERB = words("i you we they to be been being not get got is are was were am")


class Order(NamedTuple):
    """How the words of a text stand to each other.

    `plain` has the stems that carry meaning as they are written, `undated` the same without a date, which may stand
    anywhere; it is empty where there are several. `sequence` has them, dates apart, in an order that harmless
    rearrangements share; `aside` those of the prepositional phrases that may stand anywhere, which are not in
    `sequence`. `roles` has (word, preposition). `compounds` has the pairs of words with nothing between them,
    participles apart; `verbs` has those words that are verbs or said of another.
    """

    plain: tuple[str, ...]
    undated: tuple[str, ...]
    sequence: tuple[str, ...]
    aside: frozenset[str]
    roles: frozenset[tuple[str, str]]
    compounds: frozenset[tuple[str, str]]
    verbs: frozenset[str]


def order_of(tokens: Sequence[Token]) -> Order:
    """The order of `tokens`."""
    role_of, phrases = _roles(tokens)
    aside: set[int] = set()
    # Of several phrases that open alike or are coordinated, each has its own place.
    openers = {role for role in role_of.values() if role in OPENERS}
    if phrases == len(openers) <= 2 and not (phrases == 2 and any(token.form in _COORDINATORS for token in tokens)):
        aside = {position for position, role in role_of.items() if role in OPENERS}
    compounds: list[tuple[str, str]] = []
    verbs: list[str] = []
    carriers: list[Token] = []
    before: Token | None = None
    for position, token in enumerate(tokens):
        if token.kind not in CARRIERS:
            before = token
            continue
        carriers.append(token)
        if before is not None:
            if before.kind in CARRIERS and not (_is_participle(before.form) or _is_participle(token.form)):
                compounds.append((before.stem, token.stem))
            if token.kind == Kind.CONTENT and (
                (position > 1 and before.form in _BEFORE_VERB) or _is_participle(token.form)
            ):
                verbs.append(token.stem)
        before = token
    plain, undated = _plain(carriers)
    return Order(
        plain=plain,
        undated=undated,
        sequence=_sequence([token for i, token in enumerate(tokens) if i not in aside] if aside else tokens),
        aside=frozenset([tokens[position].stem for position in aside]),
        roles=frozenset([(tokens[position].stem, role) for position, role in role_of.items()]),
        compounds=frozenset(compounds),
        verbs=frozenset(verbs),
    )


def _plain(carriers: Sequence[Token]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The stems of `carriers` in their order, and the same without the date; nothing where there are several."""
    plain = tuple([token.stem for token in carriers])
    is_date = [token.kind == Kind.MOMENT and token.form not in ZONES for token in carriers]
    if True not in is_date:
        return plain, plain
    first = is_date.index(True)
    dates = is_date.count(True)
    if is_date[first : first + dates] != [True] * dates:
        return plain, ()
    return plain, plain[:first] + plain[first + dates :]


def _is_participle(form: str) -> bool:
    return len(form) > 4 and form.endswith(("ed", "ing"))


def _roles(tokens: Sequence[Token]) -> tuple[dict[int, str], int]:
    """The preposition of each word in a noun phrase after one, by position; the number of phrases with OPENERS."""
    found: dict[int, str] = {}
    phrases = 0
    role, in_phrase, before = "", False, ""
    for position, token in enumerate(tokens):
        form = token.form
        if token.kind in CARRIERS:
            if not role:
                pass
            elif token.kind != Kind.MOMENT:
                found[position] = role
                phrases += not in_phrase and role in OPENERS
                in_phrase = True
            elif role in DIRECTIONS:
                found[position] = role
        elif form in _ROLE and not (form == "to" and before in _BEFORE_INFINITIVE):
            role, in_phrase = _ROLE[form], False
        elif in_phrase or not (form in _DETERMINERS or form in _PRONOUNS):
            role = ""
        before = form
    return found, phrases


def _sequence(tokens: Sequence[Token]) -> tuple[str, ...]:
    stems: list[str] = []
    position, last = 0, len(tokens) - 1
    while position <= last:
        token = tokens[position]
        position += 1
        if token.kind not in CARRIERS or (token.kind == Kind.MOMENT and token.form not in ZONES):
            continue
        if token.stem in _FREE:
            continue
        following = tokens[position].form if position <= last else ""
        partner = None
        if following == "of":
            partner = _owner_after_of(tokens, position - 1)
            if partner is not None:
                # Before the word that "Y" is a compound with, if there is one.
                compound = _carries(tokens, position - 2) and tokens[position - 2].stem not in _FREE
                stems.insert(len(stems) - compound, tokens[partner].stem)
                stems.append(token.stem)
        elif following in _COORDINATORS:
            partner = _coordinated(tokens, position - 1)
            if partner is not None:
                stems += sorted((token.stem, tokens[partner].stem))
        if partner is None:
            stems.append(token.stem)
        else:
            position = partner + 1
    return tuple(stems)


def _carries(tokens: Sequence[Token], position: int) -> bool:
    """Whether a word stands at `position` whose place matters: a date may stand anywhere, a time zone may not."""
    if not 0 <= position < len(tokens):
        return False
    token = tokens[position]
    return token.kind in CARRIERS and (token.kind != Kind.MOMENT or token.form in ZONES)


def _after_determiner(tokens: Sequence[Token], position: int) -> int | None:
    """The position of a single word that carries meaning at `position` or behind a determiner there."""
    if position < len(tokens) and tokens[position].form in _DETERMINERS:
        position += 1
    return position if _carries(tokens, position) and not _carries(tokens, position + 1) else None


def _owner_after_of(tokens: Sequence[Token], position: int) -> int | None:
    """The position of X in "Y of (the) X", X a single word, Y one too, or two after a determiner."""
    if _carries(tokens, position - 1) and (position < 2 or tokens[position - 2].form not in _DETERMINERS):
        return None
    return _after_determiner(tokens, position + 2)


def _coordinated(tokens: Sequence[Token], position: int) -> int | None:
    """The position of Y in "X and Y", both single words with no word that could belong to one of them beside."""
    if _carries(tokens, position - 1) and tokens[position - 1].stem not in _SYMMETRIC:
        return None
    return _after_determiner(tokens, position + 2)
