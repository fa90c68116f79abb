"""Tests whether a Mooncake store can be joined: ``python -m prefix_store.tiers.mooncake.probe FILE``.

Mooncake holds the GIL while it joins, and tries for a minute and a half if no master answers. That would block a
server, so a process of its own tries it, and an alarm ends that.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from prefix_store.tiers.mooncake.settings import join, mooncake_module, read_settings

SECONDS = 10


def main(path: str) -> int:
    """0 if the store has been joined; else prints why not."""
    signal.alarm(SECONDS)
    settings = read_settings(Path(path))
    if code := join(mooncake_module("store").MooncakeDistributedStore(), settings, memory_bytes=0):
        print(f"Mooncake says {code}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
