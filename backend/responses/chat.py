"""Answers of ``POST /v1/chat/completions`` in OpenAI's shapes, whole and in chunks.

Log-probabilities go under ``choices[].logprobs.content``, one entry a token, whose ``bytes`` are exact.
"""

from __future__ import annotations

import uuid

import msgspec

from backend.chat.grammar import GrammarConstraint
from backend.chat.tool_parser import ParsedDelta, ToolParser
from backend.engine.engine import Output
from backend.engine.sequence import FinishReason, TokenLogprobs
from backend.requests.generation_request import GenerationRequest
from backend.responses.builder import Answer, ResponseBuilder, Usage
from backend.text.detokenizer import TokenBytes


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


class ChatResponseBuilder(ResponseBuilder):
    """``chat.completion`` and ``chat.completion.chunk``."""

    def __init__(self, work: GenerationRequest, model: str, fingerprint: str, token_bytes: TokenBytes) -> None:
        super().__init__(work, model, fingerprint, token_bytes)
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

    def _pieces(self, index: int, outputs: list[Output]) -> ParsedDelta:
        """Text and calls of what arrived."""
        text = "".join(output.text for output in outputs)
        if self._parsers is None:
            return ParsedDelta(text)
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

    def _message(self, pieces: ParsedDelta) -> ChatMessage:
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
