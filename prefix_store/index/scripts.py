"""The scripts that Redis runs: read from their files once, called by their digests."""

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

ScriptName = Literal["announce", "match", "owners", "publish", "retire", "touch", "withdraw"]


@dataclass(frozen=True, slots=True)
class Script:
    """Lua for Redis 7 or Valkey, and its SHA-1 for EVALSHA."""

    name: ScriptName
    source: bytes
    sha: str


@cache
def script(name: ScriptName) -> Script:
    """The script of this name, after the code that all share."""
    folder = Path(__file__).parent
    source = b"\n".join((folder / f"{part}.lua").read_bytes() for part in ("claims", name))
    return Script(name, source, hashlib.sha1(source, usedforsecurity=False).hexdigest())
