"""An answer in Ollama's form made of one in chat completions' form, and the other way round. Nothing is lost in either.

What an answer has beyond that it keeps as a difference, under one more field:

- `keepgate` of an answer of Ollama's form: {"form": …, "changes": {…}}. It was a chat completion (or, by `form`, a
  completion), which the changes restore: its id, unknown fields, further choices, details of the usage.
- `ollama` of a chat completion: {"form": …, "changes": {…}}. It was an answer of that endpoint of Ollama: durations,
  fractions of a second, `context`.

A call whose arguments are not an object is for a client of Ollama only among the changes: it could not run the call.
"""

import contextlib
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import xxhash

from cache.entries.answer import usage_of
from cache.errors import UnstorableAnswer
from gateway.surfaces.differences import difference, patched
from gateway.surfaces.ollama.messages import arguments_text
from gateway.surfaces.surface import Json
from gateway.surfaces.timestamps import rfc3339, unix_seconds

EXTENSION = "keepgate"
_NATIVE = "ollama"
REASONING = ("reasoning_content", "reasoning")
"""Names of the reasoning in chat completions; the first that says something counts."""

_COUNTS = ("prompt_eval_count", "eval_count")
_MAX_COUNT = 2**31
_decode = msgspec.json.Decoder().decode


class Shape(NamedTuple):
    """Where the answers of an endpoint have what was said: in an object or among the other fields."""

    form: str
    message: str | None
    text: str

    def said(self, own: Json) -> Json:
        """What was said, in an answer or a line of a stream."""
        if self.message is None:
            return {name: own[name] for name in (self.text, "thinking", "tool_calls") if name in own}
        message = own.get(self.message)
        return message if isinstance(message, dict) else {}

    def rest(self, own: Json) -> Json:
        """All other fields."""
        names = (self.text, "thinking", "tool_calls") if self.message is None else (self.message,)
        return {name: value for name, value in own.items() if name not in names}

    def placed(self, said: Json) -> Json:
        """What was said, as fields of an answer; a role only where there is a place for it."""
        if self.message is not None:
            return {self.message: said}
        return {name: value for name, value in said.items() if name != "role"}


CHAT = Shape("chat", "message", "content")
GENERATE = Shape("generate", None, "response")


def own_answer(answer: Json, shape: Shape) -> Json:
    """The answer of an endpoint of Ollama. Durations are 0, and there are counts if there is usage."""
    native = answer.get(_NATIVE)
    if isinstance(native, dict) and native.get("form") == shape.form and isinstance(native.get("changes"), dict):
        with contextlib.suppress(ValueError):
            restored: Json = patched(_own({k: v for k, v in answer.items() if k != _NATIVE}, shape), native["changes"])
            return restored
    own = _own(answer, shape)
    form = "completions" if answer.get("object") == "text_completion" else "chat.completions"
    own[EXTENSION] = {"form": form, "changes": difference(_chat(own, shape, form, ""), answer) or {}}
    return own


def chat_answer(own: Json, shape: Shape) -> Json:
    """The inverse. Raises UnstorableAnswer for what is not an answer of this endpoint."""
    _check(own, shape)
    try:
        extension = own.get(EXTENSION)
        if isinstance(extension, dict) and isinstance(extension.get("changes"), dict):
            plain = {name: value for name, value in own.items() if name != EXTENSION}
            chat: Json = patched(_chat(plain, shape, extension.get("form"), ""), extension["changes"])
            return chat
        digest = xxhash.xxh3_64_hexdigest(json.dumps(own, sort_keys=True).encode())
        answer = _chat(own, shape, "chat.completions", digest)
        if changes := difference(_own(answer, shape), own):
            answer[_NATIVE] = {"form": shape.form, "changes": changes}
    except (ValueError, RecursionError) as error:
        raise UnstorableAnswer("the answer is nested too deep, or its extension does not fit it") from error
    return answer


def _own(answer: Json, shape: Shape) -> Json:
    choice = _first_choice(answer)
    message = choice.get("message")
    if not isinstance(message, dict):
        message = {"content": choice.get("text")}
    content, role, reason = message.get("content"), message.get("role"), choice.get("finish_reason")
    said: Json = {"role": role if isinstance(role, str) else "assistant"}
    said[shape.text] = content if isinstance(content, str) else ""
    if thinking := next((text for name in REASONING if isinstance(text := message.get(name), str) and text), None):
        said["thinking"] = thinking
    if calls := list(_own_calls(message.get("tool_calls"))):
        said["tool_calls"] = calls
    own: Json = {"model": answer.get("model"), "created_at": rfc3339(answer.get("created")), **shape.placed(said)}
    if tokens := token_logprobs(choice):
        own["logprobs"] = tokens
    own["done"] = True
    if isinstance(reason, str):
        own["done_reason"] = "stop" if reason in ("tool_calls", "function_call") else reason
    own |= {"total_duration": 0, "load_duration": 0}
    prompt, completion = usage_of(answer) or (None, None)
    for stage, count in (("prompt_eval", prompt), ("eval", completion)):
        own |= ({} if count is None else {f"{stage}_count": count}) | {f"{stage}_duration": 0}
    return own


def token_logprobs(choice: Json) -> list[Any]:
    """Those of the tokens of a choice of a chat, in the form that both APIs have."""
    logprobs = choice.get("logprobs")
    tokens = logprobs.get("content") if isinstance(logprobs, dict) else None
    return tokens if isinstance(tokens, list) else []


def _own_calls(calls: Any) -> Iterator[Json]:
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            continue
        arguments = _arguments(function.get("arguments"))
        if arguments is not None:
            identifier = {"id": call["id"]} if isinstance(call.get("id"), str) and call["id"] else {}
            yield {**identifier, "function": {"name": function["name"], "arguments": arguments}}


def _arguments(text: Any) -> Json | None:
    """The object that a text of arguments stands for; no text at all is an empty object."""
    if not text:
        return {}
    try:
        arguments = _decode(text)
        if isinstance(arguments, dict):
            arguments_text(arguments)
            return arguments
    except (msgspec.DecodeError, TypeError, UnicodeError, RecursionError):
        pass
    return None


def _first_choice(answer: Json) -> Json:
    choices = answer.get("choices")
    choices = [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []
    return next((choice for choice in choices if choice.get("index", 0) == 0), choices[0] if choices else {})


def _chat(own: Json, shape: Shape, form: Any, digest: str) -> Json:
    """The chat completion or completion that the fields of `own` tell of; ids are made of `digest`."""
    said = shape.said(own)
    text = said.get(shape.text)
    choice: Json = {"index": 0}
    is_chat = form != "completions"
    if is_chat:
        message = choice["message"] = {
            "role": said.get("role", "assistant"),
            "content": text if text is not None else "",
        }
        if said.get("thinking"):
            message["reasoning_content"] = said["thinking"]
        if calls := said.get("tool_calls"):
            message["tool_calls"] = [_chat_call(call, f"call_{digest}{number}") for number, call in enumerate(calls)]
        if own.get("logprobs"):
            choice["logprobs"] = {"content": own["logprobs"]}
    else:
        choice["text"] = text
    reason = own.get("done_reason") or "stop"
    choice["finish_reason"] = "tool_calls" if reason == "stop" and said.get("tool_calls") else reason
    answer: Json = {
        "id": f"chatcmpl-{digest}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": unix_seconds(own.get("created_at")),
        "model": own.get("model"),
        "choices": [choice],
    }
    counts = [own.get(name) for name in _COUNTS]
    if counts != [None, None]:
        prompt, completion = (count if type(count) is int and 0 <= count <= _MAX_COUNT else 0 for count in counts)
        answer["usage"] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
    return answer


def _chat_call(call: Json, identifier: str) -> Json:
    function = call["function"]
    return {
        "id": call.get("id") or identifier,
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments_text(function.get("arguments") or {})},
    }


def _check(own: Json, shape: Shape) -> None:
    """Raises UnstorableAnswer unless `own` is a whole answer of the endpoint."""
    said = shape.said(own)
    if own.get("error") is not None:
        raise UnstorableAnswer("the answer is an error")
    if own.get("done") is not True:
        raise UnstorableAnswer("the answer is not done")
    if not isinstance(said.get(shape.text), str) and not (said.get("tool_calls") and said.get(shape.text) is None):
        raise UnstorableAnswer(f"the answer has no text in '{shape.text}'")
    if not isinstance(said.get("thinking") or "", str) or not isinstance(own.get("done_reason") or "", str):
        raise UnstorableAnswer("the thinking or the reason is not text")
    calls = said.get("tool_calls") or []
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        raise UnstorableAnswer("a tool call has no name, or arguments that are not an object")
    if not isinstance(own.get("logprobs") or [], list):
        raise UnstorableAnswer("the logprobs are not a list")


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments") or {}, dict)
        and isinstance(call.get("id") or "", str)
    )
