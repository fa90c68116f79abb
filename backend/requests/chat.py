"""From the body of ``POST /v1/chat/completions`` to work for the engine."""

from __future__ import annotations

from backend.chat.output_constraint import OutputConstraintReader
from backend.chat.prompt_renderer import PromptRenderer
from backend.chat.tools import read_tools
from backend.errors import InvalidRequest
from backend.protocol import ChatRequest
from backend.requests.generation_request import GenerationRequest, SequenceFactory
from backend.requests.sampling import MOST_LOGPROBS, in_range, sampling_params
from backend.text.context import Context


class ChatRequestReader:
    """Reads chats for one model.

    Args:
        vocab_size: token ids are below it.
    """

    def __init__(
        self,
        conversations: PromptRenderer,
        forms: OutputConstraintReader,
        context: Context,
        maker: SequenceFactory,
        vocab_size: int,
    ) -> None:
        self._conversations = conversations
        self._forms = forms
        self._context = context
        self._maker = maker
        self._vocab_size = vocab_size

    def has_form(self, request: ChatRequest) -> bool:
        """Whether reading the request may compile a grammar, which takes up to seconds."""
        return bool(request.tools or request.response_format)

    def takes_time(self, request: ChatRequest) -> bool:
        """Whether reading the request, beside its form, is too much work for the event loop."""
        return self._conversations.spells_control(request.messages)

    def read(self, request: ChatRequest) -> GenerationRequest:
        """Checks every field and renders the prompt.

        Raises:
            InvalidRequest, ContextLengthExceeded: names the field.
        """
        _refuse_fields(request)
        choice = read_tools(request.tools, request.tool_choice)
        form = self._forms.read(request, choice)
        prompt = self._conversations.read(request.messages, request.tools if choice else None)
        room = self._room(request, len(prompt))
        params = sampling_params(request, self._vocab_size, room, _logprobs(request))
        return self._maker.answers(request, [prompt], params, continues_text=False, form=form)

    def _room(self, request: ChatRequest, prompt_tokens: int) -> int:
        older, newer = request.max_tokens, request.max_completion_tokens
        if older is not None and newer not in (None, older):
            raise InvalidRequest("max_tokens and max_completion_tokens differ; give one of them", "max_tokens")
        if newer is None:
            return self._context.room(prompt_tokens, older, "max_tokens", least=1)
        return self._context.room(prompt_tokens, newer, "max_completion_tokens", least=1)


def _refuse_fields(request: ChatRequest) -> None:
    """Refuses what would change the answer and is not done; says nothing where a field asks for nothing."""
    refusals = (
        ("functions", bool(request.functions), "not offered, for it has given way to tools"),
        ("function_call", request.function_call not in (None, "none", "auto"), "has given way to tool_choice"),
        ("modalities", request.modalities not in (None, ["text"]), 'expected ["text"]'),
    )
    for field, refused, expected in refusals:
        if refused:
            raise InvalidRequest(f"{field}: {expected}", field)


def _logprobs(request: ChatRequest) -> int | None:
    """Alternatives to report at each token; None: no log-probabilities."""
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs: needs logprobs to be true", "top_logprobs")
    top = int(in_range("top_logprobs", request.top_logprobs, 0, 0, MOST_LOGPROBS))
    return top if request.logprobs else None
