"""The Redis that the settings name: reached and looked at as the gateway does, or the embedded one tried out."""

import asyncio
import contextlib
import secrets
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from redis.exceptions import AuthenticationError, NoPermissionError, OutOfMemoryError, ReadOnlyError, RedisError

from cache.errors import CacheError
from cache.stores.cluster import Cluster
from cache.stores.redis_connections import RedisConnections
from cache.stores.redis_replies import info_fields
from cache.stores.redis_store import open_topology
from cache.stores.topology import SentinelServers, Topology
from gateway.commands.doctor import clock
from gateway.commands.doctor.finding import Finding, in_units, ok, problem, warning
from gateway.processes.embedded_store import SOCKET, embedded_store
from gateway.processes.runtime_directory import socket_path
from gateway.settings.fields import SettingsError, masked
from gateway.settings.settings import Settings

_ANSWER_SECONDS = 1.0
_REACH_SECONDS = 5.0
_LOOKUPS = 100
_OLDEST = (7, 0)
"""The oldest version of Redis that has every command and option in use: docs/guides/redis.md."""
_WRITE_MILLISECONDS = 2_000
_FULL = 0.95


async def check_redis(settings: Settings) -> list[Finding]:
    """Reachable, its version, topology, memory, persistence, rights, latency, and clock."""
    if settings.redis == "none":
        return [ok("redis", "none: answers are in the memory of each worker, and end with it")]
    if settings.redis != "embedded":
        return await _look(settings, settings.redis, masked(settings.redis))
    async with contextlib.AsyncExitStack() as stack:
        try:
            url, name = await stack.enter_async_context(_embedded(settings))
        except (SettingsError, OSError) as error:
            return [problem("redis", str(error), "do what the message says, or name a server with --redis URL")]
        return await _look(settings, url, name)


@asynccontextmanager
async def _embedded(settings: Settings) -> AsyncIterator[tuple[str, str]]:
    """The URL and the name of the embedded server: the one that runs, or one that is started on an empty folder."""
    folder = settings.state_path() / "valkey"
    if (folder / SOCKET).exists():
        with socket_path(folder, SOCKET) as path:
            url = f"unix://{path}"
            if await _answers(url):
                yield url, f"embedded, running in {folder}"
                return
    with tempfile.TemporaryDirectory(prefix="keepgate-doctor-") as empty:
        async with embedded_store(Path(empty), settings.cache.embedded_memory) as url:
            yield url, "embedded, tried on an empty folder"


async def _answers(url: str) -> bool:
    async with open_topology(url) as topology:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                await topology.check()
        except (RedisError, OSError, TimeoutError, CacheError):
            return False
    return True


async def _look(settings: Settings, url: str, name: str) -> list[Finding]:
    async with open_topology(url) as topology:
        try:
            async with asyncio.timeout(_REACH_SECONDS):
                await topology.check()
                masters = await topology.masters()
        except (RedisError, OSError, TimeoutError, CacheError) as error:
            return [_unreachable(name, error)]
        found: list[Finding] = []
        for number, master in enumerate(masters, start=1):
            label = f"{name}, master {number} of {len(masters)}" if len(masters) > 1 else name
            found += await _of_master(settings, topology, master, label)
        found.append(await _rights(topology))
        found.append(await _latency(topology, settings.cache.redis_deadline))
        found.append(await _clock(topology))
        return found


def _unreachable(name: str, error: BaseException) -> Finding:
    reason: BaseException | None = error
    while reason is not None and not isinstance(reason, AuthenticationError):
        reason = reason.__cause__
    if reason is not None:
        return problem(
            "redis", f"{name} refuses the credentials: {reason}", "correct user and password in the URL of redis"
        )
    return problem(
        "redis",
        f"{name} cannot be reached: {str(error).rstrip('.') or f'no answer in {_REACH_SECONDS:g} s'}",
        "start it, or correct the URL of redis (KEEPGATE_REDIS); until then hits come from memory alone",
    )


async def _of_master(settings: Settings, topology: Topology, master: RedisConnections, name: str) -> list[Finding]:
    """What INFO says. Where it is refused, as some managed services do, nothing is known of it."""
    sections = ("server", "memory", "persistence", "replication", "cluster", "stats")
    replies = await master.ask(*(("INFO", section) for section in sections))
    info: dict[str, str] = {}
    for reply in replies:
        info |= info_fields(reply)
    if not info:
        return [
            warning(
                "redis",
                f"{name} answers, but refuses INFO: version, memory and persistence are unknown",
                "give its user +info, or check maxmemory, maxmemory-policy and appendonly by hand",
            )
        ]
    return [
        _version(topology, info, name),
        *_role(topology, info, name),
        *_memory(settings, info),
        *_persistence(settings, info, await _snapshots(master)),
    ]


def _version(topology: Topology, info: Mapping[str, str], name: str) -> Finding:
    version = info.get("valkey_version") or info.get("redis_version", "unknown")
    kind = "Valkey" if "valkey_version" in info else "Redis"
    said = f"{name}: {kind} {version}, {_topology_of(topology, info)}"
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if kind == "Redis" and len(numbers) == len(_OLDEST) and numbers < _OLDEST:
        return warning("redis", said, "use Redis 7 or later, or Valkey: older ones lack options that Keepgate uses")
    return ok("redis", said)


def _topology_of(topology: Topology, info: Mapping[str, str]) -> str:
    count = info.get("connected_slaves", "0")
    replicas = f"{count} replica{'' if count == '1' else 's'}"
    if isinstance(topology, Cluster):
        return f"of a cluster, {replicas}"
    if isinstance(topology, SentinelServers):
        return f"the master that the sentinels name, {replicas}"
    return "one server" if count == "0" else f"one server, {replicas}"


def _role(topology: Topology, info: Mapping[str, str], name: str) -> Iterator[Finding]:
    if isinstance(topology, Cluster):
        return
    if info.get("cluster_enabled") == "1":
        yield problem(
            "redis",
            f"{name} is a node of a cluster: keys of other nodes are refused",
            "use redis+cluster:// in place of redis:// in the URL of redis",
        )
    if info.get("role") == "slave":
        yield problem(
            "redis",
            f"{name} is a replica of {info.get('master_host')}:{info.get('master_port')}: it takes no writes",
            "name the master in the URL of redis, or its sentinels (redis+sentinel://)",
        )


def _memory(settings: Settings, info: Mapping[str, str]) -> Iterator[Finding]:
    limit, used = _number(info, "maxmemory"), _number(info, "used_memory")
    policy = info.get("maxmemory_policy", "unknown")
    if not limit:
        yield warning(
            "redis memory",
            f"maxmemory is 0: it grows until the machine has none left ({in_units(used)} now)",
            "set maxmemory, and maxmemory-policy volatile-lru, in redis.conf",
        )
        return
    said = f"{in_units(used)} of {in_units(limit)}, {policy}"
    if policy == "noeviction":
        yield warning(
            "redis memory",
            f"{said}: when it is full, no answer is stored any more",
            "set maxmemory-policy volatile-lru, which makes room for new answers",
        )
    elif policy.startswith("allkeys") and settings.keys.required:
        yield problem(
            "redis memory",
            f"{said}: virtual keys and limits may be evicted, and their clients refused",
            "set maxmemory-policy volatile-lru: answers have a lifetime, keys have none",
        )
    elif policy.startswith("volatile") and used > _FULL * limit and not _number(info, "evicted_keys"):
        yield warning(
            "redis memory",
            f"{said}: it is full of keys without a lifetime, of which none can be evicted",
            "raise maxmemory, or give Keepgate a Redis of its own",
        )
    else:
        yield ok("redis memory", said)


async def _snapshots(master: RedisConnections) -> str | None:
    """The setting `save`; None where it is refused."""
    (reply,) = await master.ask(("CONFIG", "GET", "save"))
    if isinstance(reply, RedisError) or not isinstance(reply, list) or len(reply) != len(("save", "")):
        return None
    return bytes(reply[1]).decode(errors="replace")


def _persistence(settings: Settings, info: Mapping[str, str], snapshots: str | None) -> Iterator[Finding]:
    if info.get("aof_enabled") == "1":
        if info.get("aof_last_write_status", "ok") != "ok":
            yield problem(
                "redis persistence", "the last write to its append-only file failed", "look at its disk and its log"
            )
        else:
            yield ok("redis persistence", "an append-only file: answers outlive a restart")
    elif info.get("rdb_last_bgsave_status", "ok") != "ok":
        yield problem(
            "redis persistence",
            "its last snapshot failed: with stop-writes-on-bgsave-error it takes no more answers",
            "look at its disk and its log; vm.overcommit_memory=1 lets it fork",
        )
    elif snapshots == "":
        if settings.keys.required:
            yield problem(
                "redis persistence",
                "none: a restart of Redis loses all virtual keys, teams and budgets",
                "set appendonly yes in redis.conf",
            )
        else:
            yield ok("redis persistence", "none: its answers end with it, which is right for a cache alone")
    elif snapshots is None:
        yield ok("redis persistence", "no append-only file; whether there are snapshots it does not tell")
    elif settings.keys.required:
        yield warning(
            "redis persistence",
            f"snapshots alone ({snapshots}): a crash loses the keys and costs since the last one",
            "set appendonly yes in redis.conf",
        )
    else:
        yield ok("redis persistence", f"snapshots ({snapshots}): answers since the last one end with a crash")


async def _rights(topology: Topology) -> Finding:
    """Writes a key for two seconds, and reads and removes it."""
    key = f"keepgate:doctor:{secrets.token_hex(8)}"
    commands = (("SET", key, b"1", "PX", _WRITE_MILLISECONDS), ("GET", key), ("UNLINK", key))
    try:
        replies = await topology.ask(*commands)
    except (RedisError, OSError) as error:
        return problem("redis rights", f"a write failed: {error}", "look at its log")
    refusal = next((reply for reply in replies if isinstance(reply, RedisError)), None)
    if refusal is None:
        return ok("redis rights", "writes, reads and removes")
    match refusal:
        case OutOfMemoryError():
            advice = "raise maxmemory, or set maxmemory-policy volatile-lru"
        case NoPermissionError():
            advice = "give its user what the documentation of Redis lists under Rights (docs/guides/redis.md)"
        case ReadOnlyError():
            advice = "name the master in the URL of redis, or its sentinels (redis+sentinel://)"
        case _:
            advice = "look at its log"
    return problem("redis rights", f"a write is refused: {refusal}", advice)


async def _latency(topology: Topology, deadline: float) -> Finding:
    """The time of a lookup on an open connection, as a request waits for it, against its deadline."""
    seconds = []
    for _ in range(_LOOKUPS):
        began = time.perf_counter()  # the clock of uvloop has milliseconds
        reply = await topology.ask_replica(("GET", "keepgate:doctor:lookup"))
        seconds.append(time.perf_counter() - began)
        if isinstance(reply, RedisError):
            return problem("redis latency", f"a lookup is refused: {reply}", "give its user +get on ~keepgate:*")
    middle, slow = statistics.median(seconds), statistics.quantiles(seconds, n=10)[-1]
    said = (
        f"a lookup takes {middle * 1000:.2f} ms, one in ten {slow * 1000:.2f} ms or more;"
        f" cache.redis_deadline is {deadline * 1000:g} ms"
    )
    if middle > deadline:
        return problem(
            "redis latency",
            f"{said}: most lookups are given up",
            "put Redis nearer to the gateway, or raise cache.redis_deadline",
        )
    if slow > deadline / 2:
        return warning(
            "redis latency",
            f"{said}: some may be given up",
            "try again when both machines are less busy; then put Redis nearer, or raise cache.redis_deadline",
        )
    return ok("redis latency", said)


async def _clock(topology: Topology) -> Finding:
    (master, *_) = await topology.masters()
    began = clock.now()
    (reply,) = await master.ask(("TIME",))
    ended = clock.now()
    if isinstance(reply, RedisError):
        return warning("clock", f"Redis refuses TIME: {reply}", "give its user +time: limits need it")
    return clock.of_redis(int(reply[0]), int(reply[1]), began, ended)


def _number(info: Mapping[str, str], name: str) -> int:
    text = info.get(name, "")
    return int(text) if text.isdecimal() else 0
