"""Assembles an upstream's answer as it is relayed, and decides at its end whether it may be stored."""

import re
from collections.abc import Callable
from typing import Any

import msgspec

from cache.entries.answer import StreamAssembler, Text, Usage, check_complete, usage_of
from cache.errors import UnstorableAnswer
from gateway.costs.usage import TokenUsage
from gateway.http.sse import event_data, event_json
from gateway.surfaces.surface import AnswerForm, Json, Surface
from gateway.surfaces.usage import PromptCacheTokens, prompt_cache_tokens, token_usage
from gateway.surfaces.whole import WholeEndpoint

_encode = msgspec.json.Encoder().encode
_decode_text = msgspec.json.Decoder(str).decode
# An event of one line in which the only field of the delta is a text. Unescaped quotes stand in no JSON string, so
# `"delta":` is a key.
_TEXT_EVENT = re.compile(rb'(data: \{.*"delta": ?\{ ?"[^"\\]+": ?")((?:[^"\\]|\\.)*+)(" ?\}.*\}\n\n)')
_ATTEMPTS = 8


class Recording(msgspec.Struct, frozen=True):
    """A whole answer: the JSON text of its response object, and the tokens it reports.

    `prompt_cache` is what the upstream says of its own; None where it does not, or says what cannot be.
    """

    body: bytes
    usage: Usage | None
    prompt_cache: PromptCacheTokens | None
    billed: TokenUsage | None = None
    """What the upstream bills, if it says so."""


class _TextFrame:
    """The bytes of an event around its text. The next event mostly has the same ones: then only its text is decoded.

    Decoding it whole and merging its fields would take ten times as long, and change nothing but the text.
    """

    __slots__ = ("_after", "_assembler", "_attempts", "_before", "_text")

    def __init__(self, assembler: StreamAssembler) -> None:
        self._assembler = assembler
        self._attempts = _ATTEMPTS  # to learn a frame, since the last that was of use
        self._before = self._after = b""
        self._text: Text | None = None

    def takes(self, event: bytes) -> bool:
        """Whether the event has this frame; its text has then been added."""
        if self._text is None or not (event.startswith(self._before) and event.endswith(self._after)):
            return False
        try:
            # With its quotes. Where the two overlap, these are no JSON.
            text = _decode_text(event[len(self._before) - 1 : len(event) - len(self._after) + 1])
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False
        self._text.add(text)
        self._attempts = _ATTEMPTS
        return True

    def forget(self) -> None:
        self._text = None

    def learn(self, event: bytes, chunk: Json) -> None:
        """Take the frame of an event that the assembler has just taken in, if it is one of a text alone."""
        self.forget()
        if not self._attempts:
            return
        self._attempts -= 1
        found = _TEXT_EVENT.fullmatch(event)
        if found is None or event.count(b'"delta"') != 1 or (text := self._assembler.text_of(chunk)) is None:
            return
        if _decode_text(b'"%b"' % found[2]) == text[0]:
            self._before, self._after, self._text = found[1], found[3], text[1]


class StreamRecorder:
    """Records a streamed answer; `choices` is the number requested. `check` is that of the stream's splitter."""

    __slots__ = ("_assembler", "_check", "_choices", "_done", "_fault", "_frame")

    def __init__(self, choices: int, check: Callable[[bytes], None]) -> None:
        self._check = check
        self._choices = choices
        self._assembler = StreamAssembler()
        self._fault: str | None = None
        self._done = False
        self._frame = _TextFrame(self._assembler)

    def add(self, event: bytes) -> bool:
        """Take in one whole event; True when it carries usage and nothing else. Raises NotAnEvent."""
        if self._frame.takes(event):
            return False
        data = event_data(event)
        if not data or self._fault or self._done:
            self._check(event)
            return False
        if data == b"[DONE]":
            self._done = True
            self._frame.forget()
            return False
        try:
            chunk = event_json(data)
            self._assembler.add(chunk)
        except (ValueError, UnstorableAnswer) as error:
            self._check(event)
            self._fault = str(error)
            return False
        self._frame.learn(event, chunk)
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

    def __init__(self, surface: Surface, check: Callable[[bytes], None]) -> None:
        self._check = check
        self._surface = surface
        self._assembler = surface.assembler()

    def add(self, event: bytes) -> bool:
        """Take in one whole event; False, for the usage is never apart from the answer. Raises NotAnEvent."""
        self._check(event)
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


def has_usage_alone(event: bytes) -> bool:
    """Whether an event of chat completions carries usage and nothing else."""
    if b'"usage"' not in event:
        return False
    try:
        chunk = event_json(event_data(event))
    except ValueError:
        return False
    return chunk.get("choices") == [] and bool(chunk.get("usage"))


def recorder_of(form: AnswerForm, choices: int, check: Callable[[bytes], None]) -> StreamRecorder | AssemblerRecorder:
    """What records a stream of this form; `check` is that of its splitter."""
    return AssemblerRecorder(form, check) if isinstance(form, Surface) else StreamRecorder(choices, check)


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
    return Recording(body, usage, cached if is_possible else None, token_usage(answer))
