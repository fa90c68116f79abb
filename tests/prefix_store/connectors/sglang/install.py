"""Install SGLang for a CPU: `python -m tests.prefix_store.connectors.sglang.install FOLDER`. Some 2.5 GB."""

import argparse
import hashlib
import os
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def main() -> int:
    """Makes the environment anew where its pins have changed."""
    parser = argparse.ArgumentParser(description="Install SGLang for a CPU.")
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder.absolute()
    stamp = folder / "installed"
    wanted = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text() == wanted:
        return 0
    print("Installing SGLang for a CPU ...", flush=True)
    # The pins are complete, so nothing is resolved.
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(REQUIREMENTS)]
    try:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run(pip, check=True, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    except subprocess.CalledProcessError as error:
        print(f"{' '.join(error.cmd)} failed; what it says is above.", file=sys.stderr)
        return 1
    stamp.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
