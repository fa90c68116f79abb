"""The page on threats names tests that are there."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs/threat-model.md").read_text())


def test_each_named_test_is_there() -> None:
    """In its file, as a function of its own."""
    missing = [f"{file}::{name}" for file, name in NAMED if name not in functions(ROOT / file)]
    assert len(NAMED) > 20
    assert missing == []


def functions(file: Path) -> set[str]:
    """The functions of a module; none where there is no such file."""
    if not file.is_file():
        return set()
    module = ast.parse(file.read_text())
    return {node.name for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
