"""The answers of entries as plain text, for comparing them."""

from collections import OrderedDict
from typing import Any

import msgspec

from cache.errors import StoreUnavailable
from cache.exact import ExactCache

_KEPT_CHARACTERS = 16 * 2**20

_decode = msgspec.json.Decoder().decode


def plain_answer(body: bytes) -> str | None:
    """What a response says, where that is one text that came to its own end; else None.

    A tool call, a refusal, several choices, or an answer cut by a limit of length are for the question that was asked
    and no other.
    """
    try:
        response = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    choices = response.get("choices") if isinstance(response, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        return None
    choice: dict[str, Any] = choices[0]
    message = choice.get("message", choice)
    if choice.get("finish_reason") != "stop" or not isinstance(message, dict):
        return None
    if any(message.get(field) for field in ("tool_calls", "function_call", "refusal", "audio")):
        return None
    text = message.get("content", message.get("text"))
    return text if isinstance(text, str) and text.strip() else None


class Answers:
    """The texts of answers, read from the store that gateways share; without one, those that were heard lately."""

    def __init__(self, store: ExactCache | None) -> None:
        self._store = store
        self._heard: OrderedDict[str, str] = OrderedDict()
        self._characters = 0

    def hear(self, entry: str, text: str) -> None:
        self.forget(entry)
        self._heard[entry] = text
        self._characters += len(text)
        while self._characters > _KEPT_CHARACTERS:
            self._characters -= len(self._heard.popitem(last=False)[1])

    def forget(self, entry: str) -> None:
        self._characters -= len(self._heard.pop(entry, ""))

    async def of(self, entry: str) -> str | None:
        """None where the entry is gone. Raises StoreUnavailable where nobody can say."""
        if (text := self._heard.get(entry)) is not None:
            self._heard.move_to_end(entry)
            return text
        if self._store is None:
            raise StoreUnavailable(f"the answer of {entry} was not heard here")
        kept = await self._store.entry(entry)
        if kept is None or (text := plain_answer(kept.body)) is None:
            return None
        self.hear(entry, text)
        return text
