"""Input items as the messages of a chat completion.

An assistant's reasoning, message and calls that follow each other are one message. Of an item, null members, its `id`
and its `status` say nothing; of reasoning the id stays, for it may stand for text that the item does not show.
`input_text`, `output_text` and `text` are one kind of part, as are `input_image` and `image_url`, `input_file` and
`file`: some clients send chat completions' parts. A text alone is a message's whole content.

What messages have no place for is in `details`, each with the index of its message:

    reasoning   reasoning items, without the text if it is all in `reasoning_content`
    item        further members of a message or of a tool's output
    parts       [index of the part, its further members] of a message's content
    calls       [index of the call, its further members] of a message's tool calls
    no_message  true if there is reasoning, and neither a message nor a call

An item or part that no message can have stays as it is among the messages; only an item has a `type` there.
"""

from collections.abc import Sequence
from typing import Any

from gateway.errors import InvalidRequest
from gateway.surfaces.responses.tools import not_in_chat, qualified
from gateway.surfaces.surface import Json

_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text")
# Parts that are the same in chat completions, or that clients already send in their form.
_CHAT_PARTS = ("input_audio", "image_url", "file", "refusal")
# Members of a message that would be taken for those that other items make.
_MADE_OF_ITEMS = ("tool_calls", "tool_call_id", "function_call", "reasoning_content", "reasoning", "refusal")
# Of each kind of call: its kind in chat completions, and the field of what it calls with.
_CALLS = {"function_call": ("function", "arguments"), "custom_tool_call": ("custom", "input")}
_OUTPUTS = {"function_call_output": "function", "custom_tool_call_output": "custom"}


def input_list(given: Any) -> list[Any]:
    """The items of a request's `input`. Raises InvalidRequest."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list | None):
        raise InvalidRequest("'input' must be text or a list of items.", param="input")
    return given or []


class InputReader:
    """Appends to `messages` what input items say. `untranslatable` is about the first that is no message."""

    def __init__(self, messages: list[Json]) -> None:
        self.messages = messages
        self.details: list[Json] = []
        self.untranslatable: InvalidRequest | None = None
        self._turn: Json | None = None  # the assistant's message to which the next item may belong
        self._said = self._called = False  # whether it has content, and calls
        self._reasoning: list[Json] = []
        self._further_of_calls: list[Any] = []
        self._kinds: dict[str, str] = {}  # of calls, by their ids

    def read(self, items: Sequence[Any]) -> None:
        """Raises InvalidRequest, naming the item."""
        for number, item in enumerate(items):
            param = f"input[{number}]"
            if not isinstance(item, dict):
                raise InvalidRequest(f"'{param}' must be an object.", param=param)
            self._read_item({name: value for name, value in item.items() if value is not None}, param)
        self._end_turn()

    def _read_item(self, item: Json, param: str) -> None:
        kind = item.get("type", "message" if "role" in item else "item_reference")
        if not isinstance(kind, str) or (kind == "item_reference" and "id" not in item):
            raise InvalidRequest(
                f"'{param}.type' must be the kind of an item, such as \"message\".", param=f"{param}.type"
            )
        if kind == "message":
            self._read_message(item, param)
        elif kind == "reasoning":
            self._read_reasoning(item, param)
        elif kind in _CALLS:
            self._read_call(kind, item, param)
        elif kind in _OUTPUTS:
            self._read_output(kind, item, param)
        else:
            self._refuse(not_in_chat(f"{param}.type", f"an item of the kind {kind[:50]!r}"))
            self._append({**item, "type": kind})

    def _refuse(self, error: InvalidRequest) -> None:
        self.untranslatable = self.untranslatable or error

    def _append(self, message: Json, **details: Any) -> None:
        self._end_turn()
        self.messages.append(message)
        self._note(details)

    def _note(self, details: Json) -> None:
        """Keep what there is of the details of the last message."""
        if kept := {name: value for name, value in details.items() if value}:
            index = len(self.messages) - 1
            if not self.details or self.details[-1]["message"] != index:
                self.details.append({"message": index})
            self.details[-1].update(kept)

    def _read_message(self, item: Json, param: str) -> None:
        role = item.get("role")
        if not isinstance(role, str):
            raise InvalidRequest(f"'{param}.role' must be one of {', '.join(_ROLES)}.", param=f"{param}.role")
        if role not in _ROLES or any(name in item for name in _MADE_OF_ITEMS):
            self._refuse(not_in_chat(f"{param}.role", "a message with this role, or with members of other items,"))
            self._append({**item, "type": "message"})
            return
        content, parts = self._content(item.get("content"), f"{param}.content")
        further = _further(item, "role", "content", "name")
        named = {"name": item["name"]} if "name" in item else {}
        if role != "assistant":
            self._append({"role": role, "content": content, **named}, item=further, parts=parts)
            return
        turn = self._assistant(begins=self._said or self._called)
        turn.update(_assistant_content(content), **named)
        self._said = True
        self._note({"item": further, "parts": parts})

    def _assistant(self, begins: bool) -> Json:
        """The assistant's message to which an item belongs: a new one if it `begins`."""
        turn = self._turn
        if begins or turn is None:
            turn = {"role": "assistant", "content": None}
            self._append(turn)
            self._turn, self._said, self._called = turn, False, False
        return turn

    def _end_turn(self) -> None:
        if self._turn is None:
            return
        turn, reasoning, calls = self._turn, self._reasoning, self._further_of_calls
        self._turn, self._reasoning, self._further_of_calls = None, [], []
        texts = [text for item in reasoning for text in _reasoning_texts(item)]
        if texts:
            turn["reasoning_content"] = "\n\n".join(texts)
        no_message = not self._said and not self._called
        if no_message:
            turn["content"] = ""
        self._note({"reasoning": _reasoning_details(reasoning), "calls": calls, "no_message": no_message})

    def _read_reasoning(self, item: Json, param: str) -> None:
        for name in ("content", "summary"):
            for part in _list(item.get(name, []), f"{param}.{name}"):
                if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                    raise InvalidRequest(f"'{param}.{name}' must be a list of texts.", param=f"{param}.{name}")
        self._assistant(begins=self._said or self._called)
        self._reasoning.append(item)

    def _read_call(self, kind: str, item: Json, param: str) -> None:
        chat_kind, argument = _CALLS[kind]
        for name in ("call_id", "name", argument):
            if not isinstance(item.get(name), str):
                raise InvalidRequest(f"'{param}.{name}' must be text.", param=f"{param}.{name}")
        calls = self._assistant(begins=False).setdefault("tool_calls", [])
        namespace = item.get("namespace")
        name = qualified(namespace, item["name"]) if isinstance(namespace, str) else item["name"]
        called = {"name": name, argument: item[argument]}
        calls.append({"id": item["call_id"], "type": chat_kind, chat_kind: called})
        self._kinds[item["call_id"]] = chat_kind
        self._called = True
        if further := _further(item, "call_id", "name", argument):
            self._further_of_calls.append([len(calls) - 1, further])

    def _read_output(self, kind: str, item: Json, param: str) -> None:
        call_id = item.get("call_id")
        if not isinstance(call_id, str):
            raise InvalidRequest(f"'{param}.call_id' must be the id of a call.", param=f"{param}.call_id")
        content, parts = self._content(item.get("output"), f"{param}.output")
        further = _further(item, "call_id", "output")
        if _OUTPUTS[kind] != self._kinds.get(call_id, "function"):
            further["type"] = kind
        self._append({"role": "tool", "tool_call_id": call_id, "content": content}, item=further, parts=parts)

    def _content(self, content: Any, param: str) -> tuple[Any, list[Any]]:
        """The content of a message, and the details of its parts."""
        if isinstance(content, str):
            return content, []
        read: list[Json] = []
        details: list[Any] = []
        for number, part in enumerate(_list(content, param, "text or a list of parts")):
            chat_part, further = self._part(part, f"{param}[{number}]")
            read.append(chat_part)
            if further:
                details.append([number, further])
        if len(read) == 1 and (text := _plain(read[0], "text")) is not None:
            return text, details
        return read, details

    def _part(self, part: Any, param: str) -> tuple[Json, Json]:
        if not isinstance(part, dict) or not isinstance(kind := part.get("type"), str):
            raise InvalidRequest(f"'{param}' must be an object with a 'type', such as \"input_text\".", param=param)
        rest = {name: value for name, value in part.items() if value is not None and name != "type"}
        if kind in _TEXTS:
            if not isinstance(rest.get("text"), str):
                raise InvalidRequest(f"'{param}.text' must be text.", param=f"{param}.text")
            further = {name: value for name in ("annotations", "logprobs") if (value := rest.pop(name, None))}
            return {"type": "text", **rest}, further
        if kind == "input_image" and isinstance(rest.get("image_url"), str) and "file_id" not in rest:
            image = {"url": rest.pop("image_url"), **_moved(rest, "detail")}
            return {"type": "image_url", "image_url": image, **rest}, {}
        if kind == "input_file" and "file_url" not in rest and ("file_data" in rest or "file_id" in rest):
            file, further = _moved(rest, "file_data", "file_id", "filename"), _moved(rest, "detail")
            return {"type": "file", "file": file, **rest}, further
        if kind not in _CHAT_PARTS:
            self._refuse(not_in_chat(param, f"a part of the kind {kind[:50]!r} as it is here"))
        return {"type": kind, **rest}, {}


def _list(value: Any, param: str, wanted: str = "a list") -> list[Any]:
    if not isinstance(value, list):
        raise InvalidRequest(f"'{param}' must be {wanted}.", param=param)
    return value


def _moved(fields: Json, *names: str) -> Json:
    """These members, which are no longer in `fields`."""
    return {name: fields.pop(name) for name in names if name in fields}


def _further(item: Json, *known: str) -> Json:
    """The members of an item that a message has no place for."""
    return {name: value for name, value in item.items() if name not in (*known, "type", "id", "status")}


def _plain(part: Json, kind: str) -> str | None:
    """The text of a part of this kind that says nothing else."""
    text = part.get(kind)
    return text if part.get("type") == kind and len(part) == 2 and isinstance(text, str) else None


def _assistant_content(content: Any) -> Json:
    """Content and refusal of an assistant's message: a refusal that ends the parts has a field of its own."""
    if not isinstance(content, list) or not content or (refusal := _plain(content[-1], "refusal")) is None:
        return {"content": content}
    if len(content) == 1:
        return {"content": None, "refusal": refusal}
    if len(content) == 2 and (text := _plain(content[0], "text")) is not None:
        return {"content": text, "refusal": refusal}
    return {"content": content}


def _reasoning_texts(item: Json) -> list[str]:
    return [part["text"] for part in item.get("content", [])]


def _reasoning_details(items: list[Json]) -> list[Json]:
    """What reasoning items say beyond one text."""
    kept = [
        {name: value for name, value in item.items() if name not in ("type", "status") and value != []}
        for item in items
    ]
    if len(kept) == 1:
        content = kept[0].get("content", [])
        if len(content) == 1 and set(content[0]) == {"type", "text"} and content[0]["type"] == "reasoning_text":
            del kept[0]["content"]
            return kept if kept[0] else []
    return kept
