"""The folder that the images are built from: the files git would commit, and the packages they install."""

import shutil
import sys
from pathlib import Path

from tests.compose.engine import run

ROOT = Path(__file__).resolve().parents[2]
# The images' Python, which need not be the one that runs the tests.
PYTHON_VERSION = "3.11"


def prepare(folder: Path) -> Path:
    """Fill folder and return it. What constraints.txt pins is fetched from where pip on this machine finds packages.

    The build itself then needs no network, no index and none of this machine's settings (``PIP_NO_INDEX``), and torch
    is the build that pip finds here.
    """
    listing = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=ROOT)
    for name in filter(None, listing.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    print("Gathering the packages of the images ...", flush=True)
    # By name and without their dependencies, so that no condition on this machine's Python decides what is there.
    target = ("--dest", folder / "wheels", "--python-version", PYTHON_VERSION, "--only-binary=:all:", "--no-deps")
    run(sys.executable, "-m", "pip", "download", "--quiet", *target, "-r", ROOT / "constraints.txt")
    return folder
