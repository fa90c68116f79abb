"""Install the clients and apps of these tests: `python -m tests.apps.install FOLDER`.

Two Python environments, for some clients still want openai 2, and a folder of npm packages. Each is made anew when its
pins have changed.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
REQUIREMENTS = {"python": HERE / "requirements.txt", "python-openai2": HERE / "requirements-openai2.txt"}


def install_python(folder: Path, requirements: Path) -> None:
    """Make a virtual environment with exactly these packages. Raises CalledProcessError."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    # The pins are complete, so nothing is resolved.
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(requirements)]
    subprocess.run(pip, check=True, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})


def install_npm(folder: Path) -> None:
    """Install the packages of package-lock.json. Raises CalledProcessError."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(HERE / name, folder)
    npm = ["npm", "ci", "--silent", "--no-audit", "--no-fund", "--ignore-scripts"]
    subprocess.run(npm, cwd=folder, check=True)


def main() -> int:
    """Install what is missing or out of date below the folder, and say what is being done."""
    parser = argparse.ArgumentParser(description="Install the clients and apps of the tests.")
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder.absolute()
    for name, pins in {**REQUIREMENTS, "npm": HERE / "package-lock.json"}.items():
        stamp = folder / f"{name}.installed"
        wanted = hashlib.sha256(pins.read_bytes()).hexdigest()
        if stamp.is_file() and stamp.read_text() == wanted:
            continue
        print(f"Installing the clients of tests/apps/{pins.name} ...", flush=True)
        try:
            install_npm(folder / name) if name == "npm" else install_python(folder / name, pins)
        except subprocess.CalledProcessError as error:
            print(f"{' '.join(error.cmd)} failed; what it says is above.", file=sys.stderr)
            return 1
        stamp.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
