"""Bodies of requests, decoded into types, with errors that name the field.

null means absent everywhere. A field that this server does not know is an error, and so is one whose meaning it
cannot honour (the readers in ``backend.requests`` check that); the few that change no answer are accepted.
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

Role = Literal["system", "developer", "user", "assistant", "tool"]
EncodingFormat = Literal["float", "base64"]
_CHOICES: dict[str, tuple[str, ...]] = {"role": get_args(Role), "encoding_format": get_args(EncodingFormat)}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """``stream_options``; obfuscation pads chunks against eavesdroppers and is not done here."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: Role
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    refusal: str | None = None
    # Clients that replay an answer as history send these along, empty.
    audio: dict[str, Any] | None = None
    function_call: dict[str, Any] | None = None
    annotations: list[Any] | None = None


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
    priority: int | None = None
    # Accepted because they change no answer of this server.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


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
    # Accepted where they say what happens anyway.
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: list[str] | None = None


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
    # Accepted because it changes no answer of this server.
    user: str | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /tokenize``: a ``prompt``, or ``messages`` with ``tools`` as in a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]


Body = TypeVar("Body", ChatRequest, CompletionRequest, EmbeddingRequest, TokenizeRequest, DetokenizeRequest)


def decode_request(body: bytes, kind: type[Body], model: str) -> Body:
    """Decodes a JSON body that is meant for this model.

    Raises:
        InvalidRequest: not JSON, not an object, an unknown field, or a value of the wrong type.
        ModelNotFound: meant for another model.
    """
    request = _decoded(body, kind)
    if request.model is not None:
        check_model(request.model, model)
    return request


def check_model(name: str, served: str) -> None:
    """Refuses a model that is not the one that is served.

    Raises:
        ModelNotFound: names the one that is.
    """
    if name != served:
        raise ModelNotFound(f"no such model here; this server has '{served}'", "model")


def _decoded(body: bytes, kind: type[Body]) -> Body:
    if not body:
        raise InvalidRequest("the body is empty, expected a JSON object")
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        known = kind.__struct_fields__
        for name, value in fields.items():
            if name not in known and bytes(value) != b"null":
                raise InvalidRequest(
                    f"unknown field '{_shortened(name)}': this server does not know it and ignores nothing",
                    _shortened(name),
                )
        return msgspec.json.decode(body, type=kind)
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
