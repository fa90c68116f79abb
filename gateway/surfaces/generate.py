"""Keepgate's own API: one prompt, one text, and a choice of what may be used to get it.

`optimization` says how much: "none" computes the answer by itself, "basic" uses the exact cache and shares calls, and
"full" (the default) also answers similar questions and uses the variant of the model with quantised weights, if the
operator has named one.
"""

from typing import Any

import msgspec

from cache.entries.answer import DONE, StreamAssembler, usage_of
from cache.entries.entry import Family
from cache.errors import UnstorableAnswer
from gateway.errors import InvalidRequest, UpstreamDisconnected
from gateway.surfaces.surface import ChatRequest, Json, TranslatedForm, Translator

PATH = "/v1/generate"
OPTIMIZATIONS = ("none", "basic", "full")
_OWN_FIELDS = frozenset({"prompt", "system", "messages", "raw", "optimization", "stream"})

_encode = msgspec.json.Encoder().encode


class GenerateForm(TranslatedForm):
    """`POST /v1/generate`."""

    family: Family = "generate"
    paths = (PATH,)

    def chat_request(self, path: str, fields: Json) -> ChatRequest:
        """All fields that are not this API's own are those of chat completions."""
        optimization = optimization_of(fields)
        stream = _flag(fields, "stream")
        rest = {name: value for name, value in fields.items() if name not in _OWN_FIELDS}
        raw = _flag(fields, "raw")
        asked: Json = {"prompt": _text(fields, "prompt")} if raw else {"messages": _messages(fields)}
        return ChatRequest(
            {**asked, **rest},
            stream=stream,
            include_usage=stream,
            path="/v1/completions" if raw else "/v1/chat/completions",
            is_cached=optimization != "none",
            is_optimized=optimization == "full",
            takes_variant=optimization == "full",
        )

    def own_answer(self, answer: Json, request: ChatRequest, entry_id: str) -> Json:
        choice = answer["choices"][0] if isinstance(answer["choices"][0], dict) else {}
        message = choice.get("message")
        if not isinstance(message, dict):
            message = {"content": choice.get("text")}
        return {
            "id": answer.get("id"),
            "object": "generation",
            "created": answer.get("created"),
            "model": answer.get("model"),
            "text": message.get("content") or "",
            **{name: message[name] for name in ("reasoning_content", "tool_calls", "refusal") if message.get(name)},
            "finish_reason": choice.get("finish_reason"),
            "usage": _usage(answer),
        }

    def own_stream(self, answer: Json, request: ChatRequest) -> bytes:
        """The text as one event, what ends it as another."""
        return _event({"text": answer["text"]}) + _end(answer)

    def translator(self, request: ChatRequest, entry_id: str) -> Translator:
        return _GenerateTranslator(self, request, entry_id)


class _GenerateTranslator(Translator):
    """Events with pieces of text, and a last one with the answer but for its text."""

    def __init__(self, form: GenerateForm, request: ChatRequest, entry_id: str) -> None:
        self._form = form
        self._request = request
        self._entry_id = entry_id
        self._assembler = StreamAssembler()

    def add(self, chunk: Json) -> bytes:
        try:
            self._assembler.add(chunk)
        except UnstorableAnswer as reason:
            raise UpstreamDisconnected(f"The upstream's answer is not whole: {reason}.") from reason
        for choice in chunk["choices"]:
            delta = choice.get("delta")
            text = (delta.get("content") if isinstance(delta, dict) else None) or choice.get("text")
            if isinstance(text, str) and text and choice.get("index", 0) == 0:
                return _event({"text": text})
        return b""

    def finish(self) -> bytes:
        try:
            answer = self._assembler.response()
        except UnstorableAnswer as reason:
            raise UpstreamDisconnected(f"The upstream's answer is not whole: {reason}.") from reason
        if not answer["choices"]:
            raise UpstreamDisconnected("The upstream's stream ended without an answer.")
        self.answer = self._form.own_answer(answer, self._request, self._entry_id)
        return _end(self.answer)


def optimization_of(fields: Json) -> str:
    """Raises InvalidRequest for none of OPTIMIZATIONS."""
    given = fields.get("optimization")
    if given is not None and given not in OPTIMIZATIONS:
        raise InvalidRequest("'optimization' must be none, basic or full.", param="optimization")
    return given or "full"


def _messages(fields: Json) -> list[Any]:
    given = fields.get("messages")
    if given is None:
        prompt: list[Any] = [{"role": "user", "content": _text(fields, "prompt")}]
    elif fields.get("prompt") is not None:
        raise InvalidRequest("'prompt' and 'messages' exclude each other.", param="messages")
    elif isinstance(given, list) and given:
        prompt = given
    else:
        raise InvalidRequest("'messages' must be a list of messages, and not empty.", param="messages")
    return prompt if fields.get("system") is None else [{"role": "system", "content": _text(fields, "system")}, *prompt]


def _text(fields: Json, name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"'{name}' must be text that is not empty.", param=name)
    return value


def _flag(fields: Json, name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"'{name}' must be true or false.", param=name)
    return bool(value)


def _usage(answer: Json) -> Json:
    usage = usage_of(answer)
    prompt, completion = usage or (0, 0)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _event(value: Json) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


def _end(answer: Json) -> bytes:
    return _event({**answer, "text": ""}) + DONE
