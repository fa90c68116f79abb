"""Which responses have an answer that may be compared with another."""

from typing import Any

import msgspec
import pytest

from cache.semantic.service.answers import plain_answer


def response(choice: dict[str, Any] | None = None, **message: Any) -> bytes:
    plain = {"index": 0, "message": {"role": "assistant", "content": "Yes.", **message}, "finish_reason": "stop"}
    return msgspec.json.encode({"choices": [plain if choice is None else {**plain, **choice}]})


def test_the_text_of_a_chat_and_of_a_completion() -> None:
    """Each in its own field; what a model thought before is not part of it."""
    assert plain_answer(response(reasoning_content="Hm.")) == "Yes."
    assert plain_answer(b'{"choices":[{"text":"Yes.","finish_reason":"stop"}]}') == "Yes."


@pytest.mark.parametrize(
    "body",
    [
        response(tool_calls=[{"id": "1"}]),
        response(function_call={"name": "f"}),
        response(refusal="No."),
        response(audio={"id": "1"}),
        response(content=None),
        response(content="  "),
        response(content=[{"type": "text", "text": "Yes."}]),
        response({"finish_reason": "length"}),
        response({"finish_reason": "tool_calls"}),
        response({"message": None}),
        msgspec.json.encode({"choices": []}),
        msgspec.json.encode({"choices": [{"text": "a", "finish_reason": "stop"}] * 2}),
        b"[]",
        b"",
        b"\xff",
        b"[" * 10_000,
    ],
)
def test_what_is_for_its_own_question_only(body: bytes) -> None:
    """Calls of tools, refusals, cut answers, several choices, and what is no response."""
    assert plain_answer(body) is None
