"""The images that Dockerfile and compose.yaml begin with, pulled, or made from Debian packages where no hub answers."""

import subprocess
import tempfile
from pathlib import Path

from tests.compose.engine import Engine, run

PYTHON = "python:3.11-slim-bookworm"
REDIS = "redis:7-alpine"
# One Debian stands in for both: what matters is what the commands in it are.
DEBIAN_PACKAGES = "ca-certificates,python3,python3-venv,redis-server"
PULL_TIMEOUT = 300.0  # seconds


def provide(engine: Engine) -> None:
    """Leave both base images in the engine under their names."""
    missing = [image for image in (PYTHON, REDIS) if not present(engine, image)]
    if not missing:
        return
    if not engine.private:
        raise RuntimeError(f"this engine has not and cannot pull {' and '.join(missing)}")
    print(f"No hub answers: making stand-ins for {' and '.join(missing)} from Debian packages ...", flush=True)
    with tempfile.TemporaryDirectory(prefix="kg-debian-") as folder:
        root = Path(folder) / "root"
        run("debootstrap", "--variant=minbase", f"--include={DEBIAN_PACKAGES}", "bookworm", root)
        (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
        for marker in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
            marker.unlink()
        archive = Path(folder) / "root.tar"
        run("tar", "-C", root, "-cf", archive, ".")
        for image in missing:
            engine.docker("import", "-c", "WORKDIR /data" if image == REDIS else "WORKDIR /", archive, image)


def present(engine: Engine, image: str) -> bool:
    """Whether the engine has an image, or could pull it."""
    for command in (("image", "inspect", image), ("pull", "--quiet", image)):
        try:
            engine.docker(*command, timeout=PULL_TIMEOUT)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            continue
        return True
    return False
