"""Load from wrk: one thread on the core of the load, connections kept alive, every answer checked."""

import asyncio
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.processes import CannotMeasure, Server, authorization, cores
from benchmarks.harness.request_bodies import CHAT_PATH, NUMBER_DIGITS

_REPORT = """
function done(summary, latency, requests)
  io.write(string.format(
    "REPORT %d %d %d %d %d %d %d\\n", summary.requests, summary.duration,
    summary.errors.connect + summary.errors.read + summary.errors.write + summary.errors.timeout,
    summary.errors.status, latency:percentile(50), latency:percentile(99), latency.max))
end
"""
_SAME = """
local file = io.open("{body}", "rb")
wrk.method, wrk.body = "POST", file:read("*all")
wrk.headers["Content-Type"] = "application/json"
if "{key}" ~= "" then wrk.headers["Authorization"] = "Bearer {key}" end
"""
# Strings are put together by hand: wrk.format would cost the load generator more than the request is worth.
_VARYING = """
local number, plain
function init()
  number, plain = 0, wrk.format("POST", "{path}")
end
function request()
  number = number + 1
  return (plain:gsub("\\r\\n", string.format("\\r\\ntraceparent: %032d\\r\\n", number), 1))
end
"""
_DISTINCT = """
local number, last = {first}, {last}
local head = "POST {path} HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Type: application/json\\r\\n{authorization}"
local before, after = head .. "Content-Length: {length}\\r\\n\\r\\n" .. [==[{before}]==], [==[{after}]==]
function request()
  number = number < last and number + 1 or {first} + 1
  return before .. string.format("%0{digits}d", number) .. after
end
"""
_PAUSES = """
function delay()
  return math.random(0, {most_milliseconds})
end
"""
_SECONDS_TO_FINISH = 30.0


@dataclass(frozen=True, slots=True)
class Run:
    """What wrk saw, and what the server spent: latencies in seconds, `cpu` in seconds of CPU time."""

    requests: int
    seconds: float
    p50: float
    p99: float
    slowest: float
    cpu: float

    @property
    def per_second(self) -> float:
        return self.requests / self.seconds

    @property
    def cpu_per_request(self) -> float:
        return self.cpu / self.requests

    @property
    def cpu_share(self) -> float:
        """Of one core."""
        return self.cpu / self.seconds


class DistinctRequests:
    """Chats of which no two are alike, however many runs ask for them."""

    def __init__(self, parts: tuple[bytes, bytes]) -> None:
        self._parts = parts
        self._next = 1

    def script(self, at_most: int, pause: float, server: Server | None = None) -> str:
        """For `at_most` requests, which then come again; each connection waits up to `pause` seconds, evenly spread,
        before its next one.

        They have the key of `server`, if it has one.
        """
        first, self._next = self._next, self._next + at_most
        before, after = (part.decode() for part in self._parts)
        length = len(before) + NUMBER_DIGITS + len(after)
        requests = _DISTINCT.format(
            first=first,
            last=first + at_most,
            path=CHAT_PATH,
            length=length,
            before=before,
            after=after,
            digits=NUMBER_DIGITS,
            authorization="" if server is None else authorization(server).replace("\r\n", "\\r\\n"),
        )
        return requests + (_PAUSES.format(most_milliseconds=round(pause * 1e3)) if pause else "")


def same_request(body: Path, header_varies: bool = False, key: str = "") -> str:
    """A script that sends the bytes of this file again and again, if wanted with a header that is never the same."""
    return _SAME.format(body=body, key=key) + (_VARYING.format(path=CHAT_PATH) if header_varies else "")


async def load(server: Server, script: str, *, connections: int, seconds: int, path: str = CHAT_PATH) -> Run:
    """Send requests as fast as answers come. Raises CannotMeasure when one is not answered with a success."""
    if shutil.which("wrk") is None:
        raise CannotMeasure("wrk is not installed. On Debian: apt-get install wrk. Elsewhere: github.com/wg/wrk.")
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as file:
        file.write(script + _REPORT)
        file.flush()
        words = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "20s", "-s", file.name]
        before = server.cpu_seconds()
        process = await asyncio.create_subprocess_exec(
            *words,
            server.url + path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            preexec_fn=lambda: os.sched_setaffinity(0, cores().load),
        )
        async with asyncio.timeout(seconds + _SECONDS_TO_FINISH):
            said, _ = await process.communicate()
        cpu = server.cpu_seconds() - before
    return _read(said.decode(errors="replace"), cpu)


def _read(said: str, cpu: float) -> Run:
    report = re.search(r"^REPORT ([\d ]+)$", said, re.MULTILINE)
    if report is None:
        raise CannotMeasure(f"wrk reported nothing; it said: {said.strip()}")
    requests, micros, broken, refused, p50, p99, slowest = map(int, report[1].split())
    if broken or refused or not requests:
        raise CannotMeasure(f"Of {requests} requests {refused} were refused and {broken} connections broke.")
    return Run(requests, micros / 1e6, p50 / 1e6, p99 / 1e6, slowest / 1e6, cpu)
