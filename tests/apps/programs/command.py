# What it imports is installed in an environment of its own.
# mypy: ignore-errors
"""Commands of the environment, run in an empty folder that is their home."""

import subprocess
import sys
from pathlib import Path

from program import ARGUMENTS

BIN = Path(sys.executable).parent
FOLDER = Path(ARGUMENTS["folder"])


def command(name, *words, **variables):
    """What the command prints. Raises AssertionError where it fails."""
    environment = {"PATH": f"{BIN}:/usr/bin:/bin", "HOME": str(FOLDER), "LANG": "C.UTF-8", **variables}
    done = subprocess.run(
        [str(BIN / name), *words],
        cwd=FOLDER, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, (words, done.stdout)
    return done.stdout
