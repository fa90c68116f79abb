"""Traces of coding agents: one conversation per line, each request as its difference to the one before.

    {"block_size": 64, "requests": [{"t": 0.0, "in": 71175, "out": 169, "keep": 0, "new": [[1, 1112]]},
                                    {"t": 19.0, "in": 72762, "out": 296, "keep": 1112, "new": [[1113, 24]]}, ...]}

`keep` counts leading blocks of the previous request, `new` are runs [first number, count]; numbers are local to their
conversation. A member with `requests` is a sub-agent with its own list and clock, which begin there.

The file has times within a conversation, not between conversations. Here every user has eleven conversations, one after
the other, and all users begin at the same time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from prefix_store.replay.lines import BadLine, parse_lines
from prefix_store.replay.trace import Trace, TraceError, TraceRequest

CONVERSATIONS_PER_USER = 11
_PAUSE_SECONDS = 1.0

EXPECTED = (
    'expected {"block_size": tokens, "requests": [{"t": seconds, "in": tokens, "out": tokens, "keep", "new"}, ...]}'
)


class _Request(msgspec.Struct, rename={"input_length": "in", "output_length": "out"}):
    t: float
    input_length: int = 0
    output_length: int = 0
    keep: int | None = None
    new: list[tuple[int, int]] = []
    requests: list[_Request] | None = None


class _Conversation(msgspec.Struct):
    block_size: int
    requests: list[_Request]


class _Step(NamedTuple):
    """A request, stored as its difference to the previous one of its list."""

    time: float
    input_length: int
    output_length: int
    list_number: int
    keep: int
    new: tuple[range, ...]


class _Reader:
    """Parses conversations; gives each list of requests a number, and each conversation its own block numbers."""

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(_Conversation).decode
        self._lists = 0
        self._first_key = 0
        self.block_tokens = 0

    def parse(self, text: str) -> list[_Step]:
        try:
            conversation = self._decode(text)
        except msgspec.DecodeError as error:
            raise BadLine(f"{error}; {EXPECTED}") from error
        if conversation.block_size < 1 or conversation.block_size != (self.block_tokens or conversation.block_size):
            raise BadLine(
                f"block_size is {conversation.block_size}, expected"
                f" {self.block_tokens or 'at least 1'}, the same in all conversations"
            )
        self.block_tokens = conversation.block_size
        before: dict[int, int] = {}
        steps = list(self._walk(conversation.requests, 0.0, before))
        self._first_key += max(before, default=-1) + 1
        return steps

    def _walk(self, requests: list[_Request], began: float, before: dict[int, int]) -> Iterator[_Step]:
        self._lists += 1
        number, length, last = self._lists, 0, -1
        keys: list[int] = []
        time = began
        for place, request in enumerate(requests, 1):
            # A clock that steps back does not change the order of a conversation.
            time = max(time, began + request.t)
            if request.keep is not None:
                if not 0 <= request.keep <= length:
                    raise BadLine(f"request {place}: keep is {request.keep}, the request before has {length} blocks")
                if min(request.input_length, request.output_length) < 0:
                    raise BadLine(f"request {place}: in or out is negative")
                del keys[request.keep :]
                for first, count in request.new:
                    if first < 0 or count < 0:
                        raise BadLine(f"request {place}: new has [{first}, {count}], expected [first number, count]")
                    last = keys[-1] if keys else -1
                    for key in range(first, first + count):
                        if before.setdefault(key, last) != last:
                            raise BadLine(f"request {place}: block {key} stands for another prefix in an earlier place")
                        last = key
                    keys.extend(range(first, first + count))
                length = len(keys)
                new = tuple(
                    range(self._first_key + first, self._first_key + first + count) for first, count in request.new
                )
                yield _Step(time, request.input_length, request.output_length, number, request.keep, new)
            elif request.requests is None:
                raise BadLine(f"request {place}: has neither keep nor requests; {EXPECTED}")
            if request.requests is not None:
                yield from self._walk(request.requests, time, before)


def read_agent(file: Path, lines: Iterator[tuple[int, str]]) -> Trace:
    """Raises TraceError, with a message for each bad line."""
    reader = _Reader()
    conversations = [steps for _, steps in parse_lines(file, lines, reader.parse)]
    steps = sorted(_merged(conversations), key=lambda step: step.time)
    if not steps:
        raise TraceError([f"{file}: has no requests"])
    return Trace("agent", reader.block_tokens, len(steps), functools.partial(_requests, steps))


def _merged(conversations: list[list[_Step]]) -> Iterator[_Step]:
    began = 0.0
    for number, steps in enumerate(conversations):
        if number % CONVERSATIONS_PER_USER == 0:
            began = 0.0
        for step in steps:
            yield step._replace(time=began + step.time)
        began += max((step.time for step in steps), default=0.0) + _PAUSE_SECONDS


def _requests(steps: list[_Step]) -> Iterator[TraceRequest]:
    lists: dict[int, list[int]] = {}
    for step in steps:
        keys = lists.get(step.list_number, [])[: step.keep]
        for run in step.new:
            keys.extend(run)
        lists[step.list_number] = keys
        yield TraceRequest(step.time, step.input_length, step.output_length, keys)
