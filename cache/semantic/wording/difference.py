"""What two questions of nearly the same words differ in. In a near-copy, the difference is the meaning."""

import functools
from collections import Counter
from difflib import SequenceMatcher
from itertools import pairwise
from typing import NamedTuple

MAX_WORDS = (3, 5)
"""Near-copies differ in no more words than these, on the one side and on the other, ..."""
MAX_SPANS = 2
"""... which stand in no more places than these; ..."""
MIN_SHARED = 0.5
"""... and at least this share of their words is common (Dice's coefficient)."""

_KEPT = 16_384
# So many words that change places are sought at a time, beside so many others that were added or removed.
_MOST_SWAPPED = 3
_FILLERS = 2
# To Unicode also the signs of other words are numeric, such as that of "what" (什么), which once meant ten.
_CHINESE_NUMERALS = frozenset("〇零一二三四五六七八九十百千万亿两萬億兩")


class Difference(NamedTuple):
    """How the words of one question became those of another.

    `added` and `removed` are words of which the one or the other has more. `substituted` are those of them that stand
    alone for a single other word, as in "buy gold", "sell gold". `moved`: both have the same words in another order,
    but for one or two, or one of these in the place of another: 你能告诉我我的名字吗, 你能告诉我你的名字吗
    (can you tell me my, your, name).
    `counted` are words that a number stands before, such as units, in either question.
    """

    added: frozenset[str]
    removed: frozenset[str]
    substituted: frozenset[str]
    moved: bool
    counted: frozenset[str]

    @property
    def words(self) -> frozenset[str]:
        return self.added | self.removed


@functools.lru_cache(_KEPT)
def difference(asked: tuple[str, ...], cached: tuple[str, ...]) -> Difference | None:
    """What `asked` has that `cached` has not, and the other way round; None if they are not near-copies."""
    ours, theirs = Counter(asked), Counter(cached)
    added, removed = ours - theirs, theirs - ours
    new, gone = added.total(), removed.total()
    size = len(asked) + len(cached)
    if min(new, gone) > MAX_WORDS[0] or max(new, gone) > MAX_WORDS[1] or size - new - gone < MIN_SHARED * size:
        return None
    one, other = sorted((asked, cached))  # the matcher breaks ties by the order of its arguments
    spans = [span for span in SequenceMatcher(None, one, other, autojunk=False).get_opcodes() if span[0] != "equal"]
    common = ours.keys() & theirs.keys()
    is_swapped = new + gone <= _FILLERS and _is_swapped(
        *(tuple(word for word in each if word in common) for each in (one, other))
    )
    if len(spans) > MAX_SPANS and (new or gone) and not is_swapped:
        return None
    substituted: set[str] = set()
    differing = added.keys() | removed.keys()
    for _, start, end, other_start, other_end in spans:
        left, right = differing.intersection(one[start:end]), differing.intersection(other[other_start:other_end])
        if len(left) == len(right) == 1:
            substituted |= left | right
    return Difference(
        frozenset(added),
        frozenset(removed),
        frozenset(substituted),
        moved=is_swapped
        or (ours.keys() == theirs.keys() and asked != cached and bool(substituted or not added | removed)),
        counted=frozenset(word for words in (asked, cached) for first, word in pairwise(words) if is_number(first)),
    )


def _is_swapped(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Whether all is in the same order, but that a few words changed places around others: from A to B, from B to A."""
    differing = [place for place, words in enumerate(zip(one, other, strict=False)) if words[0] != words[1]]
    if len(one) != len(other) or not differing:
        return False
    left, right = one[differing[0] : differing[-1] + 1], other[differing[0] : differing[-1] + 1]
    return any(
        left[:first] == right[-first:] and left[-last:] == right[:last] and left[first:-last] == right[last:-first]
        for first in range(1, _MOST_SWAPPED + 1)
        for last in range(1, _MOST_SWAPPED + 1)
        if first + last < len(left)
    )


def is_number(word: str) -> bool:
    first = word[0]
    return first in _CHINESE_NUMERALS or (first.isnumeric() and not first.isalpha())
