"""A process of the gateway gives the memory of large bodies back to the system."""

import platform
import subprocess
import sys

import pytest

_HELD = 2**20
# What is held after a larger block was freed, of which glibc by default would learn to keep both in its heap.
_SCRIPT = f"""
import ctypes
from gateway.processes.serve import run_until_signalled

class Figures(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

async def main():
    large = bytearray(16 * {_HELD})
    del large
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Figures
    before = mallinfo().hblkhd
    held = bytearray({_HELD})
    print(mallinfo().hblkhd - before)

raise SystemExit(run_until_signalled(main))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such thresholds")
def test_a_large_block_is_outside_the_heap_after_a_larger_one() -> None:
    """It is mapped by itself, so that it leaves no hole in the heap when it is freed."""
    ran = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    assert int(ran.stdout) >= _HELD
