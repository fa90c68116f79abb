"""Tries whether a Mooncake store can be joined: ``python -m prefix_store.tiers.mooncake.probe FILE``.

Mooncake holds the interpreter's lock while it joins, and tries for a minute and a half where no master answers. A
server that waited for it would block, so a process of its own tries it, and is ended by an alarm.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from prefix_store.tiers.mooncake.settings import join, mooncake_module, read_settings

SECONDS = 10


def main(path: str) -> int:
    """0 if the store has been joined; what is printed else is why not."""
    signal.alarm(SECONDS)
    settings = read_settings(Path(path))
    if code := join(mooncake_module("store").MooncakeDistributedStore(), settings, memory_bytes=0):
        print(f"Mooncake says {code}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
