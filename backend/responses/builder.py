"""What the responses to chats and completions share.

The text of a single token is decoded on its own: part of a character shows as U+FFFD.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

import msgspec

from backend.engine.output_processor import Output
from backend.engine.sequence import TokenLogprobs
from backend.requests.generation_request import GenerationRequest
from backend.text.detokenizer import TokenBytes

ResponseBody = msgspec.Struct
"""A whole response, or a chunk of a stream."""


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0
    audio_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class RankedLogprob(msgspec.Struct):
    """One candidate at a token of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, RankedLogprob] | None]
"""For each token of the prompt, None for the first: its candidates by token id."""


class Usage(msgspec.Struct):
    """Tokens of all choices. Each prompt counts once, including its chat template."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class ResponseBuilder(ABC):
    """Builds the response to one request, whole or in chunks, and counts its usage. One instance per request.

    Args:
        model: value of ``model`` in the response.
        fingerprint: value of ``system_fingerprint``.
    """

    def __init__(self, request: GenerationRequest, model: str, fingerprint: str, token_bytes: TokenBytes) -> None:
        self._request = request
        self._model = model
        self._fingerprint = fingerprint
        self._token_bytes = token_bytes
        self._created = int(time.time())
        self._generated = [0] * len(request.sequences)
        self._cached = [0] * len(request.sequences)
        self._predicted = [(0, 0)] * len(request.sequences)
        # With include_usage every chunk has the field; it is null in all but the last.
        self._chunk_usage: msgspec.UnsetType | None = None if request.include_usage else msgspec.UNSET

    @abstractmethod
    def opening_chunks(self) -> list[ResponseBody]:
        """Chunks sent before anything is generated."""

    @abstractmethod
    def chunks(self, index: int, outputs: list[Output]) -> list[ResponseBody]:
        """Chunks for new outputs of a choice; empty if they have neither text nor an end."""

    @abstractmethod
    def usage_chunk(self) -> ResponseBody:
        """The last chunk, which has the usage and no choices."""

    @abstractmethod
    def response(self, outputs: list[list[Output]]) -> ResponseBody:
        """The whole response, from all outputs of each choice."""

    def usage(self) -> Usage:
        """Usage so far."""
        prompt, generated = self._request.prompt_tokens, sum(self._generated)
        accepted, rejected = map(sum, zip(*self._predicted, strict=True))
        completion = CompletionTokensDetails(
            self.reasoning_tokens, accepted_prediction_tokens=accepted, rejected_prediction_tokens=rejected
        )
        return Usage(prompt, generated, prompt + generated, PromptTokensDetails(self.cached_tokens), completion)

    @property
    def reasoning_tokens(self) -> int:
        """Generated tokens of thoughts, so far."""
        return 0

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose keys and values were cached before the request, of choices that have begun."""
        # Later choices of a prompt find what the first one has computed, so the least of them counts.
        n = self._request.n
        return sum(min(self._cached[first : first + n]) for first in range(0, len(self._cached), n))

    def _count(self, index: int, outputs: list[Output]) -> None:
        self._generated[index] = outputs[-1].num_generated
        self._predicted[index] = outputs[-1].prediction_tokens
        self._cached[index] = max(self._cached[index], *(output.cached_tokens for output in outputs))

    def _prompt_logprobs(self, outputs: list[Output]) -> PromptLogprobs | msgspec.UnsetType:
        """The log-probabilities of a prompt, as vLLM has them; unset if the request did not ask for them."""
        if not self._request.prompt_logprobs:
            return msgspec.UNSET
        return [self._alternatives(entry) for output in outputs for entry in output.prompt_logprobs]

    def _alternatives(self, entry: TokenLogprobs) -> dict[str, RankedLogprob] | None:
        if entry.logprob is None:
            return None
        found = {
            str(token_id): RankedLogprob(value, rank, self._token_text(token_id))
            for rank, (token_id, value) in enumerate(entry.top, start=1)
        }
        found[str(entry.token_id)] = RankedLogprob(entry.logprob, entry.rank, self._token_text(entry.token_id))
        return found

    def _token_text(self, token_id: int) -> str:
        return self._token_bytes.shown(token_id).decode("utf-8", "replace")
