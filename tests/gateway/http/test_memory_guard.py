"""The memory of a process is compared with its limit before it runs out."""

import mmap
from pathlib import Path

import pytest

from gateway.http.memory_guard import MemoryGuard, memory_limit, resident_bytes

GIB = 2**30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A system with 16 GiB, and a process in the cgroup /pod/box of version 2."""
    for folder in ("proc/self", "sys/fs/cgroup/pod/box", "sys/fs/cgroup/memory/pod/box"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal:       {16 * GIB // 1024} kB\nMemFree: 1 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/pod/box\n")
    return tmp_path


def test_the_setting_is_the_limit(root: Path) -> None:
    """Of each process, whatever the machine has."""
    assert memory_limit(123, processes=4, root=root) == 123


def test_without_a_limit_it_is_nine_tenths_of_the_machine(root: Path) -> None:
    """Divided by the processes that share it."""
    (root / "sys/fs/cgroup/pod/box/memory.max").write_text("max\n")
    assert memory_limit(0, root=root) == round(14.4 * GIB)
    assert memory_limit(0, processes=4, root=root) == round(3.6 * GIB)


@pytest.mark.parametrize("group", ["pod/box", "pod", ""])
def test_a_container_limits_it(root: Path, group: str) -> None:
    """The cgroup of the process, or one around it."""
    (root / "sys/fs/cgroup" / group / "memory.max").write_text(f"{GIB}\n")
    assert memory_limit(0, root=root) == round(0.9 * GIB)


def test_a_container_of_version_1_limits_it(root: Path) -> None:
    """Whose own cgroup seems to be the root, and no limit is a large number."""
    (root / "proc/self/cgroup").write_text("5:cpu:/x\n4:memory:/docker/abc\n0::/\n")
    (root / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert memory_limit(0, root=root) == round(14.4 * GIB)
    (root / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text(f"{GIB}\n")
    assert memory_limit(0, root=root) == round(0.9 * GIB)


def test_a_system_that_does_not_tell_has_no_limit(tmp_path: Path) -> None:
    """Then no process is overloaded."""
    assert memory_limit(0, root=tmp_path) > 2**50
    assert resident_bytes(tmp_path / "statm") == 0
    assert not MemoryGuard(1, statm=tmp_path / "statm").overloaded


def test_memory_that_is_used_is_seen() -> None:
    """Of this very process."""
    before = resident_bytes()
    with mmap.mmap(-1, 64 * 2**20) as memory:
        for page in range(0, len(memory), mmap.PAGESIZE):
            memory[page] = 1
        grown = resident_bytes() - before
    assert before > 2**20
    assert grown > 48 * 2**20


def test_a_process_over_its_limit_is_overloaded() -> None:
    """And one under it is not."""
    assert MemoryGuard(resident_bytes() // 2).overloaded
    assert not MemoryGuard(resident_bytes() * 4).overloaded


def test_memory_is_not_read_for_every_request(tmp_path: Path) -> None:
    """A figure holds for 100 ms."""
    statm = tmp_path / "statm"
    statm.write_text("1000 1000 1\n")
    guard = MemoryGuard(1, statm=statm)
    assert guard.overloaded
    statm.write_text("0 0 0\n")
    assert guard.overloaded
