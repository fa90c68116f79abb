"""The documentation site builds, and what it says of the code is there."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from backend.api.app import create_app
from gateway.processes.routes import build_application
from gateway.settings.backend import BackendSettings
from gateway.settings.settings import Settings
from gateway.tenants.callers import Callers
from scripts import reference

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if "decisions" not in page.parts and "benchmarks" not in page.parts)
ROOT_PAGES = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
FOLLOWS_CODE = [DOCS / "how-it-works.md", *ROOT_PAGES[1:]]
CODE = ("gateway", "cache", "backend", "prefix_store", "telemetry", "scripts", "tests", "benchmarks")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Links and anchors between pages are checked by the strict build."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert run.returncode == 0, run.stdout + run.stderr
    configuration = (tmp_path / "site/reference/configuration/index.html").read_text()
    assert "KEEPGATE_CACHE_TTL" in configuration
    assert "<!-- generated" not in configuration


def test_the_readme_is_read_in_three_minutes() -> None:
    """All else is on the site."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def anchor(heading: str) -> str:
    """As GitHub and MkDocs make it of a plain heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", [*ROOT_PAGES, *DOCS.rglob("*.md")], ids=name_of)
def test_a_link_leads_somewhere(page: Path) -> None:
    """Relative links of pages that are read in the repository, with their anchors."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, fragment = target.partition("#")
        if "://" in path or path.startswith("mailto:"):
            continue
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        if fragment and found.suffix == ".md":
            headings = re.findall(r"(?m)^#+ (.*)$", found.read_text())
            assert fragment in {anchor(heading) for heading in headings}, target


def routes(table: str) -> set[tuple[str, str]]:
    """(method, path) of each row of the API reference that names one."""
    rows = re.findall(r"(?m)^\| (`(?:GET|POST|PUT|PATCH|DELETE|\*) /.*?) \|", table)
    return {(method, path) for row in rows for method, path in re.findall(r"`([A-Z*]+) (/[^`]*)`", row)}


def routes_of(create: str) -> set[tuple[str, str]]:
    """(method, path) of each route in an application's table; parameters without their patterns."""
    found = re.findall(r'web\.(get|post|delete|route)\(\s*(?:"\*", )?("[^"]+"|BLOCKS_PATH)', create)
    return {("*" if method == "route" else method.upper(), path.strip('"')) for method, path in found}


def test_every_route_is_in_the_reference() -> None:
    """And the reference names no other."""
    page = (DOCS / "reference/api.md").read_text()
    gateway, backend = page.split("## The engine's endpoints")
    settings = Settings()
    application = build_application(settings, Callers(None, settings), {})
    served = {(route.method, resource.canonical) for resource in application.router.resources() for route in resource}
    served = {(method, path.replace("{rest}", "{path}")) for method, path in served if method != "HEAD"}
    served -= {("*", f"/v1/{name}{{path}}") for name in ("cache", "keys", "teams")}  # answer 404
    served.remove(("POST", "/v1/cache/prefix/{operation}"))
    served.update(("POST", f"/v1/cache/prefix/{operation}") for operation in ("lookup", "pin", "unpin"))
    assert routes(gateway) == served
    engine = {(m, p.replace("BLOCKS_PATH", "/v1/prefix/blocks")) for m, p in routes_of(inspect.getsource(create_app))}
    assert routes(backend) == {(m, re.sub(r"\{(\w+):[^}]*\}", r"{\1}", p)) for m, p in engine}


def test_every_setting_says_what_it_does() -> None:
    """In a docstring below its field, which the reference shows."""
    for kind in (Settings, *(kind for _, kind, _ in reference.fields_of(Settings) if reference.is_group(kind))):
        if kind is BackendSettings:  # described by the options of `keepgate backend`
            continue
        fields = {name for name, field, _ in reference.fields_of(kind) if not reference.is_group(field)}
        assert fields == set(reference.descriptions(kind))


def test_every_setting_of_the_backend_is_one_of_its_options() -> None:
    """The reference finds its description there."""
    table = reference.backend_table()
    missing = [name for name, _, _ in reference.fields_of(BackendSettings) if f"`backend.{name}`" not in table]
    assert missing == []


@pytest.fixture(scope="module")
def source() -> str:
    """The text of all code."""
    files = (path for folder in CODE for path in (ROOT / folder).rglob("*.py") if "node_modules" not in path.parts)
    return "\n".join(path.read_text() for path in files)


@pytest.mark.parametrize("page", FOLLOWS_CODE, ids=name_of)
def test_every_name_of_the_code_is_there(page: Path, source: str) -> None:
    """Paths exist, and names in backticks occur in the code."""
    missing: list[str] = []
    for words in re.findall(r"`([^`\n]+)`", page.read_text()):
        if re.fullmatch(r"[\w./-]+\.(py|md|toml|yaml|txt|cpp|h)|[\w./]+/", words) and "/" in words:
            if not any((ROOT / package / words).exists() for package in ("", *CODE)):
                missing.append(words)
        elif re.fullmatch(r"[A-Za-z_][\w.]*", words):
            name = words.rpartition(".")[2]
            if not re.search(rf"\b{re.escape(name)}\b", source) and not any(ROOT.rglob(words)):
                missing.append(words)
    assert missing == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=name_of)
def test_every_option_and_variable_is_there(page: Path, source: str) -> None:
    """Whatever begins with KEEPGATE_, and options of `keepgate` in a console block."""
    text = page.read_text()
    settings = reference.settings_table() + reference.backend_table() + source + (ROOT / "compose.yaml").read_text()
    variables = set(re.findall(r"\bKEEPGATE_[A-Z_]+[A-Z]\b", text))
    assert {name for name in variables if name not in settings} == set()
    commands = [
        line for line in text.splitlines() if re.search(r"keepgate (serve|backend|plan|quantize|eval|replay)", line)
    ]
    options = {option for line in commands for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", line)}
    assert {option for option in options if option not in settings} == set()
