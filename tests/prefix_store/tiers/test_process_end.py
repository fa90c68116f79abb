"""A store beside an engine that has no event loop, at the end of the process."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import atexit, sys, threading
from pathlib import Path
from prefix_store.connectors.store_thread import StoreThread
from prefix_store.frames.layout import BlockLayout
from prefix_store.store.config import StoreConfig
from prefix_store.store.open_store import open_store

def left():
    threads = threading.enumerate()[1:]
    for thread in threads:
        thread.join(1)
    print("left:", *(thread.name for thread in threads if thread.is_alive()))

atexit.register(left)
config = StoreConfig(memory_bytes=2**20, disk=Path(sys.argv[1]), disk_bytes=2**20)
store = StoreThread(lambda: open_store(config, bytes(16), BlockLayout("float16", (2, 1, 1, 4, 8))))
atexit.register(store.close)
"""


def test_a_store_is_closed_when_the_process_ends(tmp_path: Path) -> None:
    """Python starts no thread any more by then, and no work in a pool of threads."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "kv")], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "left:\n"
    assert ended.stderr == ""
