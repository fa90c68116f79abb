"""What the count of code lines counts."""

from benchmarks.semantic.lines import lines_of_code

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
    assert lines_of_code(SOURCE) == 1 + 1 + 1 + 3 + 3 + 1


def test_an_empty_source_has_none() -> None:
    assert lines_of_code("") == 0
