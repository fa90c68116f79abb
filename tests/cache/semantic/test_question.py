"""Two requests are compared only where everything but the text of the last turn is equal."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.semantic.question import Question, question_of

CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "What is Redis?"},
    ],
    "temperature": 0,
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
}

texts = st.text(min_size=1).filter(str.strip)


def chat(**changes: Any) -> Question:
    return known("chat.completions", copy.deepcopy(CHAT) | changes)


def known(family: str, body: dict[str, Any], namespace: str = "public") -> Question:
    question = question_of(namespace, family, body)
    assert question is not None
    return question


def with_last(content: Any, **fields: Any) -> list[dict[str, Any]]:
    return [*CHAT["messages"][:-1], {"role": "user", "content": content, **fields}]


@given(one=texts, other=texts)
def test_the_text_of_the_last_turn_is_all_that_may_differ(one: str, other: str) -> None:
    """The partition knows nothing of it, and the question has it as it was sent."""
    first, second = chat(messages=with_last(one)), chat(messages=with_last(other))

    assert first.partition == second.partition
    assert (first.text, second.text) == (one, other)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "other"},
        {"temperature": 0.5},
        {"max_tokens": 5},
        {"n": 2},
        {"seed": 1},
        {"a_field_nobody_knows": True},
        {"tools": []},
        {"response_format": {"type": "json_object"}},
        {"messages": [{"role": "system", "content": "Be long."}, *CHAT["messages"][1:]]},
        {"messages": [*CHAT["messages"][1:]]},
        {"messages": [CHAT["messages"][0], {"role": "user", "content": "Hallo"}, *CHAT["messages"][2:]]},
        {"messages": with_last("What is Redis?", name="ada")},
    ],
    ids=str,
)
def test_any_other_difference_is_another_partition(changes: dict[str, Any]) -> None:
    """Model, parameters known and unknown, tools, system prompt, earlier turns, who speaks."""
    assert chat(**changes).partition != chat().partition


def test_tenants_and_query_strings_are_partitions_of_their_own() -> None:
    """Nobody's question is compared with a stranger's."""
    here = {
        known("chat.completions", copy.deepcopy(CHAT), "tenant").partition,
        known("chat.completions?a=1", copy.deepcopy(CHAT)).partition,
        chat().partition,
    }

    assert len(here) == 3
    assert known("chat.completions", copy.deepcopy(CHAT), "tenant").partition.startswith("tenant.")


@pytest.mark.parametrize(
    "changes", [{"stream": True}, {"stream_options": {"include_usage": True}}, {"user": None}, {"priority": 3}], ids=str
)
def test_what_cannot_change_an_answer_changes_no_partition(changes: dict[str, Any]) -> None:
    """The same that leaves the exact key alone."""
    assert chat(**changes) == chat()


def test_a_text_that_looks_like_the_blank_is_a_text_like_any_other() -> None:
    """An earlier turn cannot pretend to be the place of the last one."""
    empty = {"role": "user", "content": ""}
    blank = chat(messages=[empty, {"role": "user", "content": "x"}])
    turned = chat(messages=[{"role": "user", "content": "x"}, {"role": "user", "content": "y"}])

    assert blank.partition != turned.partition


def test_a_single_part_of_text_is_that_text() -> None:
    """Clients send both forms of one question."""
    assert chat(messages=with_last([{"type": "text", "text": "What is Redis?"}])) == chat()


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "What is Redis?",
        [{"role": "assistant", "content": "Redis is"}],
        [{"role": "tool", "tool_call_id": "1", "content": "ok"}],
        with_last(""),
        with_last(" \n"),
        with_last(None),
        with_last([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:"}}]),
        ["What is Redis?"],
    ],
    ids=str,
)
def test_what_is_not_a_users_plain_text_is_no_question(messages: Any) -> None:
    """Tools, images, prefilled answers and nonsense stay with the exact cache."""
    assert question_of("public", "chat.completions", copy.deepcopy(CHAT) | {"messages": messages}) is None


@pytest.mark.parametrize("family", ["completions", "completions?a=1"])
@pytest.mark.parametrize("prompt", ["What is Redis?", ["a", "b"], [1, 2], ""])
def test_a_prompt_to_be_continued_is_no_question(family: str, prompt: Any) -> None:
    """In it a space at the end makes another text, so only the very same one is the same."""
    assert question_of("public", family, {"model": "m", "prompt": prompt}) is None


def test_the_body_stays_as_it_was() -> None:
    """It goes to the upstream untouched."""
    body = copy.deepcopy(CHAT)
    question_of("public", "chat.completions", body)

    assert body == CHAT
