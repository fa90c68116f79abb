"""One question in each form of API, asked with the client libraries that people use, and what they read."""

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import anthropic
import ollama
import openai
from openai.lib.streaming.chat import ChatCompletionStreamState

from tests.gateway.client import Client

Json = dict[str, Any]

KEY = "sk-one"
"""The key of all of them: one tenant."""
PARAMETERS: Json = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Where."}},
    "required": ["city"],
}


STOPS = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls", "refusal": "content_filter"}


@dataclass(frozen=True)
class Question:
    """What a client asks, in words of no particular API."""

    text: str = "How is the weather in Bern?"
    system: str = "Be short."
    tool: str = ""
    max_tokens: int = 64


@dataclass(frozen=True)
class Said:
    """What a client library has read. `cached` is None where its API does not say it."""

    text: str = ""
    thoughts: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    stop: str = "stop"
    prompt: int = 12
    cached: int | None = 0
    completion: int = 5

    def without_cached(self) -> "Said":
        return replace(self, cached=None)


class Dialect(ABC):
    """A form of API."""

    name: str
    path: str

    @abstractmethod
    def body(self, question: Question, stream: bool = False) -> Json:
        """The body of a request."""

    @abstractmethod
    async def ask(self, client: Client, question: Question, stream: bool) -> Said:
        """Ask with the client library, which gets the answer whole or assembles it itself."""

    def can_say(self, said: Said) -> Said:
        """The part of an answer for which this API has a name."""
        return said

    def error_message(self, body: bytes) -> str:
        """The message of an error in this API's form, which it must have exactly."""
        error = json.loads(body)
        assert set(error) == {"error"}, error
        assert set(error["error"]) == {"message", "type", "param", "code"}, error
        assert isinstance(error["error"]["type"], str)
        return text(error["error"]["message"])

    def error_event(self, stream: bytes) -> str | None:
        """The message of the error that a stream ends with; None where it ends as streams do."""
        *_, last = stream.rstrip(b"\n").split(b"\n\n")
        if b'"error":{' not in last:
            return None
        return self.error_message(last.removeprefix(b"data: "))

    def is_whole(self, stream: bytes) -> bool:
        """Whether the stream says at its end that it is over."""
        return stream.endswith(b"data: [DONE]\n\n")


def text(value: object) -> str:
    assert isinstance(value, str)
    assert value
    return value


def arguments(value: str | Json) -> str:
    return json.dumps(json.loads(value) if isinstance(value, str) else value, sort_keys=True)


def checked(value: Any) -> Any:
    """A model of a client library, read once more with all of its checks; the libraries themselves read without any."""
    type(value).model_validate(value.to_dict() if hasattr(value, "to_dict") else value.model_dump())
    return value


def openai_client(client: Client, key: str = KEY) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=client.gateway.url + "/v1", api_key=key, max_retries=0, timeout=20)


def anthropic_client(client: Client, key: str = KEY) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=client.gateway.url, api_key=key, max_retries=0, timeout=20)


def ollama_client(client: Client, key: str = KEY) -> ollama.AsyncClient:
    return ollama.AsyncClient(client.gateway.url, headers={"Authorization": f"Bearer {key}"}, timeout=20)


class Chat(Dialect):
    """OpenAI's chat completions."""

    name = "chat"
    path = "/v1/chat/completions"

    def body(self, question: Question, stream: bool = False) -> Json:
        function = {"name": question.tool, "description": "Looks.", "parameters": PARAMETERS}
        return {
            "model": "mock",
            "messages": [
                {"role": "system", "content": question.system},
                {"role": "user", "content": question.text},
            ],
            "max_tokens": question.max_tokens,
            "temperature": 0,
            **({"tools": [{"type": "function", "function": function}]} if question.tool else {}),
            **({"stream": True, "stream_options": {"include_usage": True}} if stream else {}),
        }

    async def ask(self, client: Client, question: Question, stream: bool) -> Said:
        async with openai_client(client) as library:
            answer: Any = await library.chat.completions.create(**self.body(question, stream))
            if stream:
                state = ChatCompletionStreamState()
                async for chunk in answer:
                    state.handle_chunk(checked(chunk))
                answer = state.current_completion_snapshot  # the final one refuses an answer that was cut off
        (choice,) = checked(answer).choices
        details = answer.usage.prompt_tokens_details
        return Said(
            choice.message.content or "",
            getattr(choice.message, "reasoning_content", None) or "",
            tuple((c.function.name, arguments(c.function.arguments)) for c in choice.message.tool_calls or ()),
            choice.finish_reason,
            answer.usage.prompt_tokens,
            details.cached_tokens if details else 0,
            answer.usage.completion_tokens,
        )


class Messages(Dialect):
    """Anthropic's Messages."""

    name = "messages"
    path = "/v1/messages"

    def body(self, question: Question, stream: bool = False) -> Json:
        tool = {"name": question.tool, "description": "Looks.", "input_schema": PARAMETERS}
        return {
            "model": "mock",
            "system": question.system,
            "messages": [{"role": "user", "content": question.text}],
            "max_tokens": question.max_tokens,
            "temperature": 0,
            **({"tools": [tool]} if question.tool else {}),
            **({"stream": True} if stream else {}),
        }

    async def ask(self, client: Client, question: Question, stream: bool) -> Said:
        fields = self.body(question)
        extra = {"temperature": fields.pop("temperature")}  # the library no longer has a parameter for it
        async with anthropic_client(client) as library:
            if stream:
                async with library.messages.stream(**fields, extra_body=extra) as events:
                    answer: Any = await events.get_final_message()
            else:
                answer = await library.messages.create(**fields, extra_body=extra)
        checked(answer)
        usage = answer.usage
        return Said(
            "".join(block.text for block in answer.content if block.type == "text"),
            "".join(block.thinking for block in answer.content if block.type == "thinking"),
            tuple((block.name, arguments(block.input)) for block in answer.content if block.type == "tool_use"),
            STOPS[answer.stop_reason],
            usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0),
            usage.cache_read_input_tokens or 0,
            usage.output_tokens,
        )

    def error_message(self, body: bytes) -> str:
        error = json.loads(body)
        assert set(error) <= {"type", "error", "request_id"}, error
        assert error["type"] == "error"
        assert set(error["error"]) == {"type", "message"}, error
        assert isinstance(error["error"]["type"], str)
        return text(error["error"]["message"])

    def error_event(self, stream: bytes) -> str | None:
        *_, last = stream.rstrip(b"\n").split(b"\n\n")
        if not last.startswith(b"event: error\n"):
            return None
        return self.error_message(last.removeprefix(b"event: error\ndata: "))

    def is_whole(self, stream: bytes) -> bool:
        *_, last = stream.rstrip(b"\n").split(b"\n\n")
        return last.startswith(b"event: message_stop\n")


class Responses(Dialect):
    """OpenAI's Responses."""

    name = "responses"
    path = "/v1/responses"

    def body(self, question: Question, stream: bool = False) -> Json:
        tool = {"type": "function", "name": question.tool, "description": "Looks.", "parameters": PARAMETERS}
        return {
            "model": "mock",
            "instructions": question.system,
            "input": question.text,
            "max_output_tokens": question.max_tokens,
            "temperature": 0,
            **({"tools": [tool]} if question.tool else {}),
            **({"stream": True} if stream else {}),
        }

    async def ask(self, client: Client, question: Question, stream: bool) -> Said:
        async with openai_client(client) as library:
            if stream:
                async with library.responses.stream(**self.body(question)) as events:
                    last = None
                    async for event in events:
                        last = event
                    if last is not None and last.type == "response.incomplete":  # the library keeps no final response
                        answer: Any = last.response
                    else:
                        answer = await events.get_final_response()
            else:
                answer = await library.responses.create(**self.body(question))
        checked(answer)
        calls = [item for item in answer.output if item.type == "function_call"]
        reasons = {"max_output_tokens": "length", "content_filter": "content_filter"}
        stop = reasons[answer.incomplete_details.reason] if answer.incomplete_details else "stop"
        thoughts = [part.text for item in answer.output if item.type == "reasoning" for part in item.content or ()]
        return Said(
            answer.output_text,
            "".join(thoughts),
            tuple((call.name, arguments(call.arguments)) for call in calls),
            "tool_calls" if calls and stop == "stop" else stop,
            answer.usage.input_tokens,
            answer.usage.input_tokens_details.cached_tokens,
            answer.usage.output_tokens,
        )

    def error_event(self, stream: bytes) -> str | None:
        *_, last = stream.rstrip(b"\n").split(b"\n\n")
        if not last.startswith(b"event: error\n"):
            return None
        event = json.loads(last.removeprefix(b"event: error\ndata: "))
        assert event["type"] == "error"
        assert {"message", "code", "param", "sequence_number"} <= set(event)
        return text(event["message"])

    def is_whole(self, stream: bytes) -> bool:
        *_, last = stream.rstrip(b"\n").split(b"\n\n")
        return last.startswith((b"event: response.completed\n", b"event: response.incomplete\n"))


class OllamaChat(Dialect):
    """Ollama's chat."""

    name = "ollama"
    path = "/api/chat"

    def body(self, question: Question, stream: bool = False) -> Json:
        function = {"name": question.tool, "description": "Looks.", "parameters": PARAMETERS}
        return {
            "model": "mock",
            "messages": [
                {"role": "system", "content": question.system},
                {"role": "user", "content": question.text},
            ],
            "options": {"num_predict": question.max_tokens, "temperature": 0},
            "stream": stream,
            **({"tools": [{"type": "function", "function": function}]} if question.tool else {}),
        }

    async def ask(self, client: Client, question: Question, stream: bool) -> Said:
        library = ollama_client(client)
        async with contextlib.aclosing(library._client):
            answer: Any = await library.chat(**self.body(question, stream))
            lines = [line async for line in answer] if stream else [answer]
        for line in lines:
            checked(line)
        assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
        last = lines[-1]
        calls = [call for line in lines for call in line.message.tool_calls or ()]
        return Said(
            "".join(line.message.content or "" for line in lines),
            "".join(line.message.thinking or "" for line in lines),
            tuple((call.function.name, arguments(dict(call.function.arguments))) for call in calls),
            "tool_calls" if calls and last.done_reason == "stop" else last.done_reason,
            last.prompt_eval_count,
            None,
            last.eval_count,
        )

    def can_say(self, said: Said) -> Said:
        return said.without_cached()

    def error_message(self, body: bytes) -> str:
        error = json.loads(body)
        assert set(error) == {"error"}, error
        return text(error["error"])

    def error_event(self, stream: bytes) -> str | None:
        *_, last = stream.rstrip(b"\n").split(b"\n")
        return self.error_message(last) if "error" in json.loads(last) else None

    def is_whole(self, stream: bytes) -> bool:
        *_, last = stream.rstrip(b"\n").split(b"\n")
        return json.loads(last).get("done") is True


DIALECTS: tuple[Dialect, ...] = (Chat(), Messages(), Responses(), OllamaChat())
TRANSLATED: tuple[Dialect, ...] = DIALECTS[1:]
CALLERS = [(dialect, stream) for dialect in DIALECTS for stream in (False, True)]
"""Every way to ask: each form of API, streamed or not."""
CALLER_NAMES = [f"{dialect.name}{' stream' if stream else ''}" for dialect, stream in CALLERS]


def names(dialects: Iterable[Dialect]) -> list[str]:
    return [dialect.name for dialect in dialects]


def completion(message: Json, finish_reason: str = "stop", cached: int = 0) -> Json:
    """A chat completion with this message, whose prompt has 12 tokens, some of them cached, and its answer 5."""
    details = {"prompt_tokens_details": {"cached_tokens": cached}} if cached else {}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "mock",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", **message},
                "finish_reason": finish_reason,
                "logprobs": None,
            }
        ],
        "usage": {"prompt_tokens": 12, "completion_tokens": 5, "total_tokens": 17, **details},
    }
