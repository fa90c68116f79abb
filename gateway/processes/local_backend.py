"""The in-repo decode engine as a child process: one more upstream, reached over HTTP like any other."""

import asyncio
import importlib.util
import json
import logging
import sys
from collections.abc import Callable

from msgspec.structs import replace

from gateway.processes.app import Gateway
from gateway.processes.child import running
from gateway.settings.backend import BackendSettings
from gateway.settings.fields import SettingsError, masked
from gateway.settings.prefix_defaults import INDEX_VARIABLE
from gateway.settings.upstreams import UpstreamSettings
from gateway.upstreams.upstream import Upstream

log = logging.getLogger(__name__)

# The label in metrics: its port changes at each start.
_LABEL = "in-repo backend"
_FIRST_PAUSE = 1.0
_MAX_PAUSE = 30.0
# Its exit statuses after it has printed what is wrong, with the model or with an option.
_EXIT_CONFIG_ERROR = (1, 2)


class BackendFailed(Exception):
    """The backend ended before it was ready. The message is empty if the backend has printed the reason."""


def require_backend() -> None:
    """Raises SettingsError when the engine's dependencies are not installed."""
    if importlib.util.find_spec("torch") is None:
        raise SettingsError(
            "upstreams: none is named, and the in-repo backend is not installed; name one with --upstream URL, or"
            " install the extra: pip install 'keepgate[backend]'"
        )


class LocalBackend:
    """Keeps one backend running. Calls `on_ready` with its URL and model when it is ready, `on_gone` when it ends.

    `title` names it in the log.
    """

    def __init__(
        self,
        model: str,
        backend: BackendSettings,
        on_ready: Callable[[str, str], None],
        on_gone: Callable[[], None],
        title: str = "the backend",
    ) -> None:
        self._title = title
        self._variables = {}
        if backend.prefix_index is not None and masked(backend.prefix_index) != backend.prefix_index:
            # Every user of the machine can read command lines.
            self._variables[INDEX_VARIABLE] = backend.prefix_index
            backend = replace(backend, prefix_index=None)
        # -P: the installed package, not one in the current directory.
        program = (sys.executable, "-P", "-m", "backend")
        self._command = (
            *program,
            f"--model={model}",
            "--port=0",
            "--exit-with-parent",
            *backend.options(),
        )
        self._on_ready = on_ready
        self._on_gone = on_gone
        self._was_ready = False

    async def supervise(self) -> None:
        """Start it, and start it again when it ends. Raises BackendFailed when its first start fails."""
        pause = _FIRST_PAUSE
        while True:
            ready, status = await self._run_once()
            if not self._was_ready:
                reason = "" if status in _EXIT_CONFIG_ERROR else f"{self._title} could not start: it {_ended(status)}"
                raise BackendFailed(reason)
            pause = _FIRST_PAUSE if ready else min(pause * 2, _MAX_PAUSE)
            log.error("%s %s; starting it again in %g s", self._title, _ended(status), pause)
            await asyncio.sleep(pause)

    async def _run_once(self) -> tuple[bool, int]:
        """(whether it became ready, its exit status)."""
        ready = False
        async with running(self._command, stdout=asyncio.subprocess.PIPE, variables=self._variables) as process:
            assert process.stdout is not None  # noqa: S101  # it was asked for
            try:
                async for line in process.stdout:
                    if event := _ready_event(line):
                        ready = self._was_ready = True
                        self._on_ready(event["url"], event["model"])
                return ready, await process.wait()
            finally:
                if ready:
                    self._on_gone()


class LocalUpstream:
    """Adds a local backend to the gateway's router when it is ready, and removes it when it ends."""

    def __init__(self, gateway: Gateway, label: str) -> None:
        self._gateway = gateway
        self._label = label
        self._current: Upstream | None = None

    def on_ready(self, url: str, model: str) -> None:
        settings = self._gateway.settings
        server = UpstreamSettings(
            url=url, name=self._label, price_per_hour=settings.costs.backend_per_hour, predictions=True
        )
        upstream = Upstream(
            url,
            self._gateway.connections,
            settings.timeouts,
            settings=server,
            breaker=settings.breaker,
            workers=settings.workers,
        )
        upstream.models, upstream.reachable = frozenset({model}), True
        self._current = upstream
        self._gateway.router.add(upstream)

    def on_gone(self) -> None:
        if self._current is not None:
            self._gateway.router.remove(self._current)
            self._current = None


class LocalUpstreams:
    """The same for each of some replicas, by number from 0."""

    def __init__(self, gateway: Gateway, replicas: int) -> None:
        labels = [_LABEL] if replicas == 1 else [f"{_LABEL} {number + 1}" for number in range(replicas)]
        self._places = [LocalUpstream(gateway, label) for label in labels]

    def on_ready(self, replica: int, url: str, model: str) -> None:
        self._places[replica].on_ready(url, model)

    def on_gone(self, replica: int) -> None:
        self._places[replica].on_gone()


def _ready_event(line: bytes) -> dict[str, str] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and event.get("event") == "ready" else None


def _ended(status: int) -> str:
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
