"""Conversations that clients continue by the id of a response (`previous_response_id`)."""

from collections.abc import Sequence

import msgspec

from cache.errors import CorruptEntry, StoreUnavailable
from cache.stores.conversations import Conversations, Record, decode_record, encode_record
from gateway import metrics
from gateway.proxy.inference_request import InferenceRequest
from gateway.surfaces.responses.input_items import input_list
from gateway.surfaces.surface import Json

PATH = "/v1/responses"


class _References(msgspec.Struct):
    """What a request refers to; the rest of its body is read when the conversation is known."""

    previous_response_id: str | None = None


class ConversationKeeper:
    """Keeps the responses that this gateway has translated, for the tenants that got them.

    A response of an upstream that has the Responses API is kept there.
    """

    def __init__(self, store: Conversations) -> None:
        self._store = store

    def forget(self, namespace: str) -> int:
        """Removes a tenant's responses from this process; returns how many."""
        return self._store.forget(namespace)

    async def keep(self, inference: InferenceRequest, answer: Json) -> bool:
        """Keep a response before its client knows its id, unless the client says `store: false`.

        False for one that could not be kept: it is served, and cannot be continued.
        """
        if inference.family != "responses" or inference.asked.echo.get("store") is False:
            return True
        asked = input_list(msgspec.json.decode(inference.body).get("input"))
        record = Record([*inference.conversation, *asked], answer, inference.key.id)
        try:
            await self._store.save(inference.key.namespace, answer["id"], encode_record(record))
        except StoreUnavailable:
            metrics.store_failures.labels("conversations").inc()
            return False
        return True

    async def continued_by(self, namespace: str, body: bytes) -> Sequence[Json] | None:
        """The items of the conversation that a request continues; None if it continues none that is known here.

        Raises StoreUnavailable.
        """
        if b"previous_response_id" not in body:
            return None
        try:
            previous = msgspec.json.decode(body, type=_References).previous_response_id
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None  # parse_request says what is wrong
        record = None if previous is None else await self.record(namespace, previous)
        return None if record is None else record.items

    async def record(self, namespace: str, response_id: str) -> Record | None:
        """A response and what it answered. Raises StoreUnavailable."""
        data = await self._store.load(namespace, response_id)
        try:
            return None if data is None else decode_record(data)
        except CorruptEntry:
            return None

    async def delete(self, namespace: str, response_id: str) -> bool:
        """Forget a response; False if it is not known here. Raises StoreUnavailable."""
        return await self._store.delete(namespace, response_id)
