"""`keepgate serve`: runs the gateway and its children until a signal."""

import asyncio
import contextlib
import ctypes
import errno
import functools
import gc
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import uvloop

from gateway import __version__
from gateway.http.background_tasks import background_tasks
from gateway.processes.app import Gateway, open_gateway
from gateway.processes.embedded_store import embedded_store
from gateway.processes.local_backend import BackendFailed, LocalBackend, LocalUpstreams, require_backend
from gateway.processes.reload import Reloader
from gateway.processes.semantic_service import semantic_service
from gateway.processes.workers import Backend, Workers
from gateway.settings.backend import BackendSettings
from gateway.settings.fields import SettingsError, masked
from gateway.settings.prefix_defaults import with_prefix_store
from gateway.settings.reloading import Stamp
from gateway.settings.settings import Settings
from gateway.settings.telemetry_defaults import with_telemetry

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A request leaves no cycles, but a hundred young objects while it runs: with Python's threshold of 700 they are visited
# every few requests, which takes a twelfth of the processor time of a miss.
_YOUNG_OBJECTS = 10_000
# A failed request does leave cycles, its exceptions with their frames; some of them have become old.
_YOUNG_COLLECTIONS = 2
# mallopt(3) of glibc, and its own first value of both thresholds in bytes.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE_BYTES = 128 * 1024


def print_status(line: str) -> None:
    """Print a line on standard error, whose terminal may be closed."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def serve(settings: Settings, read: Callable[[], Settings], file: Path | None, seen: Stamp) -> int:
    """Serve until a signal; returns the exit status. `read` reads the settings again, of which `file` is a part.

    `seen` is its stamp from before it was read.
    """
    hangups = Hangups()

    async def run() -> None:
        await _serve(settings, functools.partial(Reloader, settings, read, file, seen), hangups)

    return run_until_signalled(run, on_stop=lambda: print_status("Stopping."), hangups=hangups)


class Hangups:
    """SIGHUP: an operator asks to read the settings again, or the terminal was closed, which is the end."""

    def __init__(self) -> None:
        self._has_terminal = os.isatty(0)
        self.reload: Callable[[], None] = lambda: None

    def arrived(self) -> bool:
        """Whether it means to stop."""
        if self._has_terminal and not os.isatty(0):
            return True
        self.reload()
        return False


def run_until_signalled(
    main: Callable[[], Awaitable[None]],
    on_stop: Callable[[], None] = lambda: None,
    hangups: Hangups | None = None,
) -> int:
    """Run `main` on an event loop and cancel it at the first signal. Returns the exit status.

    Without `hangups` SIGHUP is ignored, as it is where nohup has asked for that.
    """

    async def until_signalled() -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  # this is a coroutine of one
        stopped = False

        def stop() -> None:
            nonlocal stopped
            if not stopped:  # a second signal would interrupt the shutdown
                stopped = True
                on_stop()
                task.cancel()

        def hang_up() -> None:
            if hangups is not None and hangups.arrived():
                stop()

        for number in _STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, stop)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hang_up)
        try:
            await main()
        except asyncio.CancelledError:
            if not stopped:
                raise

    # Imported modules stay: the cycle collector need not visit them.
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _YOUNG_COLLECTIONS, 10)
    _return_freed_memory()
    status = 0
    try:
        uvloop.run(until_signalled())
    except* (SettingsError, BackendFailed) as errors:
        for error in _leaves(errors):
            if str(error):
                print_status(f"keepgate: {error}")
        status = 1
    return status


MakeReloader = Callable[[Callable[[Settings], Awaitable[Sequence[str]]]], Reloader]


async def _serve(settings: Settings, make_reloader: MakeReloader, hangups: Hangups) -> None:
    if not settings.upstreams:
        require_backend()
    if settings.workers > 1:
        await _serve_with_workers(settings, make_reloader, hangups)
        return
    # The backend stops after the gateway, whose last requests it still answers.
    async with background_tasks() as tasks, open_gateway(settings) as gateway:
        _print_banner(settings, gateway.url)
        tasks.start(_reloading(make_reloader(gateway.reload), hangups))
        if settings.upstreams:
            tasks.start(_print_unreachable(gateway))
        else:
            places = LocalUpstreams(gateway, settings.backend.replicas)

            def on_ready(replica: int, url: str, model: str) -> None:
                places.on_ready(replica, url, model)
                _print_ready(settings, gateway.url, model, replica)

            for backend in _local_backends(settings, gateway, on_ready, places.on_gone):
                tasks.start(backend.supervise())
        await _forever()


async def _serve_with_workers(settings: Settings, make_reloader: MakeReloader, hangups: Hangups) -> None:
    """This process is the first worker; the others share its port, its store and its backend."""
    _require_free_port(settings)
    async with contextlib.AsyncExitStack() as stack:
        shared = settings
        if settings.redis == "embedded":
            store = embedded_store(settings.state_path(), settings.cache.embedded_memory)
            shared = msgspec.structs.replace(shared, redis=await stack.enter_async_context(store))
        redis_url = "" if shared.redis == "none" else shared.redis
        socket = await stack.enter_async_context(semantic_service(shared, redis_url))
        # In this order the last requests of each worker still reach the backend.
        backend_tasks = await stack.enter_async_context(background_tasks())
        gateway = await stack.enter_async_context(open_gateway(shared, share_port=True, semantic_socket=socket))
        worker_tasks = await stack.enter_async_context(background_tasks())
        # All stop at the same time: a connection that one refuses must not be given to another that is about to.
        stack.push_async_callback(gateway.refuse)
        _print_banner(settings, gateway.url)
        workers = Workers(msgspec.structs.replace(shared, port=gateway.port), socket)

        async def apply(wanted: Settings) -> Sequence[str]:
            waiting = await gateway.reload(wanted)
            workers.tell_settings(msgspec.structs.replace(gateway.settings, port=gateway.port))
            return [name for name in waiting if name != "redis" or settings.redis != wanted.redis]

        worker_tasks.start(_reloading(make_reloader(apply), hangups))
        for _ in range(settings.workers - 1):
            worker_tasks.start(workers.supervise_one())
        if settings.upstreams:
            worker_tasks.start(_print_unreachable(gateway))
        else:
            places = LocalUpstreams(gateway, settings.backend.replicas)

            def on_ready(replica: int, url: str, model: str) -> None:
                places.on_ready(replica, url, model)
                workers.tell(Backend(replica, url, model))
                _print_ready(settings, gateway.url, model, replica)

            def on_gone(replica: int) -> None:
                places.on_gone(replica)
                workers.tell(Backend(replica))

            for backend in _local_backends(settings, gateway, on_ready, on_gone):
                backend_tasks.start(backend.supervise())
        await _forever()


async def _reloading(reloader: Reloader, hangups: Hangups) -> None:
    hangups.reload = reloader.ask
    await reloader.run()


def _require_free_port(settings: Settings) -> None:
    """SO_REUSEPORT would share the port with another program too. Raises SettingsError if it is in use."""
    if not settings.port:
        return
    with contextlib.suppress(socket.gaierror):  # an unknown host is reported when the gateway listens on it
        for family, kind, protocol, _, address in socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(address)
                except OSError as error:
                    if error.errno == errno.EADDRINUSE:
                        raise SettingsError(
                            f"port: {settings.port} is taken on {settings.host}; choose another with --port or"
                            " KEEPGATE_PORT"
                        ) from error


async def _forever() -> None:
    await asyncio.Event().wait()


def _local_backends(
    settings: Settings,
    gateway: Gateway,
    on_ready: Callable[[int, str, str], None],
    on_gone: Callable[[int], None],
) -> Sequence[LocalBackend]:
    """One for each replica, whose number is the first argument of `on_ready` and `on_gone`."""
    backend = with_telemetry(with_prefix_store(settings, gateway.redis_url), settings.log, settings.traces)
    print_status(f"  prefixes   {_describe_prefix_store(backend)}")
    replicas = backend.replicas
    if replicas == 1:
        return [LocalBackend(settings.model, backend, functools.partial(on_ready, 0), functools.partial(on_gone, 0))]
    for name in ("prefix_name", "prefix_address"):
        if getattr(backend, name) is not None:
            raise SettingsError(f"backend.{name}: is that of one backend, and backend.replicas is {replicas}; omit it")
    print_status(f"  replicas   {replicas} of the in-repo backend")
    if backend.threads is None:
        backend = msgspec.structs.replace(backend, threads=max(1, len(os.sched_getaffinity(0)) // replicas))
    return [
        LocalBackend(
            settings.model,
            backend,
            functools.partial(on_ready, number),
            functools.partial(on_gone, number),
            f"replica {number + 1} of the backend",
        )
        for number in range(replicas)
    ]


def _print_banner(settings: Settings, url: str) -> None:
    print_status(f"Keepgate {__version__}")
    print_status(f"  serving    {url}/v1 (open {url} in a browser to try it)")
    print_status(f"  figures    {url}/v1/cache/stats and {url}/metrics")
    print_status(f"  store      {_describe_store(settings)}")
    if settings.semantic.mode != "off":
        print_status(f"  semantic   {_describe_semantic(settings)}")
    print_status(
        f"  upstreams  {', '.join(server.url for server in settings.servers) or 'the in-repo backend, starting now'}"
    )
    if settings.upstreams:
        print_status("Ready. Ctrl-C stops it.")


def _print_ready(settings: Settings, url: str, model: str, replica: int) -> None:
    replicas = settings.backend.replicas
    which = f" (replica {replica + 1} of {replicas})" if replicas > 1 else ""
    print_status(f"Ready: {model} answers at {url}/v1{which}. Ctrl-C stops it.")


async def _print_unreachable(gateway: Gateway) -> None:
    """Say that no upstream answers at the start, which is more often a wrong URL than a server that is down.

    Then also when one does.
    """
    await gateway.router.refreshed.wait()
    if not gateway.router.was_ready.is_set():
        print_status(f"No upstream can be reached; GET {gateway.url}/ready says when one can.")
        await gateway.router.was_ready.wait()
        print_status("An upstream can be reached now.")


def _describe_store(settings: Settings) -> str:
    if settings.redis == "embedded":
        return f"embedded, data in {settings.state_path()}"
    return "memory only" if settings.redis == "none" else masked(settings.redis)


def _describe_prefix_store(backend: BackendSettings) -> str:
    if backend.prefix_sharing is False:
        return "not shared: every prompt is computed whole"
    places = [f"in {backend.prefix_disk}"] if backend.prefix_disk else []
    if backend.prefix_memory:
        places.insert(0, "in memory")
    return f"kept {' and '.join(places)}" if places else "in the engine's own memory only"


def _describe_semantic(settings: Settings) -> str:
    semantic = settings.semantic
    rule = {
        "budget": f"no more than {semantic.delta:.2%} of all requests answered wrong on average",
        "threshold": f"whatever is at least {semantic.threshold:g} similar, right or wrong",
    }[semantic.policy]
    return rule if semantic.mode == "on" else f"observed only; it would serve {rule}"


def _return_freed_memory() -> None:
    """Keep large bodies out of glibc's heap, where each leaves a hole.

    By default glibc keeps blocks as large as the largest one that was freed, and twice that at the heap's end.
    """
    with contextlib.suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _LARGE_BYTES)


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        yield from _leaves(error) if isinstance(error, BaseExceptionGroup) else (error,)
