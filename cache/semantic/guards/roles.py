"""Order and roles: who beat whom, from where to where, what into what."""

from collections import Counter
from collections.abc import Iterable, Sequence

from cache.semantic.reading.order import DIRECTIONS, OPENERS
from cache.semantic.text import Text

# From this share of common words on, the longer text's being the whole, two texts say the same words in some order.
_SAME_WORDS = 0.6
# Of more words than these no reordering is tried: it would take quadratic time.
_MAX_WORDS = 64

Roles = Iterable[tuple[str, str]]


def roles_differ(asked: Text, cached: Text) -> bool:
    """Whether the two give their words different roles.

    That is so where a word follows "from" in one and "to" in the other (than, against, by, before, after alike), where
    names that both mention change places, and where nearly the same words come in another order, as in the word swaps
    of PAWS (Zhang et al., arXiv 1904.01130). Of reorderings only a prepositional phrase moved as a whole passes: "in
    Python, how do I sort a list".
    """
    if asked.roles != cached.roles and _directions_clash(asked.roles, cached.roles):
        return True
    if asked.sequence == cached.sequence:
        return False
    ours, theirs = _common(asked.sequence, cached.sequence), _common(cached.sequence, asked.sequence)
    if ours == theirs:
        return False
    names = asked.names & cached.names
    if len(names) > 1 and [stem for stem in ours if stem in names] != [stem for stem in theirs if stem in names]:
        return True
    if len(ours) < _SAME_WORDS * max(len(asked.sequence), len(cached.sequence)):
        return False
    movable = {stem for stem, role in asked.roles & cached.roles if role in OPENERS}
    return not (_is_moved_phrase(ours, theirs, movable) or _is_moved_phrase(theirs, ours, movable))


def _directions_clash(asked: Roles, cached: Roles) -> bool:
    ours, theirs = _directions(asked), _directions(cached)
    return any(stem in theirs and directions.isdisjoint(theirs[stem]) for stem, directions in ours.items())


def _directions(roles: Roles) -> dict[str, set[str]]:
    directions: dict[str, set[str]] = {}
    for stem, role in roles:
        if role in DIRECTIONS:
            directions.setdefault(stem, set()).add(role)
    return directions


def _common(one: Sequence[str], other: Sequence[str]) -> list[str]:
    """The words of `one` that `other` has too, as often as both have them, in the order of `one`."""
    left = Counter(other)
    common = []
    for stem in one:
        if left[stem] > 0:
            left[stem] -= 1
            common.append(stem)
    return common


def _is_moved_phrase(one: list[str], other: list[str], movable: set[str]) -> bool:
    """Whether `other` is `one` with its end moved to the front, and that end begins with a word of `movable`."""
    if len(one) > _MAX_WORDS:
        return False
    return any(one[cut] in movable and one[cut:] + one[:cut] == other for cut in range(1, len(one)))
