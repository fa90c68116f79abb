"""The URL of a Redis: one server, servers that sentinels name, or a cluster.

redis://USER:PASSWORD@HOST:PORT/DB         rediss:// with TLS, unix:///PATH?db=DB
redis+sentinel://USER:PASSWORD@H1,H2:PORT/MASTER/DB        rediss+sentinel://
redis+cluster://USER:PASSWORD@H1,H2:PORT                   rediss+cluster://
"""

import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

Address = tuple[str, int]

_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
_OPTIONS = {"db", "protocol", "client_name", "health_check_interval", "socket_keepalive"}
_SENTINEL_OPTIONS = {"sentinel_username", "sentinel_password"}
_REDIS_PORT, _SENTINEL_PORT = 6379, 26379
_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[^\s:,\[\]]+)(:(?P<port>[0-9]{1,5}))?")


class InvalidRedisUrl(ValueError):
    """Which part of the URL is wrong, and what would be right."""


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """`server` is the URL of a single server with the same credentials, database and options, as redis-py reads it.

    `addresses` are those of the sentinels or of some nodes of the cluster; `master` is the name that sentinels watch.
    """

    kind: Literal["single", "sentinel", "cluster"]
    server: str
    addresses: tuple[Address, ...] = ()
    master: str = ""
    sentinel_username: str | None = None
    sentinel_password: str | None = None
    reads_replicas: bool = False


def parse_redis_url(url: str) -> RedisUrl:
    """Raises InvalidRedisUrl, or ValueError for what is no URL of a Redis at all."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _SCHEMES:
        raise ValueError("no URL of a Redis")
    base, _, kind = scheme.partition("+")
    options = _options(rest.partition("?")[2].partition("#")[0], kind)
    if not kind:
        _check_single(url)
        return RedisUrl("single", url)
    credentials, _, places = rest.partition("?")[0].rpartition("@")
    hosts, _, path = places.partition("/")
    addresses = _addresses(hosts, _SENTINEL_PORT if kind == "sentinel" else _REDIS_PORT)
    reads_replicas = _reads_replicas(options.pop("read_from", "master"))
    sentinel = {name: options.pop(name, None) for name in sorted(_SENTINEL_OPTIONS)}
    master, database = _sentinel_path(path, options) if kind == "sentinel" else ("", _cluster_path(path, options))
    host, port = addresses[0]
    host = f"[{host}]" if ":" in host else host
    at = f"{credentials}@" if credentials else ""
    query = f"?{urlencode(options)}" if options else ""
    server = f"{base}://{at}{host}:{port}/{database}{query}"
    return RedisUrl(
        "sentinel" if kind == "sentinel" else "cluster",
        server,
        addresses,
        master,
        sentinel["sentinel_username"],
        sentinel["sentinel_password"],
        reads_replicas,
    )


def _check_single(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme == "unix":
        if not parts.path:
            raise ValueError("no path of a socket")
        return
    if not parts.hostname or parts.port == 0:  # .port raises ValueError
        raise ValueError("no host, or no port")
    if "," in parts.netloc.rpartition("@")[2]:
        raise InvalidRedisUrl("expected one host; several are those of redis+sentinel:// or redis+cluster://")
    if not re.fullmatch(r"(/\d*)?", parts.path):
        raise InvalidRedisUrl(f"expected the number of a database after the last slash, got {parts.path[1:]!r}")


def _options(query: str, kind: str) -> dict[str, str]:
    known = _OPTIONS | ({"read_from"} if kind else set()) | (_SENTINEL_OPTIONS if kind == "sentinel" else set())
    options = dict(parse_qsl(query, keep_blank_values=True))
    for option, text in options.items():
        if option in ("username", "password"):
            raise InvalidRedisUrl(f"expected the {option} in front of the host: redis://USER:PASSWORD@HOST")
        if option == "read_from" and not kind:
            raise InvalidRedisUrl("read_from belongs to redis+sentinel:// and redis+cluster://, which know replicas")
        if option not in known and not option.startswith("ssl_"):
            raise InvalidRedisUrl(f"the option {option!r} of the URL is unknown")
        if option == "db" and not text.isdecimal():
            raise InvalidRedisUrl(f"expected the number of a database, got db={text!r}")
    return options


def _addresses(hosts: str, port: int) -> tuple[Address, ...]:
    found: list[Address] = []
    for number, text in enumerate(hosts.split(","), start=1):
        match = _ADDRESS.fullmatch(text)
        if match is None or not 0 < int(match["port"] or port) < 2**16:
            raise InvalidRedisUrl(f"expected HOST:PORT with commas between them; address {number} is {text!r}")
        found.append((unquote(match["host"].strip("[]")), int(match["port"] or port)))
    return tuple(found)


def _reads_replicas(text: str) -> bool:
    if text not in ("master", "replica"):
        raise InvalidRedisUrl(f"expected read_from=master or read_from=replica, got {text!r}")
    return text == "replica"


def _sentinel_path(path: str, options: dict[str, str]) -> tuple[str, str]:
    master, _, database = path.partition("/")
    if not master:
        raise InvalidRedisUrl("expected the name of the master after the addresses: redis+sentinel://HOST:PORT/NAME/DB")
    if not re.fullmatch(r"\d*", database):
        raise InvalidRedisUrl(f"expected the number of a database after the master's name, got {database!r}")
    return unquote(master), options.pop("db", database)


def _cluster_path(path: str, options: dict[str, str]) -> str:
    database = options.pop("db", path)
    if database not in ("", "0"):
        raise InvalidRedisUrl(f"expected no database: a cluster has number 0 alone; got {database!r}")
    return ""
