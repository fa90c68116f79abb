"""A request of the Responses API as a request for chat completions.

Requests that differ get different fields, but for these that ask the same: a null field, or member of `text`,
`reasoning` or a tool, counts as absent, as `text` and `reasoning` do when they are empty; `input` as text is one user
message; `instructions` are a first system message; and see input_items.py for the items. What chat completions have no
name for keeps its own; of the input it is in DETAILS.
"""

from collections.abc import Iterable
from typing import Any

from gateway.errors import InvalidRequest, NotFound
from gateway.surfaces.responses.input_items import InputReader, input_list
from gateway.surfaces.responses.tools import chat_tool_choice, chat_tools, not_in_chat
from gateway.surfaces.surface import ChatRequest, Json

DETAILS = "input_details"
"""The field with what input items say beyond chat completions' messages."""

_RENAMED = {"max_output_tokens": "max_tokens"}
# Fields that chat completions do not have, or that mean nothing to servers which have nothing else.
_WITHOUT_MEANING = (
    *("access_programs", "background", "context_management", "image", "include", "max_tool_calls"),
    *("prompt_cache_options", "prompt_cache_retention", "stream_options", "truncation"),
)
_UNTRANSLATABLE = {"conversation": "a stored conversation", "prompt": "a stored prompt"}
# Fields of chat completions that have another name or place here.
_ELSEWHERE = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "top_logprobs",
}
_LOGPROBS = "message.output_text.logprobs"
_ECHOED: Json = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "service_tier": None,
    "store": True,
    "temperature": None,
    "tool_choice": "auto",
    "top_logprobs": 0,
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}


class ContinuedFields(Json):
    """The fields of a request with the whole conversation in them; `previous_response_id` is only repeated."""

    previous_response_id: str


def continued(fields: Json, conversation: Iterable[Json]) -> Json:
    """The fields with the items of an earlier conversation before their input, for `chat_request`.

    The earlier instructions are not among the items: each request has its own.
    """
    earlier = ContinuedFields(fields)
    earlier.previous_response_id = earlier.pop("previous_response_id")
    earlier["input"] = [*conversation, *input_list(fields.get("input"))]
    return earlier


def chat_request(fields: Json) -> ChatRequest:
    """The request with these fields. Raises InvalidRequest, naming the field."""
    given = {name: value for name, value in fields.items() if value is not None}
    for name, instead in {**_ELSEWHERE, DETAILS: "input"}.items():
        if name in given:
            raise InvalidRequest(f"'{name}' is not a field of the Responses API: it has '{instead}'.", param=name)
    echo = _echo(given)
    stream = _boolean(given, "stream")
    given.pop("stream", None)
    read = _FieldReader(given)
    read.read()
    native = not isinstance(fields, ContinuedFields)
    if isinstance(fields, ContinuedFields):
        echo["previous_response_id"] = fields.previous_response_id
    return ChatRequest(
        fields=read.fields,
        stream=stream,
        include_usage=stream,
        ignored=tuple(name for name in read.ignored if name in read.fields),
        untranslatable=read.untranslatable,
        native=native,
        is_cached="conversation" not in read.fields,  # what it says changes with every turn
        echo=echo,
    )


class _FieldReader:
    """Moves the fields of a request to their places in chat completions."""

    def __init__(self, given: Json) -> None:
        self.fields = {_RENAMED.get(name, name): value for name, value in given.items()}
        self.ignored = [*_WITHOUT_MEANING, DETAILS]
        self.untranslatable: InvalidRequest | None = None

    def read(self) -> None:
        self._read_references()
        self._read_input()
        self._read_tools()
        self._read_text()
        self._read_reasoning()
        self._read_logprobs()

    def _refuse(self, error: InvalidRequest | None) -> None:
        self.untranslatable = self.untranslatable or error

    def _read_references(self) -> None:
        previous = self.fields.get("previous_response_id")
        if previous is not None:
            if not isinstance(previous, str):
                raise InvalidRequest("'previous_response_id' must be text.", param="previous_response_id")
            self._refuse(previous_response_not_found(previous))
        for name, what in _UNTRANSLATABLE.items():
            if name in self.fields:
                self._refuse(not_in_chat(name, what))
        if _boolean(self.fields, "background"):
            self._refuse(not_in_chat("background", "a response in the background"))

    def _read_input(self) -> None:
        instructions = self.fields.pop("instructions", None)
        if not isinstance(instructions, str | None):
            raise InvalidRequest("'instructions' must be text.", param="instructions")
        given = self.fields.pop("input", None)
        if given is None and not any(name in self.fields for name in (*_UNTRANSLATABLE, "previous_response_id")):
            raise InvalidRequest("'input' must be text or a list of items.", param="input")
        reader = InputReader([] if instructions is None else [{"role": "system", "content": instructions}])
        reader.read(input_list(given))
        self.fields["messages"] = reader.messages
        if reader.details:
            self.fields[DETAILS] = reader.details
        self._refuse(reader.untranslatable)

    def _read_tools(self) -> None:
        if "tools" in self.fields:
            self.fields["tools"] = chat_tools(self.fields["tools"])
        if "tool_choice" in self.fields:
            self.fields["tool_choice"], refused = chat_tool_choice(self.fields["tool_choice"])
            self._refuse(refused)

    def _read_text(self) -> None:
        text = self._pop_object("text")
        form = text.pop("format", None)
        if form is not None:
            if not isinstance(form, dict) or not isinstance(form.get("type"), str):
                raise InvalidRequest(
                    "'text.format' must be an object with a 'type', such as \"json_schema\".", param="text.format"
                )
            self.fields["response_format"] = _response_format(form)
        if "verbosity" in text:
            self.fields["verbosity"] = text.pop("verbosity")
        self._keep("text", text)

    def _read_reasoning(self) -> None:
        reasoning = self._pop_object("reasoning")
        if "effort" in reasoning:
            self.fields["reasoning_effort"] = reasoning.pop("effort")
        self._keep("reasoning", reasoning)

    def _read_logprobs(self) -> None:
        include = self.fields.get("include", [])
        if not isinstance(include, list):
            raise InvalidRequest("'include' must be a list of names.", param="include")
        if self.fields.get("top_logprobs") or _LOGPROBS in include:
            self.fields["logprobs"] = True
        else:
            self.ignored.append("top_logprobs")  # 0, which is an error without logprobs

    def _pop_object(self, name: str) -> Json:
        value = self.fields.pop(name, {})
        if not isinstance(value, dict):
            raise InvalidRequest(f"'{name}' must be an object.", param=name)
        return {inner: item for inner, item in value.items() if item is not None}

    def _keep(self, name: str, rest: Json) -> None:
        """Members of an object that have no name in chat completions."""
        if rest:
            self.fields[name] = rest
            self.ignored.append(name)


def previous_response_not_found(response_id: str) -> NotFound:
    """The error for a `previous_response_id` that nobody knows, in OpenAI's words."""
    return NotFound(
        f"Previous response with id '{response_id[:100]}' not found.",
        param="previous_response_id",
        code="previous_response_not_found",
    )


def _boolean(fields: Json, name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise InvalidRequest(f"'{name}' must be true or false.", param=name)
    return value


def _response_format(form: Json) -> Json:
    if form["type"] != "json_schema":
        return form
    schema = {name: value for name, value in form.items() if name != "type" and value is not None}
    return {"type": "json_schema", "json_schema": schema}


def _echo(given: Json) -> Json:
    """What the Response object repeats of its request, with OpenAI's values for what the request leaves open."""
    tools, text, reasoning = (given.get(name) for name in ("tools", "text", "reasoning"))
    return {
        **{name: given.get(name, otherwise) for name, otherwise in _ECHOED.items()},
        "tools": [_whole_tool(tool) for tool in tools] if isinstance(tools, list) else [],
        "text": {"format": {"type": "text"}, **_without_nulls(text)},
        "reasoning": {"effort": None, "summary": None, **_without_nulls(reasoning)},
    }


def _whole_tool(tool: Any) -> Any:
    """A function with the members that it has in a Response."""
    if isinstance(tool, dict) and tool.get("type") == "function":
        return {"description": None, "parameters": None, "strict": None, **tool}
    return tool


def _without_nulls(value: Any) -> Json:
    return {name: item for name, item in value.items() if item is not None} if isinstance(value, dict) else {}
