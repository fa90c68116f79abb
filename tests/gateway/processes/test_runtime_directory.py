"""The directory of a gateway's sockets and counters."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.processes.runtime_directory import MAX_SOCKET_PATH, runtime_directory, socket_path

HOLD = """
import sys
from pathlib import Path
from gateway.processes.runtime_directory import runtime_directory
with runtime_directory(Path(sys.argv[1])) as directory:
    (directory / "counters").write_text("1")
    print(directory, flush=True)
    sys.stdin.read()
"""


def holder(state: Path, **variables: str) -> tuple[subprocess.Popen[str], Path]:
    """A process that has a runtime directory, and the directory."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, state],
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_the_runtime_directory_ends_with_its_process(tmp_path: Path) -> None:
    """The runtime directory is removed at the end of its process."""
    process, directory = holder(tmp_path)
    assert (directory / "counters").is_file()
    process.communicate()
    assert list(tmp_path.iterdir()) == []


def test_the_directory_of_a_killed_process_is_removed_by_the_next(tmp_path: Path) -> None:
    """The next process removes the directory of a killed one, and none that is in use."""
    killed, abandoned = holder(tmp_path)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert abandoned.is_dir()
    other, used = holder(tmp_path)
    assert not abandoned.exists()
    with runtime_directory(tmp_path) as own:
        assert used.is_dir()
        assert own != used
    other.communicate()


def test_a_state_directory_that_cannot_be_made_is_replaced(tmp_path: Path) -> None:
    """The temporary folder replaces a state directory that cannot be made."""
    (tmp_path / "file").touch()
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    process, directory = holder(tmp_path / "file" / "state", TMPDIR=str(temporary))
    assert directory.is_relative_to(temporary)
    process.communicate()
    assert process.returncode == 0
    assert list(temporary.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, which has /proc")
def test_a_long_path_has_a_short_one(tmp_path: Path) -> None:
    """A socket below a long path is reached by a short one from another process."""
    directory = tmp_path / ("d" * 120)
    directory.mkdir()
    with socket_path(directory, "s") as path, socket.socket(socket.AF_UNIX) as server:
        assert len(os.fsencode(path)) <= MAX_SOCKET_PATH
        server.bind(str(path))
        server.listen()
        connect = f"import socket; socket.socket(socket.AF_UNIX).connect({str(path)!r})"
        subprocess.run([sys.executable, "-c", connect], check=True)
    assert (directory / "s").is_socket()
