"""From the body of ``POST /v1/completions`` to work for the engine."""

from __future__ import annotations

from backend.errors import InvalidRequest
from backend.protocol import CompletionRequest
from backend.requests.generation_request import GenerationRequest, SequenceFactory
from backend.requests.prompts import PromptReader, prompt_count
from backend.requests.sampling import MOST_LOGPROBS, in_range, sampling_params
from backend.text.context import Context

_DEFAULT_MAX_TOKENS = 16


class CompletionRequestReader:
    """Reads completions for one model.

    Args:
        vocab_size: token ids are below it.
    """

    def __init__(self, prompts: PromptReader, context: Context, maker: SequenceFactory, vocab_size: int) -> None:
        self._prompts = prompts
        self._context = context
        self._maker = maker
        self._vocab_size = vocab_size

    def read(self, request: CompletionRequest) -> GenerationRequest:
        """Checks every field and encodes the prompts.

        Raises:
            InvalidRequest, ContextLengthExceeded: names the field.
        """
        if request.suffix:
            raise InvalidRequest("suffix: this model cannot insert text; leave it out", "suffix")
        if request.best_of not in (None, 1):
            raise InvalidRequest("best_of: not offered here, expected 1; ask for n answers instead", "best_of")
        self._check_count(request)
        prompts = self._prompts.read(request.prompt, "prompt")
        room = self._room(request, max(map(len, prompts)))
        logprobs = request.logprobs
        if logprobs is not None:
            in_range("logprobs", logprobs, 0, 0, MOST_LOGPROBS)
        echo = bool(request.echo)
        params = sampling_params(
            request, self._vocab_size, room, logprobs, prompt_logprobs=echo and logprobs is not None
        )
        return self._maker.answers(request, prompts, params, continues_text=True, echo=echo)

    def _check_count(self, request: CompletionRequest) -> None:
        n, most = self._maker.answers_of_each(request), self._maker.most_sequences
        if n * (count := prompt_count(request.prompt)) > most:
            raise InvalidRequest(
                f"prompt: {count} prompts times n = {n} are over the limit of {most} answers", "prompt"
            )

    def _room(self, request: CompletionRequest, longest: int) -> int:
        asked = request.max_tokens
        if asked is None:
            asked = min(_DEFAULT_MAX_TOKENS, self._context.max_tokens - longest)
        return self._context.room(longest, asked, "max_tokens", least=0)
