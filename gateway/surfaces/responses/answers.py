"""A chat completion as a Response object, and back.

Each direction renders what the other form has a name for. What it has no name for is the difference between the
original and what the way back makes of the rendered answer (differences.py), and is kept under one key: EXTENSION in a
Response that was made of a chat completion, NATIVE in a chat completion that was made of a Response. Both ways are
therefore exact: `chat_answer(own_answer(x))` is x, and `own_answer(chat_answer(y))` is y.
"""

import hashlib
from typing import Any

import msgspec

from cache.errors import UnstorableAnswer
from gateway.surfaces.differences import difference, patched
from gateway.surfaces.responses.output_items import chat_message, items_of
from gateway.surfaces.surface import ChatRequest, Json
from gateway.surfaces.usage import PromptCacheTokens, prompt_cache_tokens

EXTENSION = "chat_completion"
"""In a Response: what its chat completion says beyond it, such as its id, further choices and unknown fields."""
NATIVE = "response"
"""In a chat completion: what its Response says beyond it, such as calls of built-in tools and ids of items."""

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_FINISH_REASONS = {reason: finish for finish, reason in _INCOMPLETE.items()}

_encode = msgspec.json.Encoder(order="deterministic").encode


def own_answer(answer: Json, request: ChatRequest, entry_id: str) -> Json:
    """The Response object of a chat completion."""
    native = _native(answer)
    if native is not None:
        return native
    base = item_base(entry_id, answer.get("id"), answer.get("created"))
    response = {
        "id": response_id(base, request),
        "object": "response",
        **request.echo,
        **_rendered(answer, base, request.echo.get("tools")),
    }
    return {**response, EXTENSION: difference(_chat(response), answer) or {}}


def chat_answer(response: Json) -> Json:
    """The chat completion of a Response object. Raises UnstorableAnswer for what is none, or has not ended."""
    if response.get("object") != "response" or not isinstance(response.get("id"), str):
        raise UnstorableAnswer("the answer is not a response object")
    output = response.get("output")
    if not isinstance(output, list):
        raise UnstorableAnswer("the response has no output")
    if not all(isinstance(item, dict) and isinstance(item.get("type"), str) for item in output):
        raise UnstorableAnswer("an output item has no type")
    if response.get("error") is not None:
        raise UnstorableAnswer("the response is an error")
    if response.get("status", "completed") not in ("completed", "incomplete", None):
        raise UnstorableAnswer("the response has not ended")
    try:
        chat = _chat(response)
        if isinstance(beyond := response.get(EXTENSION), dict):
            translated: Json = patched(chat, beyond)
            return translated
        return {**chat, NATIVE: difference(_rendered(chat, "", None), response) or {}}
    except ValueError as error:
        raise UnstorableAnswer(f"'{EXTENSION}' of the response is {error}") from error
    except RecursionError as error:
        raise UnstorableAnswer("the response is nested too deep") from error


def item_base(entry_id: str, chat_id: Any, created: Any) -> str:
    """What the ids of all output items of one computed answer begin with, whatever its requests repeat."""
    named = [part or None if isinstance(part, str | int | float) else None for part in (chat_id, created)]
    return hashlib.blake2b(_encode([entry_id, *named]), digest_size=20).hexdigest()


def response_id(base: str, request: ChatRequest) -> str:
    """Differs for requests that share an answer and repeat different things."""
    return "resp_" + hashlib.blake2b(_encode([base, request.echo]), digest_size=24).hexdigest()


def begun(response_id: str, created: Any, model: Any, request: ChatRequest) -> Json:
    """The Response object of an answer that has just begun."""
    return {
        "id": response_id,
        "object": "response",
        **request.echo,
        "created_at": _seconds(created),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": model if isinstance(model, str) else "",
        "output": [],
        "usage": None,
    }


def _native(answer: Json) -> Json | None:
    """The Response object of which the chat completion was made, if it was."""
    if not isinstance(beyond := answer.get(NATIVE), dict):
        return None
    chat = {name: value for name, value in answer.items() if name != NATIVE}
    try:
        response: Json = patched(_rendered(chat, "", None), beyond)
    except ValueError:  # a field of this name that an upstream gave
        return None
    return response if isinstance(response.get("id"), str) else None


def _rendered(answer: Json, base: str, tools: Any) -> Json:
    """The part of a Response object that follows from a chat completion, the ids of its items from `base`."""
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    output = items_of(choice.get("message"), choice.get("logprobs"), base, tools)
    finish = choice.get("finish_reason")
    reason = _INCOMPLETE.get(finish) if isinstance(finish, str) else None
    if reason and output and "status" in output[-1]:
        output[-1]["status"] = "incomplete"
    tier = answer.get("service_tier")
    return {
        "created_at": _seconds(answer.get("created")),
        "status": "incomplete" if reason else "completed",
        "error": None,
        "incomplete_details": {"reason": reason} if reason else None,
        "model": answer["model"] if isinstance(answer.get("model"), str) else "",
        "output": output,
        "usage": _own_usage(answer.get("usage")),
        **({"service_tier": tier} if isinstance(tier, str) else {}),
    }


def _chat(response: Json) -> Json:
    """The part of a chat completion that follows from a Response object."""
    message, logprobs = chat_message(response["output"])
    details = response.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, dict) else None
    finish = _FINISH_REASONS.get(reason) if isinstance(reason, str) else None
    usage = _chat_usage(response.get("usage"))
    tier = response.get("service_tier")
    return {
        "id": response["id"],
        "object": "chat.completion",
        "created": int(_seconds(response.get("created_at"))),
        "model": response["model"] if isinstance(response.get("model"), str) else "",
        "choices": [
            {
                "index": 0,
                "message": message,
                "finish_reason": finish or ("tool_calls" if "tool_calls" in message else "stop"),
                **({"logprobs": {"content": logprobs}} if logprobs else {}),
            }
        ],
        **({"usage": usage} if usage else {}),
        **({"service_tier": tier} if isinstance(tier, str) else {}),
    }


def _seconds(value: Any) -> int | float:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else 0


def _count(value: Any) -> int | None:
    return value if type(value) is int else None


def _detail(usage: Json, details: str, name: str) -> int:
    inner = usage.get(details)
    return (_count(inner.get(name)) if isinstance(inner, dict) else None) or 0


def _own_usage(usage: Any) -> Json | None:
    if not isinstance(usage, dict):
        return None
    asked, said = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    if asked is None or said is None:
        return None
    total = _count(usage.get("total_tokens"))
    cached = prompt_cache_tokens(usage) or PromptCacheTokens(0, 0)
    return {
        "input_tokens": asked,
        "input_tokens_details": {
            "cached_tokens": cached.read,
            "cache_write_tokens": cached.written,
        },
        "output_tokens": said,
        "output_tokens_details": {"reasoning_tokens": _detail(usage, "completion_tokens_details", "reasoning_tokens")},
        "total_tokens": asked + said if total is None else total,
    }


def _chat_usage(usage: Any) -> Json | None:
    if not isinstance(usage, dict):
        return None
    asked, said = _count(usage.get("input_tokens")), _count(usage.get("output_tokens"))
    if asked is None or said is None:
        return None
    total = _count(usage.get("total_tokens"))
    asked_details = {
        name: count
        for name in ("cached_tokens", "cache_write_tokens")
        if (count := _detail(usage, "input_tokens_details", name))
    }
    reasoning = _detail(usage, "output_tokens_details", "reasoning_tokens")
    return {
        "prompt_tokens": asked,
        "completion_tokens": said,
        "total_tokens": asked + said if total is None else total,
        **({"prompt_tokens_details": asked_details} if asked_details else {}),
        **({"completion_tokens_details": {"reasoning_tokens": reasoning}} if reasoning else {}),
    }
