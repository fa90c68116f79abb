"""Assembles an answer from the chunks of a stream, and cuts it into chunks again.

Both directions keep unknown fields. A field of a delta that no specification names (reasoning of one server, citations
of another) is merged by its JSON type, and replayed.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from cache.errors import UnstorableAnswer

Json = dict[str, Any]

DONE = b"data: [DONE]\n\n"

# Repeated with one value; other strings come in pieces.
_WHOLE_STRINGS = frozenset({"id", "type", "role", "object", "format"})
# Random padding that some servers add to every chunk against eavesdroppers: part of a stream, not of an answer.
_PADDING = "obfuscation"
# Fields that a server repeats on every chunk; any other field of the response is sent once, on the first.
_ON_EVERY_CHUNK = ("id", "object", "created", "model", "system_fingerprint", "service_tier")
# Reasoning comes before the content.
_BEFORE_CONTENT = ("reasoning_content", "reasoning", "reasoning_details", "thinking")
_UNFINISHED = frozenset({"error", "abort", "aborted", "cancelled", "canceled", "timeout", "content_filter"})
_PIECE_CHARACTERS = 24
_MAX_PIECES = 256
_MAX_TOKENS = 2**31  # of one answer: more would take the precision of the counters

_encode = msgspec.json.Encoder().encode


class Usage(NamedTuple):
    prompt_tokens: int
    completion_tokens: int


class Text:
    """A string that arrives in pieces, in time and memory linear in its length."""

    __slots__ = ("_utf8",)

    def __init__(self, first: str) -> None:
        self._utf8 = bytearray()
        self.add(first)

    def add(self, piece: str) -> None:
        self._utf8 += piece.encode("utf-8", "surrogatepass")

    def __str__(self) -> str:
        return self._utf8.decode("utf-8", "surrogatepass")


class _Items(list[Any]):
    """A list whose items come in pieces, each piece with the index of its item."""

    def __init__(self) -> None:
        super().__init__()
        self._by_index: dict[int, Json] = {}

    def merge(self, news: list[Any]) -> None:
        for item in news:
            index = item.get("index") if isinstance(item, dict) else None
            if not isinstance(index, int):
                self.append(item)
                continue
            same = self._by_index.get(index)
            if same is None:
                same = self._by_index[index] = {}
                self.append(same)
            _merge(same, item)


class StreamAssembler:
    """Builds the response object of a request that streamed, chunk by chunk."""

    __slots__ = ("_choices", "_response", "_usage")

    def __init__(self) -> None:
        self._response: Json = {}
        self._choices: dict[int, Json] = {}
        self._usage: Json | None = None

    def add(self, chunk: Json) -> None:
        """Adds one decoded chunk. Raises UnstorableAnswer if it is not a chunk of an answer."""
        choices = chunk.get("choices")
        if chunk.get("error") is not None:
            raise UnstorableAnswer("the stream carries an error")
        if not isinstance(choices, list):
            raise UnstorableAnswer("a chunk has no choices")
        for field, value in chunk.items():
            if field == "usage":
                self._usage = value or self._usage
            elif field not in ("choices", _PADDING):
                self._add_field(field, value)
        for choice in choices:
            if not isinstance(choice, dict):
                raise UnstorableAnswer("a choice is not an object")
            try:
                self._add_choice(choice)
            except RecursionError as error:
                raise UnstorableAnswer("a chunk is nested too deep") from error

    def _add_field(self, field: str, value: Any) -> None:
        # Of repeated fields the first that is not empty; of the others (timings and the like) the last, which is
        # complete.
        known = self._response.get(field)
        if field not in self._response or (value is not None and not (known and field in _ON_EVERY_CHUNK)):
            self._response[field] = value

    def _add_choice(self, choice: Json) -> None:
        index = choice.get("index", 0)
        if type(index) is not int:
            raise UnstorableAnswer("the index of a choice is not an integer")
        known = self._choices.get(index)
        if known is None:
            known = self._choices[index] = {"index": index}
        for field, value in choice.items():
            if field == "index":
                continue
            if field == "delta":
                message = known.get("message")
                if not isinstance(message, dict):
                    message = known["message"] = {}
                if isinstance(value, dict):
                    _merge(message, value)
            elif field == "finish_reason":
                known[field] = value or known.get(field)
            elif field == "logprobs":
                _extend(known, field, value)
            else:
                _merge(known, {field: value})

    def text_of(self, chunk: Json) -> tuple[str, Text] | None:
        """The text that a chunk has added to the answer, and where it went, if its text is all that it has added.

        A chunk that differs from this one in the text alone, and comes next, adds that and nothing else.
        """
        choices = chunk["choices"]
        delta = choices[0].get("delta") if len(choices) == 1 else None
        if not isinstance(delta, dict) or len(delta) != 1:
            return None
        ((field, text),) = delta.items()
        if not isinstance(text, str) or field in _WHOLE_STRINGS or field == "name":
            return None
        if any(value is not None for name, value in choices[0].items() if name not in ("index", "delta")):
            return None
        return text, self._choices[choices[0].get("index", 0)]["message"][field]

    def response(self) -> Json:
        """The response object so far, in the form of one that was not streamed. Raises UnstorableAnswer."""
        response = dict(self._response)
        if isinstance(response.get("object"), str):
            response["object"] = response["object"].removesuffix(".chunk")
        try:
            response["choices"] = [_joined(self._choices[index]) for index in sorted(self._choices)]
        except RecursionError as error:
            raise UnstorableAnswer("the answer is nested too deep") from error
        for choice in response["choices"]:
            message = choice.get("message")
            calls = message.get("tool_calls") if isinstance(message, dict) else None
            for call in calls if isinstance(calls, list) else ():
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
        elif field in _WHOLE_STRINGS and isinstance(value, str):
            if value or not isinstance(before, str):  # some servers repeat the field without its value
                known[field] = value
        elif isinstance(value, str):
            if not isinstance(before, Text):
                known[field] = Text(value)
            elif value and not (field == "name" and str(before) == value):  # some servers repeat the name
                before.add(value)
        elif isinstance(value, dict):
            if not isinstance(before, dict):
                before = known[field] = {}
            _merge(before, value)
        elif isinstance(value, list):
            if not isinstance(before, _Items):
                before = known[field] = _Items()
            before.merge(value)
        else:
            known[field] = value


def _extend(known: Json, field: str, news: Any) -> None:
    """Merge logprobs: their lists grow by one item for each token, and the items themselves are never merged."""
    before = known.get(field)
    if isinstance(news, dict):
        if not isinstance(before, dict):
            before = known[field] = {}
        for name, value in news.items():
            _extend(before, name, value)
    elif isinstance(news, list):
        if not isinstance(before, list):
            before = known[field] = []
        before.extend(news)
    elif news is not None or field not in known:
        known[field] = news


def _joined(value: Any) -> Any:
    if isinstance(value, Text):
        return str(value)
    if isinstance(value, dict):
        return {field: _joined(item) for field, item in value.items()}
    if isinstance(value, list):
        return [_joined(item) for item in value]
    return value


def check_complete(response: Json, asked_for: int = 1) -> None:
    """Raises UnstorableAnswer, with the reason, unless every choice of the response is finished and not empty.

    `asked_for` is how many choices there must be.

    An empty choice is allowed only if the usage has completion tokens: a stop string came at once.
    """
    if response.get("error") is not None:
        raise UnstorableAnswer("the answer is an error")
    choices = response.get("choices")
    if not isinstance(choices, list) or not choices:
        raise UnstorableAnswer("the answer has no choices")
    if len(choices) < asked_for:
        raise UnstorableAnswer(f"the answer has {len(choices)} of {asked_for} choices")
    usage = usage_of(response)
    for choice in choices:
        reason = choice.get("finish_reason") if isinstance(choice, dict) else None
        if not reason or not isinstance(reason, str):
            raise UnstorableAnswer("a choice has no finish reason")
        if reason in _UNFINISHED:
            raise UnstorableAnswer(f"a choice ended with {reason!r}")
        if not isinstance(choice.get("message", {}), dict) or not isinstance(choice.get("text", ""), str):
            raise UnstorableAnswer("a choice says nothing that can be sent again")
        if not _has_content(choice) and not (usage and usage.completion_tokens):
            raise UnstorableAnswer("a choice is empty")


def _has_content(choice: Json) -> bool:
    message = choice.get("message")
    said = {field: value for field, value in message.items() if field != "role"} if isinstance(message, dict) else {}
    return bool(choice.get("text")) or any(said.values())


def usage_of(response: Json) -> Usage | None:
    """The tokens the answer reports, or None if it reports none. An invalid count is 0."""
    usage = response.get("usage")
    if not isinstance(usage, dict):
        return None
    counts = [usage.get(field) for field in ("prompt_tokens", "completion_tokens")]
    return Usage(*(count if isinstance(count, int) and 0 <= count <= _MAX_TOKENS else 0 for count in counts))


def stream_of(response: Json, include_usage: bool) -> bytes:
    """The response as the body of an event stream: role, pieces, finish reason, optional usage, [DONE]."""
    return b"".join(b"data: " + _encode(chunk) + b"\n\n" for chunk in _chunks(response, include_usage)) + DONE


def _chunks(response: Json, include_usage: bool) -> Iterator[Json]:
    choices: list[Json] = response.get("choices") or []
    is_chat = response.get("object") != "text_completion" and not any("text" in choice for choice in choices)
    base = {field: response[field] for field in _ON_EVERY_CHUNK if field in response}
    if is_chat and isinstance(base.get("object"), str):
        base["object"] += ".chunk"
    extra = {f: v for f, v in response.items() if f not in _ON_EVERY_CHUNK and f not in ("choices", "usage")}
    if include_usage:
        base["usage"] = None
    for position, choice in enumerate(choices):
        for piece in _chat_pieces(choice) if is_chat else _text_pieces(choice):
            yield {**base, **extra, "choices": [{"index": choice.get("index", position), **piece}]}
            extra = {}
    if include_usage:
        yield {**base, "choices": [], "usage": response.get("usage")}


def _chat_pieces(choice: Json) -> Iterator[Json]:
    message = choice.get("message") or {}
    logprobs = choice.get("logprobs")
    opening: Json = {}
    pieces: list[Json] = []
    for field in sorted(message, key=lambda field: field not in _BEFORE_CONTENT):
        value = message[field]
        if (
            field == "content"
            and isinstance(value, str)
            and isinstance(logprobs, dict)
            and _logprobs_match(logprobs, value)
        ):
            opening[field] = ""
            pieces += _by_token(logprobs)
            logprobs = None
        elif isinstance(value, str) and field not in _WHOLE_STRINGS:
            opening[field] = ""
            pieces += [{"delta": {field: piece}} for piece in _cut(value)]
        elif field == "tool_calls" and isinstance(value, list) and all(isinstance(call, dict) for call in value):
            opening |= {} if value else {field: value}
            pieces += [{"delta": {field: [{"index": i, **call}]}} for i, call in enumerate(value)]
        else:
            opening[field] = value
    yield {"delta": opening, "finish_reason": None}
    for piece in pieces:
        yield {**piece, "finish_reason": None}
    yield {"delta": {}, **_ending(choice, "message", logprobs)}


def _text_pieces(choice: Json) -> Iterator[Json]:
    text = choice.get("text")
    nothing: Json = {"logprobs": None} if "logprobs" in choice else {}
    logprobs = choice.get("logprobs")
    if logprobs or not isinstance(text, str):
        # The offsets in logprobs count from the start of the text: they are sent with the whole text.
        yield {"text": text, **nothing, **({"logprobs": logprobs} if logprobs else {}), "finish_reason": None}
        logprobs = None
    else:
        for piece in _cut(text):
            yield {"text": piece, **nothing, "finish_reason": None}
    yield {"text": "" if isinstance(text, str) else None, **_ending(choice, "text", logprobs)}


def _ending(choice: Json, sent: str, logprobs: Any) -> Json:
    """The last piece: everything of the choice that has not been sent, `logprobs` if they have not."""
    rest = {field: value for field, value in choice.items() if field not in ("index", sent)}
    return {**rest, "logprobs": logprobs} if "logprobs" in choice else rest


def _logprobs_match(logprobs: Json, text: str) -> bool:
    """Whether the tokens in the logprobs are the text, so that each is sent with its own."""
    tokens = logprobs.get("content")
    if not isinstance(tokens, list) or not tokens:
        return False
    texts = [token.get("token") if isinstance(token, dict) else None for token in tokens]
    return all(isinstance(part, str) for part in texts) and "".join(map(str, texts)) == text


def _by_token(logprobs: Json) -> Iterator[Json]:
    first = logprobs
    for token in logprobs["content"]:
        yield {"delta": {"content": token["token"]}, "logprobs": {**first, "content": [token]}}
        first = {"refusal": None} if "refusal" in logprobs else {}


def _cut(text: str) -> Iterator[str]:
    """Pieces of a few words, as in a stream; of a long text a few hundred larger ones."""
    size = max(_PIECE_CHARACTERS, -(-len(text) // _MAX_PIECES))
    start = 0
    while start < len(text):
        end = start + size
        border = text.rfind(" ", start + 1, end)
        if end < len(text) and border > start:
            end = border
        yield text[start:end]
        start = end
