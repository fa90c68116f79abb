"""Replies of Redis in RESP2, as the client's connections give them: bytes, integers, and lists of these."""

from typing import Any, cast, get_args

from redis.exceptions import RedisError

from cache.entries.generations import Purge, Scope

Fields = dict[bytes, bytes]


def pairs(reply: Any) -> Fields:
    """The reply to HGETALL, or the fields of an item of a stream."""
    return dict(zip(reply[::2], reply[1::2], strict=False))


def stream_items(read: Any) -> list[tuple[str, Fields]]:
    """The positions and fields in the reply to an XREAD of one stream."""
    return [item for _, items in read or () for item in range_items(items)]


def range_items(items: Any) -> list[tuple[str, Fields]]:
    """The positions and fields in the reply to XRANGE or XREVRANGE."""
    return [(position.decode(), pairs(fields or ())) for position, fields in items or ()]


def is_after(position: str, other: str) -> bool:
    """Whether a position of a stream comes after another one."""
    return _parts(position) > _parts(other)


def _parts(position: str) -> tuple[int, int]:
    milliseconds, _, number = position.partition("-")
    return int(milliseconds), int(number)


def event(fields: Fields) -> Purge | str | None:
    """A purge, or the id of a deleted entry; None if this version does not know it."""
    try:
        scope, name, token = (fields[field].decode() for field in (b"scope", b"name", b"token"))
    except (KeyError, UnicodeDecodeError):
        return None
    if scope == "entry":
        return name
    return Purge(cast(Scope, scope), name, token) if scope in get_args(Scope) else None


def info_fields(reply: Any) -> dict[str, str]:
    """The lines of INFO; none where it is refused."""
    if isinstance(reply, RedisError) or not isinstance(reply, bytes):
        return {}
    lines = (line.partition(":") for line in reply.decode(errors="replace").splitlines())
    return {name: value for name, separator, value in lines if separator}
