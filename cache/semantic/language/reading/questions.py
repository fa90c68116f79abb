"""The types of question in a prompt: who, when, where, why, how, how many, yes or no, …"""

from collections.abc import Sequence

from cache.semantic.language.lexicon import words
from cache.semantic.language.token import Kind, Token, word

_BOUNDARIES = frozenset({Kind.CLAUSE_END, Kind.SENTENCE_END})
# Before the first word of a question without changing it.
_SKIPPED = words(
    "and but so or also then now explain describe show tell me us about exactly actually in on at to for from of by "
    "with until since"
)
_PREPOSITIONS = words("in on at to for from of by with until since")
_DIRECT = {"who": "who", "whom": "who", "whose": "who", "when": "when", "where": "where", "why": "why", "which": "what"}
_QUESTION_WORDS = frozenset({*_DIRECT, "what", "how"})
_AUXILIARIES = words("is are am was were do does did can could will would should shall may might must has have had")
_MODALITIES = {
    "can": "yes or no, may",
    "could": "yes or no, may",
    "may": "yes or no, may",
    "might": "yes or no, may",
    "should": "yes or no, should",
    "must": "yes or no, must",
}
_REQUESTING = frozenset({"can", "could", "will", "would"})
_TIMES = words("time date year day month hour week")
_PLACES = words("place city country state location town")
_REASONS = words("reason reasons cause causes")
_WAYS = words("step steps way ways process procedure method")
_AMOUNTS = {
    "many": "how many",
    "much": "how much",
    "long": "how long",
    "often": "how often",
    "frequently": "how often",
    "soon": "when",
}
_DEGREES = words(
    "far tall big old high deep fast hot cold heavy wide large small good bad quick quickly close late early "
    "strong likely safe accurate expensive difficult hard easy"
)
_PAST_AUXILIARIES = frozenset({"was", "were", "did", "had"})
_KINDS_OF_WHAT = ((_TIMES, "when"), (_PLACES, "where"), (_REASONS, "why"), (_WAYS, "how"))
# Of these questions past and present have different answers; why and how it is, is mostly how it was.
_TENSED = frozenset({"who", "what", "when", "where", "yes or no"})
PAST = ", past"
_DEGREE = "how "
# What the difference is, and how two things differ, is one question.
_RELATIONS = frozenset({word("difference").stem, word("effect").stem})
_WHAT_OR_HOW = frozenset({"what", "how"})


def questions(tokens: Sequence[Token]) -> frozenset[str]:
    """The question types of the clauses of `tokens`; empty for a statement or an instruction.

    A type is "how many" or, closer, "who, past", "yes or no, may".
    """
    found: set[str] = set()
    subordinate = ""
    at_start = True
    for position, token in enumerate(tokens):
        if token.kind in _BOUNDARIES:
            at_start = True
        elif at_start:
            if token.form in _SKIPPED and not _is_closed(tokens, position):
                continue
            at_start = False
            kind = _type(tokens, position)
            if kind == "when" and not _is_inverted(tokens, position):
                # "When I travel, …" asks nothing, unless nothing else does.
                subordinate = kind
            elif kind:
                found.add(kind)
    found = found or _embedded(tokens) or ({subordinate} if subordinate else set())
    if "ever" in [token.form for token in tokens]:
        # The best that ever was is the best there is.
        found = {kind.removesuffix(PAST) for kind in found}
    if not found.isdisjoint(_WHAT_OR_HOW):
        asked = _RELATIONS.intersection([token.stem for token in tokens])
        if asked:
            return frozenset(found - _WHAT_OR_HOW | asked)
    return frozenset(found)


def _is_inverted(tokens: Sequence[Token], position: int) -> bool:
    return tokens[position].form != "when" or (
        position + 1 < len(tokens) and (tokens[position + 1].form in _AUXILIARIES or _is_past(tokens[position + 1]))
    )


def _is_closed(tokens: Sequence[Token], position: int) -> bool:
    """Whether a preposition at the start opens a phrase of its own ("in Python …") and not a question ("in what …")."""
    if tokens[position].form not in _PREPOSITIONS:
        return False
    return position + 1 == len(tokens) or tokens[position + 1].form not in _QUESTION_WORDS


def _embedded(tokens: Sequence[Token]) -> set[str]:
    """The type of a question that starts late: "in python how do i …", "show me how to …"."""
    for position in range(len(tokens) - 1):
        if tokens[position].form in _QUESTION_WORDS:
            after = tokens[position + 1].form
            if after in _AUXILIARIES or after == "to" or after in _AMOUNTS:
                return {_type(tokens, position)} - {""}
    return set()


def _type(tokens: Sequence[Token], position: int) -> str:
    form = tokens[position].form
    after = tokens[position + 1] if position + 1 < len(tokens) else None
    kind = ""
    if form in _DIRECT:
        kind = _DIRECT[form]
    elif form == "what":
        noun = after.form if after else ""
        kind = next((kind for nouns, kind in _KINDS_OF_WHAT if noun in nouns), "what")
    elif form == "how":
        kind = _how(after)
    elif form in _AUXILIARIES:
        # "can you …" asks for a deed, "do not …" forbids one.
        is_request = after is not None and (
            (after.form == "not" and form == "do") or (after.form == "you" and form in _REQUESTING)
        )
        kind = "" if is_request else _yes_or_no(tokens, position)
    is_past = form in _PAST_AUXILIARIES or (form in _QUESTION_WORDS and after is not None and _is_past(after))
    if kind.startswith(_DEGREE) and position + 2 < len(tokens):
        return kind + PAST if tokens[position + 2].form in _PAST_AUXILIARIES else kind
    return kind + PAST if is_past and kind in _TENSED else kind


def _how(after: Token | None) -> str:
    if after is None:
        return "how"
    # "how big" and "how large" are one type.
    return _AMOUNTS.get(after.form) or (f"how {after.stem}" if after.form in _DEGREES else "how")


def _is_past(verb: Token) -> bool:
    """Whether the word after a question word puts the question into the past: "who was", "who won", "when did"."""
    return verb.form in _PAST_AUXILIARIES or (verb.kind == Kind.CONTENT and verb.form in PAST_FORMS)


def _yes_or_no(tokens: Sequence[Token], position: int) -> str:
    """ "yes or no", with what is asked for where that is a permission, an advice or a duty."""
    later = tuple(token.form for token in tokens[position + 2 : position + 4])
    if later[:1] == ("need",) or later == ("have", "to"):
        return "yes or no, must"
    if later == ("get", "to"):
        return "yes or no, may"
    return _MODALITIES.get(tokens[position].form, "yes or no")


PAST_FORMS = words(
    "won lost beat wrote made said told bought sold sent paid found gave took came went saw knew thought broke stole "
    "chose began drank ate drove rose fell grew flew drew wore ran sang taught caught brought fought felt kept slept "
    "left met spent built held stood became died led shot hit invented discovered created founded directed played "
    "killed signed started painted composed designed developed produced sang starred happened"
)
