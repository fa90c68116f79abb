"""What answers to chats and to completions have in common.

Token texts are decoded alone: a part of a character shows as U+FFFD.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

import msgspec

from backend.engine.engine import Output
from backend.requests.generation_request import GenerationRequest
from backend.text.detokenizer import TokenBytes

Answer = msgspec.Struct
"""A whole answer, or a chunk of one."""


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


class ResponseBuilder(ABC):
    """Builds one request's answer. One instance for one request; it counts usage on the way.

    Args:
        model: the name that the answer gives for it.
        fingerprint: says which computation answered.
    """

    def __init__(self, work: GenerationRequest, model: str, fingerprint: str, token_bytes: TokenBytes) -> None:
        self._work = work
        self._model = model
        self._fingerprint = fingerprint
        self._token_bytes = token_bytes
        self._created = int(time.time())
        self._generated = [0] * len(work.sequences)
        self._cached = [0] * len(work.sequences)
        # With include_usage every chunk has the field, null in all but the last.
        self._chunk_usage: msgspec.UnsetType | None = None if work.include_usage else msgspec.UNSET

    @abstractmethod
    def opening(self) -> list[Answer]:
        """Chunks sent before anything is generated."""

    @abstractmethod
    def chunks(self, index: int, outputs: list[Output]) -> list[Answer]:
        """Chunks for what arrived for a choice; none if there is nothing to say yet."""

    @abstractmethod
    def usage_chunk(self) -> Answer:
        """The last chunk, without choices."""

    @abstractmethod
    def whole(self, outputs: list[list[Output]]) -> Answer:
        """The answer that is not streamed: all outputs of each choice."""

    def usage(self) -> Usage:
        """Usage so far."""
        prompt, generated = self._work.prompt_tokens, sum(self._generated)
        details = PromptTokensDetails(self.cached_tokens)
        return Usage(prompt, generated, prompt + generated, details, CompletionTokensDetails())

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose keys and values were there already, as far as the choices have begun."""
        # Answers to one prompt find what the first of them has computed; that was not there before the request.
        n = self._work.n
        return sum(min(self._cached[first : first + n]) for first in range(0, len(self._cached), n))

    def _count(self, index: int, outputs: list[Output]) -> None:
        self._generated[index] = outputs[-1].num_generated
        self._cached[index] = max(self._cached[index], *(output.cached_tokens for output in outputs))

    def _token_text(self, token_id: int) -> str:
        return self._token_bytes.shown(token_id).decode("utf-8", "replace")
