"""The language of a prompt, as far as its script and its function words tell."""

from collections.abc import Sequence

from cache.semantic.language.lexicon.grammar import FUNCTION_WORDS
from cache.semantic.language.lexicon.languages import ENGLISH_TOO, LANGUAGES
from cache.semantic.language.token import LATIN_END, Token

ENGLISH = "en"
_ENGLISH_ONLY = FUNCTION_WORDS - ENGLISH_TOO


def language(prompt: str, tokens: Sequence[Token]) -> str:
    """ "en", another ISO 639-1 code, "other" for a script that is not Latin; "en" if nothing speaks against it."""
    if not prompt.isascii():
        letters = sum(map(str.isalpha, prompt))
        if 2 * sum(sign > LATIN_END and sign.isalpha() for sign in prompt) > letters:
            return "other"
    english = 0
    votes: dict[str, int] = {}
    for token in tokens:
        if token.form in _ENGLISH_ONLY:
            english += 1
        elif token.form in LANGUAGES:
            for candidate in LANGUAGES[token.form]:
                votes[candidate] = votes.get(candidate, 0) + 1
    if not votes:
        return ENGLISH
    most = max(votes.values())
    # The name breaks a tie, so that the same words give the same language.
    return min(candidate for candidate, count in votes.items() if count == most) if most > english else ENGLISH
