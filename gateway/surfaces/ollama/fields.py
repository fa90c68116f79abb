"""The fields that requests for chats and for prompts have in common, as those of chat completions.

Null counts as absent, and so does what Ollama's clients send for it: an empty `format`, `options` or list of tools, and
a `num_predict` below 1, which sets no limit.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

from gateway.errors import InvalidRequest
from gateway.surfaces.surface import Json

PREFIX = "ollama."
"""Before the name of a field that Ollama does not have and chat completions do: it has no meaning here either."""

# Options of sampling; vLLM, llama.cpp, SGLang and the in-repo engine have each of them among the fields of a request.
# What penalises repetition has two names: that of llama.cpp is the one Ollama has.
_SAMPLING: dict[str, tuple[str, ...]] = {
    **{
        name: (name,)
        for name in (
            *("temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "stop", "logit_bias"),
            *("presence_penalty", "frequency_penalty", "repeat_last_n", "mirostat", "mirostat_tau", "mirostat_eta"),
        )
    },
    "num_predict": ("max_tokens",),
    "repeat_penalty": ("repetition_penalty", "repeat_penalty"),
}
_READ_HERE = frozenset({"stream", "keep_alive", "options", "format", "think"})
_WITHOUT_MEANING = frozenset({"truncate", "shift"})  # of a context that the upstream manages
_OF_CHAT_COMPLETIONS = frozenset(
    {
        *(name for names in _SAMPLING.values() for name in names),
        *("response_format", "chat_template_kwargs", "reasoning_effort", "stream_options", "n"),
    }
)


class CommonFields(NamedTuple):
    """`fields` are chat completions' and those that keep their names; `ignored` are some of the latter."""

    fields: Json
    ignored: tuple[str, ...]


def common_fields(given: Json, read: Collection[str], produced: Collection[str] = ()) -> CommonFields:
    """All fields but those that the caller has `read`. Raises InvalidRequest, naming the field.

    `produced` are further names that the caller makes fields of, so that no other field may have them.
    """
    kept: Json = {}
    ignored: list[str] = []
    for name, value in given.items():
        if value is None or name in read or name in _READ_HERE or (name == "tools" and value == []):
            continue
        if name in _OF_CHAT_COMPLETIONS or name in produced or name.startswith(PREFIX):
            name = PREFIX + name
            ignored.append(name)
        elif name in _WITHOUT_MEANING:
            ignored.append(name)
        kept[name] = value
    sampling, runtime = _options(given.get("options"))
    if runtime:
        kept["options"] = runtime
        ignored.append("options")
    thinking = _thinking(given.get("think"))
    if thinking:
        ignored.append("think")
    return CommonFields(kept | sampling | thinking | _format(given.get("format")), tuple(ignored))


def streams(given: Json) -> bool:
    """Whether the client wants a stream; it does unless it says no."""
    value = given.get("stream")
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest("'stream' must be true or false.", param="stream")
    return value is not False


def text_field(given: Json, name: str) -> str:
    """The text of a field; "" if it is absent. Raises InvalidRequest."""
    value = given.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"'{name}' must be text.", param=name)
    return value or ""


def _options(given: Any) -> tuple[Json, Json]:
    """The options of sampling by the names of an upstream, and those of Ollama's runtime and unknown ones."""
    if given is not None and not isinstance(given, dict):
        raise InvalidRequest("'options' must be an object such as {\"temperature\": 0}.", param="options")
    sampling: Json = {}
    runtime: Json = {}
    for name, value in (given or {}).items():
        if value is None or (name == "num_predict" and isinstance(value, int | float) and value < 1):
            continue
        if name in _SAMPLING:
            sampling |= dict.fromkeys(_SAMPLING[name], value)
        else:
            runtime[name] = value
    return sampling, runtime


def _thinking(think: Any) -> Json:
    """A level is a reasoning effort. On and off are variables of chat templates, which have two names for it.

    `think` stays beside them, so that its requests have keys of their own: Ollama may do more about it.
    """
    if think is None:
        return {}
    if isinstance(think, bool):
        return {"think": think, "chat_template_kwargs": {"enable_thinking": think, "thinking": think}}
    if isinstance(think, str):
        return {"think": think, "reasoning_effort": think}
    raise InvalidRequest("'think' must be true, false or a level such as \"low\".", param="think")


def _format(given: Any) -> Json:
    if given is None or given == "":
        return {}
    if given == "json":
        return {"response_format": {"type": "json_object"}}
    if isinstance(given, dict):
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "response", "schema": given}}}
    raise InvalidRequest("'format' must be \"json\" or a JSON schema.", param="format")
