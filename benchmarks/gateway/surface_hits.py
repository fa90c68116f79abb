"""Exact hits per second in each form of API, against the same conversation in chat completions."""

import asyncio
import tempfile
from pathlib import Path

from benchmarks.harness import request_bodies as bodies
from benchmarks.harness.client import post
from benchmarks.harness.measurement import RATIO, Figure, Row, Target
from benchmarks.harness.processes import CannotMeasure, Server, cores, gateway, upstream
from benchmarks.harness.wrk import load, same_request

_CONNECTIONS = 32
_METHOD = """\
One worker on one core, wrk with one thread and 32 kept-alive connections on the other. A conversation is computed once,
by chat completions; then each form of API asks for it, in rounds that alternate with chat completions."""


async def measure(quick: bool) -> Figure:
    rounds, seconds = (2, 1) if quick else (7, 3)
    rows: list[Row] = []
    async with upstream() as origin, gateway(origin.url, on=cores().subject) as subject:
        for stream in (False, True):
            forms = bodies.in_other_forms(stream=stream)
            for path, body in forms.items():
                await post(subject, body, path)
                if (await post(subject, body, path)).headers.get("x-keepgate-cache") != "hit":
                    raise CannotMeasure(f"{path}: asked for again, it is no hit")
            chat = forms.pop(bodies.CHAT_PATH)
            for path, body in forms.items():
                what = f"{path}, streamed" if stream else path
                rows.append(await _compare(subject, what, chat, path, body, rounds, seconds))
    return Figure(figure="surface_hits", title="Exact hits in other forms of API", method=_METHOD, rows=tuple(rows))


async def _compare(subject: Server, what: str, chat: bytes, path: str, body: bytes, rounds: int, seconds: int) -> Row:
    ratios: list[float] = []
    beside: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        chat_file, body_file = Path(folder, "chat"), Path(folder, "body")
        await asyncio.to_thread(chat_file.write_bytes, chat)
        await asyncio.to_thread(body_file.write_bytes, body)
        for _ in range(rounds):
            reference = await load(subject, same_request(chat_file), connections=_CONNECTIONS, seconds=seconds)
            hits = await load(subject, same_request(body_file), connections=_CONNECTIONS, seconds=seconds, path=path)
            ratios.append(hits.per_second / reference.per_second)
            beside.append({"hits per second": hits.per_second, "chat per second": reference.per_second})
    return Row(what=what, unit=RATIO, rounds=tuple(ratios), target=Target("least", 0.9), beside=tuple(beside))
