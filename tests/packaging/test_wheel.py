"""What is installed elsewhere is what the checkout shows: the wheel, in environments of its own."""

import asyncio
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import aiohttp
import pytest

from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
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


@pytest.fixture(scope="module")
def plain(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that has the wheel and what it needs, and nothing of the extras."""
    folder = tmp_path_factory.mktemp("plain")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    [site] = (folder / "venv" / "lib").glob("python*/site-packages")
    for name in needed(wheel):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}:
            if not (site / top).exists():
                (site / top).symlink_to(str(distribution.locate_file(top)))
    return python.parent


def needed(wheel: Path) -> set[str]:
    """The distributions that the wheel requires without extras, and those that they require."""
    found: set[str] = set()
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    waiting = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    while waiting:
        requirement = waiting.pop()
        match = re.match(r"([A-Za-z0-9._-]+)(?:\[([^]]*)\])?", requirement)
        assert match is not None
        if "extra ==" in requirement or match[1] in found:
            continue
        try:
            further = importlib.metadata.requires(match[1]) or []
        except importlib.metadata.PackageNotFoundError:  # for another Python or another system
            continue
        found.add(match[1])
        extras = (match[2] or "").split(",")
        waiting += [
            each.split(";")[0] if any(f"'{e}'" in each or f'"{e}"' in each for e in extras if e) else each
            for each in further
        ]
    return found


def test_wheel_holds_the_five_packages_and_nothing_else(wheel: Path) -> None:
    """Tests, benchmarks and scripts stay in the checkout."""
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == PACKAGES
    assert [name for name in zipfile.ZipFile(wheel).namelist() if re.search(r"(^|/)(tests?_?|conftest)", name)] == []


@pytest.mark.parametrize(
    "path",
    [
        "gateway/api/page.html",
        "gateway/costs/prices.json",
        "gateway/tenants/admit.lua",
        "prefix_store/index/match.lua",
        "backend/runners/fused/step/fused_step.cpp",
        "backend/runners/fused/step/simd.h",
        "cache/semantic/embedding/native/bert.cpp",
        "backend/quantization/calibration/wikitext-2-valid.txt.gz",
    ],
)
def test_what_is_no_python_is_in_the_wheel(wheel: Path, path: str) -> None:
    """Pages, prices, scripts for Redis, sources of kernels and the calibration text."""
    assert zipfile.ZipFile(wheel).getinfo(path).file_size > 0


def test_wheel_says_what_it_needs_and_under_which_licence(wheel: Path) -> None:
    """Its metadata has the extras of pyproject.toml, the licence files and the command."""
    archive = zipfile.ZipFile(wheel)
    [folder] = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
    metadata = archive.read(f"{folder}/METADATA").decode()
    extras = {"backend", "cuda", "embedded", "encryption", "kv-events", "mooncake", "semantic", "tracing", "vllm"}
    assert set(re.findall(r"^Provides-Extra: (.*)$", metadata, re.MULTILINE)) == extras
    assert "License-Expression: Apache-2.0" in metadata
    assert f"{folder}/licenses/LICENSE" in archive.namelist()
    assert "keepgate = gateway.commands.cli:main" in archive.read(f"{folder}/entry_points.txt").decode()


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
    """The five names are generic: no dependency installs one of them too."""
    owners = json.loads(run(elsewhere / "python", "-c", OWNERS, cwd=tmp_path))
    assert {name: set(owners[name]) for name in PACKAGES} == {name: {"keepgate"} for name in PACKAGES}


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (("backend",), "backend"),
        (("plan", "model", "--memory", "1GB"), "backend"),
        (("quantize", "model"), "backend"),
        (("eval", "model"), "backend"),
        (("profile",), "backend"),
        (("replay", "trace.jsonl"), "backend"),
        (("eval-pairs", "pairs.csv"), "semantic"),
        (("serve", "--port", "0"), "backend"),
        (("serve", "--port", "0", "--upstream", "mock:"), "embedded"),
        (("serve", "--port", "0", "--upstream", "mock:", "--redis", "none", "--semantic", "on"), "semantic"),
    ],
)
def test_a_command_without_its_extra_names_it(plain: Path, tmp_path: Path, words: tuple[str, ...], extra: str) -> None:
    """One line that says what to install, and no traceback."""
    done = command(plain, *words, cwd=tmp_path)
    assert done.returncode in (1, 2)
    assert done.stderr.count("\n") == 1, done.stderr
    assert f"keepgate[{extra}]" in done.stderr


def test_doctor_names_the_extras_that_are_missing(plain: Path, tmp_path: Path) -> None:
    """Without any extra it runs, and its advice has the words of pip."""
    done = command(plain, "doctor", "--semantic", "on", "--port", "0", "--json", cwd=tmp_path)
    said = json.dumps([each for each in json.loads(done.stdout)["findings"] if each["status"] == "problem"])
    assert done.returncode == 1
    for extra in ("backend", "semantic", "embedded"):
        assert f"keepgate[{extra}]" in said
    assert "the check itself failed" not in said


def test_the_gateway_alone_answers(plain: Path, tmp_path: Path) -> None:
    """`keepgate serve --upstream mock:` needs no extra with a Redis of one's own, or with none."""
    asyncio.run(_answers(plain, tmp_path))


async def _answers(plain: Path, folder: Path) -> None:
    words = ("serve", "--port", "0", "--upstream", "mock:", "--redis", "none", "--state-dir", str(folder / "state"))
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            plain / "keepgate", *words, cwd=folder, env=environment(plain), stderr=log
        )
        try:
            await until(lambda: "Ready" in (folder / "log").read_text(), 30.0, 0.02)
            [url] = re.findall(r"serving +(\S+)/v1 ", (folder / "log").read_text())
            chat = {"model": "mock", "temperature": 0, "messages": [{"role": "user", "content": "hi"}]}
            async with aiohttp.ClientSession(url) as session:
                for expected in ("miss", "hit"):
                    async with session.post("/v1/chat/completions", json=chat) as answer:
                        assert (answer.status, answer.headers["x-keepgate-cache"]) == (200, expected)
                async with session.get("/") as page:
                    assert "<html" in await page.text()
        finally:
            process.terminate()
            assert await process.wait() == 0


def command(bin_folder: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command of an environment to its end."""
    return subprocess.run(
        [bin_folder / "keepgate", *words],
        cwd=cwd,
        env=environment(bin_folder),
        capture_output=True,
        text=True,
        timeout=60,
    )


def environment(bin_folder: Path) -> dict[str, str]:
    """Variables without those of a checkout, of settings, and of programs that an extra would bring."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KEEPGATE_", "PYTHON"))}
    return {**kept, "PATH": str(bin_folder)}
