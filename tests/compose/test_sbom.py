"""The SBOM of an environment."""

import importlib.metadata as metadata
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.sbom import document, main, normalized


@pytest.fixture(scope="module")
def sbom() -> dict[str, Any]:
    """Of this environment."""
    return document(metadata.distributions())


def test_every_installed_package_is_in_it(sbom: dict[str, Any]) -> None:
    """With its version and its package URL; Keepgate is what it is about."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "list", "--format=json"], capture_output=True, text=True, check=True
    )
    installed = {normalized(package["name"]): package["version"] for package in json.loads(listing.stdout)}
    about = sbom["metadata"]["component"]
    assert (about["name"], about["type"]) == ("keepgate", "application")
    found = {normalized(each["name"]): each["version"] for each in [about, *sbom["components"]]}
    assert found == installed
    for each in sbom["components"]:
        assert each["purl"].startswith(f"pkg:pypi/{normalized(each['name'])}@{each['version'].split('+')[0]}")


def test_it_says_what_needs_what(sbom: dict[str, Any]) -> None:
    """Among the packages that are there, extras included, and each that it names is one of them."""
    references = {each["bom-ref"] for each in [sbom["metadata"]["component"], *sbom["components"]]}
    needed = {each["ref"]: set(each["dependsOn"]) for each in sbom["dependencies"]}
    assert needed.keys() == references
    assert set().union(*needed.values()) <= references
    (keepgate,) = (reference for reference in references if reference.startswith("pkg:pypi/keepgate@"))
    assert {"aiohttp", "torch", "cryptography"} <= {name.split("/")[1].split("@")[0] for name in needed[keepgate]}


def test_most_packages_have_a_licence(sbom: dict[str, Any]) -> None:
    """As an SPDX expression or as names, and never as a text of pages."""
    licenses = [each["licenses"] for each in sbom["components"] if "licenses" in each]
    assert len(licenses) > 0.9 * len(sbom["components"])
    for each in licenses:
        names = [entry["expression"] if "expression" in entry else entry["license"]["name"] for entry in each]
        assert all(0 < len(name) <= 120 and "\n" not in name for name in names), names
        assert len(each) == 1 or not any("expression" in entry for entry in each)


def test_the_same_packages_give_the_same_bytes(tmp_path: Path) -> None:
    """Also the serial number, which is a UUID as CycloneDX wants it."""
    files = [tmp_path / "new" / "first.json", tmp_path / "second.json"]
    for file in files:
        assert main([str(file)]) == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    written = json.loads(files[0].read_text())
    assert (written["bomFormat"], written["specVersion"], written["version"]) == ("CycloneDX", "1.6", 1)
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", written["serialNumber"])


def test_an_environment_without_keepgate_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line; so is a file that cannot be written."""
    with pytest.raises(ValueError, match="keepgate is not installed"):
        document([])
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "file" / "sbom.json")]) == 1
    assert capsys.readouterr().err.startswith("sbom: ")
