"""Questions about a prompt to upstreams, within a deadline that is short beside the time that computing it takes."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import msgspec
from multidict import CIMultiDict

from gateway.errors import GatewayError
from gateway.http.sse import event_json
from gateway.upstreams.upstream import NO_HEADERS, Upstream

log = logging.getLogger(__name__)

TOKENIZE_PATH = "/tokenize"
_DEADLINE = 0.02
_BYTE_SECONDS = 1e-6
"""What each byte of a prompt adds to the deadline: about four times what vLLM takes to make tokens of it, and a tenth
of what a GPU takes to compute them (256 tokens a KiB, 25,000 tokens a second)."""
_LONGEST_ADDED = 0.5
"""Most seconds that the size of a body adds: one with images is large without having many tokens."""
_PAUSE = 5.0
"""Seconds for which an upstream that failed or was too slow is not asked; requests that had asked it before wait."""
_CLOSED = (404, 405)
"""Statuses of an endpoint that is not there."""
_MAX_BYTES = 8 * 2**20
_FIELDS = (
    *("model", "prompt", "messages", "tools", "chat_template", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message", "add_special_tokens"),
)
_encode = msgspec.json.Encoder().encode


def prompt_body(fields: Mapping[str, Any]) -> bytes:
    """The body of a question about the prompt of a request."""
    return _encode({name: fields[name] for name in _FIELDS if fields.get(name) is not None})


def are_tokens(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(type(token) is int and 0 <= token < 2**32 for token in value)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to ask upstreams about, in the form of a chat or a completion.

    `headers` are the client's and `own` those of the gateway: an upstream that separates tenants tells them by these.
    """

    fields: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=lambda: NO_HEADERS)
    own: Mapping[str, str] = field(default_factory=lambda: NO_HEADERS)


class Asker:
    """Asks upstreams. One that fails is not asked for a while, nor one that takes longer than `deadline` seconds and
    1 ms for each kB of the prompt (half a second of these at most).
    """

    def __init__(self, deadline: float = _DEADLINE) -> None:
        self._deadline = deadline
        self._paused: dict[str, float] = {}

    def may_ask(self, upstream: Upstream) -> bool:
        """Whether it would be asked now."""
        return upstream.loop.time() >= self._paused.get(upstream.name, 0.0)

    async def ask(self, upstream: Upstream, path: str, prompt: Prompt) -> Mapping[str, Any] | None:
        """The reply, a JSON object; None if there is none in time."""
        if not self.may_ask(upstream):
            return None
        body = prompt_body(prompt.fields)
        headers = CIMultiDict(prompt.headers)
        headers["Content-Type"] = "application/json"
        try:
            async with asyncio.timeout(self._deadline + min(len(body) * _BYTE_SECONDS, _LONGEST_ADDED)):
                with await upstream.request("POST", path, headers, body, prompt.own) as answer:
                    content = await answer.body(_MAX_BYTES)
            if answer.status == 200:
                self._paused.pop(upstream.name, None)
                return event_json(content)
            if answer.status < 500 and answer.status not in _CLOSED:  # of this request, not of the next one
                return None
        except (GatewayError, TimeoutError, ValueError) as error:
            log.debug("%s: %s: %s", upstream.title, path, error or "no answer in time")
        self._paused[upstream.name] = upstream.loop.time() + _PAUSE
        return None
