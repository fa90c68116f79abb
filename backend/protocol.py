"""Bodies of requests, decoded into types, with errors that name the field.

null means absent everywhere. A field without a meaning here is ignored and named in a header of the response; with
``strict`` one that no API has is an error. The readers in ``backend.requests`` check the others.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal, TypeVar, get_args

import msgspec

from backend.errors import InvalidRequest, ModelNotFound

_PATH = re.compile(r" - at `(?:key in )?\$\.?(.*?)`$")
_FIELD = re.compile(r"field `(\w+)`")
_LONGEST_QUOTED_NAME = 64

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
EncodingFormat = Literal["float", "base64"]
_CHOICES: dict[str, tuple[str, ...]] = {
    "role": get_args(Role),
    "encoding_format": get_args(EncodingFormat),
    "type": ("content",),
}


class StreamOptions(msgspec.Struct):
    """``stream_options``; its other fields are ignored."""

    include_usage: bool | None = None


class Message(msgspec.Struct):
    """One message of a conversation. Fields that clients add to it, such as ``annotations``, are ignored."""

    role: Role
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    function_call: dict[str, Any] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same under another name."""


class CommonFields(msgspec.Struct, kw_only=True):
    """What both endpoints take."""

    model: str
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    """Requests share KV blocks only with those of the same salt, within their tenant."""
    # vLLM's ways to name an output constraint; the first is the newest, and the one that it documents.
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def has_structured_output(self) -> bool:
        """Whether one of these fields is given."""
        guided = (self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        return bool(self.structured_outputs) or any(value is not None for value in guided)


class Prediction(msgspec.Struct):
    """OpenAI's ``prediction``: text that most of the answer is expected to be."""

    type: Literal["content"]
    content: str | list[dict[str, Any]]


class ChatRequest(CommonFields, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    """The form of ``tools`` that OpenAI has deprecated, as ``function_call`` is that of ``tool_choice``."""
    function_call: str | dict[str, Any] | None = None
    modalities: list[str] | None = None
    prediction: Prediction | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    """Without effect unless the chat template uses it."""
    include_reasoning: bool | None = None


class CompletionRequest(CommonFields, kw_only=True):
    """Body of ``POST /v1/completions``; ``prompt`` is a text, texts, token ids, or lists of token ids."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /v1/embeddings``; ``input`` is a text, texts, token ids, or lists of token ids."""

    model: str
    input: str | list[str | int | list[int]]
    encoding_format: EncodingFormat | None = None
    dimensions: int | None = None
    priority: int | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /tokenize``: a ``prompt``, or ``messages`` with ``tools`` as in a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]


Body = TypeVar("Body", ChatRequest, CompletionRequest, EmbeddingRequest, TokenizeRequest, DetokenizeRequest)

# Of OpenAI's API and of the servers that clients are written for. None of them changes an answer of this server.
_STANDARD_WITHOUT_EFFECT = frozenset(
    {
        "audio",
        "early_stopping",
        "guided_decoding_backend",
        "guided_whitespace_pattern",
        "include_stop_str_in_output",
        "length_penalty",
        "metadata",
        "mm_processor_kwargs",
        "moderation",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "store",
        "thinking",
        "truncate_prompt_tokens",
        "use_beam_search",
        "user",
        "verbosity",
        "web_search_options",
    }
)


def decode_request(body: bytes, kind: type[Body], model: str, strict: bool = False) -> tuple[Body, tuple[str, ...]]:
    """Decodes a JSON body that is meant for this model; returns it and the names of the fields that are ignored.

    Args:
        strict: whether a field that is in no API that this server knows is an error.

    Raises:
        InvalidRequest: not JSON, not an object, an unknown field, or a value of the wrong type.
        ModelNotFound: meant for another model.
    """
    request, ignored = _decoded(body, kind, strict)
    if request.model is not None:
        check_model(request.model, model)
    return request, ignored


def check_model(name: str, served: str) -> None:
    """Refuses a model that is not the one that is served.

    Raises:
        ModelNotFound: names the one that is.
    """
    if name != served:
        raise ModelNotFound(f"no such model here; this server has '{served}'", "model")


def _decoded(body: bytes, kind: type[Body], strict: bool) -> tuple[Body, tuple[str, ...]]:
    if not body:
        raise InvalidRequest("the body is empty, expected a JSON object")
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        known = kind.__struct_fields__
        ignored = [name for name, value in fields.items() if name not in known and bytes(value) != b"null"]
        if strict and (unknown := [name for name in ignored if name not in _STANDARD_WITHOUT_EFFECT]):
            raise InvalidRequest(
                f"unknown field '{_shortened(unknown[0])}': this server was started with --strict-fields",
                _shortened(unknown[0]),
            )
        return msgspec.json.decode(body, type=kind), tuple(ignored)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {_fault(body, str(error))}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid UTF-8: {_undecodable(body)}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error


def _wrong_type(message: str) -> InvalidRequest:
    """Turns msgspec's "Expected `int`, got `str` - at `$.n`" into a sentence and a field's path."""
    path = _PATH.search(message)
    text = message[: path.start()] if path else message
    where = path[1].removesuffix("[...]") if path else ""  # msgspec's way to point at some value of an object
    if (field := _FIELD.search(text)) is not None:
        where = f"{where}.{field[1]}" if where else field[1]
    if text.startswith("Invalid enum value"):
        # msgspec quotes the value, however long, and does not say what would be right.
        text = f"expected one of {', '.join(_CHOICES[where.rpartition('.')[2]])}"
    elif text.endswith("out of range"):
        text = "expected a number of at most 64 bits"
    where = _shortened(where)
    return InvalidRequest(f"{where}: {text}" if where else text, where or None)


def _fault(body: bytes, message: str) -> str:
    """What is wrong, where msgspec takes half of a surrogate pair for the end of the body."""
    if message != "Input data was truncated":
        return message
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return message
    return "a string has half of a surrogate pair (an escape from \\ud800 to \\udfff)"


def _undecodable(body: bytes) -> str:
    """Where the fault is; msgspec counts from the beginning of the string in which it finds it."""
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"byte {error.start} cannot be decoded"
    return "a name or a string cannot be decoded"


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST_QUOTED_NAME else name[:_LONGEST_QUOTED_NAME] + "…"
