"""What is installed elsewhere is what the checkout shows: the wheel, in an environment of its own."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"gateway", "cache", "backend", "prefix_store", "telemetry"}
SOURCE = ("pyproject.toml", "README.md", "LICENSE", *sorted(PACKAGES))
OWNERS = "import importlib.metadata as m, json; print(json.dumps(m.packages_distributions()))"
PLACES = "import json; {imports}; print(json.dumps({{n: m.__file__ for n, m in {{ {pairs} }}.items()}}))"


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command to its end; return what it wrote to stdout, or fail the test with all it wrote."""
    # Of a checkout on PYTHONPATH pip would say that it is installed already.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: setuptools leaves a build folder behind, whose old files it would pack again."""
    source, wheels = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    # Tests and benchmarks lie beside the packages, as they do in a checkout: they must not get in.
    for name in (*SOURCE, "tests", "benchmarks", "scripts"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    offline = ("--no-deps", "--no-build-isolation", "--no-index")
    run(sys.executable, "-m", "pip", "wheel", *offline, "-w", wheels, source, cwd=wheels)
    [built] = wheels.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def elsewhere(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that has the wheel, and this one's packages but not its checkout."""
    folder = tmp_path_factory.mktemp("elsewhere")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    # A plain line in a .pth file is searched for packages, but the .pth files there, the checkout's, are not followed.
    [site] = (folder / "venv" / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.parent


def test_wheel_holds_the_four_packages_and_nothing_else(wheel: Path) -> None:
    """Tests, benchmarks and scripts stay in the checkout."""
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == PACKAGES


def test_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    """Type markers, C++ and Lua sources and pages travel with the code."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    tracked = {name for name in listing.split("\0") if name and (ROOT / name).is_file()}
    assert {f"{package}/py.typed" for package in PACKAGES} <= tracked
    assert tracked - set(zipfile.ZipFile(wheel).namelist()) == set()


def test_command_runs_from_the_wheel_in_another_directory(elsewhere: Path, tmp_path: Path) -> None:
    """``keepgate --help`` works where there is no checkout, and the packages it uses are the installed ones."""
    assert "serve" in run(elsewhere / "keepgate", "--help", cwd=tmp_path)
    pairs = ", ".join(f"{name!r}: {name}" for name in PACKAGES)
    places = run(
        elsewhere / "python", "-c", PLACES.format(imports=f"import {', '.join(PACKAGES)}", pairs=pairs), cwd=tmp_path
    )
    for name, place in json.loads(places).items():
        assert Path(place).is_relative_to(elsewhere.parent), f"{name} came from {place}"


def test_each_name_has_one_owner(elsewhere: Path, tmp_path: Path) -> None:
    """The four names are generic: no dependency installs one of them too."""
    owners = json.loads(run(elsewhere / "python", "-c", OWNERS, cwd=tmp_path))
    assert {name: set(owners[name]) for name in PACKAGES} == {name: {"keepgate"} for name in PACKAGES}
