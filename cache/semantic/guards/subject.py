"""The subject: sentences alike but for the word that matters."""

from cache.semantic.language.lexicon import words
from cache.semantic.language.text import Text
from cache.semantic.language.token import word
from cache.semantic.language.word_relations import are_opposed, is_derived, is_slip

# Shares of common content words, the longer text's being the whole. From the first on, two texts are one sentence with
# something exchanged or added. From the second on, a word more is an elaboration, unless it narrows what is meant:
# "… in India", "… for beginners".
SAME_SENTENCE = 0.5
LONG_SENTENCE = 0.8
# From so many content words on, two texts that share some but less than SAME_SENTENCE are two ways of telling a story,
# for the similarity to judge; in fewer words each one is the subject.
MANY_WORDS = 5
# More words than these that one text has alone are not searched for kin.
_MAX_SEARCHED = 8
# One text may say them and the other not.
_MODIFIERS = frozenset(
    word(form).stem
    for form in words(
        "current good easy quick own full personal common main certain specific different various generic usual normal "
        "recent ever official actual exact type person proper effective"
    )
)


def subjects_differ(asked: Text, cached: Text) -> bool:
    """Whether the two are about different things, as far as words show.

    They are if each has a content word that is no word of the other, nor a synonym, inflection, derivation or slip of
    one: then it is no more than a guess that the two words mean the same. They are as well if one has content words
    more, except for an adjective of no weight or one word in a long sentence. Long texts that share few words are let
    pass, unless a word of one is the opposite of one of the other by its affix (lock, unlock).
    """
    if asked.stems == cached.stems:
        return not asked.stems and asked.words != cached.words and (_has_nothing(asked) or _has_nothing(cached))
    only_asked, only_cached = asked.stems - cached.stems, cached.stems - asked.stems
    if only_asked and only_cached:
        only_asked, only_cached = _without_kin(only_asked, only_cached)
        if are_opposed(only_asked, only_cached):
            return True
    only_asked, only_cached = only_asked - _MODIFIERS, only_cached - _MODIFIERS
    shorter, longest = sorted((len(asked.stems), len(cached.stems)))
    if not only_asked and not only_cached and shorter:
        return False
    common = min(len(asked.stems) - len(only_asked), len(cached.stems) - len(only_cached))
    if common < SAME_SENTENCE * longest:
        return common == 0 or longest < MANY_WORDS
    if only_asked and only_cached:
        return True
    return common < LONG_SENTENCE * longest or _are_restricting(only_asked or only_cached, asked, cached)


def _has_nothing(text: Text) -> bool:
    """Whether `text` is of function words alone ("who are you"), each of which then matters."""
    return not (text.instructions or text.dates or text.quantities)


def _are_restricting(added: frozenset[str], asked: Text, cached: Text) -> bool:
    """Whether one of the `added` words narrows what is meant.

    So does one after a preposition, and in a question one right before a word that both have: art history is not all
    of history.
    """
    if any(stem in added for stem, _ in asked.order.roles | cached.order.roles):
        return True
    if not (asked.questions and cached.questions):
        return False
    compounds = asked.order.compounds | cached.order.compounds
    return any(one in added and other not in added for one, other in compounds)


def _without_kin(some: frozenset[str], others: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
    """`some` and `others` without the words of each that are a form or a slip of one of the other."""
    if len(some) > _MAX_SEARCHED or len(others) > _MAX_SEARCHED:
        return some, others
    kin = [(one, other) for one in some for other in others if is_derived(one, other) or is_slip(one, other)]
    if not kin:
        return some, others
    return some - {one for one, _ in kin}, others - {other for _, other in kin}
