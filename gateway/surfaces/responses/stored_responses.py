"""What clients get of a response that was kept: the response, a page of the items that it answered, its deletion."""

from collections.abc import Mapping
from typing import Any

from cache.stores.conversations import Record
from gateway.errors import InvalidRequest, NotFound
from gateway.surfaces.surface import Json

_DEFAULT_LIMIT = 20
_MAX_LIMIT = 100
_ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
_WITH_STATUS = ("message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output")


def input_items(record: Record, query: Mapping[str, str]) -> Json:
    """A page of GET /v1/responses/{id}/input_items, by the parameters `order`, `limit` and `after`.

    Raises InvalidRequest, naming the parameter.
    """
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("'order' must be asc or desc.", param="order")
    limit = query.get("limit", str(_DEFAULT_LIMIT))
    if not limit.isascii() or not limit.isdigit() or len(limit) > 3 or not 1 <= int(limit) <= _MAX_LIMIT:
        raise InvalidRequest(f"'limit' must be a number from 1 to {_MAX_LIMIT}.", param="limit")
    items = [_whole(item, number, record.response) for number, item in enumerate(record.input)]
    if order == "desc":
        items.reverse()
    if (after := query.get("after")) is not None:
        places = [place for place, item in enumerate(items) if item.get("id") == after]
        if not places:
            raise InvalidRequest("'after' must be the id of an item of this response's input.", param="after")
        items = items[places[-1] + 1 :]
    page = items[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > len(page),
    }


def deleted(response_id: str) -> Json:
    """The answer to DELETE /v1/responses/{id}."""
    return {"id": response_id, "object": "response", "deleted": True}


def response_not_found(response_id: str) -> NotFound:
    """The error for an id in the path that nobody knows, in OpenAI's words."""
    return NotFound(f"Response with id '{response_id[:100]}' not found.")


def _whole(item: Json, number: int, response: Json) -> Json:
    """An item in full, with an id: clients leave out what follows."""
    kind = item.get("type") or ("message" if "role" in item else "item_reference")
    prefix = _ID_PREFIXES.get(kind, "item")
    item_id = f"{prefix}_{str(response['id']).removeprefix('resp_')[:48]}{number:04x}"
    given = {name: value for name, value in item.items() if value is not None}
    status = {"status": "completed"} if kind in _WITH_STATUS else {}
    whole = {"id": item_id, **status, **given, "type": kind}
    if kind == "message":
        whole["content"] = _parts(whole.get("content"), whole.get("role"))
    return whole


def _parts(content: Any, role: Any) -> Any:
    if not isinstance(content, str):
        return content
    if role == "assistant":
        return [{"type": "output_text", "text": content, "annotations": []}]
    return [{"type": "input_text", "text": content}]
