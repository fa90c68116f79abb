"""The prompt in the body of a request: its prefixes, and marks put into its text.

Nothing is encoded again: a mark is inserted at its place, and all bytes of the client's stay. Where each value is
follows from the order and the lengths of those before it, which the decoder gives without decoding them.
"""

import re
from collections.abc import Sequence

import msgspec
import xxhash
from msgspec import Raw

BYTES_PER_TOKEN = 4
"""Of JSON text, about. An upstream that counts fewer tokens than its minimum ignores a breakpoint."""

_MAX_PIECES = 32
_MARK = b'"cache_control":{"type":"ephemeral"}'
_MARKED = b"cache_control"
# A letter of it, or its underscore, that is written as an escape sequence.
_ESCAPED = re.compile(rb"\\u00[567]")
_SPACE = b" \t\r\n"
# Other blocks, such as `thinking`, take no breakpoint.
_MESSAGES_BLOCKS = frozenset({"text", "image", "document", "tool_use", "tool_result"})
_CHAT_BLOCKS = frozenset({"text", "image_url"})
_INSTRUCTING = frozenset({"system", "developer"})
_MARKED_ROLES = {
    "messages": frozenset({"user", "assistant"}),
    "chat.completions": frozenset({*_INSTRUCTING, "user", "assistant"}),
}

Insertion = tuple[int, bytes]


class _Message(msgspec.Struct):
    role: str = ""


class _Block(msgspec.Struct):
    type: str = ""
    text: str | None = None


_object = msgspec.json.Decoder(dict[str, Raw]).decode
_list = msgspec.json.Decoder(list[Raw]).decode
_message = msgspec.json.Decoder(_Message).decode
_block = msgspec.json.Decoder(_Block).decode
_text = msgspec.json.Decoder(str).decode
_UNREADABLE = (msgspec.DecodeError, RecursionError, LookupError, ValueError)


class _Value(msgspec.Struct, frozen=True, gc=False):
    """A JSON value in a longer text, and where it begins there."""

    start: int
    text: bytes

    @property
    def end(self) -> int:
        return self.start + len(self.text)


class _Piece(msgspec.Struct, frozen=True, gc=False):
    """What one prefix has more than the one before: a whole field of the body, or an element of the list in it."""

    field: str
    value: _Value
    is_whole: bool = False


class Prefix(msgspec.Struct, frozen=True, gc=False):
    """The beginning of a prompt, of about `size` bytes."""

    digest: bytes
    size: int

    @property
    def tokens(self) -> int:
        return self.size // BYTES_PER_TOKEN


class Prompt:
    """The prompt of a body. `prefixes` are those that matter, of which the first `head` have no turn of a conversation.

    Of a long conversation these are the first turn and the last ones.
    """

    def __init__(self, body: bytes, family: str, model: str) -> None:
        """Raises one of `_UNREADABLE` for what is no such prompt."""
        self._body = body
        self._family = family
        fields = _fields(body, 0)
        self.has_key = "prompt_cache_key" in fields
        fields = {name: value for name, value in fields.items() if value.text != b"null"}
        head, turns = _pieces(family, fields)
        head = [*head[:1], *head[1:][-_MAX_PIECES:]]
        self.head = len(head)
        self._pieces = [*head, *turns[:1], *turns[1:][-_MAX_PIECES:]]
        self.prefixes = self._prefixes(f"{family} {model}\n".encode("utf-8", "surrogatepass"), fields)

    def _prefixes(self, seed: bytes, fields: dict[str, _Value]) -> list[Prefix]:
        digest, size = xxhash.xxh3_128(seed), 0
        prefixes: list[Prefix] = []
        field, done = "", 0
        for piece in self._pieces:
            if piece.field != field:
                field, done = piece.field, fields[piece.field].start
                digest.update(field.encode())
            end = piece.value.end
            digest.update(self._body[done:end])
            size += end - done
            done = end
            prefixes.append(Prefix(digest.digest(), size))
        return prefixes

    @property
    def opening(self) -> tuple[bytes, bytes]:
        """Digests of what comes before the conversation, b"" for nothing, and of this with the first turn."""
        digests = [prefix.digest for prefix in self.prefixes]
        return digests[self.head - 1] if self.head else b"", digests[min(self.head, len(digests) - 1)]

    def has_breakpoints(self) -> bool:
        """Whether the client may have placed some itself."""
        return _MARKED in self._body or (b"\\u00" in self._body and _ESCAPED.search(self._body) is not None)

    def with_key(self, key: str) -> bytes:
        """The body with a `prompt_cache_key`."""
        start = self._body.index(b"{") + 1
        return b'%s"prompt_cache_key":"%s",%s' % (self._body[:start], key.encode(), self._body[start:])

    def with_breakpoints(self, ends: Sequence[int]) -> bytes:
        """The body with a breakpoint at the end of each of these prefixes that can have one."""
        parts: list[bytes] = []
        done = 0
        for position, text in sorted(insertion for end in ends for insertion in self._insertions(self._pieces[end])):
            parts += (self._body[done:position], text)
            done = position
        return b"".join((*parts, self._body[done:]))

    def _insertions(self, piece: _Piece) -> list[Insertion]:
        """What makes a breakpoint at the end of a piece; nothing where there can be none."""
        types = _MESSAGES_BLOCKS if self._family == "messages" else _CHAT_BLOCKS
        try:
            if piece.field == "system":
                return _wrapped(piece.value) if piece.is_whole else _marked_block(piece.value, types)
            if piece.is_whole:  # tools, which take none in chat completions
                return _marked_object(_elements(piece.value)[-1]) if self._family == "messages" else []
            if _message(piece.value.text).role not in _MARKED_ROLES[self._family]:
                return []
            content = _fields(piece.value.text, piece.value.start)["content"]
            return _wrapped(content) if _is_text(content) else _marked_block(_elements(content)[-1], types)
        except _UNREADABLE:
            return []


def read_prompt(family: str, model: str, body: bytes) -> Prompt | None:
    """The prompt of a body in this form; None for a form without one that can be marked, and for unusual bodies."""
    try:
        prompt = Prompt(body, family, model)
    except _UNREADABLE:
        return None
    return prompt if prompt.prefixes else None


def _pieces(family: str, fields: dict[str, _Value]) -> tuple[list[_Piece], list[_Piece]]:
    """What comes before a conversation, and its turns."""
    tools = [_Piece("tools", fields["tools"], is_whole=True)] if "tools" in fields else []
    if family == "messages":
        return [*tools, *_parts("system", fields)], _parts("messages", fields)
    if family == "responses":
        return [*tools, *_parts("instructions", fields)], _parts("input", fields)
    if family != "chat.completions":
        return [], []
    messages = _parts("messages", fields)
    turns = (n for n, message in enumerate(messages) if _message(message.value.text).role not in _INSTRUCTING)
    first = next(turns, 0)
    return [*tools, *messages[:first]], messages[first:]


def _parts(field: str, fields: dict[str, _Value]) -> list[_Piece]:
    """A text, or each element of a list."""
    if field not in fields:
        return []
    value = fields[field]
    if _is_text(value):
        return [_Piece(field, value, is_whole=True)]
    return [_Piece(field, element) for element in _elements(value)]


def _fields(text: bytes, start: int) -> dict[str, _Value]:
    """The fields of an object that begins at `start`. Raises ValueError for one with escape sequences in a name."""
    found: dict[str, _Value] = {}
    position = text.index(b"{") + 1
    for name, raw in _object(text).items():
        key = b'"%s"' % name.encode()
        position = text.index(b'"', position)
        if not text.startswith(key, position):
            raise ValueError
        position = _skip(text, text.index(b":", position + len(key)) + 1)
        found[name] = _Value(start + position, bytes(raw))
        position += len(found[name].text)
    return found


def _elements(array: _Value) -> list[_Value]:
    """The elements of an array."""
    found: list[_Value] = []
    text, position = array.text, 1
    for raw in _list(text):
        while text[position] in b", \t\r\n":
            position += 1
        found.append(_Value(array.start + position, bytes(raw)))
        position += len(found[-1].text)
    return found


def _skip(text: bytes, position: int) -> int:
    while text[position] in _SPACE:
        position += 1
    return position


def _is_text(value: _Value) -> bool:
    return value.text[:1] == b'"'


def _wrapped(value: _Value) -> list[Insertion]:
    """A text as a block with a breakpoint."""
    if not _text(value.text).strip():
        return []
    return [(value.start, b'[{"type":"text","text":'), (value.end, b"," + _MARK + b"}]")]


def _marked_block(block: _Value, types: frozenset[str]) -> list[Insertion]:
    read = _block(block.text)
    if read.type not in types or (read.type == "text" and not (read.text or "").strip()):
        return []
    return _marked_object(block)


def _marked_object(value: _Value) -> list[Insertion]:
    return [(value.start + 1, _MARK + b",")] if _object(value.text) else []
