"""Prompts that no other test has."""

import itertools

from tests.prefix_store.connectors.paged_engine.toy_model import VOCABULARY

_numbers = itertools.count()


def prompt_of(count: int) -> list[int]:
    """A new prompt of so many tokens; any two differ in the first one."""
    return [(next(_numbers) * 7) % VOCABULARY for _ in range(count)]
