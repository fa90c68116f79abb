"""Order and roles: who beat whom, from where to where, what into what."""

from collections import Counter
from collections.abc import Iterable, Sequence

from cache.semantic.language.reading.order import DIRECTIONS, OPENERS
from cache.semantic.language.text import Text

# From this share of common words on, the longer text's being the whole, two texts say the same words in some order.
SAME_WORDS = 0.6
# In a text of more words than these, any of them that moves may change what is said.
MANY_WORDS = 5
# Of more words than these no single one is sought that moved: it would take quadratic time.
_MAX_WORDS = 64
# Their answer is one side of a verb, so that which side the other stands on decides.
_ASKING_FOR_A_SIDE = frozenset({"who", "what"})
# None of these is ever another one: a talk about Paris, a talk in Paris; with a child, as a child.
_TOPICAL = frozenset({"about", "as", "if"})
# Nobody is for and against one thing.
_PREPOSITIONS = DIRECTIONS | OPENERS
_OPPOSED = frozenset({"for", "against"})

Roles = Iterable[tuple[str, str]]


def roles_differ(asked: Text, cached: Text) -> bool:
    """Whether the two give their words different roles.

    That is so where a word follows "from" in one and "to" in the other (than, against, by, before, after alike), where
    a word in a prepositional phrase and one outside change places, where names that both mention do, and where nearly
    the same words come in another order, as in the word swaps of PAWS (Zhang et al., arXiv 1904.01130). Of reorderings
    only those pass that Order undoes, and one verb that moved: "activate my card", "get my card activated".
    """
    ours, theirs = asked.order, cached.order
    if ours == theirs:
        return False
    if ours.roles != theirs.roles and _roles_clash(ours.roles, theirs.roles):
        return True
    if not (ours.undated or theirs.undated) and _dates(ours.plain) != _dates(theirs.plain):
        return True
    written = (ours.undated, theirs.undated) if ours.undated and theirs.undated else (ours.plain, theirs.plain)
    one, other = _common(*written), _common(*reversed(written))
    if one == other:
        return False
    longest = max(map(len, written))
    if longest > MANY_WORDS and len(one) >= SAME_WORDS * longest:
        return True
    if not (ours.aside.isdisjoint(theirs.sequence) or theirs.aside.isdisjoint(ours.sequence)):
        return True
    one, other = _common(ours.sequence, theirs.sequence), _common(theirs.sequence, ours.sequence)
    if one == other:
        return False
    names = asked.names & cached.names
    if len(names) > 1 and [stem for stem in one if stem in names] != [stem for stem in other if stem in names]:
        return True
    if len(one) < SAME_WORDS * max(len(ours.sequence), len(theirs.sequence)):
        return False
    return not _is_one_verb_moved(one, other, asked, cached)


def _roles_clash(ours: Roles, theirs: Roles) -> bool:
    """Whether a word has other directions in the other text, or two phrases other prepositions.

    In one phrase "on" may be "for": the date on my visa card, the date for my visa card.
    """
    if _of(ours, DIRECTIONS) and _of(theirs, DIRECTIONS) and _differing(_of(ours, DIRECTIONS), _of(theirs, DIRECTIONS)):
        return True
    if any(one | other == _OPPOSED for one, other in _differing(_of(ours, _PREPOSITIONS), _of(theirs, _PREPOSITIONS))):
        return True
    # Dates have no place in the sequence: which of two is the end of a range is seen here.
    ends, other_ends = _ends(ours), _ends(theirs)
    if ends and other_ends and ends != other_ends:
        return True
    # In three days is not for three days.
    if _differing(_quantities(_of(ours, OPENERS)), _quantities(_of(theirs, OPENERS))):
        return True
    differing = _differing(_of(ours, OPENERS), _of(theirs, OPENERS))
    return len(differing) > 1 or any(not _TOPICAL.isdisjoint(one | other) for one, other in differing)


def _dates(stems: Sequence[str]) -> list[str]:
    """Of several dates each belongs to something: born in 1990, died in 2020."""
    return [stem for stem in stems if stem.startswith("@")]


def _ends(roles: Roles) -> set[str]:
    """The dates that a range leads to."""
    return {stem for stem, role in roles if role == "to" and stem.startswith("@")}


def _of(roles: Roles, prepositions: frozenset[str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for stem, role in roles:
        if role in prepositions:
            found.setdefault(stem, set()).add(role)
    return found


def _quantities(roles: dict[str, set[str]]) -> dict[str, set[str]]:
    return {stem: prepositions for stem, prepositions in roles.items() if stem.startswith("#")}


def _differing(ours: dict[str, set[str]], theirs: dict[str, set[str]]) -> set[tuple[frozenset[str], frozenset[str]]]:
    """The roles of words that have none in common: those in the one text, those in the other."""
    return {
        (frozenset(roles), frozenset(theirs[stem]))
        for stem, roles in ours.items()
        if stem in theirs and roles.isdisjoint(theirs[stem])
    }


def _common(one: Sequence[str], other: Sequence[str]) -> list[str]:
    """The words of `one` that `other` has too, as often as both have them, in the order of `one`."""
    left = Counter(other)
    common = []
    for stem in one:
        if left[stem] > 0:
            left[stem] -= 1
            common.append(stem)
    return common


def _is_one_verb_moved(one: list[str], other: list[str], asked: Text, cached: Text) -> bool:
    """Whether `one` is `other` but for a word that is a verb, or said of another, in one of the texts.

    Not so where it and the word it passed are a compound in both texts, as in chocolate milk and milk chocolate, nor
    where one of the moved words has a direction.
    """
    if len(one) > _MAX_WORDS or not _ASKING_FOR_A_SIDE.isdisjoint(
        question.partition(",")[0] for question in asked.questions | cached.questions
    ):
        return False
    differing = [position for position in range(len(one)) if one[position] != other[position]]
    first, last = differing[0], differing[-1]
    span, moved = one[first : last + 1], other[first : last + 1]
    if any(stem in span and role in DIRECTIONS for stem, role in asked.order.roles | cached.order.roles):
        return False
    if any((a, b) in asked.order.compounds and (b, a) in cached.order.compounds for a in span for b in span):
        return False
    verbs = asked.order.verbs | cached.order.verbs
    ours, theirs = asked.order.verbs.intersection(span), cached.order.verbs.intersection(span)
    if ours and theirs and ours.isdisjoint(theirs):
        # Each is said of the other: all cats are animals, all animals are cats.
        return False
    if len(asked.order.verbs.intersection(cached.order.verbs, span)) > 1:
        # Two verbs have changed places: what was cancelled when what was opened.
        return False
    return (span[0] in verbs and moved == span[1:] + span[:1]) or (span[-1] in verbs and moved == span[-1:] + span[:-1])
