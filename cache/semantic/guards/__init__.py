"""Guards: reasons why two similar questions must not share an answer, as pure functions of two texts.

One guard per file, named after what it compares (numbers, dates, negation, …); GUARDS lists them with the names that
`x-keepgate-guard` shows. Uses language.
"""

from collections.abc import Callable

from cache.semantic.guards.dates import dates_differ
from cache.semantic.guards.entities import entities_differ
from cache.semantic.guards.instruction import instructions_differ
from cache.semantic.guards.languages import languages_differ
from cache.semantic.guards.length import too_long_to_embed
from cache.semantic.guards.negation import negations_differ
from cache.semantic.guards.numbers import numbers_differ
from cache.semantic.guards.person import persons_differ
from cache.semantic.guards.polarity import polarities_differ
from cache.semantic.guards.question import questions_differ
from cache.semantic.guards.quotation import quotations_differ
from cache.semantic.guards.roles import roles_differ
from cache.semantic.guards.subject import subjects_differ
from cache.semantic.language.text import Text

Guard = Callable[[Text, Text], bool]

# In the order in which they are asked, cheapest first.
GUARDS: tuple[tuple[str, Guard], ...] = (
    ("numbers", numbers_differ),
    ("dates", dates_differ),
    ("polarity", polarities_differ),
    ("language", languages_differ),
    ("instructions", instructions_differ),
    ("verbatim", quotations_differ),
    ("length", too_long_to_embed),
    ("person", persons_differ),
    ("question", questions_differ),
    ("entities", entities_differ),
    ("negation", negations_differ),
    ("order", roles_differ),
    ("subject", subjects_differ),
)


def refusal(asked: Text, cached: Text) -> str | None:
    """The name of the first guard that refuses to answer `asked` with the answer to `cached`; None if all agree."""
    for name, refuses in GUARDS:
        if refuses(asked, cached):
            return name
    return None
