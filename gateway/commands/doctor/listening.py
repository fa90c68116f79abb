"""Whether the port is free, and who listens on it where it is not."""

import asyncio
import contextlib
import errno
import os
import socket
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec

from gateway.commands.doctor.execution import in_thread
from gateway.commands.doctor.finding import Finding, ok, problem, warning
from gateway.errors import UpstreamError
from gateway.settings.settings import Settings, TimeoutSettings
from gateway.settings.upstreams import UpstreamSettings
from gateway.upstreams.connection import open_connections
from gateway.upstreams.upstream import Upstream

_SECONDS = 3.0
_MAX_ANSWER = 4 * 2**20
_ALL_ADDRESSES = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # compared, not bound
# Of a listening socket in /proc/net/tcp (proc(5)).
_LISTEN = "0A"


async def check_listening(settings: Settings) -> list[Finding]:
    """Tries to bind the address as the gateway does; a running gateway there is no problem."""
    place = f"{settings.host}:{settings.port}"
    try:
        addresses = await asyncio.get_running_loop().getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except socket.gaierror as error:
        return [
            problem(
                "port",
                f"host: {settings.host!r} is no address: {error.strerror}",
                "set host to an address of this machine: 127.0.0.1, or 0.0.0.0 for all",
            )
        ]
    for family, kind, protocol, _, address in addresses:
        if (refusal := _bind(family, kind, protocol, address)) is not None:
            return [await _refused(settings, place, refusal)]
    if settings.port == 0:
        return [ok("port", f"any free port of {settings.host}")]
    return [ok("port", f"{place} is free")]


def _bind(family: int, kind: int, protocol: int, address: Any) -> OSError | None:
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind(address)
        except OSError as error:
            return error
    return None


async def _refused(settings: Settings, place: str, refusal: OSError) -> Finding:
    if refusal.errno == errno.EADDRINUSE:
        return await _taken(settings, place)
    if refusal.errno == errno.EADDRNOTAVAIL:
        return problem(
            "port",
            f"host: {settings.host} is no address of this machine",
            "set host to one of those that `ip addr` shows, or to 0.0.0.0 for all",
        )
    if refusal.errno in (errno.EACCES, errno.EPERM):
        return problem(
            "port",
            f"this user may not listen on {place}: ports below {_first_free_port()} are reserved",
            "choose a port from 1024 on, or give the service CAP_NET_BIND_SERVICE (systemd: AmbientCapabilities)",
        )
    return problem("port", f"cannot listen on {place}: {refusal.strerror}", "choose another host or port")


def _first_free_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text())
    except (OSError, ValueError):
        return 1024


async def _taken(settings: Settings, place: str) -> Finding:
    health, ready = await asyncio.gather(_ask(settings, "/health"), _ask(settings, "/ready"))
    listener = await in_thread(lambda: _listener(settings.port))
    by = f" ({listener})" if listener else ""
    if health == (HTTPStatus.OK, {"status": "ok"}) and ready == (HTTPStatus.OK, {"status": "ready"}):
        return ok("port", f"{place}: a running Keepgate answers /health{by}, and can reach an upstream")
    if health == (HTTPStatus.OK, {"status": "ok"}) and ready == (
        HTTPStatus.SERVICE_UNAVAILABLE,
        {"status": "starting"},
    ):
        return warning(
            "port",
            f"{place}: a running Keepgate answers /health{by}, but can reach no upstream",
            "see what is said of upstreams here, and in its log",
        )
    return problem(
        "port",
        f"{place} is taken by another program{by}",
        "stop that program, or choose another port with --port or KEEPGATE_PORT",
    )


async def _ask(settings: Settings, path: str) -> tuple[int, Any] | None:
    """Status and JSON of what listens at the settings' address; None if it does not answer so."""
    host = _ALL_ADDRESSES.get(settings.host, settings.host)
    scheme = "http" if settings.tls.certificate is None else "https"
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings.port}"
    timeouts = TimeoutSettings(connect=_SECONDS, first_byte=_SECONDS, idle=_SECONDS)
    with contextlib.suppress(UpstreamError, TimeoutError, msgspec.DecodeError, UnicodeDecodeError):
        async with asyncio.timeout(_SECONDS), open_connections(_SECONDS) as connections:
            # Its certificate is for the name that clients use.
            server = UpstreamSettings(url=url, verify_tls=False)
            gateway = Upstream(url, connections, timeouts, settings=server)
            with await gateway.request("GET", path, {}, None) as response:
                return response.status, msgspec.json.decode(await response.body(_MAX_ANSWER))
    return None


def _listener(port: int) -> str:
    """The program that listens on a port, such as "nginx, process 812"; "" where it cannot be told."""
    inodes = {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _listening(Path("/proc/net") / table, port)}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(_target(file) in inodes for file in (process / "fd").iterdir()):
                return f"{(process / 'comm').read_text().strip()}, process {process.name}"
        except OSError:  # it has ended, or is another user's
            continue
    return ""


def _target(file: Path) -> str:
    """What a file descriptor below /proc is open for; "" where it is closed by now."""
    try:
        return os.readlink(file)
    except OSError:
        return ""


def _listening(table: Path, port: int) -> set[str]:
    """The inodes of the sockets that listen on a port."""
    try:
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
    except OSError:
        return set()
    return {row[9] for row in rows if row[3] == _LISTEN and int(row[1].rpartition(":")[2], 16) == port}
