"""What a prompt denies, and whether it reports that something went wrong."""

from collections.abc import Sequence

from cache.semantic.language.lemma import lemma
from cache.semantic.language.lexicon import words
from cache.semantic.language.lexicon.grammar import NEGATORS
from cache.semantic.language.token import CARRIERS, Kind, Token, word

# How far after a negator the word that it denies may stand.
_SCOPE = 5
_DENIABLE = CARRIERS | {Kind.LIGHT, Kind.INSTRUCTION}
_DETERMINERS = words("the a an my your our his her their its this that")
_ENDS = frozenset({Kind.SENTENCE_END, Kind.CLAUSE_END})
# Denied, these report a fault: "has not arrived" says what "is still missing" says.
SUCCESSES = frozenset(
    word(form).stem
    for form in words(
        "work arrive receive get show appear come accept see find recognize identify know remember make go complete "
        "process update match add reach load open credit succeed let able approve clear refund authorize reflect post "
        "deposit connect start respond deliver have pass send use login access verify transfer withdraw"
    )
)
_TROUBLES = frozenset(
    stem
    for form in words(
        "fail broken decline wrong miss lose wait late pending stuck problem error deny reject steal unknown forget "
        "dispute revert unrecognized unauthorized invalid block crash hang freeze trouble bug incorrect damage "
        "unfamiliar strange duplicate delay"
    )
    for stem in (lemma(form), word(form).stem)
)


def negations(tokens: Sequence[Token]) -> tuple[frozenset[str], bool]:
    """The stems that `tokens` deny ("" where a negator has no object), and whether trouble is reported otherwise."""
    denied: set[str] = set()
    trouble = False
    for position, token in enumerate(tokens):
        if token.form in NEGATORS:
            denied.add(_object(tokens, position))
        elif token.stem in _TROUBLES:
            trouble = True
    return frozenset(denied), trouble


def _object(tokens: Sequence[Token], position: int) -> str:
    scope = tokens[position + 1 : position + 1 + _SCOPE]
    # "does not my card work": the subject stands between, and what is denied comes last.
    inverted = tokens[position].form == "not" and bool(scope) and scope[0].form in _DETERMINERS
    stem = ""
    for token in scope:
        if token.kind in _DENIABLE:
            stem = token.stem
            if not inverted:
                break
        elif stem or token.kind in _ENDS:
            break
    return stem
