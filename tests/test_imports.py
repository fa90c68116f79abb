"""Which package may import which, and what must not be imported to say ``--help``."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = {
    "gateway": {"cache"},
    "backend": {"prefix_store"},
    "cache": set[str](),
    "prefix_store": set[str](),
}
# Folders of the repository that are not installed: a package that imports them works in a checkout only.
NOT_INSTALLED = {"tests", "benchmarks", "scripts"}
IMPORT_CALLS = {"import_module", "__import__", "run_module"}
HEAVY = {"torch", "transformers", "faiss", "sentence_transformers", "numpy", "onnxruntime"}
# Put together here, so that this file does not mention them either.
REGISTRIES = re.compile(
    "|".join(
        re.escape(".".join(parts))
        for parts in (
            ("pypi", "org"),
            ("pythonhosted", "org"),
            ("npmjs", "org"),
            ("npmjs", "com"),
            ("yarnpkg", "com"),
            ("registry", "npmmirror"),
            ("download", "pytorch"),
            ("registry-1", "docker"),
            ("hub", "docker"),
            ("ghcr", "io"),
            ("quay", "io"),
        )
    )
)


def imported(tree: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    """Yield (line, top-level name) of each import, wherever it stands in the file.

    Imports in functions and under TYPE_CHECKING count, and so do calls of importlib with a constant name. A relative
    import that climbs out of its package is yielded as ``..``. package is the dotted package that the file lies in.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name.split(".")[0]) for alias in names)
            case ast.ImportFrom(level=0, module=str(module)):
                yield node.lineno, module.split(".")[0]
            case ast.ImportFrom(level=level):
                inside = level <= len(package.split("."))
                yield node.lineno, package.split(".")[0] if inside else ".."
            case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]) if called(func) in IMPORT_CALLS:
                yield node.lineno, name.split(".")[0]


def called(func: ast.expr) -> str:
    """Return the last name of what is called: ``import_module`` for ``importlib.import_module``."""
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""


def wrong_imports(source: str, package: str) -> list[str]:
    """Return ``line N: package imports other`` for each import in source that the rule forbids."""
    own = package.split(".")[0]
    forbidden = (set(ALLOWED) | NOT_INSTALLED | {".."}) - ALLOWED[own] - {own}
    found = imported(ast.parse(source), package)
    return [f"line {line}: {own} imports {name}" for line, name in found if name in forbidden]


def imported_by(command: list[str]) -> set[str]:
    """Run a Python command; return the top-level names of the modules it imported."""
    environment = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {line.rsplit("|", 1)[1].strip().split(".")[0] for line in lines}


def tracked() -> list[Path]:
    """Return the files that git tracks and that are there."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listing.split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_import_only_what_the_rule_allows(package: str) -> None:
    """gateway imports cache, backend imports prefix_store, and nothing else crosses."""
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"no source found in {package}"
    wrong = [
        f"{path.relative_to(ROOT)} {fault}"
        for path in files
        for fault in wrong_imports(path.read_text(encoding="utf-8"), ".".join(path.relative_to(ROOT).parent.parts))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("gateway", "import backend"),
        ("gateway", "import os, prefix_store.index as index"),
        ("gateway", "from backend.engine import Engine"),
        ("gateway", "def start():\n    from backend import engine"),
        ("gateway", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import backend.engine"),
        ("gateway", "import importlib\nimportlib.import_module('backend.commands.cli')"),
        ("gateway", "from importlib import import_module\nimport_module('backend')"),
        ("gateway", "__import__('prefix_store')"),
        ("gateway", "import runpy\nrunpy.run_module('backend')"),
        ("gateway", "from tests.gateway import world"),
        ("gateway.web", "from ... import backend"),
        ("cache", "import gateway"),
        ("cache", "from .. import gateway"),
        ("cache", "try:\n    import prefix_store\nexcept ImportError:\n    pass"),
        ("backend", "import cache"),
        ("backend", "class A:\n    import gateway.cli"),
        ("prefix_store", "import backend"),
        ("prefix_store", "import cache.key"),
    ],
)
def test_a_wrong_import_is_found(package: str, source: str) -> None:
    """The check sees an import in whatever form it comes."""
    assert len(wrong_imports(source, package)) == 1


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("gateway", "import cache\nfrom cache.key import key"),
        ("gateway.web", "from ..errors import Fault\nfrom . import pages"),
        ("gateway", "import importlib\nimportlib.import_module(name)\nopen('backend')"),
        ("backend", "from prefix_store import index\nimport torch"),
        ("cache", "import backend_tools, cachetools\nfrom . import key"),
    ],
)
def test_a_right_import_passes(package: str, source: str) -> None:
    """Names that only begin alike, own modules and allowed neighbours are no faults."""
    assert wrong_imports(source, package) == []


def test_help_imports_nothing_heavy() -> None:
    """``keepgate --help`` answers without torch, numpy or a model library."""
    names = imported_by([str(Path(sys.executable).with_name("keepgate")), "--help"])
    assert "gateway" in names
    assert not names & HEAVY
    assert "backend" not in names


def test_a_heavy_import_is_found() -> None:
    """The check above sees a module that a command imports."""
    assert "numpy" in imported_by([sys.executable, "-c", "import numpy.linalg"])


def test_no_file_is_a_drawer() -> None:
    """A file is named after what is in it, and nothing is called utils or common."""
    drawers = {"util", "utils", "common", "helpers", "misc"}
    assert [path for path in tracked() if drawers & {path.stem, path.parent.name}] == []


def test_no_file_names_a_package_registry() -> None:
    """Where packages come from is the business of the machine, not of the repository."""
    named = [path for path in tracked() if REGISTRIES.search(path.read_bytes().decode("utf-8", "ignore"))]
    assert named == []


@pytest.mark.parametrize(
    "host", ["https://" + "registry." + "npmjs" + ".org/openai", "files." + "pythonhosted" + ".org"]
)
def test_a_package_registry_is_found(host: str) -> None:
    """The pattern matches addresses as lock files write them."""
    assert REGISTRIES.search(f'"resolved": "{host}"')
