"""docs/guides/scaling.md names tests and options that are there."""

import re
import shlex
from pathlib import Path

from gateway.commands.simulation.command import _parser
from tests.docs.test_threat_model import functions

ROOT = Path(__file__).resolve().parents[4]
GUIDE = (ROOT / "docs/guides/scaling.md").read_text(encoding="utf-8")


def test_each_named_test_is_there() -> None:
    """In its file, as a function of its own."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", GUIDE)
    assert len(named) > 10
    assert [f"{file}::{name}" for file, name in named if name not in functions(ROOT / file)] == []


def test_its_commands_are_understood() -> None:
    """Each command line is one of the command's own."""
    lines = GUIDE.replace("\\\n", " ").splitlines()
    commands = [line.partition("keepgate simulate")[2] for line in lines if line.startswith("$ keepgate simulate")]
    commands += [words for words in re.findall(r"`keepgate simulate ([^`]*)`", GUIDE) if "NAME" not in words]
    assert len(commands) >= 3
    for words in commands:
        _parser().parse_args(shlex.split(words))
