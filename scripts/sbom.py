"""Write a CycloneDX SBOM (ECMA-424, version 1.6) of the Python packages of an environment.

The images have one of their own packages at /opt/keepgate/sbom.cdx.json; ``make sbom`` writes one of .venv. Runs with
the environment's Python and nothing but the standard library. The same packages give the same bytes.
"""

import argparse
import importlib.metadata as metadata
import json
import re
import sys
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

ROOT = "keepgate"
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MAX_NAME = 80
"""Characters of a licence's name; longer ones are its whole text, which old packages have in that field."""


def normalized(name: str) -> str:
    """A package's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def reference(name: str, version: str) -> str:
    """The package URL (purl), which also names the component inside the document."""
    return f"pkg:pypi/{normalized(name)}@{quote(version, safe='')}"


def licenses(package: metadata.PackageMetadata) -> list[dict[str, Any]]:
    """What a package says of its licence: an SPDX expression, else its classifiers, else its short text."""
    if expression := _field(package, "License-Expression"):
        return [{"expression": expression}]
    classifiers = [
        line.split(" :: ")[-1] for line in package.get_all("Classifier", []) if line.startswith("License ::")
    ]
    text = _field(package, "License")
    names = classifiers or ([text] if text and "\n" not in text and len(text) <= _MAX_NAME else [])
    return [{"license": {"name": name}} for name in names]


def document(packages: Iterable[metadata.Distribution]) -> dict[str, Any]:
    """The SBOM as a JSON object. Raises ValueError where Keepgate itself is not among the packages."""
    found = {normalized(package.metadata["Name"]): package for package in packages}
    if ROOT not in found:
        raise ValueError(f"{ROOT} is not installed in this environment, so there is nothing to describe")
    references = {name: reference(name, package.version) for name, package in found.items()}
    components = {name: _component(found[name], references[name]) for name in sorted(found)}
    # Whichever extra asks for a package: if it is installed, it is used.
    needed = {name: {normalized(required) for required in _required(package)} for name, package in found.items()}
    dependencies = [
        {"ref": references[name], "dependsOn": sorted(references[other] for other in needed[name] & found.keys())}
        for name in sorted(found)
    ]
    root = {**components.pop(ROOT), "type": "application"}
    body = {"components": list(components.values()), "dependencies": dependencies}
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([root, body], sort_keys=True))}",
        "version": 1,
        "metadata": {
            "component": root,
            "properties": [{"name": "keepgate:python", "value": "{}.{}.{}".format(*sys.version_info)}],
        },
        **body,
    }


def _field(package: metadata.PackageMetadata, name: str) -> str:
    return next(iter(package.get_all(name, [])), "")


def _component(package: metadata.Distribution, purl: str) -> dict[str, Any]:
    said = package.metadata
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": purl,
        "name": said["Name"],
        "version": package.version,
        "purl": purl,
    }
    if summary := _field(said, "Summary"):
        component["description"] = summary
    if found := licenses(said):
        component["licenses"] = found
    return component


def _required(package: metadata.Distribution) -> list[str]:
    matches = (_REQUIREMENT.match(line) for line in package.requires or ())
    return [match[0] for match in matches if match]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file; returns the exit status."""
    parser = argparse.ArgumentParser(description="Write a CycloneDX SBOM of the Python packages of this environment.")
    parser.add_argument("file", type=Path, help="where to write it, such as build/sbom.cdx.json")
    file: Path = parser.parse_args(arguments).file
    try:
        text = json.dumps(document(metadata.distributions()), indent=1, ensure_ascii=False) + "\n"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"sbom: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
