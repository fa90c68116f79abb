"""Patterns in a model's config match as ``re`` does, in bounded time."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.checkpoints.quantized.targets import Pattern
from backend.errors import ModelError
from backend.models.json_fields import Fields

NAME = "model.layers.10.self_attn.q_proj"
FIELDS = Fields({"ignore": ["re:..."]}, "config.json")
ATOMS = st.sampled_from(
    [
        "a",
        "b",
        "ab",
        ".",
        r"\.",
        r"\d",
        r"\w",
        r"\S",
        "[ab]",
        "[^a]",
        "[0-9a]",
        r"[\d.]",
        "^",
        "$",
        r"\b",
        r"\B",
        "x",
        r"\n",
    ]
)


def grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Expressions that combine smaller ones."""
    repeats = st.sampled_from(["*", "+", "?", "*?", "+?", "{2}", "{1,3}", "{2,}", "{3,40}"])
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("|".join),
        st.tuples(inner, repeats).map(lambda parts: f"({parts[0]}){parts[1]}"),
        st.tuples(st.sampled_from(["(?=", "(?!", "(?:", "("]), inner).map(lambda parts: f"{parts[0]}{parts[1]})"),
    )


PATTERNS = st.recursive(ATOMS, grown, max_leaves=8)


def of(text: str) -> Pattern:
    return Pattern(text, FIELDS, "ignore")


@settings(max_examples=1000, deadline=None)
@given(text=PATTERNS, name=st.text("ab1.\n", max_size=8))
def test_patterns_match_as_re_does(text: str, name: str) -> None:
    """A random expression of the supported parts matches a name exactly if ``re`` matches it."""
    assert of(text).match(name) == bool(re.match(text, name))


@pytest.mark.parametrize(
    "text",
    [
        r".*layers\.(1|10)\..*_proj$",
        r"^(?!.*lm_head)model\.layers\.[0-9]+\.self_attn\.(?:q|k|v)_proj",
        r".*\.q_proj",
        r"q_proj",
        r"(?P<part>model)\.layers",
        r"",
        r"(?!)",
    ],
)
def test_patterns_of_real_configs_match_as_re_does(text: str) -> None:
    """Expressions as real configs have them match as in ``re``."""
    assert of(text).match(NAME) == bool(re.match(text, NAME))


@pytest.mark.parametrize(
    "text", ["(.+)+X$", "(.*a|.*b|.*.)*X$", "(.|.)*X", "(.?)*" * 8 + "X", ".*" * 60 + "X", "(a?){50}" * 9, "((.*)*)*X"]
)
def test_no_pattern_takes_exponential_time(text: str) -> None:
    """An expression that backtracks exponentially in ``re`` is matched or refused within two seconds."""
    began = time.perf_counter()
    try:
        assert not of(text).match(NAME * 2) or "X" not in text
    except ModelError as error:
        refused = str(error)
    else:
        refused = "expected regular expressions"
    assert time.perf_counter() - began < 2
    assert "expected regular expressions" in refused


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(" * 400 + ")" * 400, "expected regular expressions"),
        ("(" * 3000 + ")" * 3000, "expected regular expressions of at most 1000 letters"),
        ("(" * 30 + ")" * 30, "expected regular expressions nested at most 20 deep"),
        ("a{99999999999999999999}", r"expected regular expressions \(the repetition number is too large"),
        (
            "\n\n(",
            r"expected regular expressions \(missing \), unterminated subpattern at position 2 \(line 3, column 1",
        ),
        (r"(a)\1", "expected regular expressions without groupref"),
        ("(?<=a)b", "expected regular expressions without assert"),
        ("(?>a)", "expected regular expressions without atomic_group"),
        ("a++", "expected regular expressions without possessive_repeat"),
        ("(?i)a", "expected regular expressions without flags"),
        ("(?i:a)", "expected regular expressions without flags"),
    ],
)
def test_unsupported_patterns_are_refused(text: str, message: str) -> None:
    """An unsupported or invalid expression is refused in one line with the file and the field."""
    with pytest.raises(ModelError, match=rf"config\.json: ignore is \['re:...'\], {message}") as refused:
        of(text)
    assert len(str(refused.value).splitlines()) == 1


def test_a_pattern_with_too_many_steps_is_refused() -> None:
    """A match of nested repeats that takes too many steps is refused."""
    with pytest.raises(ModelError, match=r"ignore is .*, expected regular expressions with fewer repeats in repeats"):
        of("((((.)+)+)+)+X").match(NAME * 4)
