"""The backend's process: loads the model, warms it up, serves it and stops in order."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import functools
import ipaddress
import os
import signal
import socket
import sys
import urllib.parse
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import uvloop

from backend.checkpoints.gguf.convert import Progress
from backend.engine.config import EngineConfig
from backend.errors import EngineLost
from backend.model import ServedModel, load_model
from backend.model_loader.source import resolve_model
from backend.runners.warm_up import warm_up
from backend.speculation.opening import open_speculator
from backend.speculation.speculator import AdaptiveSpeculator
from prefix_store.store.config import StoreConfig
from telemetry.tracing.opening import open_tracing
from telemetry.tracing.span import Tracing

_PR_SET_PDEATHSIG = 1
_PARENT_CHECK_SECONDS = 0.5
_SHUTDOWN_SECONDS = 5.0
_LOST_SECONDS = 2.0
"""After the loss of a rank requests are refused, and the health endpoint says why, for so long before the end."""
_ALL_INTERFACES = ("0.0.0.0", "::")  # noqa: S104


def serve(
    model_name: str,
    engine: EngineConfig,
    *,
    chat_template: str | None,
    host: str,
    port: int,
    exit_with_parent: bool,
    progress: Progress,
    announce: Callable[[str, str], None],
    traces_endpoint: str = "",
    traces_file: str = "",
) -> None:
    """Serves one model until SIGTERM or SIGINT, or until the parent process ends.

    Args:
        chat_template: Jinja source that replaces the model's own.
        announce: called once with URL and model name, when the model is warm and the port listens.
        traces_endpoint, traces_file: where traces go; both empty: there are none.

    Raises:
        ModelError: the model cannot be served, or (EngineLost) no longer, since a rank has failed.
        TracingUnavailable: traces cannot be exported.
        OSError: the address cannot be bound.
    """
    parent = os.getppid()
    if exit_with_parent:
        _die_with_parent()
    # The address is bound before the model is loaded, so that a port in use fails at once.
    with _bound_socket(host, port) as sock:
        source = dataclasses.replace(resolve_model(model_name, progress), chat_template=chat_template)
        model = load_model(source, engine, progress)
        progress("warming up")
        with contextlib.closing(model.parallel) if model.parallel is not None else contextlib.nullcontext():
            warm_up(model.runner, model.tokenizer.token_bytes, model.max_context)
            speculator = open_speculator(model, engine, progress)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                traces = open_tracing("keepgate-engine", endpoint=traces_endpoint, file=traces_file)
                watched = parent if exit_with_parent else None
                runner.run(_serve(traces, model, engine, speculator, sock, watched, progress, announce))


async def _serve(
    traces: AbstractAsyncContextManager[Tracing],
    model: ServedModel,
    engine: EngineConfig,
    speculator: AdaptiveSpeculator | None,
    sock: socket.socket,
    parent: int | None,
    progress: Progress,
    announce: Callable[[str, str], None],
) -> None:
    # Imported here because torch takes seconds to import: a wrong model or a port in use fails before.
    from backend.api.app import create_app
    from backend.api.http_server import listening
    from backend.api.server_state import STATE

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    address, port = sock.getsockname()[:2]
    url = f"http://{f'[{address}]' if ':' in address else address}:{port}"
    engine = dataclasses.replace(engine, prefix_store=_prefix_store(model, engine, url, progress))
    async with (
        traces as tracing,
        listening(app := create_app(model, engine, tracing, speculator), sock, _SHUTDOWN_SECONDS),
    ):
        announce(url, model.name)
        progress(f"serving {model.name} with {model.runner.name} on {url}")
        watcher = asyncio.create_task(_watch_parent(parent, stop)) if parent is not None else None
        lost: list[str] = []

        def lose(message: str) -> None:
            progress(f"stopping soon, for {message}")
            lost.append(message)
            app[STATE].engine.mark_lost(f"the engine has lost a part of itself: {message}")
            loop.call_later(_LOST_SECONDS, stop.set)

        if model.parallel is not None:
            model.parallel.ranks.on_failure(functools.partial(_call_on, loop, lose))
        await stop.wait()
        if watcher is not None:
            watcher.cancel()
        progress("stopping")
        # Running answers end with an error, which their handlers send while the server waits for them.
        await app[STATE].engine.stop()
    if lost:
        raise EngineLost(lost[0])


def _call_on(loop: asyncio.AbstractEventLoop, function: Callable[[str], None], message: str) -> None:
    """Calls a function on an event loop; any thread may call this."""
    loop.call_soon_threadsafe(function, message)


def _prefix_store(model: ServedModel, engine: EngineConfig, url: str, progress: Progress) -> StoreConfig | None:
    """The configuration of the prefix store with the engine's name and address; None: this model cannot have one."""
    from backend.api.prefix_store import unsupported_reason

    config = engine.prefix_store
    if config is None:
        return None
    if not engine.shares_prefixes:
        progress("no prefix store: --no-prefix-sharing computes every prompt in full")
        return None
    if reason := unsupported_reason(model):
        progress(f"no prefix store: {reason}")
        return None
    if config.index and not config.secret:
        progress("--prefix-index without --prefix-secret-file: this engine shares no blocks with other engines")
    name = f"{socket.gethostname()}:{url.rpartition(':')[2]}"
    return dataclasses.replace(config, name=config.name or name, address=config.address or _address(url, name, config))


def _address(url: str, name: str, config: StoreConfig) -> str:
    """The URL at which other engines reach this server; empty: they cannot."""
    host = urllib.parse.urlsplit(url).hostname or ""
    if host in _ALL_INTERFACES:
        return f"http://{name}"
    # On another host a loopback address would lead to that host itself.
    return "" if _is_loopback(host) and not _is_loopback(urllib.parse.urlsplit(config.index).hostname or "") else url


def _is_loopback(host: str) -> bool:
    """Whether a host is loopback; an empty one is a Unix socket."""
    try:
        return not host or host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bound_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return sock


def _die_with_parent() -> None:
    """On Linux the kernel sends SIGTERM when the parent dies; elsewhere ``_watch_parent`` notices."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


async def _watch_parent(parent: int, stop: asyncio.Event) -> None:
    """Covers what the kernel's signal does not: other systems, and a parent that died before the call."""
    while os.getppid() == parent:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _PARENT_CHECK_SECONDS)
            return
    stop.set()
