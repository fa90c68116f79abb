"""``POST /v1/completions``: from its body to a `GenerationRequest`."""

from __future__ import annotations

from backend.chat.output_constraint import OutputConstraintReader
from backend.errors import InvalidRequest
from backend.models.generation_config import SamplingDefaults
from backend.protocol import CompletionRequest
from backend.requests.generation_request import GenerationRequest, SequenceFactory
from backend.requests.prompts import PromptReader, prompt_count
from backend.requests.sampling import MAX_LOGPROBS, in_range, sampling_params
from backend.text.context import Context

_DEFAULT_MAX_TOKENS = 16


class CompletionRequestReader:
    """Reads completion requests for one model.

    Args:
        vocab_size: token ids are below it.
        defaults: what holds where a request leaves a field out.
    """

    def __init__(
        self,
        prompts: PromptReader,
        constraints: OutputConstraintReader,
        context: Context,
        sequences: SequenceFactory,
        vocab_size: int,
        defaults: SamplingDefaults,
    ) -> None:
        self._prompts = prompts
        self._constraints = constraints
        self._context = context
        self._sequences = sequences
        self._vocab_size = vocab_size
        self._defaults = defaults

    def read(self, request: CompletionRequest) -> GenerationRequest:
        """Checks every field and encodes the prompts.

        Raises:
            InvalidRequest, ContextLengthExceeded: names the field.
        """
        if request.suffix:
            raise InvalidRequest("suffix: not supported, this model cannot insert text; leave it out", "suffix")
        if request.best_of not in (None, 1):
            raise InvalidRequest("best_of: not supported, expected 1; use n instead", "best_of")
        self._check_count(request)
        prompts = self._prompts.read(request.prompt, "prompt")
        max_tokens = self._max_tokens(request, max(map(len, prompts)))
        logprobs = request.logprobs
        if logprobs is not None:
            in_range("logprobs", logprobs, 0, 0, MAX_LOGPROBS)
        echo = bool(request.echo)
        params = sampling_params(
            request, self._defaults, self._vocab_size, max_tokens, logprobs, prompt_logprobs=logprobs if echo else None
        )
        constraint = self._constraints.read_structured(request)
        return self._sequences.generation_request(
            request, prompts, params, continues_text=True, echo=echo, output_constraint=constraint
        )

    def _check_count(self, request: CompletionRequest) -> None:
        n, limit = self._sequences.choices_per_prompt(request), self._sequences.max_sequences
        if n * (count := prompt_count(request.prompt)) > limit:
            raise InvalidRequest(
                f"prompt: {count} prompts times n = {n} are over the limit of {limit} answers", "prompt"
            )

    def _max_tokens(self, request: CompletionRequest, longest_prompt: int) -> int:
        max_tokens = request.max_tokens
        if max_tokens is None:
            max_tokens = min(_DEFAULT_MAX_TOKENS, self._context.max_tokens - longest_prompt)
        return self._context.answer_tokens(longest_prompt, max_tokens, "max_tokens", least=0)
