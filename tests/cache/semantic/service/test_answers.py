"""Which responses have an answer that may be compared with another."""

from typing import Any

import msgspec
import pytest

from cache.errors import StoreUnavailable
from cache.exact import ExactCache
from cache.semantic.service import answers as answers_module
from cache.semantic.service.answers import Answers, plain_answer
from cache.semantic.service.records import Record
from cache.stores.memory import MemoryStore
from tests.cache.entries.entry_examples import entry


def response(choice: dict[str, Any] | None = None, **message: Any) -> bytes:
    plain = {"index": 0, "message": {"role": "assistant", "content": "Yes.", **message}, "finish_reason": "stop"}
    return msgspec.json.encode({"choices": [plain if choice is None else {**plain, **choice}]})


def test_the_text_of_a_chat() -> None:
    """The plain answer of a chat is its text without the reasoning."""
    assert plain_answer(response(reasoning_content="Hm.")) == "Yes."


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
        msgspec.json.encode({"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}] * 2}),
        msgspec.json.encode({"choices": [{"text": "a", "finish_reason": "stop"}]}),
        b"[]",
        b"",
        b"\xff",
        b"[" * 10_000,
    ],
)
def test_other_responses_have_no_plain_answer(body: bytes) -> None:
    """A tool call, a refusal, a cut answer, several choices or a malformed response has no plain answer."""
    assert plain_answer(body) is None


def record(name: str, created: float = 1e9) -> Record:
    return Record(f"a.{name}", "a.context", "?", f"a.{name}", "m", "0.0.0", created, created + 60)


async def text_of(answers: Answers, record: Record) -> str | None:
    answer = await answers.of(record)
    return answer and answer.text


async def test_an_answer_belongs_to_one_version_of_its_entry() -> None:
    """An answer is returned only for the version of the entry that it was recorded for."""
    answers = Answers(None)
    answers.record_answer(record("one"), "Yes.")
    assert await text_of(answers, record("one")) == "Yes."
    with pytest.raises(StoreUnavailable):
        await text_of(answers, record("one", created=2e9))
    answers.record_answer(record("one", created=2e9), "No.")
    assert await text_of(answers, record("one", created=2e9)) == "No."
    with pytest.raises(StoreUnavailable):
        await text_of(answers, record("one"))


async def test_a_missing_entry_differs_from_one_of_another_version() -> None:
    """A missing or incomparable entry gives None, and one of another version raises StoreUnavailable."""
    store = ExactCache(MemoryStore(10_000), None, keep_stale=0.0)
    for name, body in (("one", response()), ("call", response(tool_calls=[{"id": "1"}]))):
        await store.store(entry(f"a.{name}", body=body, created=1e9, fresh_for=3e9))
    answers = Answers(store)

    assert await text_of(answers, record("one")) == "Yes."
    assert await text_of(answers, record("call")) is None
    assert await text_of(answers, record("unknown")) is None
    with pytest.raises(StoreUnavailable):
        await text_of(answers, record("one", created=2e9))


async def test_the_least_recently_used_answers_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are kept up to a total length, and the least recently used ones are forgotten first."""
    monkeypatch.setattr(answers_module, "_KEPT_CHARACTERS", 10)  # no setting, and far too long for a test
    answers = Answers(None)
    answers.record_answer(record("one"), "12345")
    answers.record_answer(record("two"), "12345")
    await text_of(answers, record("one"))
    answers.record_answer(record("three"), "123")

    assert [await text_of(answers, record(name)) for name in ("one", "three")] == ["12345", "123"]
    with pytest.raises(StoreUnavailable):
        await text_of(answers, record("two"))
    answers.forget("a.one")
    answers.record_answer(record("four"), "1234567")
    assert [await text_of(answers, record(name)) for name in ("three", "four")] == ["123", "1234567"]
