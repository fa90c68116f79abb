"""A real master of Mooncake as a child process, for tests: started, stopped, frozen, killed and started again."""

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from prefix_store.tiers.mooncake.settings import mooncake_module

_READY_WITHIN = 15.0
_SEGMENT_BYTES = 64 * 2**20
LEASE_SECONDS = 0.5


class MooncakeMaster:
    """A master on a fixed port; its log is in `folder`.

    Skips a test if Mooncake cannot be loaded, which must not happen in CI.
    """

    def __init__(self, folder: Path) -> None:
        try:
            package = mooncake_module("store").__file__
        except ValueError as error:
            pytest.skip(str(error))
        assert package is not None
        self._binary = Path(package).parent / "mooncake_master"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._port, self._metrics_port = _free_ports(2)
        self.address = f"127.0.0.1:{self._port}"

    def settings(self, **changes: object) -> Path:
        """A configuration file of an engine that uses it."""
        said = {
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": self.address,
            "global_segment_size": _SEGMENT_BYTES,
            "local_buffer_size": "16MB",
            "protocol": "tcp",
            **changes,
        }
        path = self._folder / f"engine-{len(list(self._folder.iterdir()))}.json"
        path.write_text(json.dumps({name: value for name, value in said.items() if value is not None}), "utf-8")
        return path

    def start(self) -> None:
        """Returns when it answers."""
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    str(self._binary),
                    *("--rpc_address", "127.0.0.1", "--rpc_port", str(self._port)),
                    *("--metrics_host", "127.0.0.1", "--metrics_port", str(self._metrics_port)),
                    *("--default_kv_lease_ttl", f"{LEASE_SECONDS * 1000:.0f}"),
                ],
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + _READY_WITHIN
        while True:
            assert self._process.poll() is None, "the master ended while it was starting"
            assert time.monotonic() < deadline, "the master does not answer"
            try:
                socket.create_connection(("127.0.0.1", self._port), 1.0).close()
            except ConnectionRefusedError:
                time.sleep(0.02)
            else:
                return

    def freeze(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)  # all of its threads

    def thaw(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def stop(self) -> None:
        """Kills it, as a power cut."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
