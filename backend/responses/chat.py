"""Responses of ``POST /v1/chat/completions``, whole and in chunks.

Log-probabilities are ``choices[].logprobs.content``, one entry a token, whose ``bytes`` are exact.
"""

from __future__ import annotations

import uuid

import msgspec

from backend.chat.grammar import GrammarConstraint
from backend.chat.tool_parser import ParsedDelta, ToolParser
from backend.engine.output_processor import Output
from backend.engine.sequence import FinishReason, TokenLogprobs
from backend.requests.generation_request import GenerationRequest
from backend.responses.builder import ResponseBody, ResponseBuilder, Usage
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
    """One call. Chunks have its index; only the first chunk of a call has id, type and name."""

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

    def __init__(self, request: GenerationRequest, model: str, fingerprint: str, token_bytes: TokenBytes) -> None:
        super().__init__(request, model, fingerprint, token_bytes)
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        constraint = request.output_constraint
        tool_format = None if constraint is None else constraint.tool_format
        self._parsers = None if tool_format is None else [ToolParser(tool_format) for _ in request.sequences]

    def opening_chunks(self) -> list[ResponseBody]:
        return [
            self._chunk([ChatChunkChoice(index, ChatDelta("assistant", ""), None, None)])
            for index in range(len(self._request.sequences))
        ]

    def chunks(self, index: int, outputs: list[Output]) -> list[ResponseBody]:
        self._count(index, outputs)
        parsed = self._parse(index, outputs)
        logprobs = self._logprobs(outputs)
        chunks: list[ResponseBody] = []
        if parsed.content or parsed.calls or (logprobs and logprobs.content):
            delta = ChatDelta()
            if parsed.content or not parsed.calls:
                delta.content = parsed.content
            if parsed.calls:
                delta.tool_calls = [
                    ToolCall(CalledFunction(call.arguments), call.index)
                    if call.id is None
                    else ToolCall(CalledFunction(call.arguments, call.name or ""), call.index, call.id, "function")
                    for call in parsed.calls
                ]
            chunks.append(self._chunk([ChatChunkChoice(index, delta, logprobs, None)]))
        if outputs[-1].finish_reason is not None:
            reason = self._finish_reason(index, outputs[-1].finish_reason)
            chunks.append(self._chunk([ChatChunkChoice(index, ChatDelta(), None, reason)]))
        return chunks

    def _parse(self, index: int, outputs: list[Output]) -> ParsedDelta:
        """Text and tool calls in new outputs of a choice."""
        text = "".join(output.text for output in outputs)
        if self._parsers is None:
            return ParsedDelta(text)
        parsed = self._parsers[index].add(text)
        if outputs[-1].finish_reason is not None:
            parsed.content += self._parsers[index].finish().content
        return parsed

    def _finish_reason(self, index: int, reason: FinishReason) -> str:
        constraint = self._request.sequences[index].constraint
        if reason is FinishReason.LENGTH and isinstance(constraint, GrammarConstraint) and constraint.complete:
            # The answer is complete: only the end could have followed.
            reason = FinishReason.STOP
        called = self._parsers is not None and self._parsers[index].num_calls > 0
        return "tool_calls" if called and reason is FinishReason.STOP else reason.value

    def usage_chunk(self) -> ResponseBody:
        chunk = self._chunk([])
        chunk.usage = self.usage()
        return chunk

    def response(self, outputs: list[list[Output]]) -> ResponseBody:
        choices = []
        for index, parts in enumerate(outputs):
            self._count(index, parts)
            reason = parts[-1].finish_reason
            message = _message(self._parse(index, parts))
            finish_reason = self._finish_reason(index, reason) if reason else ""
            choices.append(ChatChoice(index, message, self._logprobs(parts), finish_reason))
        return ChatCompletion(
            self._id, "chat.completion", self._created, self._model, choices, self.usage(), self._fingerprint
        )

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
        if not self._request.logprobs:
            return None
        return ChatLogprobs([self._entry(entry) for output in outputs for entry in output.logprobs])

    def _entry(self, entry: TokenLogprobs) -> TokenLogprob:
        top = [
            TopLogprob(self._token_text(token_id), value, list(self._token_bytes.shown(token_id)))
            for token_id, value in entry.top
        ]
        shown = list(self._token_bytes.shown(entry.token_id))
        return TokenLogprob(self._token_text(entry.token_id), entry.logprob or 0.0, shown, top)


def _message(parsed: ParsedDelta) -> ChatMessage:
    calls: dict[int, ToolCall] = {}
    for delta in parsed.calls:
        if delta.id is not None:
            calls[delta.index] = ToolCall(CalledFunction("", delta.name or ""), id=delta.id, type="function")
        calls[delta.index].function.arguments += delta.arguments
    if not calls:
        return ChatMessage(parsed.content)
    return ChatMessage(parsed.content or None, tool_calls=list(calls.values()))
