"""`keepgate serve`: the gateway with its children, from the first line it prints to the last signal it gets."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator

import msgspec
import uvloop

from gateway import __version__
from gateway.app import Gateway, open_gateway
from gateway.child import running
from gateway.embedded_store import embedded_store
from gateway.local_backend import BackendFailed, LocalBackend, require_backend
from gateway.settings import Settings, SettingsError
from gateway.tasks import background_tasks
from gateway.upstream import Upstream

log = logging.getLogger(__name__)

WORKER_SETTINGS = "KEEPGATE_WORKER_SETTINGS"
_WORKER_PAUSE = 1.0


def say(line: str) -> None:
    """A line for the person at the terminal."""
    print(line, file=sys.stderr, flush=True)


def serve(settings: Settings) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit status."""
    return _run(lambda stop: _serve(settings, stop))


def serve_as_worker() -> int:
    """One more process behind a shared port; its parent runs the children and does the talking."""
    settings = msgspec.json.decode(os.environ[WORKER_SETTINGS], type=Settings, dec_hook=lambda kind, value: kind(value))
    return _run(lambda stop: _work(settings, stop))


def _run(main: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    async def until_signalled() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await main(stop)

    status = 0
    try:
        uvloop.run(until_signalled())
    except* (SettingsError, BackendFailed) as errors:
        for error in _leaves(errors):
            say(f"keepgate: {error}")
        status = 1
    return status


async def _work(settings: Settings, stop: asyncio.Event) -> None:
    async with open_gateway(settings, share_port=True):
        await stop.wait()


async def _serve(settings: Settings, stop: asyncio.Event) -> None:
    if not settings.upstreams:
        require_backend()
    if settings.workers > 1:
        await _serve_with_workers(settings, stop)
        return
    # The backend outlives the gateway, whose last requests it still answers.
    async with background_tasks() as tasks, open_gateway(settings) as gateway:
        _introduce(settings, gateway.url)
        if not settings.upstreams:
            tasks.start(_local_backend(settings, gateway).supervise())
        await stop.wait()
        say("Stopping.")


def _local_backend(settings: Settings, gateway: Gateway) -> LocalBackend:
    current: list[Upstream] = []

    def came(url: str, model: str) -> None:
        upstream = Upstream(url, gateway.session, settings.timeouts)
        upstream.models, upstream.reachable = frozenset({model}), True
        current.append(upstream)
        gateway.router.add(upstream)
        _invite(gateway.url, model)

    def went() -> None:
        gateway.router.remove(current.pop())

    return LocalBackend(settings.model, port=0, came=came, went=went)


async def _serve_with_workers(settings: Settings, stop: asyncio.Event) -> None:
    """This process is the first worker; the others share its port, its store and its backend."""
    async with contextlib.AsyncExitStack() as stack:
        shared = settings
        if settings.redis == "embedded":
            store = embedded_store(settings.state_path(), settings.cache.embedded_memory)
            shared = msgspec.structs.replace(shared, redis=await stack.enter_async_context(store))
        tasks = await stack.enter_async_context(background_tasks())
        if not settings.upstreams:
            port = _free_port()
            shared = msgspec.structs.replace(shared, upstreams=(f"http://127.0.0.1:{port}/v1",))
            backend = LocalBackend(settings.model, port, came=lambda _, model: _invite(url, model), went=lambda: None)
        gateway = await stack.enter_async_context(open_gateway(shared, share_port=True))
        url = gateway.url
        shared = msgspec.structs.replace(shared, port=gateway.port)
        _introduce(settings, url)
        if not settings.upstreams:
            tasks.start(backend.supervise())
        for _ in range(settings.workers - 1):
            tasks.start(_keep_worker(shared))
        await stop.wait()
        say("Stopping.")


async def _keep_worker(settings: Settings) -> None:
    environment = {WORKER_SETTINGS: msgspec.json.encode(settings, enc_hook=str).decode()}
    while True:
        async with running((sys.executable, "-P", "-m", "gateway.worker"), environment=environment) as process:
            status = await process.wait()
        log.error("a worker ended with status %s; starting another", status)
        await asyncio.sleep(_WORKER_PAUSE)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _introduce(settings: Settings, url: str) -> None:
    say(f"Keepgate {__version__}")
    say(f"  serving    {url}/v1")
    say(f"  figures    {url}/v1/cache/stats and {url}/metrics")
    say(f"  store      {_store_in_words(settings)}")
    say(f"  upstreams  {', '.join(settings.upstreams) or 'the in-repo backend, starting now'}")
    if settings.upstreams:
        say("Ready. Ctrl-C stops it.")


def _invite(url: str, model: str) -> None:
    say(f"Ready: {model} answers at {url}/v1. Ctrl-C stops it.")


def _store_in_words(settings: Settings) -> str:
    if settings.redis == "embedded":
        return f"embedded, data in {settings.state_path()}"
    return "memory only" if settings.redis == "none" else _without_password(settings.redis)


def _without_password(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    credentials, at, place = rest.rpartition("@")
    return f"{scheme}{separator}***{at}{place}" if credentials else url


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        yield from _leaves(error) if isinstance(error, BaseExceptionGroup) else (error,)
