"""Assembles an upstream's answer as it is relayed, and decides at its end whether it may be stored."""

from typing import Any

import msgspec

from cache.entries.answer import StreamAssembler, Usage, check_complete, usage_of
from cache.errors import UnstorableAnswer
from gateway.http.sse import event_data, event_json
from gateway.surfaces.surface import AnswerForm, Json, Surface
from gateway.surfaces.usage import PromptCacheTokens, prompt_cache_tokens
from gateway.surfaces.whole import WholeEndpoint

_encode = msgspec.json.Encoder().encode


class Recording(msgspec.Struct, frozen=True):
    """A whole answer: the JSON text of its response object, and the tokens it reports.

    `prompt_cache` is what the upstream says of its own; None where it does not, or says what cannot be.
    """

    body: bytes
    usage: Usage | None
    prompt_cache: PromptCacheTokens | None


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
        return _checked(_encode(response), response, self._choices, response)


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
        return _checked(_encode(answer), self._surface.chat_answer(answer), 1, answer)


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
    chat_answer = form.chat_answer(response) if isinstance(form, Surface) else response
    return _checked(body, chat_answer, choices, response)


def _checked(body: bytes, response: Json, choices: int, answer: Json) -> Recording:
    """`response` is the answer as a chat completion. `answer` is as it came: it says apart what is 0 and what is not
    known.
    """
    check_complete(response, choices)
    usage = usage_of(response)
    cached = prompt_cache_tokens(answer.get("usage"))
    is_possible = usage is not None and cached is not None and sum(cached) <= usage.prompt_tokens
    return Recording(body, usage, cached if is_possible else None)
