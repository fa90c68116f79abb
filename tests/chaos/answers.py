"""The one right answer to each question: a function of tenant, model and prompt, so that any other is recognised."""

import hashlib
from collections.abc import Sequence

MODELS = ("small", "large")
# No more words than this and 31 others are in an answer.
_FEWEST_WORDS = 6
_DIMENSIONS = 8
_REPEATED = 1000
LONG = "at length"
"""In a prompt: an answer of hundreds of kilobytes."""


def tenant_digest(credential: str) -> str:
    """How an upstream names the tenant that asks, by what it is sent of it."""
    return hashlib.sha256(credential.encode()).hexdigest()[:12]


def words_of(tenant: str, model: str, prompt: str) -> list[str]:
    """The words of the answer, each a chunk of its stream. `tenant` is its digest."""
    digest = hashlib.sha256("\0".join((tenant, model, prompt)).encode()).digest()
    count = _FEWEST_WORDS + digest[0] % 32
    words = [hashlib.sha256(digest + bytes([number])).hexdigest()[:6] for number in range(count)]
    times = _REPEATED if LONG in prompt else 1
    return [f"{tenant}: ", *(f"{number}-{word} " * times for number, word in enumerate(words)), "end."]


def vector_of(tenant: str, model: str, text: str) -> Sequence[float]:
    """The embedding of a text."""
    digest = hashlib.sha256("\0".join((tenant, model, text)).encode()).digest()
    return [byte / 256 for byte in digest[:_DIMENSIONS]]
