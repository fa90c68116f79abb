"""A turn of the assistant: blocks of Messages, and a message of chat completions; in requests and answers alike.

A chat message has thoughts, a text and tool calls, in this order. `blocks_of` makes blocks of it. Blocks that it would
not make again, because of their kind or order, are kept whole in the message, as `anthropic.content`.
"""

from collections.abc import Iterator
from typing import Any, TypeGuard

from gateway.surfaces.messages.arguments import arguments_of, input_of
from gateway.surfaces.messages.content import EXTRA, MARKER, left, with_extra
from gateway.surfaces.surface import Json

THINKING_BLOCKS = "thinking_blocks"
THINKING = ("thinking", "redacted_thinking")


def chat_message(blocks: list[Json], content: Any) -> Json:
    """The chat message of these blocks, whose texts are `content`.

    `blocks_of` is the inverse, but for markers and for the null fields of a block, which count as absent.

    Raises ValueError for an input of a tool that JSON cannot say.
    """
    blocks = [left(block) for block in blocks]
    message: Json = {"role": "assistant", "content": content}
    thoughts = [block for block in blocks if block["type"] in THINKING]
    reasoning = _joined(thoughts)
    if reasoning:
        message["reasoning_content"] = reasoning
    if thoughts and thoughts != _unsigned(reasoning):
        message[THINKING_BLOCKS] = thoughts
    if calls := [_call_of(block) for block in blocks if is_call(block)]:
        message["tool_calls"] = calls
    unmarked = [left(block, MARKER) for block in blocks]
    if [left(block, MARKER) for block in blocks_of(message)] != unmarked:
        message[EXTRA] = {"content": unmarked}
    return message


def blocks_of(message: Json) -> list[Json]:
    """The blocks of a chat message."""
    extra = message.get(EXTRA)
    kept = extra.get("content") if isinstance(extra, dict) else None
    if is_blocks(kept):
        return kept
    calls = (tool_use_of(call, at) for at, call in enumerate(calls_of(message)))
    return [*_thoughts_of(message), *_texts_of(message), *calls]


def is_blocks(value: Any) -> TypeGuard[list[Json]]:
    return isinstance(value, list) and all(
        isinstance(block, dict) and isinstance(block.get("type"), str) for block in value
    )


def is_call(block: Json) -> bool:
    """Whether a block is a call of the client's tool that a chat completion can say."""
    texts = (block.get("id"), block.get("name"))
    return block["type"] == "tool_use" and all(isinstance(text, str) for text in texts) and _is_object(block, "input")


def _call_of(block: Json) -> Json:
    function = {"name": block["name"], "arguments": arguments_of(block["input"])}
    call = {"id": block["id"], "type": "function", "function": function}
    return with_extra(call, block, left(block, "type", "id", "name", "input", MARKER))


def calls_of(message: Json) -> Iterator[Json]:
    """The calls of functions in a chat message, or in a delta of one."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict) and _is_object(call, "function"):
            yield call


def tool_use_of(call: Json, at: int) -> Json:
    """The block of a tool call, the one with index `at` in its message."""
    extra = call.get(EXTRA)
    function = call["function"]
    return {
        **(extra if isinstance(extra, dict) else {}),
        **({MARKER: call[MARKER]} if MARKER in call else {}),
        "type": "tool_use",
        "id": text_in(call, "id") or f"call_{at}",
        "name": text_in(function, "name"),
        "input": input_of(text_in(function, "arguments")),
    }


def _texts_of(message: Json) -> list[Json]:
    content = message.get("content")
    if isinstance(content, list):
        return [_text_block(part) for part in content if _is_text(part)]
    text = said_in(message)
    return [{"type": "text", "text": text}] if text else []


def said_in(message: Json) -> str:
    """What a chat message says to the user."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part["text"] for part in content if _is_text(part))
    return text_in(message, "content") or text_in(message, "refusal")


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _text_block(part: Json) -> Json:
    extra = part.get(EXTRA)
    said = {name: value for name, value in part.items() if name != EXTRA}
    return {**extra, **said} if isinstance(extra, dict) else said


def thought_in(message: Json) -> str:
    """The thoughts in a chat message, or in a delta of one, under whichever name."""
    return text_in(message, "reasoning_content") or text_in(message, "reasoning")


def _thoughts_of(message: Json) -> list[Json]:
    reasoning = thought_in(message)
    blocks = message.get(THINKING_BLOCKS)
    if not is_blocks(blocks):
        return _unsigned(reasoning)
    merged = _merged([block for block in blocks if block["type"] in THINKING])
    return merged if any(text_in(block, "thinking") for block in merged) else [*_unsigned(reasoning), *merged]


def _merged(blocks: list[Json]) -> list[Json]:
    """Thinking that came in pieces, of which the last has the signature, as one block; what says nothing is none."""
    runs: list[list[Json]] = []
    for block in blocks:
        last = runs[-1][-1] if runs else {}
        if _is_plain(last) and not last["signature"] and _is_plain(block):
            runs[-1].append(block)
        else:
            runs.append([block])
    merged = [run[0] if len(run) == 1 else {**run[-1], "thinking": _joined(run)} for run in runs]
    return [block for block in merged if not _is_plain(block) or block["thinking"] or block["signature"]]


def _joined(thoughts: list[Json]) -> str:
    return "".join(text_in(block, "thinking") for block in thoughts)


def _is_plain(block: Json) -> bool:
    return (
        block.keys() == {"type", "thinking", "signature"}
        and isinstance(block["thinking"], str)
        and isinstance(block["signature"], str)
    )


def _unsigned(reasoning: str) -> list[Json]:
    return [{"type": "thinking", "thinking": reasoning, "signature": ""}] if reasoning else []


def _is_object(fields: Json, name: str) -> bool:
    return isinstance(fields.get(name), dict)


def text_in(fields: Json, name: str) -> str:
    """The text under this name; the empty one if there is none."""
    value = fields.get(name)
    return value if isinstance(value, str) else ""
