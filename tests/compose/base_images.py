"""The images that Dockerfile and compose.yaml begin with, pulled, or made from Debian packages where no hub answers."""

import re
import subprocess
import tempfile
from pathlib import Path

import yaml

from tests.compose.engine import Engine, run

ROOT = Path(__file__).resolve().parents[2]
_SERVICES = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]
PYTHON = re.findall(r"(?m)^ARG PYTHON_IMAGE=(\S+)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"))[0]
REDIS: str = _SERVICES["redis"]["image"]
PROMETHEUS: str = _SERVICES["prometheus"]["image"]
DISKS: str = _SERVICES["disks"]["image"]
GRAFANA: str = _SERVICES["grafana"]["image"]
"""No Debian package has what is in this one."""
DEBIAN_PACKAGES = "ca-certificates,python3,python3-venv"
# What the images have that Dockerfile and compose.yaml rely on: commands, users' folders, entry points.
STAND_INS = {
    REDIS: """\
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends redis-server \\
    && install -d -o 999 -g 1000 /data
WORKDIR /data
""",
    PROMETHEUS: """\
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends prometheus wget \\
    && install -d -o 65534 -g 65534 /prometheus
ENTRYPOINT ["prometheus"]
""",
    DISKS: """\
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends prometheus-node-exporter wget
ENTRYPOINT ["prometheus-node-exporter"]
""",
}
PULL_TIMEOUT = 300.0  # seconds


def provide(engine: Engine) -> None:
    """Leave the base images in the engine under their names, but for Grafana's."""
    missing = [image for image in (PYTHON, *STAND_INS) if not present(engine, image)]
    if not missing:
        return
    if not engine.private:
        raise RuntimeError(f"this engine has not and cannot pull {' and '.join(missing)}")
    print(f"No hub answers: making stand-ins for {', '.join(missing)} from Debian packages ...", flush=True)
    with tempfile.TemporaryDirectory(prefix="kg-debian-") as folder:
        if PYTHON in missing:
            root = Path(folder) / "root"
            run("debootstrap", "--variant=minbase", f"--include={DEBIAN_PACKAGES}", "bookworm", root)
            (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
            for marker in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
                marker.unlink()
            archive = Path(folder) / "root.tar"
            run("tar", "-C", root, "-cf", archive, ".")
            engine.docker("import", "-c", "WORKDIR /", archive, PYTHON)
        context = Path(folder) / "context"
        context.mkdir()
        for image in missing:
            if image in STAND_INS:
                (context / "Dockerfile").write_text(f"FROM {PYTHON}\n{STAND_INS[image]}", encoding="utf-8")
                engine.docker("build", "--quiet", "--tag", image, context)


def present(engine: Engine, image: str) -> bool:
    """Whether the engine has an image, or could pull it."""
    for command in (("image", "inspect", image), ("pull", "--quiet", image)):
        try:
            engine.docker(*command, timeout=PULL_TIMEOUT)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            continue
        return True
    return False
