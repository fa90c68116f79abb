"""tests/skips.py, on small test files in a pytest of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

SKIP = "import pytest\n@pytest.mark.skip(reason={0!r})\ndef test_it(): pass\n"
SKIP_INSIDE = "import pytest\ndef test_it(): pytest.skip({0!r})\n"
SKIP_FIXTURE = "import pytest\n@pytest.fixture\ndef part(): pytest.skip({0!r})\ndef test_it(part): pass\n"
SKIP_MODULE = "import pytest\npytest.skip({0!r}, allow_module_level=True)\ndef test_it(): pass\n"
XFAIL = "import pytest\n@pytest.mark.xfail(reason={0!r})\ndef test_it(): assert False\n"
PASS = "def test_it(): pass\n"


def run_pytest(folder: Path, source: str, ci: str) -> tuple[int, str]:
    """Run one test file with the plugin; return the exit status and what it printed."""
    (folder / "test_one.py").write_text(source)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.skips",
        "-p",
        "no:cacheprovider",
        "-rA",
        "-c",
        "/dev/null",
    ]
    # Without the other plugins a run takes half a second instead of two.
    alone = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment = {**os.environ, **alone, "CI": ci}
    done = subprocess.run([*command, "test_one.py"], cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout


@pytest.mark.parametrize("source", [SKIP, SKIP_INSIDE, SKIP_FIXTURE, SKIP_MODULE, XFAIL])
def test_in_ci_a_test_that_did_not_run_fails_and_says_why(tmp_path: Path, source: str) -> None:
    """Every way of skipping turns the run red and keeps its reason in the output."""
    status, output = run_pytest(tmp_path, source.format("no npm here"), ci="true")
    assert status != 0
    assert "no npm here" in output
    assert "skipped" not in output.splitlines()[-1]
    assert "Not run" not in output


@pytest.mark.parametrize("why", ["needs a GPU", "needs 2 GPUs"])
@pytest.mark.parametrize("source", [SKIP, SKIP_INSIDE, SKIP_FIXTURE, SKIP_MODULE])
def test_a_missing_gpu_excuses_a_skip(tmp_path: Path, source: str, why: str) -> None:
    """The one reason that stays a skip in CI."""
    status, output = run_pytest(tmp_path, PASS.replace("test_it", "test_other") + source.format(why), ci="true")
    assert "1 skipped" in output.splitlines()[-1]
    assert status in (0, 5), output  # 5: a module that skipped itself leaves nothing to run


@pytest.mark.parametrize("source", [SKIP, SKIP_INSIDE, SKIP_FIXTURE, SKIP_MODULE, XFAIL])
def test_outside_ci_a_skip_is_a_skip(tmp_path: Path, source: str) -> None:
    """A developer without npm still gets a green run, which says in one line what it left out."""
    status, output = run_pytest(tmp_path, source.format("no npm here"), ci="")
    assert status in (0, 5), output
    (line,) = [line for line in output.splitlines() if line.startswith("Not run: ")]
    assert line.startswith("Not run: 1 (")
    assert line.endswith("no npm here)")
