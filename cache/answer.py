"""One answer, two ways to travel: assembled from the chunks of a stream, and cut into chunks again.

Both directions keep what they do not know. A field of a delta that no specification names (reasoning of one server,
citations of another) is merged by its JSON type, and comes back in the replay.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from cache.errors import UnstorableAnswer

Json = dict[str, Any]

DONE = b"data: [DONE]\n\n"

# Sent again and again with one value, where other strings come in pieces.
_WHOLE_STRINGS = frozenset({"id", "type", "role", "object", "format"})
# Fields that a server repeats on every chunk; any other field of the response travels once, on the first.
_ON_EVERY_CHUNK = ("id", "object", "created", "model", "system_fingerprint", "service_tier")
# People read what a model thought before what it said.
_BEFORE_CONTENT = ("reasoning_content", "reasoning", "reasoning_details", "thinking")
_UNFINISHED = frozenset({"error", "abort", "aborted", "cancelled", "canceled", "timeout", "content_filter"})
_PIECE_CHARACTERS = 24
_MOST_PIECES = 256

_encode = msgspec.json.Encoder().encode


class Usage(NamedTuple):
    prompt_tokens: int
    completion_tokens: int


class _Text:
    """A string that arrives in pieces; joined once, so that a long answer costs linear time."""

    __slots__ = ("pieces",)

    def __init__(self, first: str) -> None:
        self.pieces = [first]


class StreamAssembler:
    """Builds the response object of a request that streamed, chunk by chunk."""

    def __init__(self) -> None:
        self._response: Json = {}
        self._choices: dict[int, Json] = {}
        self._usage: Json | None = None

    def add(self, chunk: Json) -> None:
        """Take in one decoded chunk. Raises UnstorableAnswer when it is not a chunk of an answer."""
        choices = chunk.get("choices")
        if "error" in chunk or not isinstance(choices, list):
            raise UnstorableAnswer("the stream carries an error" if "error" in chunk else "a chunk has no choices")
        for field, value in chunk.items():
            if field == "usage":
                self._usage = value or self._usage
            elif field != "choices" and (value is not None or field not in self._response):
                self._response.setdefault(field, value)
        for choice in choices:
            if not isinstance(choice, dict):
                raise UnstorableAnswer("a choice is not an object")
            self._add_choice(choice)

    def _add_choice(self, choice: Json) -> None:
        index = choice.get("index", 0)
        known = self._choices.get(index)
        if known is None:
            known = self._choices[index] = {"index": index}
        for field, value in choice.items():
            if field == "index":
                continue
            if field == "delta":
                message = known.setdefault("message", {})
                if isinstance(value, dict):
                    _merge(message, value)
            elif field == "finish_reason":
                known[field] = value or known.get(field)
            else:
                _merge(known, {field: value})

    def response(self) -> Json:
        """The response object so far, in the form of one that was not streamed."""
        response = dict(self._response)
        if isinstance(response.get("object"), str):
            response["object"] = response["object"].removesuffix(".chunk")
        response["choices"] = [_joined(self._choices[index]) for index in sorted(self._choices)]
        for choice in response["choices"]:
            for call in choice.get("message", {}).get("tool_calls") or ():
                if isinstance(call, dict):
                    call.pop("index", None)
        if self._usage is not None:
            response["usage"] = self._usage
        return response


def _merge(known: Json, news: Json) -> None:
    for field, value in news.items():
        before = known.get(field)
        if value is None:
            known.setdefault(field, None)
        elif isinstance(value, str) and field not in _WHOLE_STRINGS:
            if isinstance(before, _Text):
                if not (field == "name" and before.pieces == [value]):
                    before.pieces.append(value)
            else:
                known[field] = _Text(value)
        elif isinstance(value, dict):
            if not isinstance(before, dict):
                before = known[field] = {}
            _merge(before, value)
        elif isinstance(value, list):
            if not isinstance(before, list):
                before = known[field] = []
            _merge_list(before, value)
        else:
            known[field] = value


def _merge_list(known: list[Any], news: list[Any]) -> None:
    for item in news:
        if isinstance(item, dict) and isinstance(item.get("index"), int):
            same = next((old for old in known if isinstance(old, dict) and old.get("index") == item["index"]), None)
            if same is None:
                same = {}
                known.append(same)
            _merge(same, item)
        else:
            known.append(item)


def _joined(value: Any) -> Any:
    if isinstance(value, _Text):
        return "".join(value.pieces)
    if isinstance(value, dict):
        return {field: _joined(item) for field, item in value.items()}
    if isinstance(value, list):
        return [_joined(item) for item in value]
    return value


def check_whole(response: Json) -> None:
    """Raises UnstorableAnswer, saying why, unless every choice of the response came to its own end."""
    if "error" in response:
        raise UnstorableAnswer("the answer is an error")
    choices = response.get("choices")
    if not isinstance(choices, list) or not choices:
        raise UnstorableAnswer("the answer has no choices")
    for choice in choices:
        reason = choice.get("finish_reason") if isinstance(choice, dict) else None
        if not reason:
            raise UnstorableAnswer("a choice has no finish reason")
        if reason in _UNFINISHED:
            raise UnstorableAnswer(f"a choice ended with {reason!r}")


def usage_of(response: Json) -> Usage | None:
    """The tokens the answer reports, or None where it reports none."""
    usage = response.get("usage")
    if not isinstance(usage, dict):
        return None
    counts = [usage.get(field) for field in ("prompt_tokens", "completion_tokens")]
    return Usage(*(count if isinstance(count, int) else 0 for count in counts))


def stream_of(response: Json, include_usage: bool) -> bytes:
    """The response as the body of an event stream: role, pieces, finish reason, usage where asked, [DONE]."""
    return b"".join(b"data: " + _encode(chunk) + b"\n\n" for chunk in _chunks(response, include_usage)) + DONE


def _chunks(response: Json, include_usage: bool) -> Iterator[Json]:
    is_chat = response.get("object") != "text_completion"
    base = {field: response[field] for field in _ON_EVERY_CHUNK if field in response}
    if is_chat and isinstance(base.get("object"), str):
        base["object"] += ".chunk"
    extra = {f: v for f, v in response.items() if f not in _ON_EVERY_CHUNK and f not in ("choices", "usage")}
    if include_usage:
        base["usage"] = None
    for choice in response.get("choices", ()):
        for piece in _chat_pieces(choice) if is_chat else _text_pieces(choice):
            yield {**base, **extra, "choices": [{"index": choice.get("index", 0), **piece}]}
            extra = {}
    if include_usage:
        yield {**base, "choices": [], "usage": response.get("usage")}


def _chat_pieces(choice: Json) -> Iterator[Json]:
    message = choice.get("message") or {}
    opening: Json = {}
    pieces: list[Json] = []
    for field in sorted(message, key=lambda field: field not in _BEFORE_CONTENT):
        value = message[field]
        if isinstance(value, str) and field not in _WHOLE_STRINGS:
            opening[field] = ""
            pieces += _sliced(field, value, choice) if field == "content" else _sliced(field, value, {})
        elif field == "tool_calls" and isinstance(value, list) and value:
            pieces += [{"delta": {field: [{"index": i, **call}]}} for i, call in enumerate(value)]
        else:
            opening[field] = value
    yield {"delta": opening, "finish_reason": None}
    if choice.get("logprobs") and not any("logprobs" in piece for piece in pieces):
        pieces.append({"delta": {}, "logprobs": choice["logprobs"]})
    for piece in pieces:
        yield {**piece, "finish_reason": None}
    yield {"delta": {}, **_ending(choice, ("message",))}


def _text_pieces(choice: Json) -> Iterator[Json]:
    text = choice.get("text")
    if choice.get("logprobs") or not isinstance(text, str):
        # The offsets in logprobs count from the start of the text: they stay with all of it.
        yield {"text": text, "logprobs": choice.get("logprobs"), "finish_reason": None}
    else:
        for piece in _cut(text):
            yield {"text": piece, "logprobs": None, "finish_reason": None}
    yield {"text": "", **_ending(choice, ("text",))}


def _ending(choice: Json, sent: tuple[str, ...]) -> Json:
    rest = {field: value for field, value in choice.items() if field not in ("index", "logprobs", *sent)}
    return {"logprobs": None, **rest} if "logprobs" in choice else rest


def _sliced(field: str, text: str, choice: Json) -> list[Json]:
    tokens = (choice.get("logprobs") or {}).get("content")
    if tokens and "".join(str(token.get("token", "")) for token in tokens) == text:
        return [
            {"delta": {field: token["token"]}, "logprobs": {**choice["logprobs"], "content": [token]}}
            for token in tokens
        ]
    if tokens:
        return [{"delta": {field: text}, "logprobs": choice["logprobs"]}]
    return [{"delta": {field: piece}} for piece in _cut(text)]


def _cut(text: str) -> Iterator[str]:
    """Pieces of a few words, so that a replay reads like a stream; at most _MOST_PIECES of them."""
    size = max(_PIECE_CHARACTERS, -(-len(text) // _MOST_PIECES))
    start = 0
    while start < len(text):
        end = start + size
        border = text.rfind(" ", start + 1, end)
        if end < len(text) and border > start:
            end = border
        yield text[start:end]
        start = end
