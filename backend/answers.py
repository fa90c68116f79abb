"""Answers in OpenAI's shapes, for chat and for completions, whole and in chunks.

Log-probabilities of chat go under ``choices[].logprobs.content``, one entry a token; those of completions are four
lists side by side. Token texts are decoded alone: a part of a character shows as U+FFFD, its ``bytes`` are exact.
"""

from __future__ import annotations

import time
import uuid
from typing import Protocol

import msgspec

from backend.detokenizer import Detokenizer, TokenBytes
from backend.engine import Output
from backend.grammar import GrammarConstraint
from backend.requests import Work
from backend.sequence import FinishReason, TokenLogprobs
from backend.tool_parser import Pieces, ToolParser


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0
    audio_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(msgspec.Struct):
    """Tokens of all choices together; a prompt counts once, the tokens of its chat template included."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct):
    arguments: str
    name: str | msgspec.UnsetType = msgspec.UNSET


class ToolCall(msgspec.Struct):
    """One call; in chunks with its place, and with id, type and name in its first piece only."""

    function: CalledFunction
    index: int | msgspec.UnsetType = msgspec.UNSET
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: str | msgspec.UnsetType = msgspec.UNSET


class ChatMessage(msgspec.Struct):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatCompletion(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str


class ChatDelta(msgspec.Struct):
    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatChunk(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class TextLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(msgspec.Struct):
    text: str
    index: int
    logprobs: TextLogprobs | None
    finish_reason: str | None


class TextCompletion(msgspec.Struct):
    """Whole answer and chunk alike; chunks have no usage unless it was asked for."""

    id: str
    object: str
    created: int
    model: str
    choices: list[TextChoice]
    system_fingerprint: str
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


Answer = ChatCompletion | ChatChunk | TextCompletion


class AnswerFormat(Protocol):
    """Builds one request's answer. One instance for one request; it counts usage on the way."""

    def opening(self) -> list[Answer]:
        """Chunks sent before anything is generated."""
        ...

    def chunks(self, index: int, outputs: list[Output]) -> list[Answer]:
        """Chunks for what arrived for a choice; none if there is nothing to say yet."""
        ...

    def usage_chunk(self) -> Answer:
        """The last chunk, without choices."""
        ...

    def whole(self, outputs: list[list[Output]]) -> Answer:
        """The answer that is not streamed: all outputs of each choice."""
        ...


class _Base:
    """What both endpoints share: identity, usage, and token texts."""

    def __init__(self, work: Work, model: str, fingerprint: str, token_bytes: TokenBytes, usage_in_chunks: bool):
        self._work = work
        self._model = model
        self._fingerprint = fingerprint
        self._token_bytes = token_bytes
        self._created = int(time.time())
        self._generated = [0] * len(work.sequences)
        self._cached = [0] * len(work.sequences)
        # With include_usage every chunk has the field, null in all but the last.
        self._chunk_usage: msgspec.UnsetType | None = None if usage_in_chunks else msgspec.UNSET

    def _count(self, index: int, outputs: list[Output]) -> None:
        self._generated[index] = outputs[-1].num_generated
        self._cached[index] = max(self._cached[index], *(output.cached_tokens for output in outputs))

    def usage(self) -> Usage:
        """Usage so far."""
        prompt, generated = self._work.prompt_tokens, sum(self._generated)
        # Answers to one prompt find what the first of them has computed; that was not there before the request.
        n = self._work.n
        cached = sum(min(self._cached[first : first + n]) for first in range(0, len(self._cached), n))
        return Usage(prompt, generated, prompt + generated, PromptTokensDetails(cached), CompletionTokensDetails())

    def _token_text(self, token_id: int) -> str:
        return self._token_bytes.shown(token_id).decode("utf-8", "replace")


class ChatFormat(_Base):
    """``chat.completion`` and ``chat.completion.chunk``."""

    def __init__(self, work: Work, model: str, fingerprint: str, token_bytes: TokenBytes, usage_in_chunks: bool):
        super().__init__(work, model, fingerprint, token_bytes, usage_in_chunks)
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        form = None if work.form is None else work.form.tool_format
        self._parsers = None if form is None else [ToolParser(form) for _ in work.sequences]

    def opening(self) -> list[Answer]:
        return [
            self._chunk([ChatChunkChoice(index, ChatDelta("assistant", ""), None, None)])
            for index in range(len(self._work.sequences))
        ]

    def chunks(self, index: int, outputs: list[Output]) -> list[Answer]:
        self._count(index, outputs)
        pieces = self._pieces(index, outputs)
        logprobs = self._logprobs(outputs)
        answers: list[Answer] = []
        if pieces.content or pieces.calls or (logprobs and logprobs.content):
            delta = ChatDelta()
            if pieces.content or not pieces.calls:
                delta.content = pieces.content
            if pieces.calls:
                delta.tool_calls = [
                    ToolCall(CalledFunction(piece.arguments), piece.index)
                    if piece.id is None
                    else ToolCall(CalledFunction(piece.arguments, piece.name or ""), piece.index, piece.id, "function")
                    for piece in pieces.calls
                ]
            answers.append(self._chunk([ChatChunkChoice(index, delta, logprobs, None)]))
        if outputs[-1].finish_reason is not None:
            reason = self._reason(index, outputs[-1].finish_reason)
            answers.append(self._chunk([ChatChunkChoice(index, ChatDelta(), None, reason)]))
        return answers

    def _pieces(self, index: int, outputs: list[Output]) -> Pieces:
        """Text and calls of what arrived."""
        text = "".join(output.text for output in outputs)
        if self._parsers is None:
            return Pieces(text)
        pieces = self._parsers[index].add(text)
        if outputs[-1].finish_reason is not None:
            pieces.content += self._parsers[index].finish().content
        return pieces

    def _reason(self, index: int, reason: FinishReason) -> str:
        constraint = self._work.sequences[index].constraint
        if reason is FinishReason.LENGTH and isinstance(constraint, GrammarConstraint) and constraint.complete:
            # The limit came where nothing but the end could have followed.
            reason = FinishReason.STOP
        called = self._parsers is not None and self._parsers[index].num_calls > 0
        return "tool_calls" if called and reason is FinishReason.STOP else reason.value

    def usage_chunk(self) -> Answer:
        chunk = self._chunk([])
        chunk.usage = self.usage()
        return chunk

    def whole(self, outputs: list[list[Output]]) -> Answer:
        choices = []
        for index, parts in enumerate(outputs):
            self._count(index, parts)
            reason = parts[-1].finish_reason
            message = self._message(self._pieces(index, parts))
            text = self._reason(index, reason) if reason else ""
            choices.append(ChatChoice(index, message, self._logprobs(parts), text))
        return ChatCompletion(
            self._id, "chat.completion", self._created, self._model, choices, self.usage(), self._fingerprint
        )

    def _message(self, pieces: Pieces) -> ChatMessage:
        calls: dict[int, ToolCall] = {}
        for piece in pieces.calls:
            if piece.id is not None:
                function = CalledFunction("", piece.name or "")
                calls[piece.index] = ToolCall(function, id=piece.id, type="function")
            calls[piece.index].function.arguments += piece.arguments
        if not calls:
            return ChatMessage(pieces.content)
        return ChatMessage(pieces.content or None, tool_calls=list(calls.values()))

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        return ChatChunk(
            self._id,
            "chat.completion.chunk",
            self._created,
            self._model,
            choices,
            self._fingerprint,
            self._chunk_usage,
        )

    def _logprobs(self, outputs: list[Output]) -> ChatLogprobs | None:
        if not self._work.logprobs:
            return None
        return ChatLogprobs([self._entry(entry) for output in outputs for entry in output.logprobs])

    def _entry(self, entry: TokenLogprobs) -> TokenLogprob:
        top = [
            TopLogprob(self._token_text(token_id), value, list(self._token_bytes.shown(token_id)))
            for token_id, value in entry.top
        ]
        shown = list(self._token_bytes.shown(entry.token_id))
        return TokenLogprob(self._token_text(entry.token_id), entry.logprob or 0.0, shown, top)


class CompletionFormat(_Base):
    """``text_completion``, whole and in chunks."""

    def __init__(self, work: Work, model: str, fingerprint: str, token_bytes: TokenBytes, usage_in_chunks: bool):
        super().__init__(work, model, fingerprint, token_bytes, usage_in_chunks)
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._offsets = [0] * len(work.sequences)
        self._started = [False] * len(work.sequences)

    def opening(self) -> list[Answer]:
        return []

    def chunks(self, index: int, outputs: list[Output]) -> list[Answer]:
        choice = self._choice(index, outputs)
        has_logprobs = choice.logprobs is not None and bool(choice.logprobs.tokens)
        if not choice.text and choice.finish_reason is None and not has_logprobs:
            return []
        return [self._answer([choice], self._chunk_usage)]

    def usage_chunk(self) -> Answer:
        return self._answer([], self.usage())

    def whole(self, outputs: list[list[Output]]) -> Answer:
        choices = [self._choice(index, parts) for index, parts in enumerate(outputs)]
        return self._answer(choices, self.usage())

    def _answer(self, choices: list[TextChoice], usage: Usage | msgspec.UnsetType | None) -> TextCompletion:
        return TextCompletion(
            self._id, "text_completion", self._created, self._model, choices, self._fingerprint, usage
        )

    def _choice(self, index: int, outputs: list[Output]) -> TextChoice:
        self._count(index, outputs)
        text = "".join(output.text for output in outputs)
        if self._work.echo and not self._started[index]:
            text = self._prompt_text(index) + text
        self._started[index] = True
        reason = outputs[-1].finish_reason
        return TextChoice(text, index, self._logprobs(index, outputs), reason.value if reason else None)

    def _prompt_text(self, index: int) -> str:
        sequence = self._work.sequences[index]
        return Detokenizer(self._token_bytes).decode(sequence.tokens[: sequence.num_prompt])

    def _logprobs(self, index: int, outputs: list[Output]) -> TextLogprobs | None:
        if not self._work.logprobs:
            return None
        lists = TextLogprobs([], [], [], [])
        for output in outputs:
            for entry in output.prompt_logprobs + output.logprobs:
                text = self._token_text(entry.token_id)
                lists.tokens.append(text)
                lists.token_logprobs.append(entry.logprob)
                top = {self._token_text(token_id): value for token_id, value in entry.top}
                lists.top_logprobs.append(None if entry.logprob is None else top)
                lists.text_offset.append(self._offsets[index])
                self._offsets[index] += len(text)
        return lists
