"""Where files lie and what they are called; `lint-imports` checks which of them import which."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gateway", "cache", "backend", "prefix_store", "telemetry")
AT_THE_ROOT = {"__init__.py", "__main__.py", "py.typed"}
MAX_AT_THE_ROOT = 3
"""Further files directly in a package: those that a reader wants first."""
MAX_IN_A_SUBPACKAGE = 15
# Put together here, so that this file does not name them either.
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


def tracked() -> list[Path]:
    """Return the files that git tracks and that are there."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listing.split("\0") if name and (ROOT / name).is_file()]


def subpackages() -> list[Path]:
    """Return the folders of Python files below the packages."""
    return sorted({path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")})


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_has_few_files_outside_its_subpackages(package: str) -> None:
    """A reader who opens a package sees its subpackages, not its files."""
    files = {path.name for path in (ROOT / package).iterdir() if path.is_file()}
    assert len(files - AT_THE_ROOT) <= MAX_AT_THE_ROOT, sorted(files - AT_THE_ROOT)


@pytest.mark.parametrize("subpackage", subpackages(), ids=lambda each: str(each.relative_to(ROOT)))
def test_a_subpackage_is_small_and_says_what_it_is_for(subpackage: Path) -> None:
    """It has a screenful of files, and its ``__init__.py`` a docstring of more than one line."""
    files = [path for path in subpackage.glob("*.py") if path.name not in AT_THE_ROOT]
    assert len(files) <= MAX_IN_A_SUBPACKAGE, f"{len(files)} files"
    docstring = ast.get_docstring(ast.parse((subpackage / "__init__.py").read_text(encoding="utf-8")))
    assert docstring is not None
    assert len(docstring.splitlines()) > 1


@pytest.mark.parametrize("subpackage", subpackages(), ids=lambda each: str(each.relative_to(ROOT)))
def test_a_file_that_a_subpackage_names_exists(subpackage: Path) -> None:
    """A name in its ``__init__.py`` is a file of the subpackage, or a path from there or from the root."""
    docstring = ast.get_docstring(ast.parse((subpackage / "__init__.py").read_text(encoding="utf-8"))) or ""
    named = re.findall(r"[\w/.-]+\.(?:py|md|lua)\b", docstring)
    assert [name for name in named if not any((folder / name).is_file() for folder in (subpackage, ROOT))] == []


@pytest.mark.parametrize(
    "subpackage", [each for each in subpackages() if each.parent != ROOT], ids=lambda each: str(each.name)
)
def test_a_subpackage_says_which_others_it_uses(subpackage: Path) -> None:
    """The sentence `Uses …` of its ``__init__.py`` names the subpackages that its files import, and no others."""
    docstring = ast.get_docstring(ast.parse((subpackage / "__init__.py").read_text(encoding="utf-8"))) or ""
    sentence = re.search(r"\bUses\s([^.]*)\.", docstring)
    assert sentence is not None
    words = " ".join(sentence[1].replace("`", "").split()).replace("the package ", "")
    said = set(re.split(", | and ", words))
    assert said == (imports_of(subpackage) or {"no other subpackage"})


def imports_of(subpackage: Path) -> set[str]:
    """The siblings of a subpackage, and of the folders above it, that its files import; other packages by name."""
    found: set[str] = set()
    for path in subpackage.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
            for module in modules:
                if module.partition(".")[0] in PACKAGES:
                    found |= _as_seen_from(subpackage, module)
    return found


def _as_seen_from(subpackage: Path, module: str) -> set[str]:
    folder = ROOT.joinpath(*module.split("."))
    while not (folder / "__init__.py").is_file():
        folder = folder.parent
    if folder.is_relative_to(subpackage) or subpackage.is_relative_to(folder):
        return set()
    above = next(parent for parent in subpackage.parents if folder.is_relative_to(parent))
    return {folder.relative_to(above).parts[0]}


def test_no_file_is_a_drawer() -> None:
    """A file is named after what is in it, and nothing is called utils or common."""
    drawers = {"util", "utils", "common", "helpers", "misc"}
    assert [path for path in tracked() if drawers & {path.stem, path.parent.name}] == []


def test_no_file_names_a_package_registry() -> None:
    """The machine decides where packages come from, not the repository."""
    named = [path for path in tracked() if REGISTRIES.search(path.read_bytes().decode("utf-8", "ignore"))]
    assert named == []


@pytest.mark.parametrize(
    "host", ["https://" + "registry." + "npmjs" + ".org/openai", "files." + "pythonhosted" + ".org"]
)
def test_a_package_registry_is_found(host: str) -> None:
    """The pattern matches addresses as lock files write them."""
    assert REGISTRIES.search(f'"resolved": "{host}"')
