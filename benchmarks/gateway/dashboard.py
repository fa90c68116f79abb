"""What an open dashboard costs: CPU time of an idle gateway, the first paint, and the bytes of the page."""

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from benchmarks.harness.client import Client
from benchmarks.harness.measurement import Figure, Row, Target
from benchmarks.harness.processes import CannotMeasure, Server, cores, gateway, upstream

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--remote-debugging-port=0",
)
_DEADLINE = 30.0
_REQUESTS, _MODELS = 300, 20
_SETTLE_SECONDS = 7.0
"""Until what the requests left to do is done, and the page has asked for everything once."""
# Resolves to the milliseconds since the navigation began, once the figures are there and painted.
_UNTIL_SHOWN = """new Promise(resolve => {
  const look = () => document.querySelector("#cards b") ? requestAnimationFrame(() => resolve(performance.now()))
    : requestAnimationFrame(look);
  look();
})"""
_UNTIL_PAINTED = """new Promise(resolve => {
  const look = () => performance.getEntriesByName("first-contentful-paint").length ? resolve(true)
    : requestAnimationFrame(look);
  look();
})"""
_FIRST_PAINT = 'performance.getEntriesByName("first-contentful-paint")[0].startTime'
_BYTES = """[...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")]
  .filter(entry => new URL(entry.name).pathname.startsWith("/dashboard"))
  .reduce((sum, entry) => sum + entry.transferSize, 0)"""
_REFRESHES = 'performance.getEntriesByType("resource").filter(entry => entry.name.includes("/v1/cache/stats")).length'
_METHOD = f"""\
One gateway, one worker on one core, embedded Valkey, after {_REQUESTS} requests of {_MODELS} models. Headless
Chromium opens its dashboard on the core of the load, over the loopback and with nothing of it in the browser's cache.
CPU is the CPU time of the gateway's process by the time that passes while nobody else asks it anything; beside it
stands the same without the page. First paint is the browser's own first contentful paint, from the navigation's
begin, in a browser that has shown another page of the gateway: without that it is the start of Chromium that is
measured. The figures are painted once the gateway has answered the first questions of the page. Bytes are those of
the page and its files with their headers."""


async def measure(quick: bool) -> Figure:
    seconds, rounds = (6.0, 1) if quick else (60.0, 3)
    async with upstream() as origin, gateway(origin.url, on=cores().subject) as subject:
        await _fill(subject)
        await asyncio.sleep(_SETTLE_SECONDS)
        without = [await _cpu(subject, seconds) for _ in range(rounds)]
        pages = [await _opened(subject) for _ in range(1 if quick else 5)]
        async with _browser() as page:
            await page.open(f"{subject.url}/dashboard")
            await asyncio.sleep(_SETTLE_SECONDS)
            before = await page.evaluate(_REFRESHES)
            opened = [await _cpu(subject, seconds) for _ in range(rounds)]
            if (await page.evaluate(_REFRESHES) - before) < seconds * rounds / 15:
                raise CannotMeasure("The dashboard did not go on to ask the gateway.")
    return Figure(
        figure="dashboard",
        title="An open dashboard",
        method=_METHOD,
        rows=(
            Row(
                what="CPU of an idle gateway with the dashboard open",
                unit="% of a core",
                rounds=tuple(opened),
                target=Target("most", 1.0),
                beside=tuple({"without it, % of a core": each} for each in without),
            ),
            Row(
                what="first paint",
                unit="ms",
                rounds=tuple(paint for paint, _, _ in pages),
                target=Target("most", 1000.0),
                beside=tuple({"figures are painted, ms": shown} for _, shown, _ in pages),
            ),
            Row(
                what="bytes of the page",
                unit="B",
                rounds=tuple(float(size) for _, _, size in pages),
                target=Target("most", 300_000.0),
            ),
        ),
    )


async def _fill(subject: Server) -> None:
    async with Client(subject) as client:
        for number in range(_REQUESTS):
            content = f"question {number % (_REQUESTS // 2)}"
            body = {"model": f"model-{number % _MODELS}", "messages": [{"role": "user", "content": content}]}
            answer = await client.post(msgspec.json.encode(body))
            if answer.status != 200:
                raise CannotMeasure(f"A request was answered with {answer.status}: {answer.body[:300]!r}")


async def _cpu(subject: Server, seconds: float) -> float:
    """Per cent of a core that the gateway uses."""
    used, began = subject.cpu_seconds(), time.monotonic()
    await asyncio.sleep(seconds)
    return 100.0 * (subject.cpu_seconds() - used) / (time.monotonic() - began)


async def _opened(subject: Server) -> tuple[float, float, int]:
    """Milliseconds to the first paint and to that of the figures, and the page's bytes; in a browser of its own."""
    async with _browser() as page:
        await page.open(f"{subject.url}/health")
        await page.evaluate(_UNTIL_PAINTED)
        await page.open(f"{subject.url}/dashboard")
        shown = await page.evaluate(_UNTIL_SHOWN)
        return await page.evaluate(_FIRST_PAINT), shown, await page.evaluate(_BYTES)


class _Page:
    """A page of Chromium, by its DevTools protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0

    async def open(self, url: str) -> None:
        await self._call("Page.navigate", url=url)

    async def evaluate(self, expression: str) -> Any:
        """What a JavaScript expression gives, or the promise that it is."""
        given = await self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in given:
            raise CannotMeasure(f"The page failed: {given['exceptionDetails']['exception'].get('description')}")
        return given["result"]["value"]

    async def _call(self, method: str, **params: Any) -> Any:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        try:
            async with asyncio.timeout(_DEADLINE):
                while (said := await self._socket.receive_json()).get("id") != self._number:
                    pass  # it tells of other things as well
        except TimeoutError as error:
            raise CannotMeasure(f"The page did nothing for {_DEADLINE:g} s after {method}: does it fail?") from error
        if "error" in said:
            raise CannotMeasure(f"Chromium refused {method}: {said['error']['message']}")
        return said["result"]


@asynccontextmanager
async def _browser() -> AsyncIterator[_Page]:
    """An empty page of a browser of its own."""
    path = next((found for name in _BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        raise CannotMeasure(f"None of {', '.join(_BROWSERS)} is on PATH; install one: apt-get install chromium")
    with tempfile.TemporaryDirectory(prefix="keepgate-bench-", ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            path,
            *_OPTIONS,
            f"--user-data-dir={profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            port = await _debugging_port(process, Path(profile) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    pages = [each for each in await answer.json() if each["type"] == "page"]
                async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    yield _Page(socket)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


async def _debugging_port(process: asyncio.subprocess.Process, file: Path) -> int:
    """The port that Chromium has written into a file of its profile."""
    try:
        async with asyncio.timeout(_DEADLINE):
            while not (lines := _lines(file)):
                if process.returncode is not None:
                    raise CannotMeasure(f"Chromium ended with status {process.returncode} at its start.")
                await asyncio.sleep(0.02)
    except TimeoutError as error:
        raise CannotMeasure(f"Chromium did not start within {_DEADLINE:g} s.") from error
    return int(lines[0])


def _lines(file: Path) -> list[str]:
    """No lines while there is no such file."""
    try:
        return file.read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        return []
