"""A Docker engine for one run of the tests: the machine's own where it has one, else a private one."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

SOCKET = Path("/var/run/docker.sock")
PACKAGES = {"dockerd": "docker.io", "docker-compose": "docker-compose", "debootstrap": "debootstrap"}
START_TIMEOUT = 60.0  # seconds
STOP_TIMEOUT = 30.0  # seconds


class EngineError(Exception):
    """No engine can be had here; the message says what is missing."""


@dataclass
class Engine:
    """How to reach a Docker engine: the variables its commands need. A private one can be given made images."""

    variables: dict[str, str] = field(default_factory=dict)
    private: bool = False

    def docker(self, *arguments: str | Path, timeout: float = 600.0) -> str:
        """Run ``docker`` and return its stdout. Raises CalledProcessError."""
        return run("docker", *arguments, variables=self.variables, timeout=timeout)

    def answers(self) -> bool:
        """Whether a daemon is there."""
        try:
            self.docker("version", timeout=20.0)
        except (FileNotFoundError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
            return False
        return True


def run(
    *command: str | Path, variables: dict[str, str] | None = None, cwd: Path | None = None, timeout: float = 1800.0
) -> str:
    """Run a command and return its stdout. Raises CalledProcessError with the command's stderr as a note."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env={**os.environ, **(variables or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if done.returncode != 0:
        error = subprocess.CalledProcessError(done.returncode, done.args, done.stdout, done.stderr)
        error.add_note("\n".join([*done.stdout.splitlines()[-20:], *done.stderr.splitlines()[-20:]]))
        raise error
    return done.stdout


@contextmanager
def engine() -> Iterator[Engine]:
    """Yield an engine that answers. Raises EngineError where there is none and none can be started."""
    own = Engine()
    if (os.environ.get("DOCKER_HOST") or SOCKET.exists()) and own.answers():
        yield own
        return
    if os.geteuid() != 0:
        raise EngineError("no Docker engine answers here, and only root can start one: start it, or set DOCKER_HOST")
    install_packages()
    with private_engine() as private:
        yield private


def install_packages() -> None:
    """Install what is missing of an engine and of what makes base images, with apt."""
    missing = [package for command, package in PACKAGES.items() if shutil.which(command) is None]
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise EngineError(f"no Docker engine answers here, and without apt-get none can be installed: {missing}")
    print(f"Installing {' '.join(missing)} ...", flush=True)
    variables = {"DEBIAN_FRONTEND": "noninteractive"}
    run("apt-get", "update", "-qq", variables=variables)
    run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing, variables=variables)


@contextmanager
def private_engine() -> Iterator[Engine]:
    """Run a dockerd whose every file lies in a temporary folder, and stop it at the end."""
    # Short, for a socket's path may have no more than 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="kg-docker-"))
    address = f"unix://{folder}/docker.sock"
    log = folder / "dockerd.log"
    print("Starting a private Docker engine ...", flush=True)
    folders = [f"--data-root={folder}/data", f"--exec-root={folder}/exec", f"--pidfile={folder}/pid"]
    with log.open("wb") as output:
        daemon = subprocess.Popen(["dockerd", *folders, f"--host={address}"], stdout=output, stderr=output)
    # Debian's client and docker-compose 1.29 have no BuildKit of their own.
    private = Engine({"DOCKER_HOST": address, "DOCKER_BUILDKIT": "0", "COMPOSE_DOCKER_CLI_BUILD": "0"}, private=True)
    try:
        began = time.monotonic()
        while not private.answers():
            if daemon.poll() is not None or time.monotonic() - began > START_TIMEOUT:
                raise EngineError("dockerd did not start:\n" + "\n".join(log.read_text().splitlines()[-20:]))
        yield private
    finally:
        daemon.terminate()
        try:
            daemon.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
        shutil.rmtree(folder, ignore_errors=True)
