"""The router's own memory of prompts."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.prefixes.history import PrefixHistory


def test_shares_are_of_leading_blocks() -> None:
    """A block counts where all before it were sent too, and each upstream has its own."""
    history = PrefixHistory(10)
    history.sent("a", (1, 2, 3))
    history.sent("b", (1, 9))
    assert history.shares(["a", "b", "c"], (1, 2, 3, 4)) == {"a": 0.75, "b": 0.25, "c": 0.0}
    assert history.shares(["a"], (2, 3)) == {"a": 1.0}
    assert history.shares(["a"], ()) == {}


def test_the_end_of_the_oldest_prompt_is_forgotten_first() -> None:
    """As in an upstream's own cache: the beginning that others may share stays longest."""
    history = PrefixHistory(4)
    history.sent("a", (1, 2, 3))
    history.sent("a", (7, 8))
    assert history.shares(["a"], (1, 2, 3)) == {"a": 2 / 3}
    history.sent("a", (9,))
    assert history.shares(["a"], (1, 2, 3)) == {"a": 1 / 3}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 40), max_size=12)), max_size=60))
def test_it_stays_within_its_bound(sent: list[tuple[str, list[int]]]) -> None:
    """No upstream has more blocks than the capacity, whatever is sent."""
    history = PrefixHistory(7)
    for upstream, blocks in sent:
        history.sent(upstream, blocks)
        assert len(history) <= 3 * 7
    history.resize(2)
    assert len(history) <= 3 * 2


def test_an_upstream_that_is_gone_is_forgotten() -> None:
    """Only the upstreams that are there take memory."""
    history = PrefixHistory(10)
    history.sent("a", (1,))
    history.sent("b", (1,))
    history.keep_only(["b"])
    assert history.shares(["a", "b"], (1,)) == {"a": 0.0, "b": 1.0}
    history.forget("b")
    assert len(history) == 0
