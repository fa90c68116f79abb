"""What prompts cost where upstreams have prompt caches of their own, with and without the gateway's marks.

As a program it prints the figures as JSON: `python -m benchmarks.gateway.prompt_caches`.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from benchmarks.harness.measurement import RATIO, Figure, Row, Target
from benchmarks.harness.processes import run_on_subject_core
from gateway.proxy.prompt_caches.planner import PromptCachePlanner
from gateway.routing.router import Router
from gateway.settings.cache import PromptCacheSettings
from gateway.settings.settings import TimeoutSettings
from gateway.upstreams.connection import open_connections
from gateway.upstreams.upstream import Attempt, Upstream
from tests.gateway.upstreams.billing_upstream import AnthropicCache, OpenAICache

Json = dict[str, Any]

_SEED = 20
_TENANTS = 4
_METHOD = """\
Requests from a seeded generator, through the code that marks them, to the rules by which Anthropic and OpenAI bill, on
a clock of their own; no model and no network. A figure is the cost of all prompts, where 1 is their cost without any
cache. Anthropic: breakpoints, at least 1,024 tokens, a look back of 20 blocks, 5 minutes after each use, 1.25 for what
is written and 0.1 for what is read. OpenAI: automatic, steps of 128 tokens, 0.1 for what is read, a machine takes 15
requests a minute of one beginning and key. Chats: 200 conversations in two hours, of 4 turns on average, with pauses
of 45 s (median; a tenth is longer than 200 s); 12 apps of 4 tenants with tools and system prompts of 1,500 to 6,000
tokens. Questions: 600 single turns to the same apps. Documents: 600 single turns, each about another text of 3,000
tokens, of which nothing comes again. Agents: 40 loops of 30 tool calls. Busy: 1,200 conversations with one app in ten
minutes. "Every end" marks the system prompt and the last message of every request, as many clients do. The time is CPU
time of the code that marks, over all bodies for Anthropic (JSON of 6 to 90 KB)."""
_WORKLOADS = ("chats", "questions", "documents", "agents", "busy")
_TARGETS = {"chats": 0.3, "questions": 0.4, "documents": 1.0, "agents": 0.2, "busy": 0.3}


@dataclass(frozen=True, slots=True)
class _App:
    """A tenant's application: what its conversations begin with."""

    tenant: str
    system: str
    tools: list[Json]


@dataclass(frozen=True, slots=True)
class _Turn:
    """A request: the pieces of a conversation so far, each who said it and what."""

    at: float
    app: _App
    said: tuple[tuple[str, str], ...]
    calls_tools: bool


def _text(random_: random.Random, tokens: int) -> str:
    """Words of some four characters."""
    return " ".join("".join(random_.choices("etaoinshrdlu", k=3)) for _ in range(tokens))


def _tool(random_: random.Random, number: int) -> Json:
    schema = {"type": "object", "properties": {"query": {"type": "string", "description": _text(random_, 40)}}}
    return {"name": f"tool_{number}", "description": _text(random_, 60), "input_schema": schema}


def _apps(random_: random.Random) -> list[_App]:
    return [
        _App(
            f"tenant {number % _TENANTS}",
            _text(random_, random_.randint(1_000, 5_000)),
            [_tool(random_, tool) for tool in range(random_.randint(3, 8))],
        )
        for number in range(12)
    ]


def _conversation(
    random_: random.Random, app: _App, start: float, turns: int, pause: float, calls_tools: bool
) -> Iterator[_Turn]:
    at, said = start, []
    for _ in range(turns):
        said.append(("user", _text(random_, random_.randint(20, 300))))
        yield _Turn(at, app, tuple(said), calls_tools)
        said.append(("assistant", _text(random_, random_.randint(50, 500))))
        at += random_.lognormvariate(0, 1.2) * pause


def _workload(name: str, share: float) -> list[_Turn]:
    """The requests in the order of their times; `share` of all of them."""
    random_ = random.Random(f"{_SEED} {name}")  # noqa: S311  # the same requests every time
    apps = _apps(random_)
    weights = [1 / (rank + 1) for rank in range(len(apps))]
    count = int({"chats": 200, "questions": 600, "documents": 600, "agents": 40, "busy": 1_200}[name] * share)
    turns: list[_Turn] = []
    for _ in range(count):
        start, app = random_.uniform(0, 7_200 * share), random_.choices(apps, weights)[0]
        if name == "documents":
            app = _App(app.tenant, _text(random_, 3_000), [])
        if name == "busy":
            app, start = apps[0], start / 12
        length = {
            "chats": 1 + int(random_.expovariate(1 / 3.5)),
            "busy": 1 + int(random_.expovariate(1 / 3.5)),
            "agents": 30,
        }.get(name, 1)
        turns += _conversation(random_, app, start, length, 4.0 if name == "agents" else 45.0, name == "agents")
    return sorted(turns, key=lambda turn: turn.at)


def _message_body(turn: _Turn) -> Json:
    messages: list[Json] = []
    for number, (role, text) in enumerate(turn.said):
        content: Any = text
        if turn.calls_tools and role == "assistant":
            call = {"type": "tool_use", "id": f"toolu_{number}", "name": "tool_0", "input": {"query": text[:200]}}
            content = [{"type": "text", "text": text}, call]
        elif turn.calls_tools and number:
            content = [{"type": "tool_result", "tool_use_id": f"toolu_{number - 1}", "content": text}]
        messages.append({"role": role, "content": content})
    asked = {"model": "m", "max_tokens": 1_000, "system": turn.app.system, "messages": messages}
    return {**asked, "tools": turn.app.tools} if turn.app.tools else asked


def _chat_body(turn: _Turn) -> Json:
    messages = [{"role": "system", "content": turn.app.system}]
    messages += [{"role": role, "content": text} for role, text in turn.said]
    tools = [
        {"type": "function", "function": {"name": tool["name"], "parameters": tool["input_schema"]}}
        for tool in turn.app.tools
    ]
    return {"model": "m", "messages": messages, **({"tools": tools} if tools else {})}


def _every_end(fields: Json) -> Json:
    """As clients do that always mark the system prompt and the last message."""
    mark = {"cache_control": {"type": "ephemeral"}}
    *earlier, last = fields["messages"]
    content = last["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    blocks[-1] = {**blocks[-1], **mark}
    system = [{"type": "text", "text": fields["system"], **mark}]
    return {**fields, "system": system, "messages": [*earlier, {**last, "content": blocks}]}


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


Mark = Callable[[Json, str], Json]


def _unmarked(fields: Json, tenant: str) -> Json:
    return fields


def _cost(
    turns: list[_Turn],
    body: Callable[[_Turn], Json],
    cache: AnthropicCache | OpenAICache,
    clock: _Clock,
    mark: Mark,
) -> float:
    """The cost of the prompts with this cache, where 1 is their cost without any."""
    paid = tokens = 0.0
    for turn in turns:
        clock.now = turn.at
        bill = cache.bill(turn.app.tenant, mark(body(turn), turn.app.tenant))
        paid += bill.price(cache.WRITTEN, cache.READ)
        tokens += sum(bill)
    return paid / tokens


def _gateway_marks(planner: PromptCachePlanner, path: str, family: str, seconds: list[float] | None = None) -> Mark:
    def mark(fields: Json, tenant: str) -> Json:
        attempt = Attempt(path, msgspec.json.encode(fields), family)
        began = time.thread_time()
        made = planner.marked([attempt], tenant, fields["model"])[0].body
        if seconds is not None:
            seconds.append(time.thread_time() - began)
        marked: Json = msgspec.json.decode(made or b"")
        return marked

    return mark


async def _figures(share: float) -> dict[str, float]:
    """Every figure by its name."""
    found: dict[str, float] = {}
    settings, seconds = PromptCacheSettings(mode="mark"), list[float]()
    async with open_connections(1.0) as connections:
        anthropic, openai = (
            Router(Upstream(f"https://api.{name}.com", connections, TimeoutSettings()))
            for name in ("anthropic", "openai")
        )
        for name in _WORKLOADS:
            turns = _workload(name, share)
            for mode in ("off", "every end", "mark"):
                clock = _Clock()
                planner = PromptCachePlanner(settings, anthropic, clock)
                marks = {
                    "off": _unmarked,
                    "every end": lambda fields, _: _every_end(fields),
                    "mark": _gateway_marks(planner, "/v1/messages", "messages", seconds),
                }
                found[f"Anthropic, {name}: {mode}"] = _cost(
                    turns, _message_body, AnthropicCache(clock), clock, marks[mode]
                )
            for mode in ("off", "mark"):
                clock = _Clock()
                planner = PromptCachePlanner(settings, openai, clock)
                marks = {"off": _unmarked, "mark": _gateway_marks(planner, "/v1/chat/completions", "chat.completions")}
                found[f"OpenAI, {name}: {mode}"] = _cost(turns, _chat_body, OpenAICache(clock), clock, marks[mode])
    found["time, p50"] = statistics.median(seconds) * 1e6
    found["time, p99"] = statistics.quantiles(seconds, n=100)[-1] * 1e6
    return found


async def measure(quick: bool) -> Figure:
    words = ("--share", "0.1") if quick else ()
    found = json.loads(await run_on_subject_core("benchmarks.gateway.prompt_caches", *words))
    rows = [
        Row(
            what=f"{provider}, {name}",
            unit=RATIO,
            rounds=(found[f"{provider}, {name}: mark"],),
            target=Target("most", _TARGETS[name]),
            beside=({mode: found[f"{provider}, {name}: {mode}"] for mode in modes},),
        )
        for provider, modes in (("Anthropic", ("off", "every end")), ("OpenAI", ("off",)))
        for name in _WORKLOADS
    ]
    times = (("p50", Target("most", 100.0)), ("p99", None))
    rows += [
        Row(what=f"time to mark a request, {which}", unit="µs", rounds=(found[f"time, {which}"],), target=target)
        for which, target in times
    ]
    return Figure(figure="prompt_caches", title="Prompt caches of upstreams", method=_METHOD, rows=tuple(rows))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway.prompt_caches")
    parser.add_argument("--share", type=float, default=1.0, help="of the requests that are replayed")
    json.dump(asyncio.run(_figures(parser.parse_args().share)), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
