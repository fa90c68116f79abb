"""Memory that freed lists left behind in the C library's heap."""

import platform
import re
from pathlib import Path

import pytest

from cache.semantic.index import partition


def resident() -> int:
    """Anonymous memory of this process in bytes."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries give pages back by themselves")
def test_freed_pages_below_one_in_use_go_back_to_the_system() -> None:
    """Trimming the heap gives freed pages below a block in use back to the system."""
    blocks = [bytes(1000) for _ in range(60_000)]
    before = resident()
    last = blocks[-1]
    blocks.clear()
    partition.trim_heap()
    assert before - resident() > 50_000_000
    assert len(last) == 1000
