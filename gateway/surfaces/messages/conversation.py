"""The system prompt and the turns of a request as messages of chat completions."""

from collections.abc import Iterator
from typing import Any

from gateway.errors import InvalidRequest
from gateway.surfaces.messages.assistant_turn import THINKING, chat_message, is_call
from gateway.surfaces.messages.content import (
    EXTRA,
    MARKER,
    Untranslatable,
    blocks_in,
    content_of,
    left,
    objects,
    part_of,
    text_of,
    with_extra,
)
from gateway.surfaces.surface import Json

# Claude Code's names for what it adds to the user's turns.
_USERS = ("user", "ctx", "msg")
# A block of the system prompt by which Claude Code reports its use to Anthropic. It says nothing to a model, and is not
# the same in two sessions.
_BILLING = "x-anthropic-billing-header:"


def chat_messages(system: Any, messages: Any, untranslatable: Untranslatable) -> list[Json]:
    """The messages of a chat completion. Raises InvalidRequest.

    A turn with the results of tools is one message for each result, and one for the rest, in this order: a result after
    a text is read as if it were before, for no server takes it otherwise.
    """
    made: list[Json] = []
    if isinstance(system, list):
        system = [block for block in system if not _is_billing(block)]
    if system not in (None, "", []):
        made.append({"role": "system", "content": _content(system, "system", untranslatable)})
    for at, message in enumerate(objects(messages, "messages")):
        made += _turn(message, f"messages[{at}]", untranslatable)
    return made


def _is_billing(block: Any) -> bool:
    text = block.get("text") if isinstance(block, dict) else None
    return isinstance(text, str) and text.startswith(_BILLING)


def _turn(message: Json, field: str, untranslatable: Untranslatable) -> list[Json]:
    role = message.get("role")
    if role == "assistant":
        made = [_assistant(blocks_in(message.get("content"), f"{field}.content"), f"{field}.content", untranslatable)]
    elif role == "system":
        content = _content(message.get("content"), f"{field}.content", untranslatable)
        made = [{"role": role, "content": content}]
    elif role in _USERS:
        made = list(_user(blocks_in(message.get("content"), f"{field}.content"), f"{field}.content", untranslatable))
    else:
        expected = f"'{field}.role' must be 'user', 'assistant' or 'system'."
        raise InvalidRequest(expected, param=f"{field}.role")
    rest = left(message, "content", "role") | ({} if role in ("user", "assistant", "system") else {"role": role})
    if rest:
        made[-1] = {**made[-1], EXTRA: {**made[-1].get(EXTRA, {}), "message": rest}}
    return made


def _content(content: Any, field: str, untranslatable: Untranslatable) -> str | list[Json]:
    blocks = blocks_in(content, field)
    return content_of(part_of(block, f"{field}[{at}]", untranslatable) for at, block in enumerate(blocks))


def _user(blocks: list[Json], field: str, untranslatable: Untranslatable) -> Iterator[Json]:
    parts: list[Json] = []
    for at, block in enumerate(blocks):
        if block["type"] == "tool_result":
            yield _tool_result(block, f"{field}[{at}]", untranslatable)
        else:
            parts.append(part_of(block, f"{field}[{at}]", untranslatable))
    if parts or not any(block["type"] == "tool_result" for block in blocks):
        yield {"role": "user", "content": content_of(parts)}


def _tool_result(block: Json, field: str, untranslatable: Untranslatable) -> Json:
    content = _content(block.get("content"), f"{field}.content", untranslatable)
    call = text_of(block, "tool_use_id", field)
    message: Json = {"role": "tool", "tool_call_id": call, "content": content}
    failed = block.get("is_error")
    if failed is not None and failed is not False:
        message["is_error"] = failed
    rest = left(block, "type", "tool_use_id", "content", "is_error", MARKER)
    return with_extra(message, block, {"tool_result": rest} if rest else {})


def _assistant(blocks: list[Json], field: str, untranslatable: Untranslatable) -> Json:
    parts: list[Json] = []
    for at, block in enumerate(blocks):
        place = f"{field}[{at}]"
        if block["type"] == "text":
            parts.append(part_of(block, place, untranslatable))
        elif block["type"] == "tool_use":
            if not is_call(block):
                expected = f"'{place}' must have an 'id' and a 'name' that are texts, and an 'input' that is an object."
                raise InvalidRequest(expected, param=place)
        elif block["type"] in THINKING:
            text_of(block, "thinking" if block["type"] == "thinking" else "data", place)
        else:
            untranslatable.add(f"{place}.type", f"is {block['type']!r}")
    try:
        return chat_message(blocks, content_of(parts) if parts or not blocks else None)
    except ValueError as error:
        raise InvalidRequest(f"'{field}' has an input of a tool that is not JSON.", param=field) from error
