"""Blocks of prompts."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.prefixes.prompt_blocks import BLOCK_BYTES, MAX_BLOCKS, prompt_blocks


def said(*texts: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text} for text in texts]}


@given(texts=st.lists(st.text(max_size=3000), min_size=1, max_size=6))
def test_a_conversation_that_goes_on_keeps_its_blocks(texts: list[str]) -> None:
    """The whole blocks of a beginning are the first blocks of what it becomes."""
    before, after = prompt_blocks("n", said(*texts[:-1])), prompt_blocks("n", said(*texts))
    if sum(map(len, texts[:-1])) >= BLOCK_BYTES:
        assert after[: len(before)] == before


def test_a_change_changes_its_block_and_all_after_it() -> None:
    """Numbers are of all text before: equal blocks after a difference are not equal."""
    one, other = prompt_blocks("n", said("a" * 2000, "b" * 4000)), prompt_blocks("n", said("a" * 2001, "b" * 4000))
    assert one[0] == other[0]
    assert not set(one[2:]) & set(other[2:])


def test_tenants_share_no_block() -> None:
    """Another namespace has other numbers for the same prompt."""
    assert not set(prompt_blocks("one", said("a" * 5000))) & set(prompt_blocks("two", said("a" * 5000)))


def test_tools_come_before_messages() -> None:
    """Requests that differ in their tools have no block in common, as no KV block of theirs has."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert not set(prompt_blocks("n", said("a" * 5000))) & set(prompt_blocks("n", {**said("a" * 5000), "tools": tools}))


def test_the_order_of_keys_and_other_fields_do_not_matter() -> None:
    """Only what becomes part of the prompt counts."""
    one = {"messages": [{"role": "user", "content": "a" * 2000}], "temperature": 0, "stream": True}
    other = {"messages": [{"content": "a" * 2000, "role": "user"}]}
    assert prompt_blocks("n", one) == prompt_blocks("n", other)


def test_a_short_prompt_is_one_block_and_a_long_one_is_bounded() -> None:
    """A prompt always has a block, unless it is empty, and never more than the bound."""
    assert len(prompt_blocks("n", said("hello"))) == 1
    assert len(prompt_blocks("n", {"prompt": "x" * 10 * BLOCK_BYTES * MAX_BLOCKS})) == MAX_BLOCKS
    assert prompt_blocks("n", {}) == ()


def test_any_field_has_blocks() -> None:
    """Prompts of token numbers and text that is no UTF-8 have blocks as well."""
    assert prompt_blocks("n", {"prompt": [1, 2, 3]}) != prompt_blocks("n", {"prompt": [1, 2, 4]})
    assert prompt_blocks("n", {"prompt": "\ud800"})
