"""The message of a chat completion as output items of a Response, and back.

Output has one order: a reasoning item, a message, the calls.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from gateway.surfaces.responses.tools import qualified, unqualified
from gateway.surfaces.surface import Json

_encode = msgspec.json.Encoder().encode


def items_of(message: Any, logprobs: Any, base: str, tools: Any) -> list[Json]:
    """The output items of a message, their ids from `base`. What no item has a place for is left out.

    `tools` are those of the request, which say whether a function that is called is in a namespace.
    """
    if not isinstance(message, dict):
        return []
    items = []
    if reasoning := reasoning_in(message):
        items.append({**reasoning_item(base), "content": [{"type": "reasoning_text", "text": reasoning}]})
    calls = list(_call_items(message, base, tools))
    text, refusal = text_in(message.get("content")), message.get("refusal")
    refused = isinstance(refusal, str) and bool(refusal)
    parts: list[Json] = []
    if text or not (refused or items or calls):  # an answer that says nothing is an empty text
        parts.append({**empty_part("output_text"), "text": text, "logprobs": own_logprobs(logprobs)})
        parts[0]["annotations"] = _own_annotations(message.get("annotations"))
    if refused:
        parts.append({"type": "refusal", "refusal": refusal})
    if parts:
        items.append({**message_item(base), "status": "completed", "content": parts})
    return items + calls


def reasoning_in(message: Json) -> str:
    """The reasoning of a message, or of a delta, under either of the names that servers use."""
    return next(
        (text for name in ("reasoning_content", "reasoning") if (text := message.get(name)) and isinstance(text, str)),
        "",
    )


def text_in(content: Any) -> str:
    """The text of a message, or of a delta, which may come in parts."""
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        return "".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def reasoning_item(base: str) -> Json:
    """A reasoning item without its text. Open models show their reasoning itself, so it is no summary."""
    return {"id": f"rs_{base}00", "type": "reasoning", "summary": [], "content": []}


def message_item(base: str) -> Json:
    return {"id": f"msg_{base}00", "type": "message", "status": "in_progress", "role": "assistant", "content": []}


def empty_part(kind: str) -> Json:
    """A part of a message or of reasoning before its text."""
    if kind == "output_text":
        return {"type": kind, "annotations": [], "logprobs": [], "text": ""}
    return {"type": kind, "refusal" if kind == "refusal" else "text": ""}


def call_item(base: str, number: int, call: Json, used: set[str], tools: Any) -> Json | None:
    """The item of call `number` before its arguments; None if it is neither of a function nor of a custom tool.

    Its id is the call's, unless it has none or one that is in `used`, where it is added.
    """
    kind = "custom" if call.get("type") == "custom" else "function"
    tool = call.get(kind)
    if not isinstance(tool, dict):
        return None
    call_id, name = call.get("id"), tool.get("name")
    if not isinstance(call_id, str) or not call_id or call_id in used:
        call_id = f"call_{base}{number:02x}"
    used.add(call_id)
    namespace, name = unqualified(name if isinstance(name, str) else "", tools)
    common = {"call_id": call_id, "name": name, **({"namespace": namespace} if namespace is not None else {})}
    if kind == "custom":
        return {"id": f"ctc_{base}{number:02x}", "type": "custom_tool_call", **common, "input": ""}
    item = {"id": f"fc_{base}{number:02x}", "type": "function_call", "status": "in_progress", **common}
    return {**item, "arguments": ""}


def _call_items(message: Json, base: str, tools: Any) -> Iterator[Json]:
    used: set[str] = set()
    calls = message.get("tool_calls")
    for number, call in enumerate(calls if isinstance(calls, list) else ()):
        item = call_item(base, number, call, used, tools) if isinstance(call, dict) else None
        if item is None:
            continue
        if item["type"] == "custom_tool_call":
            yield {**item, "input": _text(call["custom"].get("input"))}
        else:
            yield {**item, "status": "completed", "arguments": _text(call["function"].get("arguments"))}


def _text(given: Any) -> str:
    """The arguments of a call, which some servers give as an object."""
    if given is None:
        return ""
    return given if isinstance(given, str) else _encode(given).decode()


def own_logprobs(logprobs: Any) -> list[Json]:
    """The log probabilities of an output text; none unless every token has its own."""
    tokens = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(tokens, list):
        return []
    own = [_own_token(token) for token in tokens]
    return [token for token in own if token is not None] if None not in own else []


def _own_token(token: Any) -> Json | None:
    own = _with_bytes(token)
    tops = token.get("top_logprobs") if own else None
    if own is None or not isinstance(tops, list | None):
        return None
    own_tops = [_with_bytes(top) for top in tops or ()]
    return None if None in own_tops else {**own, "top_logprobs": own_tops}


def _with_bytes(token: Any) -> Json | None:
    """A token with the bytes that a Response must have."""
    if not isinstance(token, dict) or not isinstance(text := token.get("token"), str):
        return None
    logprob, given = token.get("logprob"), token.get("bytes")
    if not isinstance(logprob, int | float) or isinstance(logprob, bool):
        return None
    if not isinstance(given, list) or not all(type(byte) is int for byte in given):
        given = list(text.encode("utf-8", "surrogatepass"))
    return {"token": text, "bytes": given, "logprob": logprob}


def _own_annotations(annotations: Any) -> list[Json]:
    """The annotations of an output text; none unless each is the citation of a URL, chat completions' only kind."""
    own = [_own_citation(annotation) for annotation in annotations] if isinstance(annotations, list) else []
    return [citation for citation in own if citation is not None] if None not in own else []


def _own_citation(annotation: Any) -> Json | None:
    citation = annotation.get("url_citation") if isinstance(annotation, dict) else None
    if not isinstance(citation, dict) or annotation.get("type") != "url_citation":
        return None
    whole = all(type(citation.get(name)) is int for name in ("start_index", "end_index"))
    whole = whole and all(isinstance(citation.get(name), str) for name in ("title", "url"))
    return {**citation, "type": "url_citation"} if whole else None


def chat_message(items: list[Json]) -> tuple[Json, list[Json]]:
    """The message that output items make, and the log probabilities of its text."""
    parts = [part for item in items if item.get("type") == "message" for part in _objects(item.get("content"))]
    texts = [part for part in parts if part.get("type") == "output_text" and isinstance(part.get("text"), str)]
    refusals = [part.get("refusal") for part in parts if part.get("type") == "refusal"]
    message: Json = {"role": "assistant", "content": "".join(part["text"] for part in texts) if texts else None}
    if refusal := "".join(text for text in refusals if isinstance(text, str)):
        message["refusal"] = refusal
    if reasoning := "\n\n".join(filter(None, (_reasoning_text(item) for item in items))):
        message["reasoning_content"] = reasoning
    if calls := [call for item in items if (call := _chat_call(item))]:
        message["tool_calls"] = calls
    flat = [annotation for part in texts for annotation in _objects(part.get("annotations"))]
    if citations := [_chat_citation(one) for one in flat if one.get("type") == "url_citation"]:
        message["annotations"] = citations
    return message, [token for part in texts for token in _objects(part.get("logprobs"))]


def _objects(values: Any) -> list[Json]:
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _reasoning_text(item: Json) -> str:
    """The text of a reasoning item; its summary where it does not show its reasoning."""
    if item.get("type") != "reasoning":
        return ""
    for name in ("content", "summary"):
        texts = [part.get("text") for part in _objects(item.get(name))]
        if text := "\n\n".join(text for text in texts if isinstance(text, str)):
            return text
    return ""


def _chat_call(item: Json) -> Json | None:
    named = {name: value if isinstance(value := item.get(name), str) else "" for name in ("call_id", "name")}
    if isinstance(namespace := item.get("namespace"), str):
        named["name"] = qualified(namespace, named["name"])
    if item.get("type") == "function_call" and isinstance(item.get("arguments"), str):
        function = {"name": named["name"], "arguments": item["arguments"]}
        return {"id": named["call_id"], "type": "function", "function": function}
    if item.get("type") == "custom_tool_call" and isinstance(item.get("input"), str):
        return {"id": named["call_id"], "type": "custom", "custom": {"name": named["name"], "input": item["input"]}}
    return None


def _chat_citation(annotation: Json) -> Json:
    inner = {name: value for name, value in annotation.items() if name != "type"}
    return {"type": "url_citation", "url_citation": inner}
