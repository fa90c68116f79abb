"""Responses of ``POST /v1/chat/completions``, whole and in chunks.

Log-probabilities are ``choices[].logprobs.content``, one entry a token, whose ``bytes`` are exact.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

import msgspec

from backend.chat.grammar import GrammarConstraint
from backend.chat.reasoning import ReasoningParser
from backend.chat.tool_parser import ToolCallDelta, ToolParser
from backend.engine.output_processor import Output
from backend.engine.sequence import FinishReason, TokenLogprobs
from backend.requests.generation_request import ChatAnswer, GenerationRequest
from backend.responses.builder import PromptLogprobs, ResponseBody, ResponseBuilder, Usage
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
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET
    function_call: CalledFunction | msgspec.UnsetType = msgspec.UNSET


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
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(msgspec.Struct):
    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET
    function_call: CalledFunction | msgspec.UnsetType = msgspec.UNSET


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
        assert request.chat is not None  # noqa: S101 - its reader has made it
        self._chat = request.chat
        self._parsers = [AnswerParser(request, self._chat) for _ in request.sequences]

    @property
    def reasoning_tokens(self) -> int:
        return sum(parser.reasoning_tokens for parser in self._parsers)

    def opening_chunks(self) -> list[ResponseBody]:
        return [
            self._chunk([ChatChunkChoice(index, ChatDelta("assistant", ""), None, None)])
            for index in range(len(self._request.sequences))
        ]

    def chunks(self, index: int, outputs: list[Output]) -> list[ResponseBody]:
        self._count(index, outputs)
        parsed = self._parsers[index].parse(outputs)
        logprobs = self._logprobs(outputs)
        chunks: list[ResponseBody] = []
        if parsed.content or parsed.reasoning or parsed.calls or (logprobs and logprobs.content):
            delta = ChatDelta()
            if parsed.content or not (parsed.calls or parsed.reasoning):
                delta.content = parsed.content
            if parsed.reasoning:
                delta.reasoning_content = parsed.reasoning
            if parsed.calls and self._chat.calls_functions:
                delta.function_call = _function_of(parsed.calls)
            elif parsed.calls:
                delta.tool_calls = [_tool_call(call) for call in parsed.calls]
            chunks.append(self._chunk([ChatChunkChoice(index, delta, logprobs, None)]))
        if outputs[-1].finish_reason is not None:
            reason = self._finish_reason(index, outputs[-1].finish_reason)
            chunks.append(self._chunk([ChatChunkChoice(index, ChatDelta(), None, reason)]))
        return chunks

    def _finish_reason(self, index: int, reason: FinishReason) -> str:
        constraint = self._request.sequences[index].constraint
        if reason is FinishReason.LENGTH and isinstance(constraint, GrammarConstraint) and constraint.complete:
            # The answer is complete: only the end could have followed.
            reason = FinishReason.STOP
        if self._parsers[index].num_calls and reason is FinishReason.STOP:
            return "function_call" if self._chat.calls_functions else "tool_calls"
        return reason.value

    def usage_chunk(self) -> ResponseBody:
        chunk = self._chunk([])
        chunk.usage = self.usage()
        return chunk

    def response(self, outputs: list[list[Output]]) -> ResponseBody:
        choices = []
        for index, parts in enumerate(outputs):
            self._count(index, parts)
            reason = parts[-1].finish_reason
            message = _message(self._parsers[index].parse(parts), self._chat.calls_functions)
            finish_reason = self._finish_reason(index, reason) if reason else ""
            choices.append(ChatChoice(index, message, self._logprobs(parts), finish_reason))
        return ChatCompletion(
            self._id,
            "chat.completion",
            self._created,
            self._model,
            choices,
            self.usage(),
            self._fingerprint,
            self._prompt_logprobs(outputs[0]),
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


class AnswerParser:
    """Takes one answer apart: its thoughts, its text and its calls."""

    def __init__(self, request: GenerationRequest, chat: ChatAnswer) -> None:
        constraint, reasoning_format = request.output_constraint, chat.reasoning_format
        tool_format = None if constraint is None else constraint.tool_format
        self._tools = None if tool_format is None else ToolParser(tool_format)
        self._reasoning = None if reasoning_format is None else ReasoningParser(reasoning_format, chat.opens_reasoning)
        self._shows_reasoning = chat.shows_reasoning
        self.reasoning_tokens = 0

    @property
    def num_calls(self) -> int:
        """Complete calls so far."""
        return 0 if self._tools is None else self._tools.num_calls

    def parse(self, outputs: list[Output]) -> ParsedAnswer:
        """The next outputs, of one token each."""
        parsed = ParsedAnswer()
        content = ""
        for output in outputs:
            content += self._without_thoughts(output, parsed)
        ended = outputs[-1].finish_reason is not None
        if self._reasoning is not None and ended:
            reasoning, rest = self._reasoning.finish()
            self._add_thought(reasoning, parsed)
            content += rest
        if self._tools is None:
            parsed.content = content
            return parsed
        delta = self._tools.add(content)
        parsed.content, parsed.calls = delta.content, delta.calls
        if ended:
            parsed.content += self._tools.finish().content
        return parsed

    def _without_thoughts(self, output: Output, parsed: ParsedAnswer) -> str:
        if self._reasoning is None:
            return output.text
        reasoning, content = self._reasoning.add(output.text)
        if reasoning or self._reasoning.in_reasoning:
            self.reasoning_tokens += 1
        self._add_thought(reasoning, parsed)
        return content

    def _add_thought(self, reasoning: str, parsed: ParsedAnswer) -> None:
        if self._shows_reasoning:
            parsed.reasoning += reasoning


@dataclass(slots=True)
class ParsedAnswer:
    """A part of an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)


def _tool_call(call: ToolCallDelta) -> ToolCall:
    if call.id is None:
        return ToolCall(CalledFunction(call.arguments), call.index)
    return ToolCall(CalledFunction(call.arguments, call.name or ""), call.index, call.id, "function")


def _function_of(calls: list[ToolCallDelta]) -> CalledFunction:
    """The one call of an answer in the deprecated form."""
    arguments = "".join(call.arguments for call in calls)
    name = next((call.name for call in calls if call.name is not None), None)
    return CalledFunction(arguments) if name is None else CalledFunction(arguments, name)


def _message(parsed: ParsedAnswer, calls_functions: bool) -> ChatMessage:
    message = ChatMessage(parsed.content)
    if parsed.reasoning:
        message.reasoning_content = parsed.reasoning
    if not parsed.calls:
        return message
    message.content = parsed.content or None
    if calls_functions:
        message.function_call = _function_of(parsed.calls)
        return message
    calls: dict[int, ToolCall] = {}
    for delta in parsed.calls:
        if delta.id is not None:
            calls[delta.index] = ToolCall(CalledFunction("", delta.name or ""), id=delta.id, type="function")
        calls[delta.index].function.arguments += delta.arguments
    message.tool_calls = list(calls.values())
    return message
