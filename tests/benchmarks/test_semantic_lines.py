"""What the count of code lines counts."""

import pytest

from benchmarks.semantic.lines import lines_of_code, lines_of_definition

SOURCE = '''\
"""A docstring
of two lines."""

import os  # counted

# not counted
LIMIT = 3
"""Not counted: it says what the name above is."""


class Cache:
    """Not counted."""

    TEXT = """counted

    also the blank line within"""

    def get(
        self,
    ) -> str:
        """Not counted."""
        return "counted"; os.getpid()
'''


def test_blanks_comments_and_docstrings_are_no_code() -> None:
    """import, LIMIT, class, three lines of a text, three of a signature, return"""
    assert len(lines_of_code(SOURCE)) == 1 + 1 + 1 + 3 + 3 + 1


def test_an_empty_source_has_none() -> None:
    assert lines_of_code("") == set()


def test_a_definition_has_the_lines_of_its_decorators() -> None:
    source = "class Cache:\n    @property\n    def size(self):\n        return 0\n\n    def get(self): ...\n"
    assert lines_of_definition(source, "Cache.size") == range(2, 5)
    assert lines_of_definition(source, "Cache") == range(1, 7)


def test_a_definition_that_is_gone_is_named() -> None:
    with pytest.raises(LookupError, match=r"there is no Cache\.put"):
        lines_of_definition("class Cache: ...", "Cache.put")
