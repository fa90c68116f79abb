"""A process that stores a page and ends without closing its backend: `ending.py MODEL DISK`."""

import atexit
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]


def left() -> None:
    """Says which threads of the store do not end. Called last."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(("prefix-store", "kv-"))]
    for thread in threads:
        thread.join(1.0)
    print("left:", *(thread.name for thread in threads if thread.is_alive()))


def main(model: Path, disk: Path) -> None:
    """Stores a page."""
    from tests.prefix_store.connectors.sglang import torchvision_schemas

    torchvision_schemas.define()
    from tests.prefix_store.connectors.sglang.engine import (
        after,
        attach_backend,
        host_pool,
        page_keys,
        slots_of,
        start_engine,
    )

    start_engine(model)
    backend = attach_backend(host_pool("layer_first"), {}, {"disk": str(disk), "disk_size": 2**30})
    assert backend.batch_set_v1(page_keys(1), slots_of(0, 1), after([])) == [True]
    print("stored")


if __name__ == "__main__":
    atexit.register(left)
    sys.path.insert(0, str(ROOT))
    main(Path(sys.argv[1]), Path(sys.argv[2]))
