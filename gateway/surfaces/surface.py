"""The contract of a surface: one form of API in which clients ask, and some upstreams answer.

Chat completions are the form in the middle. Every surface reads its requests into that form, whose fields decide the
key, and renders answers from it. An upstream that has the surface itself gets the client's own bytes, and its answer is
stored in the surface's own form; `chat_answer` brings that into the middle again for clients of other surfaces.

    client's fields ──chat_request──► chat request ──► upstream without the surface ──► chat answer
           │                                                                              │
           └──── as they are ───────► upstream with the surface ──► own answer            │ own_answer, Translator
                                                                        │                 ▼
                                                                        └─chat_answer─►  any client's form

What has no name in chat completions keeps its own name and place, in both directions: two requests that differ get
two keys, and an answer comes back to its own surface as it was.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import xxhash

from cache.entries.entry import Family
from gateway.errors import GatewayError
from gateway.http.sse import EVENT_STREAM

Json = dict[str, Any]

_CHAT_TOOLS = ("function", "custom")

_encode = msgspec.json.Encoder(order="deterministic").encode


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request of some surface as a request for chat completions (or, by `path`, for completions).

    `fields` are all of its fields: chat completions' where they have a name there, else under the surface's own name.
    `stream` says what the client wants, and is not in `fields`. `ignored` names the fields that are not sent to an
    upstream that has only chat completions, because they have no meaning there. `untranslatable` is raised instead of
    asking such an upstream. With `native` false no upstream gets the client's own bytes, for they refer to what only
    this gateway knows.

    What is not `is_cached` is computed by itself; what is not `is_optimized` is not answered from similar questions;
    what `takes_variant` may be answered by a quantised variant of its model. `echo` is what a rendered answer repeats
    of its request.
    """

    fields: Json
    stream: bool = False
    include_usage: bool = False
    path: str = "/v1/chat/completions"
    ignored: tuple[str, ...] = ()
    untranslatable: GatewayError | None = None
    native: bool = True
    is_cached: bool = True
    is_optimized: bool = True
    takes_variant: bool = False
    echo: Mapping[str, Any] = field(default_factory=dict)

    @property
    def hosted_tools(self) -> list[int]:
        """The places of tools that a provider runs itself: no upstream with only chat completions has them."""
        tools = self.fields.get("tools")
        return [
            place
            for place, tool in enumerate(tools if isinstance(tools, list) else ())
            if isinstance(tool, dict) and tool.get("type") not in _CHAT_TOOLS
        ]

    @property
    def unsent(self) -> list[str]:
        """The names of the fields that such an upstream does not get."""
        return [*self.ignored, *(f"tools[{place}]" for place in self.hosted_tools)]

    @property
    def chat_fields(self) -> Json:
        """The fields that it gets."""
        fields = {name: value for name, value in self.fields.items() if name not in self.ignored}
        if hosted := self.hosted_tools:
            fields["tools"] = [tool for place, tool in enumerate(fields["tools"]) if place not in hosted]
            if not fields["tools"]:
                for name in ("tools", "tool_choice", "parallel_tool_calls"):
                    fields.pop(name, None)
        return without_empty_tools(fields)

    @property
    def echo_digest(self) -> str:
        """Tells apart the answers to requests that share an entry and repeat different things."""
        return xxhash.xxh3_64_hexdigest(_encode(self.echo)) if self.echo else ""


def without_empty_tools(fields: Json) -> Json:
    """The fields of a chat completion without an empty list of tools, and without what says how to use them: it means
    the same as none, but OpenAI and vLLM refuse it.
    """
    if fields.get("tools") != []:
        return fields
    dropped = ["tools", "parallel_tool_calls"]
    if fields.get("tool_choice") in (None, "auto", "none"):  # other choices cannot be made: the upstream says so
        dropped.append("tool_choice")
    return {name: value for name, value in fields.items() if name not in dropped}


class Translator(ABC):
    """Makes a stream of a surface from the chunks of a chat completion as they arrive, for one client."""

    answer: Json
    """The whole answer in the surface's own form; set by `finish`."""

    @abstractmethod
    def add(self, chunk: Json) -> bytes:
        """The events (framed, ready to send; may be empty) that follow from one chunk, which is not [DONE].

        A chunk is what an OpenAI-compatible server sends, with unknown fields, and with `usage` on its last one, if
        the upstream gives any. It may come with several choices; a surface with one answer takes that of index 0.
        Raises UpstreamDisconnected for what is no chunk.
        """

    @abstractmethod
    def finish(self) -> bytes:
        """The events that end the stream, after the last chunk."""


class Assembler(ABC):
    """Records a stream of a surface's own form, as an upstream that has the surface sends it."""

    done = False
    """Whether the stream has said that it is over."""

    @abstractmethod
    def add(self, event: bytes) -> None:
        """Take in one whole event with its framing: an SSE event, or a line of NDJSON. Faults are kept for `answer`."""

    @abstractmethod
    def answer(self) -> Json:
        """The answer as the surface gives it to a client that does not stream.

        Raises UnstorableAnswer, saying why, when it is not whole.
        """


class AnswerForm:
    """How an API frames its answers and errors: OpenAI's way. Stateless: one object serves all requests."""

    family: Family
    """The family of answers in this form, and its label in the metrics."""
    paths: tuple[str, ...]
    """Its endpoints."""
    stream_type = EVENT_STREAM
    """The content type of its streams."""

    def error_body(self, error: GatewayError) -> bytes:
        """An error as clients of this form expect it."""
        return error.body()

    def error_event(self, error: GatewayError) -> bytes:
        """The same as the last event of a stream that has begun, framed."""
        return error.event()


class StreamedForm(AnswerForm, ABC):
    """A form whose answers can be streamed."""

    @abstractmethod
    def own_stream(self, answer: Json, request: ChatRequest) -> bytes:
        """A whole answer in this form as the body of a stream."""


class TranslatedForm(StreamedForm):
    """A form of API whose requests are brought into chat completions, and whose answers are made of them."""

    @abstractmethod
    def chat_request(self, path: str, fields: Json) -> ChatRequest:
        """The request with these decoded fields, whose `model` has been checked to be text.

        Raises InvalidRequest, naming the field, for what cannot be read. What an upstream would judge is left to it.
        """

    @abstractmethod
    def own_answer(self, answer: Json, request: ChatRequest, entry_id: str) -> Json:
        """The response object of a chat completion in this form. Identifiers follow from the arguments."""

    @abstractmethod
    def translator(self, request: ChatRequest, entry_id: str) -> Translator:
        """For a client that streams, while the upstream's chat completion arrives."""


class Surface(TranslatedForm):
    """A form of API that upstreams may have themselves."""

    @abstractmethod
    def chat_answer(self, answer: Json) -> Json:
        """The inverse of `own_answer`. Raises UnstorableAnswer for what is not such an answer."""

    @abstractmethod
    def assembler(self) -> Assembler:
        """For a stream of an upstream that has this surface."""
