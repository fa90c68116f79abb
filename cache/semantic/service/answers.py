"""The answers of entries as plain text, for comparing them."""

from collections import OrderedDict
from typing import NamedTuple

import msgspec

from cache.errors import StoreUnavailable
from cache.exact import ExactCache
from cache.semantic.service.records import Record

_KEPT_CHARACTERS = 16 * 2**20
_OTHER_CONTENT = ("tool_calls", "function_call", "refusal", "audio")


def plain_answer(body: bytes) -> str | None:
    """The text of a chat completion, if that is one complete text; else None.

    A tool call, a refusal, several choices, or an answer cut by a length limit are valid for their own question only.
    """
    try:
        response = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    match response:
        case {"choices": [{"finish_reason": "stop", "message": {"content": str(text)} as message}]} if text.strip():
            return None if any(message.get(field) for field in _OTHER_CONTENT) else text
    return None


class KnownAnswer(NamedTuple):
    """The text of an answer, and its record."""

    record: Record
    text: str


class Answers:
    """The texts of answers, read from the store that gateways share; without one, the latest ones here."""

    def __init__(self, store: ExactCache | None) -> None:
        self._store = store
        self._heard: OrderedDict[str, KnownAnswer] = OrderedDict()
        self._characters = 0

    def record_answer(self, record: Record, text: str) -> None:
        self.forget(record.entry)
        self._heard[record.entry] = KnownAnswer(record, text)
        self._characters += len(text)
        while self._characters > _KEPT_CHARACTERS:
            self._characters -= len(self._heard.popitem(last=False)[1].text)

    def forget(self, entry: str) -> None:
        heard = self._heard.pop(entry, None)
        if heard is not None:
            self._characters -= len(heard.text)

    def earlier(self, entry: str) -> KnownAnswer | None:
        """The last answer that came under this entry, even if it has expired since; with its record as it was then."""
        return self._heard.get(entry)

    async def of(self, record: Record) -> KnownAnswer | None:
        """None if the entry is gone. Raises StoreUnavailable if that is unknown, or it has another answer now."""
        heard = self._heard.get(record.entry)
        if heard is not None and heard.record.created == record.created:
            self._heard.move_to_end(record.entry)
            return KnownAnswer(record, heard.text)
        if self._store is None:
            raise StoreUnavailable(f"the answer of {record.entry} was not heard here")
        kept = await self._store.entry(record.entry)
        if kept is None or (text := plain_answer(kept.body)) is None:
            return None
        if kept.created != record.created:
            raise StoreUnavailable(f"the answer of {record.entry} was computed anew")
        self.record_answer(record, text)
        return KnownAnswer(record, text)
