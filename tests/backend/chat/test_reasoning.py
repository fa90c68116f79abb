"""Thoughts are separated from the answer, wherever the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.chat.reasoning import ReasoningFormat, ReasoningParser, detect_reasoning_format

THINK = ReasoningFormat("<think>", "</think>")


def parsed(pieces: list[str], opened: bool) -> tuple[str, str]:
    parser = ReasoningParser(THINK, opened)
    parts = [*(parser.add(piece) for piece in pieces), parser.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@pytest.mark.parametrize(
    ("answer", "opened", "expected"),
    [
        ("<think>\nhmm\n</think>\n\nyes", False, ("hmm\n", "yes")),
        ("hmm</think>yes", True, ("hmm", "yes")),
        ("yes", False, ("", "yes")),
        ("  yes <think>", False, ("", "  yes <think>")),
        ("<think>hmm", False, ("hmm", "")),
        ("hmm </thin", True, ("hmm </thin", "")),
        ("<think></think>", False, ("", "")),
        ("<thi", False, ("", "<thi")),
        ("a</think>b</think>c", True, ("a", "b</think>c")),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_an_answer_is_taken_apart(answer: str, opened: bool, expected: tuple[str, str], size: int) -> None:
    """The result does not depend on the pieces in which the answer comes."""
    pieces = [answer[start : start + size] for start in range(0, len(answer), size)]
    assert parsed(pieces, opened) == expected


@given(st.lists(st.text(alphabet="<>/think ab\n", max_size=6), max_size=12), st.booleans())
def test_the_cuts_do_not_matter(pieces: list[str], opened: bool) -> None:
    """Any pieces give what the whole text gives."""
    assert parsed(pieces, opened) == parsed(["".join(pieces)], opened)


def test_a_family_is_known_by_its_template() -> None:
    """The markers that a template mentions; None for a model without thoughts."""
    assert detect_reasoning_format("{{ x.split('</think>') }}") == THINK
    assert detect_reasoning_format("[THINK]{{ x }}[/THINK]") == ReasoningFormat("[THINK]", "[/THINK]")
    assert detect_reasoning_format("{{ messages }}") is None
