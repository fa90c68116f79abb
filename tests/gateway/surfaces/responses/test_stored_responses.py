"""What clients are told of a stored response: pages of its input, in the form of OpenAI's SDK."""

from typing import Any

import pytest
from openai.types.responses import ResponseItemList

from cache.stores.conversations import Record
from gateway.errors import InvalidRequest
from gateway.surfaces.responses.stored_responses import deleted, input_items, response_not_found

Json = dict[str, Any]

ITEMS: list[Json] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"type": "reasoning", "id": "rs_1", "summary": []},
    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}", "status": None},
    {"type": "function_call_output", "call_id": "a", "output": "1"},
    {"type": "custom_tool_call", "call_id": "b", "name": "f", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "b", "output": "1"},
    {"role": "user", "content": [{"type": "input_text", "text": "and?"}]},
]
RECORD = Record(ITEMS, {"id": "resp_1", "output": [{"type": "message", "id": "msg_1"}]})


def test_items_are_listed_in_full() -> None:
    """Each item is one of the SDK's types, with an id of its own that stays the same."""
    page = input_items(RECORD, {"order": "asc"})
    listed = ResponseItemList.model_validate(page)
    assert [item.type for item in listed.data] == [item.get("type", "message") for item in ITEMS]
    assert len({item["id"] for item in page["data"]}) == len(ITEMS)
    assert page["data"][2]["id"] == "rs_1"
    assert page["data"][1]["content"] == [{"type": "output_text", "text": "hello", "annotations": []}]
    assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
    assert page == input_items(RECORD, {"order": "asc"})
    assert ITEMS[0] == {"role": "user", "content": "hi"}, "the items were changed"


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_pages_follow_each_other(order: str) -> None:
    """Pages after the last item of each are all items, in the order asked for, by default the newest first."""
    whole = input_items(RECORD, {"order": order})["data"]
    seen: list[Json] = []
    query = {"limit": "3", "order": order}
    while True:
        page = input_items(RECORD, query)
        seen += page["data"]
        if not page["has_more"]:
            break
        query = {**query, "after": page["last_id"]}
    assert seen == whole
    assert input_items(RECORD, {})["data"] == input_items(RECORD, {"order": "desc"})["data"]


def test_a_response_to_no_items_has_an_empty_page() -> None:
    """A response without input has a page without ids."""
    page = input_items(Record([], {"id": "resp_1", "output": []}), {})
    assert page == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"order": "up"}, "order"),
        ({"limit": "0"}, "limit"),
        ({"limit": "101"}, "limit"),
        ({"limit": "٣"}, "limit"),
        ({"limit": "9" * 5000}, "limit"),
        ({"after": "msg_unknown"}, "after"),
    ],
)
def test_a_parameter_that_cannot_be_read_is_named(query: dict[str, str], param: str) -> None:
    """A parameter of a page that is not in its range is named."""
    with pytest.raises(InvalidRequest) as raised:
        input_items(RECORD, query)
    assert raised.value.param == param


def test_the_conversation_goes_to_the_end_of_the_response() -> None:
    """The items of a record are those it answered, as they were sent, and its output."""
    assert RECORD.items == [*ITEMS, {"type": "message", "id": "msg_1"}]


def test_a_deletion_and_a_missing_response_are_told_as_openai_does() -> None:
    """A deletion names the response, and a missing one is status 404."""
    assert deleted("resp_1") == {"id": "resp_1", "object": "response", "deleted": True}
    assert response_not_found("resp_1").status == 404
