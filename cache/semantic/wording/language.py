"""The language of a text, where it shows one."""

import functools

from py3langid.langid import MODEL_FILE, LanguageIdentifier

# The two most probable languages of a short text are often near relatives: half of the probability says enough.
_LEAST = 0.5
_KEPT = 16_384


@functools.cache
def load() -> LanguageIdentifier:
    """The model, which is read once: that takes about a second."""
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    # Languages without a code of two letters are mostly taken for their large neighbours' short texts.
    identifier.set_languages([code for code in identifier.labels if len(code) == 2])
    return identifier


@functools.lru_cache(_KEPT)
def language_of(text: str) -> str | None:
    """The ISO 639-1 code of the language of `text`; None where a short text could be of several."""
    code, probability = load().classify(text)
    return code if probability >= _LEAST else None
