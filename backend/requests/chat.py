"""``POST /v1/chat/completions``: from its body to a `GenerationRequest`."""

from __future__ import annotations

from typing import Any

import msgspec

from backend.chat.output_constraint import OutputConstraintReader
from backend.chat.prompt_renderer import PromptRenderer
from backend.chat.reasoning import ReasoningFormat
from backend.chat.tools import hosted_tools, read_tools
from backend.errors import InvalidRequest
from backend.models.generation_config import SamplingDefaults
from backend.protocol import ChatRequest, TokenizeRequest
from backend.requests.generation_request import ChatAnswer, GenerationRequest, SequenceFactory
from backend.requests.sampling import MAX_LOGPROBS, in_range, sampling_params
from backend.text.context import Context


class ChatRequestReader:
    """Reads chat requests for one model.

    Args:
        reasoning_format: how the model marks its thoughts; None: it does not.
        vocab_size: token ids are below it.
        defaults: what holds where a request leaves a field out.
    """

    def __init__(
        self,
        renderer: PromptRenderer,
        constraints: OutputConstraintReader,
        context: Context,
        sequences: SequenceFactory,
        reasoning_format: ReasoningFormat | None,
        vocab_size: int,
        defaults: SamplingDefaults,
    ) -> None:
        self._renderer = renderer
        self._constraints = constraints
        self._context = context
        self._sequences = sequences
        self._reasoning_format = reasoning_format
        self._vocab_size = vocab_size
        self._defaults = defaults

    def may_compile_grammar(self, request: ChatRequest) -> bool:
        """Whether `read` may compile a grammar, which takes up to seconds."""
        return bool(request.tools or request.functions or request.response_format) or request.has_structured_output

    def is_slow_to_encode(self, request: ChatRequest) -> bool:
        """Whether encoding the messages would block the event loop for too long, whatever their length."""
        return self._renderer.contains_control_text(request.messages)

    def read(self, request: ChatRequest) -> GenerationRequest:
        """Checks every field and renders the prompt.

        Raises:
            InvalidRequest, ContextLengthExceeded: names the field.
        """
        if request.modalities is not None and "text" not in request.modalities:
            raise InvalidRequest("modalities: this model answers in text, expected it to contain 'text'", "modalities")
        calls_functions = bool(request.functions) and not request.tools
        if calls_functions:
            request = _with_tools(request)
        continues = continues_last_message(request)
        tool_choice = read_tools(request.tools, request.tool_choice)
        output_constraint = self._constraints.read(request, tool_choice)
        variables = dict(request.chat_template_kwargs or {})
        if request.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", request.reasoning_effort)
        prompt = self._renderer.render(
            request.messages,
            tool_choice.listed if tool_choice else None,
            request.add_generation_prompt is not False,
            variables,
            continues,
        )
        max_tokens = self._max_tokens(request, len(prompt.ids))
        params = sampling_params(request, self._defaults, self._vocab_size, max_tokens, _logprobs(request))
        answer = ChatAnswer(
            calls_functions=calls_functions,
            # A grammar that allows no thought begins with the answer itself.
            reasoning_format=None if output_constraint and output_constraint.from_the_start else self._reasoning_format,
            opens_reasoning=prompt.opens_reasoning,
            shows_reasoning=request.include_reasoning is not False,
        )
        ignored = (*hosted_tools(request.tools), *(("tools.description",) if prompt.shortened_tools else ()))
        return self._sequences.generation_request(
            request,
            [prompt.ids],
            params,
            continues_text=continues,
            output_constraint=output_constraint,
            chat=answer,
            ignored=ignored,
            prediction=self._prediction(request, max_tokens),
        )

    def _prediction(self, request: ChatRequest, max_tokens: int) -> list[int]:
        """Tokens of what the answer is predicted to be. Only what it begins with matters after a limit."""
        if request.prediction is None:
            return []
        content = request.prediction.content
        text = content if isinstance(content, str) else "".join(map(_text_of_part, content))
        return self._renderer.predicted_ids(text)[:max_tokens]

    def _max_tokens(self, request: ChatRequest, prompt_tokens: int) -> int:
        older, newer = request.max_tokens, request.max_completion_tokens
        if older is not None and newer not in (None, older):
            raise InvalidRequest("max_tokens and max_completion_tokens differ; give one of them", "max_tokens")
        if newer is None:
            return self._context.answer_tokens(prompt_tokens, older, "max_tokens", least=1)
        return self._context.answer_tokens(prompt_tokens, newer, "max_completion_tokens", least=1)


def continues_last_message(request: ChatRequest | TokenizeRequest) -> bool:
    """Whether the answer continues the last message. Raises InvalidRequest, naming the field, where it cannot."""
    if not request.continue_final_message:
        return False
    if request.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message: not together with add_generation_prompt", "continue_final_message"
        )
    if request.messages and request.messages[-1].role != "assistant":
        raise InvalidRequest(
            "continue_final_message: expected the last message to be the assistant's", "continue_final_message"
        )
    return True


def _text_of_part(part: dict[str, Any]) -> str:
    """Raises InvalidRequest for a part that is not text."""
    text = part.get("text")
    if part.get("type") != "text" or not isinstance(text, str):
        raise InvalidRequest(
            "prediction.content: expected a text, or parts of the type 'text' with a text", "prediction.content"
        )
    return text


def _with_tools(request: ChatRequest) -> ChatRequest:
    """The request with its functions in the form that replaced them."""
    choice: object = request.function_call
    if isinstance(choice, dict):
        choice = {"type": "function", "function": choice}
    tools = [{"type": "function", "function": function} for function in request.functions or ()]
    return msgspec.structs.replace(
        request, tools=tools, tool_choice=request.tool_choice or choice, parallel_tool_calls=False
    )


def _logprobs(request: ChatRequest) -> int | None:
    """Alternatives to report at each token; None: no log-probabilities."""
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs: needs logprobs to be true", "top_logprobs")
    top = int(in_range("top_logprobs", request.top_logprobs, 0, 0, MAX_LOGPROBS))
    return top if request.logprobs else None
