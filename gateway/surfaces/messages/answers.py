"""A chat completion as a message, and a message as a chat completion. Neither direction loses anything.

What one form has no name for is kept in the other, in one field of the answer, as a difference: it makes the original
of the plain translation. `chat_answer(own_answer(x))` is `x`, and `own_answer(chat_answer(m))` is `m`. Blocks that a
chat message cannot say are in the message itself: assistant_turn.py.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, TypeGuard

from cache.errors import UnstorableAnswer
from gateway.surfaces.differences import difference, patched
from gateway.surfaces.messages.assistant_turn import blocks_of, calls_of, chat_message, is_blocks, said_in
from gateway.surfaces.messages.content import left
from gateway.surfaces.surface import Json
from gateway.surfaces.usage import prompt_cache_tokens

CHAT = "chat_completion"
"""The field of a message with what its chat completion has besides."""
NATIVE = "anthropic_message"
"""The field of a chat completion with what its message has besides."""
ID_PREFIX = "msg_"

_FINISH_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "compaction": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
_STOP_REASONS = {
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
_MAX_TOKENS = 2**53


def own_answer(answer: Json, entry_id: str) -> Json:
    """The message of a chat completion. Raises UnstorableAnswer for what JSON cannot say."""
    with _unstorable():
        plain = _plain_message(answer, blocks_of(_first_choice(answer)[1]), entry_id)
        return _with_difference(_restored(plain, answer.get(NATIVE)), answer)


def message_of(answer: Json, blocks: list[Json], opening: Json) -> Json:
    """The same where `blocks` and the fields in `opening` have been sent already."""
    with _unstorable():
        return _with_difference({**_plain_message(answer, blocks, ""), **opening}, answer)


def chat_answer(message: Json) -> Json:
    """The chat completion of a message. Raises UnstorableAnswer for what is no whole message."""
    plain = {name: value for name, value in message.items() if name != CHAT}
    if not is_message(plain):
        raise UnstorableAnswer("the answer is not a message")
    with _unstorable():
        completion = _completion(plain)
        restored = patched(completion, message[CHAT]) if CHAT in message else completion
    if not isinstance(restored, dict):
        raise UnstorableAnswer(f"'{CHAT}' of the message is not a difference of its chat completion")
    return restored


@contextlib.contextmanager
def _unstorable() -> Iterator[None]:
    try:
        yield
    except RecursionError as error:
        raise UnstorableAnswer("the answer is nested too deep") from error
    except ValueError as error:
        raise UnstorableAnswer(f"the answer has what JSON cannot say: {error}") from error


def is_message(message: Any) -> TypeGuard[Json]:
    """Whether this is a message as far as this package needs to know."""
    return (
        isinstance(message, dict)
        and message.get("type") == "message"
        and is_blocks(message.get("content"))
        and isinstance(message.get("usage"), dict | None)
    )


def own_id(answer: Json, entry_id: str) -> str:
    """The identifier of a message: that of its chat completion or, if this has none, of its entry."""
    given = answer.get("id")
    name = given if isinstance(given, str) and given else entry_id
    return name if name.startswith(ID_PREFIX) else ID_PREFIX + name


def _restored(message: Json, patch: Any) -> Json:
    """`message` as it was before it became a chat completion. A field that is no such patch counts as unknown."""
    if patch is None:
        return message
    try:
        made = patched(message, patch)
    except ValueError:
        return message
    return made if is_message(made) else message


def _with_difference(message: Json, answer: Json) -> Json:
    patch = difference(_completion(message), answer)
    return {**message, CHAT: patch} if patch else message


def _first_choice(answer: Json) -> tuple[Json, Json]:
    """The choice with the index 0, and its message."""
    choices = answer.get("choices")
    listed = [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []
    choice = next((choice for choice in listed if choice.get("index", 0) == 0), {})
    message = choice.get("message")
    return choice, message if isinstance(message, dict) else {}


def _plain_message(answer: Json, blocks: list[Json], entry_id: str) -> Json:
    choice, message = _first_choice(answer)
    sequence = choice.get("stop_reason")
    sequence = sequence if isinstance(sequence, str) and choice.get("finish_reason") == "stop" else None
    model = answer.get("model")
    return {
        "id": own_id(answer, entry_id),
        "type": "message",
        "role": "assistant",
        "model": model if isinstance(model, str) else "",
        "content": blocks,
        "stop_reason": "stop_sequence" if sequence is not None else _stop_reason(choice, message),
        "stop_sequence": sequence,
        "usage": _usage(answer.get("usage")),
    }


def _stop_reason(choice: Json, message: Json) -> str | None:
    reason = choice.get("finish_reason")
    if not isinstance(reason, str) or not reason:
        return None
    if reason in _FINISH_REASONS:  # some servers of chat completions say Anthropic's names
        return reason
    if reason in _STOP_REASONS:
        return _STOP_REASONS[reason]
    if next(calls_of(message), None):  # a call that the client demanded ends with "stop"
        return "tool_use"
    return "refusal" if message.get("refusal") and said_in(message) == message["refusal"] else "end_turn"


def _usage(usage: Any) -> Json:
    """Anthropic counts the prompt's tokens that were read from a cache, or written to it, apart from the others."""
    counts = usage if isinstance(usage, dict) else {}
    read, written = prompt_cache_tokens(counts) or (0, 0)
    made: Json = {
        "input_tokens": max(0, _count(counts, "prompt_tokens") - read - written),
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": read,
        "output_tokens": _count(counts, "completion_tokens"),
    }
    if reasoning := _count(counts.get("completion_tokens_details"), "reasoning_tokens"):
        made["output_tokens_details"] = {"thinking_tokens": reasoning}
    return made


def _count(counts: Any, name: str) -> int:
    value = counts.get(name) if isinstance(counts, dict) else None
    return value if type(value) is int and 0 <= value <= _MAX_TOKENS else 0


def _completion(message: Json) -> Json:
    """The chat completion of a message that has no patch."""
    completion = _plain_completion(message)
    plain = _plain_message(completion, blocks_of(completion["choices"][0]["message"]), "")
    patch = difference(plain, message)
    return {**completion, NATIVE: patch} if patch else completion


def _plain_completion(message: Json) -> Json:
    blocks: list[Json] = message["content"]
    text = "".join(block["text"] for block in blocks if block["type"] == "text" and isinstance(block.get("text"), str))
    reason = message.get("stop_reason")
    choice: Json = {
        "index": 0,
        "message": chat_message(blocks, text or None),
        "finish_reason": _FINISH_REASONS.get(reason, "stop") if isinstance(reason, str) else None,
    }
    if reason == "stop_sequence" and isinstance(message.get("stop_sequence"), str):
        choice["stop_reason"] = message["stop_sequence"]
    return {
        "id": message.get("id"),
        "object": "chat.completion",
        "created": 0,  # a message does not say
        "model": message.get("model"),
        "choices": [choice],
        "usage": _chat_usage(message.get("usage")),
    }


def _chat_usage(usage: Any) -> Json:
    read, written = _count(usage, "cache_read_input_tokens"), _count(usage, "cache_creation_input_tokens")
    prompt = _count(usage, "input_tokens") + read + written
    answer = _count(usage, "output_tokens")
    made: Json = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
    if read or written:
        made["prompt_tokens_details"] = left({"cached_tokens": read, "cache_write_tokens": written or None})
    details = usage.get("output_tokens_details") if isinstance(usage, dict) else None
    if thinking := _count(details, "thinking_tokens"):
        made["completion_tokens_details"] = {"reasoning_tokens": thinking}
    return made
