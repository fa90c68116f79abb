"""Responses of ``POST /v1/completions``, whole and in chunks.

Log-probabilities are four lists of the same length, with one item per token.
"""

from __future__ import annotations

import uuid

import msgspec

from backend.engine.output_processor import Output
from backend.requests.generation_request import GenerationRequest
from backend.responses.builder import PromptLogprobs, ResponseBody, ResponseBuilder, Usage
from backend.text.detokenizer import Detokenizer, TokenBytes


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
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class TextCompletion(msgspec.Struct):
    """A whole response or a chunk; chunks have ``usage`` only if the request asked for it."""

    id: str
    object: str
    created: int
    model: str
    choices: list[TextChoice]
    system_fingerprint: str
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class CompletionResponseBuilder(ResponseBuilder):
    """``text_completion``, whole and in chunks."""

    def __init__(self, request: GenerationRequest, model: str, fingerprint: str, token_bytes: TokenBytes) -> None:
        super().__init__(request, model, fingerprint, token_bytes)
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._offsets = [0] * len(request.sequences)
        self._started = [False] * len(request.sequences)

    def opening_chunks(self) -> list[ResponseBody]:
        return []

    def chunks(self, index: int, outputs: list[Output]) -> list[ResponseBody]:
        choice = self._choice(index, outputs)
        has_logprobs = choice.logprobs is not None and bool(choice.logprobs.tokens)
        if not choice.text and choice.finish_reason is None and not has_logprobs:
            return []
        return [self._body([choice], self._chunk_usage)]

    def usage_chunk(self) -> ResponseBody:
        return self._body([], self.usage())

    def response(self, outputs: list[list[Output]]) -> ResponseBody:
        choices = [self._choice(index, parts) for index, parts in enumerate(outputs)]
        return self._body(choices, self.usage())

    def _body(self, choices: list[TextChoice], usage: Usage | msgspec.UnsetType | None) -> TextCompletion:
        return TextCompletion(
            self._id, "text_completion", self._created, self._model, choices, self._fingerprint, usage
        )

    def _choice(self, index: int, outputs: list[Output]) -> TextChoice:
        self._count(index, outputs)
        text = "".join(output.text for output in outputs)
        if self._request.echo and not self._started[index]:
            text = self._prompt_text(index) + text
        self._started[index] = True
        reason = outputs[-1].finish_reason
        return TextChoice(
            text,
            index,
            self._logprobs(index, outputs),
            reason.value if reason else None,
            self._prompt_logprobs(outputs),
        )

    def _prompt_text(self, index: int) -> str:
        sequence = self._request.sequences[index]
        return Detokenizer(self._token_bytes).decode(sequence.tokens[: sequence.num_prompt])

    def _logprobs(self, index: int, outputs: list[Output]) -> TextLogprobs | None:
        if not self._request.logprobs:
            return None
        lists = TextLogprobs([], [], [], [])
        for output in outputs:
            for entry in (output.prompt_logprobs if self._request.echo else []) + output.logprobs:
                text = self._token_text(entry.token_id)
                lists.tokens.append(text)
                lists.token_logprobs.append(entry.logprob)
                if entry.logprob is None:
                    lists.top_logprobs.append(None)
                else:
                    top = {self._token_text(token_id): value for token_id, value in entry.top}
                    lists.top_logprobs.append({**top, text: entry.logprob})
                lists.text_offset.append(self._offsets[index])
                self._offsets[index] += len(text)
        return lists
