"""Two requests are compared only where everything but the text of the last turn is equal."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.entries.key import canonical_body
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
    question = question_of(namespace, family, canonical_body(body))
    assert question is not None
    return question


def with_last(content: Any, **fields: Any) -> list[dict[str, Any]]:
    return [*CHAT["messages"][:-1], {"role": "user", "content": content, **fields}]


@given(one=texts, other=texts)
def test_only_the_text_of_the_last_turn_may_differ(one: str, other: str) -> None:
    """Requests that differ only in the text of the last turn share a partition."""
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
        {"an_unknown_field": True},
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
    """A difference in any other field or turn gives another partition."""
    assert chat(**changes).partition != chat().partition


def test_tenants_and_query_strings_have_their_own_partitions() -> None:
    """A tenant and a query string each give a partition of their own."""
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
def test_fields_that_change_no_answer_change_no_partition(changes: dict[str, Any]) -> None:
    """A field that does not change the exact key does not change the partition."""
    assert chat(**changes) == chat()


def test_an_empty_earlier_turn_is_not_taken_for_the_last() -> None:
    """An earlier turn with an empty text gives another partition than one with a text."""
    empty = {"role": "user", "content": ""}
    blank = chat(messages=[empty, {"role": "user", "content": "x"}])
    turned = chat(messages=[{"role": "user", "content": "x"}, {"role": "user", "content": "y"}])

    assert blank.partition != turned.partition


def test_a_single_text_part_equals_its_text() -> None:
    """A last turn of one text part gives the same question as its text."""
    assert chat(messages=with_last([{"type": "text", "text": "What is Redis?"}])) == chat()


def test_what_does_not_count_in_a_key_does_not_count_in_a_question() -> None:
    """A marker for prompt caching or another encoding of an earlier image gives the same question."""

    def asked(url: str, **marker: Any) -> Question:
        image = {"type": "image_url", "image_url": {"url": url}, **marker}
        last = {"role": "user", "content": [{"type": "text", "text": "What is Redis?", **marker}]}
        tools = [{**CHAT["tools"][0], **marker}]
        return chat(messages=[{"role": "user", "content": [image], **marker}, last], tools=tools)

    plain = asked("data:image/png;base64,+w==")
    assert asked("data:image/png;base64,-w", cache_control={"type": "ephemeral"}) == plain
    assert asked("data:image/png;base64,+g==").partition != plain.partition


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
def test_a_last_turn_without_plain_user_text_is_no_question(messages: Any) -> None:
    """A request whose last turn is not plain text of a user gives no question."""
    assert (
        question_of("public", "chat.completions", canonical_body(copy.deepcopy(CHAT) | {"messages": messages})) is None
    )


@pytest.mark.parametrize("family", ["completions", "completions?a=1"])
@pytest.mark.parametrize("prompt", ["What is Redis?", ["a", "b"], [1, 2], ""])
def test_a_text_completion_is_no_question(family: str, prompt: Any) -> None:
    """A text completion gives no question."""
    assert question_of("public", family, canonical_body({"model": "m", "prompt": prompt})) is None


def test_the_body_is_not_changed() -> None:
    """Making a question leaves the body of the request as it was."""
    body = copy.deepcopy(CHAT)
    question_of("public", "chat.completions", canonical_body(body))

    assert body == CHAT
