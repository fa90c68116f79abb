"""The subject: sentences alike but for the word that matters."""

from cache.semantic.kinship import are_opposed, is_derived, is_slip
from cache.semantic.lexicon import words
from cache.semantic.text import Text
from cache.semantic.token import word

# The share of common content words, the longer text's being the whole, from which on two texts are one sentence with
# something exchanged or added. Below it they are two ways of saying something, for the similarity to judge.
SAME_SENTENCE = 0.5
# From this share on a word more is an elaboration, unless a preposition introduces it: "… in India", "… for beginners".
LONG_SENTENCE = 0.8
# More words than these that one text has alone are not searched for kin.
_MAX_SEARCHED = 8
# One text may say them and the other not.
_MODIFIERS = frozenset(
    word(form).stem
    for form in words(
        "current good easy quick own full personal common main certain specific different various generic usual normal "
        "recent ever official actual exact"
    )
)


def subjects_differ(asked: Text, cached: Text) -> bool:
    """Whether the two are about different things, as far as words show.

    They are if they share no content word, if one has the opposite of a word of the other by its affix (lock, unlock),
    or if they are nearly the same sentence with a content word exchanged or added that is no synonym, inflection,
    derivation or slip. Of words that differ in texts that share little, nothing is said here.
    """
    if asked.stems == cached.stems:
        return not asked.stems and asked.words != cached.words and (_has_nothing(asked) or _has_nothing(cached))
    only_asked, only_cached = asked.stems - cached.stems, cached.stems - asked.stems
    if only_asked and only_cached:
        only_asked, only_cached = _without_kin(only_asked, only_cached)
        if are_opposed(only_asked, only_cached):
            return True
    only_asked, only_cached = only_asked - _MODIFIERS, only_cached - _MODIFIERS
    if not only_asked and not only_cached:
        return False
    common = min(len(asked.stems) - len(only_asked), len(cached.stems) - len(only_cached))
    if common == 0:
        return True
    share = common / max(len(asked.stems), len(cached.stems))
    if only_asked and only_cached:
        return share >= SAME_SENTENCE
    return share >= SAME_SENTENCE and (share < LONG_SENTENCE or _restrict(only_asked or only_cached, asked, cached))


def _has_nothing(text: Text) -> bool:
    """Whether `text` is of function words alone ("who are you"), each of which then matters."""
    return not (text.instructions or text.moments or text.quantities)


def _restrict(added: frozenset[str], asked: Text, cached: Text) -> bool:
    """Whether a preposition stands before one of the `added` words."""
    return any(stem in added for stem, _ in asked.order.roles | cached.order.roles)


def _without_kin(some: frozenset[str], others: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
    """`some` and `others` without the words of each that are a form or a slip of one of the other."""
    if len(some) > _MAX_SEARCHED or len(others) > _MAX_SEARCHED:
        return some, others
    kin = [(one, other) for one in some for other in others if is_derived(one, other) or is_slip(one, other)]
    if not kin:
        return some, others
    return some - {one for one, _ in kin}, others - {other for _, other in kin}
