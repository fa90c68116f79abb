"""Types of question."""

from cache.semantic.language.reading.questions import PAST
from cache.semantic.language.text import Text

_WHAT = frozenset({"what"})
# What is never asked by "what".
_NOT_WHAT = frozenset({"how", "why", "yes or no"})


def questions_differ(asked: Text, cached: Text) -> bool:
    """Whether the two ask for different kinds of answer: a person, place, time, reason, way, number, yes or no.

    Whether one may, should or must are three questions, and so are who is and who was. A statement or an instruction
    ("activate my card") is of no type and agrees with each; "what is the population" may ask what "how
    many people" asks.
    """
    if asked.questions == cached.questions or not asked.questions or not cached.questions:
        return False
    one, other = _types(asked.questions), _types(cached.questions)
    common = one & other
    if not common:
        return not ((one == _WHAT or other == _WHAT) and _NOT_WHAT.isdisjoint(one | other))
    ours = [question for question in asked.questions if question.partition(",")[0] in common]
    theirs = [question for question in cached.questions if question.partition(",")[0] in common]
    if {question.endswith(PAST) for question in ours}.isdisjoint({question.endswith(PAST) for question in theirs}):
        return True
    closer = {question for question in ours if "," in question}
    return bool(closer) and closer.isdisjoint(theirs) and any("," in question for question in theirs)


def _types(questions: frozenset[str]) -> frozenset[str]:
    """The types without tense and mood."""
    return frozenset(question.partition(",")[0] for question in questions)
