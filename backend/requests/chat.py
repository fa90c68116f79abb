"""``POST /v1/chat/completions``: from its body to a `GenerationRequest`."""

from __future__ import annotations

from backend.chat.output_constraint import OutputConstraintReader
from backend.chat.prompt_renderer import PromptRenderer
from backend.chat.tools import read_tools
from backend.errors import InvalidRequest
from backend.protocol import ChatRequest
from backend.requests.generation_request import GenerationRequest, SequenceFactory
from backend.requests.sampling import MAX_LOGPROBS, in_range, sampling_params
from backend.text.context import Context


class ChatRequestReader:
    """Reads chat requests for one model.

    Args:
        vocab_size: token ids are below it.
    """

    def __init__(
        self,
        renderer: PromptRenderer,
        constraints: OutputConstraintReader,
        context: Context,
        sequences: SequenceFactory,
        vocab_size: int,
    ) -> None:
        self._renderer = renderer
        self._constraints = constraints
        self._context = context
        self._sequences = sequences
        self._vocab_size = vocab_size

    def may_compile_grammar(self, request: ChatRequest) -> bool:
        """Whether `read` may compile a grammar, which takes up to seconds."""
        return bool(request.tools or request.response_format)

    def is_slow_to_encode(self, request: ChatRequest) -> bool:
        """Whether encoding the messages would block the event loop for too long, whatever their length."""
        return self._renderer.contains_control_text(request.messages)

    def read(self, request: ChatRequest) -> GenerationRequest:
        """Checks every field and renders the prompt.

        Raises:
            InvalidRequest, ContextLengthExceeded: names the field.
        """
        _refuse_unsupported(request)
        tool_choice = read_tools(request.tools, request.tool_choice)
        output_constraint = self._constraints.read(request, tool_choice)
        prompt = self._renderer.render(request.messages, request.tools if tool_choice else None)
        max_tokens = self._max_tokens(request, len(prompt))
        params = sampling_params(request, self._vocab_size, max_tokens, _logprobs(request))
        return self._sequences.generation_request(
            request, [prompt], params, continues_text=False, output_constraint=output_constraint
        )

    def _max_tokens(self, request: ChatRequest, prompt_tokens: int) -> int:
        older, newer = request.max_tokens, request.max_completion_tokens
        if older is not None and newer not in (None, older):
            raise InvalidRequest("max_tokens and max_completion_tokens differ; give one of them", "max_tokens")
        if newer is None:
            return self._context.answer_tokens(prompt_tokens, older, "max_tokens", least=1)
        return self._context.answer_tokens(prompt_tokens, newer, "max_completion_tokens", least=1)


def _refuse_unsupported(request: ChatRequest) -> None:
    """Refuses fields that would change the answer and are not supported; values without effect are accepted."""
    if request.functions:
        raise InvalidRequest("functions: deprecated and not supported; use tools", "functions")
    if request.function_call not in (None, "none", "auto"):
        raise InvalidRequest("function_call: deprecated and not supported; use tool_choice", "function_call")
    if request.modalities not in (None, ["text"]):
        raise InvalidRequest('modalities: expected ["text"]', "modalities")


def _logprobs(request: ChatRequest) -> int | None:
    """Alternatives to report at each token; None: no log-probabilities."""
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs: needs logprobs to be true", "top_logprobs")
    top = int(in_range("top_logprobs", request.top_logprobs, 0, 0, MAX_LOGPROBS))
    return top if request.logprobs else None
