"""What the faults happen to: upstreams, a Redis, and two gateways of two workers each that share them.

One gateway passes its callers' credentials on; the other has virtual keys, and credentials of its own for upstreams.
"""

import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from yarl import URL

from tests.cache.valkey import Valkey
from tests.cache.valkey_cluster import ValkeySentinels, running_sentinels
from tests.chaos.load import DEADLINE, TOTAL, Tenant
from tests.chaos.machine import Clock, listeners, small_disk
from tests.gateway.processes.serving import Serving, serving
from tests.waiting import until

Setting = Literal["plain", "sentinels", "small disk", "own clock", "semantic", "backend", "soak"]
"""With one Redis; with sentinels; with all data on a small disk; with a clock to set; with the semantic cache; with the
in-repo backend as the only upstream of one gateway; with a small Redis that evicts answers.
"""
_STARTED_WITHIN = 30.0
_UPSTREAMS = 3
_WORKERS = 2
_STALLED = 1.5
_TENANTS = 2
_SMALL_REDIS = ("--appendonly", "no", "--maxmemory", "64mb", "--maxmemory-policy", "volatile-lru")
_ENVIRONMENT = {"KEEPGATE_CACHE_REDIS_DEADLINE": "0.02", "CHAOS_UPSTREAM_KEY": "the operator's own"}


class UpstreamProcess:
    """An upstream as a process, which keeps its port when it is started again."""

    def __init__(self) -> None:
        self.port = 0
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def process(self) -> asyncio.subprocess.Process:
        assert self._process is not None, "it was never started"
        return self._process

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.chaos.upstream", str(self.port)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        self.port = int(await self._line())

    async def behave(self, behaviour: str) -> None:
        """Return when it does so."""
        assert self.process.stdin is not None
        self.process.stdin.write(behaviour.encode() + b"\n")
        assert await self._line() == behaviour

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    async def _line(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(_STARTED_WITHIN):
            return (await self.process.stdout.readline()).decode().strip()


@dataclass(slots=True)
class Stage:
    """All that runs."""

    state: Path
    upstreams: list[UpstreamProcess]
    gateways: list[Serving]
    tenants: list[Tenant]
    valkey: Valkey | None = None
    sentinels: ValkeySentinels | None = None
    clock: Clock | None = None
    model: str = ""
    """The model of the in-repo backend, where that is the upstream."""

    @property
    def one(self) -> UpstreamProcess:
        """The upstream that fails where others do not."""
        return self.upstreams[0]


@asynccontextmanager
async def open_stage(setting: Setting = "plain") -> AsyncIterator[Stage]:
    """Run it all. Raises CannotStage."""
    async with AsyncExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="kg-"))
        stack.callback(shutil.rmtree, folder)
        state = folder / "state"
        if setting == "small disk":
            stack.enter_context(small_disk(state))
        if setting == "backend":
            yield await _with_backend(stack, state)
            return
        clock = Clock(folder) if setting == "own clock" else None
        upstreams = [UpstreamProcess() for _ in range(_UPSTREAMS)]
        for upstream in upstreams:
            await upstream.start()
            stack.push_async_callback(upstream.kill)
        stage = Stage(state, upstreams, [], [], clock=clock)
        redis = "embedded"
        if setting in ("plain", "semantic", "soak"):
            stage.valkey = Valkey(folder, *(_SMALL_REDIS if setting == "soak" else ()))
            await stage.valkey.start()
            stack.push_async_callback(stage.valkey.stop)
            redis = stage.valkey.url
        elif setting == "sentinels":
            stage.sentinels = await stack.enter_async_context(running_sentinels())
            redis = stage.sentinels.url
        for has_keys in (False, True):
            file = folder / f"{'keys' if has_keys else 'plain'}.json"  # JSON is YAML
            file.write_bytes(msgspec.json.encode(_settings(upstreams, redis, has_keys, setting)))
            gateway = await stack.enter_async_context(
                serving(
                    state,
                    *("--config", str(file)),
                    ready=True,
                    **{**_ENVIRONMENT, **(clock.variables if clock is not None else {})},
                )
            )
            await _all_listen(gateway)
            stage.gateways.append(gateway)
            stage.tenants += [
                Tenant(f"{'key' if has_keys else 'caller'} {number}", gateway.url, key)
                for number, key in enumerate(await _keys(gateway) if has_keys else ("sk-one", "sk-two"))
            ]
        yield stage


async def _all_listen(gateway: Serving) -> None:
    """Return when all workers take connections: the first says that it is ready before the others are."""
    port = URL(gateway.url).port or 0
    await until(lambda: listeners(port) == _WORKERS, _STARTED_WITHIN)


async def _with_backend(stack: AsyncExitStack, state: Path) -> Stage:
    words = ("--workers", str(_WORKERS), "--model", "default")
    gateway = await stack.enter_async_context(serving(state, *words, ready=True, **_ENVIRONMENT))
    await _all_listen(gateway)
    listed = await gateway.send("GET", "/v1/models")
    tenants = [Tenant("caller", gateway.url, "sk-one")]
    return Stage(state, [], [gateway], tenants, model=listed.json["data"][0]["id"])


def _settings(upstreams: list[UpstreamProcess], redis: str, has_keys: bool, setting: Setting) -> dict[str, Any]:
    own = {"api_key": "env:CHAOS_UPSTREAM_KEY"} if has_keys else {}
    return {
        "workers": _WORKERS,
        "redis": redis,
        "upstreams": [{"url": each.url, "name": f"up{number}", **own} for number, each in enumerate(upstreams)],
        "timeouts": {
            "connect": _STALLED,
            "first_byte": _STALLED,
            "idle": _STALLED,
            "total": TOTAL,
            "shutdown": DEADLINE,
        },
        "breaker": {"open_for": 0.5},
        "health": {"interval": 1.0, "deadline": _STALLED},
        "keys": {"required": has_keys},
        "cache": {"memory": "8MiB"},
        "semantic": {"mode": "on" if setting == "semantic" else "off"},
    }


async def _keys(gateway: Serving) -> list[str]:
    limits = {"requests_per_minute": 1_000_000, "tokens_per_minute": 1_000_000_000, "concurrent_requests": 1000}
    made: list[str] = []
    for number in range(_TENANTS):
        answer = await gateway.send("POST", "/v1/keys", {"name": f"key-{number}", "limits": limits})
        assert answer.status in (200, 201), answer.body
        made.append(json.loads(answer.body)["secret"])
    return made
