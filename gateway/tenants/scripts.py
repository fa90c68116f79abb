"""The scripts that Redis runs: read from their files once, called by their digests."""

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from cache.errors import StoreUnavailable
from cache.stores.redis_store import RedisStore

ScriptName = Literal["admit", "settle", "heartbeat", "find_key", "write_key"]

# Scripts that begin with what is in window.lua.
_WITH_WINDOWS = ("admit", "settle")
_UNKNOWN = "No matching script"


@cache
def script(name: ScriptName) -> tuple[str, str]:
    """The source of a script, and its SHA-1 for EVALSHA."""
    parts = ("window", name) if name in _WITH_WINDOWS else (name,)
    source = "\n".join((Path(__file__).parent / f"{part}.lua").read_text(encoding="utf-8") for part in parts)
    return source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


async def run_script(
    redis: RedisStore, name: ScriptName, keys: Sequence[str], arguments: Sequence[str | bytes | int], deadline: float
) -> Any:
    """The script's reply within `deadline` seconds. Raises StoreUnavailable."""
    source, sha = script(name)
    try:
        return await redis.command(("EVALSHA", sha, len(keys), *keys, *arguments), deadline)
    except StoreUnavailable as error:
        if _UNKNOWN not in str(error):  # else Redis was started again, or this is another of its nodes
            raise
    return await redis.command(("EVAL", source, len(keys), *keys, *arguments), deadline)
