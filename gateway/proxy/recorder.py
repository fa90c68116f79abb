"""Assembles an upstream's answer as it is relayed, and decides at its end whether it may be stored."""

from typing import Any

import msgspec

from cache.entries.answer import StreamAssembler, Usage, check_complete, usage_of
from cache.errors import UnstorableAnswer
from gateway.http.sse import event_data, event_json
from gateway.surfaces.surface import AnswerForm, Surface
from gateway.surfaces.whole import WholeEndpoint

_encode = msgspec.json.Encoder().encode


class Recording(msgspec.Struct, frozen=True):
    """A whole answer: the JSON text of its response object, and the tokens it reports.

    `prefix_tokens` of the prompt had been computed before; None where the upstream does not say, or what cannot be.
    """

    body: bytes
    usage: Usage | None
    prefix_tokens: int | None


class StreamRecorder:
    """Records a streamed answer; `choices` is the number requested."""

    def __init__(self, choices: int) -> None:
        self._choices = choices
        self._assembler = StreamAssembler()
        self._fault: str | None = None
        self._done = False

    def add(self, event: bytes) -> bool:
        """Take in one whole event; True when it carries usage and nothing else."""
        data = event_data(event)
        if not data or self._fault or self._done:
            return False
        if data == b"[DONE]":
            self._done = True
            return False
        try:
            chunk = event_json(data)
            self._assembler.add(chunk)
        except (ValueError, UnstorableAnswer) as error:
            self._fault = str(error)
            return False
        return not chunk["choices"] and bool(chunk.get("usage"))

    @property
    def done(self) -> bool:
        """Whether the stream has said that it is over."""
        return self._done

    def finish(self) -> Recording:
        """Raises UnstorableAnswer, saying why, when the answer is not whole."""
        if self._fault:
            raise UnstorableAnswer(self._fault)
        if not self._done:
            raise UnstorableAnswer("the stream did not end with [DONE]")
        response = self._assembler.response()
        return _checked(_encode(response), response, self._choices)


class AssemblerRecorder:
    """Records a stream of another form of API."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface
        self._assembler = surface.assembler()

    def add(self, event: bytes) -> bool:
        """Take in one whole event; False, for the usage is never apart from the answer."""
        self._assembler.add(event)
        return False

    @property
    def done(self) -> bool:
        """Whether the stream has said that it is over."""
        return self._assembler.done

    def finish(self) -> Recording:
        """Raises UnstorableAnswer, saying why, when the answer is not whole."""
        answer = self._assembler.answer()
        return _checked(_encode(answer), self._surface.chat_answer(answer), 1)


def recorder_of(form: AnswerForm, choices: int) -> StreamRecorder | AssemblerRecorder:
    return AssemblerRecorder(form) if isinstance(form, Surface) else StreamRecorder(choices)


def record_response(form: AnswerForm, content_type: str, body: bytes, choices: int) -> Recording:
    """Record an answer that is not streamed. Raises UnstorableAnswer when it must not be stored."""
    if isinstance(form, WholeEndpoint):
        if fault := form.storable(200, content_type, body):
            raise UnstorableAnswer(fault)
        return Recording(body, None, None)
    try:
        response: dict[str, Any] = event_json(body)
    except ValueError as error:
        raise UnstorableAnswer("the answer is not a JSON object") from error
    return _checked(body, form.chat_answer(response) if isinstance(form, Surface) else response, choices)


def _checked(body: bytes, response: dict[str, Any], choices: int) -> Recording:
    check_complete(response, choices)
    usage = usage_of(response)
    return Recording(body, usage, _prefix_tokens(response["usage"], usage.prompt_tokens) if usage else None)


def _prefix_tokens(usage: dict[str, Any], prompt_tokens: int) -> int | None:
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if type(cached) is int and 0 <= cached <= prompt_tokens else None
