"""What the count of code lines counts."""

from pathlib import Path

import pytest

from benchmarks.semantic.lines import ADDED, FOLDER, code_of, lines_of_code, lines_of_definition

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
    """A property begins at its decorator, a class ends with its last function."""
    source = "class Cache:\n    @property\n    def size(self):\n        return 0\n\n    def get(self): ...\n"
    assert lines_of_definition(source, "Cache.size") == range(2, 5)
    assert lines_of_definition(source, "Cache") == range(1, 7)


@pytest.mark.parametrize("name", ["cache.py:Cache.put", "store.py", "store"])
def test_what_is_gone_is_named(name: str) -> None:
    """A definition, file or folder that is not there is an error, not nothing."""
    with pytest.raises(LookupError, match=r"there is no (cache\.py:)?(Cache\.put|store)"):
        code_of({"cache.py": "class Cache: ..."}, name)


def test_what_is_new_is_there_and_counted_once() -> None:
    """Each file and definition that is counted as new exists, and no line belongs to two of them."""
    folder = Path(__file__).parents[2] / FOLDER
    sources = {path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in folder.rglob("*.py")}
    found = [line for names in ADDED.values() for name in names for line in code_of(sources, name)]
    assert len(found) == len(set(found)) > 0
