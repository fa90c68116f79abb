"""What a release consists of agrees: the version in its places, and the changelog's form."""

import re
import tomllib
from pathlib import Path

from gateway import __version__

ROOT = Path(__file__).resolve().parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+) - (\d{4}-\d{2}-\d{2})")


def headings(level: int) -> list[str]:
    return re.findall(rf"^{'#' * level} (.+)$", CHANGELOG, re.MULTILINE)


def test_the_version_is_the_same_everywhere() -> None:
    """What pip shows is what `keepgate --version` prints."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)


def test_the_changelog_keeps_its_form() -> None:
    """Unreleased first, then versions with their dates, the newest first; below them the kinds of changes."""
    first, *released = headings(2)
    assert first == "Unreleased"
    matches = [VERSION.fullmatch(heading) for heading in released]
    assert all(matches), released
    numbers = [(int(match[1]), int(match[2]), int(match[3])) for match in matches if match]
    assert numbers == sorted(numbers, reverse=True)
    assert set(headings(3)) <= KINDS
    current = VERSION.fullmatch(f"{__version__} - 2000-01-01")
    assert current is not None
    assert (int(current[1]), int(current[2]), int(current[3])) >= max(numbers, default=(0, 0, 0))


def test_a_line_of_the_changelog_is_in_a_list() -> None:
    """Between headings there are items, and each is one bullet."""
    _, _, body = CHANGELOG.partition("## Unreleased\n")
    lines = [line for line in body.splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not re.match(r"(- \S|  \S)", line)] == []
