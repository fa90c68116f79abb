"""A request for a message as one for a chat completion."""

from typing import Any

from gateway.errors import InvalidRequest
from gateway.surfaces.messages.assistant_turn import said_in
from gateway.surfaces.messages.content import EXTRA, Untranslatable, left
from gateway.surfaces.messages.conversation import chat_messages
from gateway.surfaces.messages.tools import chat_tool_choice, chat_tools
from gateway.surfaces.surface import ChatRequest, Json

# Names of chat completions that Messages have another name for, or no use. They would be taken for what that one says.
_CHAT_NAMES = {
    "stop": "use 'stop_sequences'",
    "user": "use 'metadata.user_id'",
    "max_completion_tokens": "use 'max_tokens'",
    "response_format": "use 'output_config.format'",
    "reasoning_effort": "use 'output_config.effort'",
    "parallel_tool_calls": "use 'tool_choice.disable_parallel_tool_use'",
    "functions": "use 'tools'",
    "function_call": "use 'tool_choice'",
    "stream_options": "a stream of messages always has its usage",
    "n": "a message is one answer",
}
_SERVER_SIDE = {
    "container": "is a container of Anthropic's",
    "mcp_servers": "has servers that Anthropic would call",
    "thread": "is a conversation that Anthropic keeps",
}
_IGNORED = (
    *("thinking", "output_config", "metadata", "service_tier", "context_management", "cache_control", "compaction"),
    *("inference_geo", "speed", "diagnostics", "user_profile_id", "workspace_id", "fallbacks", "fallback_credit_token"),
    *(*_SERVER_SIDE, "billing_policy", "betas", "anthropic_beta", "anthropic_version"),
)


def chat_request(fields: Json) -> ChatRequest:
    """The request with these fields; those that are null count as absent. Raises InvalidRequest."""
    try:
        return _chat_request(left(fields))
    except RecursionError as error:
        raise InvalidRequest("The body is nested too deeply.") from error


def _chat_request(fields: Json) -> ChatRequest:
    for name, instead in _CHAT_NAMES.items():
        if name in fields:
            raise InvalidRequest(f"'{name}' is no field of Messages: {instead}.", param=name)
    if "max_tokens" not in fields:
        expected = "'max_tokens' must say how many tokens the answer may have; Messages have no default."
        raise InvalidRequest(expected, param="max_tokens")
    stream = fields.pop("stream", False)
    if not isinstance(stream, bool):
        raise InvalidRequest("'stream' must be true or false.", param="stream")
    untranslatable = Untranslatable()
    for name, what in _SERVER_SIDE.items():
        if fields.get(name):
            untranslatable.add(name, what)
    fields["messages"] = chat_messages(fields.pop("system", None), fields.get("messages"), untranslatable)
    if _continues(fields["messages"]):
        # The answer goes on from the text that the client has put into the assistant's mouth.
        fields = {"continue_final_message": True, "add_generation_prompt": False, **fields}
    if "tools" in fields:
        fields["tools"] = chat_tools(fields["tools"])
        if not fields["tools"]:
            del fields["tools"]
    if "tool_choice" in fields:
        fields |= chat_tool_choice(fields["tool_choice"])
    fields |= _stop(fields) | _user(fields) | _output(fields)
    return ChatRequest(
        fields=fields,
        stream=stream,
        include_usage=stream,
        ignored=tuple(name for name in _IGNORED if name in fields),
        untranslatable=untranslatable.first,
        is_cached=not any(fields.get(name) for name in ("container", "thread")),  # their state is the provider's
    )


def _continues(messages: list[Json]) -> bool:
    last = messages[-1] if messages else {}
    return last.get("role") == "assistant" and not last.get("tool_calls") and bool(said_in(last))


def _stop(fields: Json) -> Json:
    sequences = fields.pop("stop_sequences", None)
    if sequences is not None and not isinstance(sequences, list):
        raise InvalidRequest("'stop_sequences' must be a list of texts.", param="stop_sequences")
    return {"stop": sequences} if sequences else {}


def _user(fields: Json) -> Json:
    metadata = _popped(fields, "metadata")
    user = metadata.pop("user_id", None)
    if user is not None and not isinstance(user, str):
        raise InvalidRequest("'metadata.user_id' must be a text.", param="metadata.user_id")
    return ({} if user is None else {"user": user}) | ({"metadata": metadata} if metadata else {})


def _output(fields: Json) -> Json:
    """`response_format`, `reasoning_effort`, and what else the configuration of the output says."""
    config = _popped(fields, "output_config")
    name = "output_config.format"
    form = config.pop("format", None)
    if "output_format" in fields:
        if form is not None:
            message = "'output_format' is an older name of 'output_config.format'; give one of them."
            raise InvalidRequest(message, param="output_format")
        name, form = "output_format", fields.pop("output_format")
    made: Json = {}
    if config.get("effort") is not None:
        made["reasoning_effort"] = config.pop("effort")
    if form is not None:
        made["response_format"] = _response_format(form, name)
    return made | ({"output_config": config} if config else {})


def _response_format(form: Any, field: str) -> Json:
    if not isinstance(form, dict) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        expected = f'\'{field}\' must be an object such as {{"type": "json_schema", "schema": {{...}}}}.'
        raise InvalidRequest(expected, param=field)
    schema: Json = {"name": "output", "schema": form["schema"], "strict": True}
    rest = left(form, "type", "schema")
    return {"type": "json_schema", "json_schema": {**schema, **({EXTRA: rest} if rest else {})}}


def _popped(fields: Json, name: str) -> Json:
    """A copy of the object under `name`, taken out, without null; empty if there is none."""
    value = fields.pop(name, {})
    if not isinstance(value, dict):
        raise InvalidRequest(f"'{name}' must be an object.", param=name)
    return left(value)
