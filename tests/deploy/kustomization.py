"""Renders a kustomization as `kubectl kustomize` does, for the fields that deploy/kubernetes uses.

Any other field is refused, so that no test passes on manifests that a cluster would not get.
"""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]

KUBERNETES = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
OVERLAYS = sorted(folder.name for folder in (KUBERNETES / "overlays").iterdir() if folder.is_dir())
_FIELDS = {
    "apiVersion",
    "kind",
    "namespace",
    "resources",
    "components",
    "generatorOptions",
    "configMapGenerator",
    "secretGenerator",
    "patches",
    "images",
}
_OF_THE_CLUSTER = {"Namespace"}


class Refused(Exception):
    """A kustomization that kustomize would refuse, or that this renderer does not know how to render."""


class Rendering:
    """The manifests of a kustomization, and the files that they were read from."""

    def __init__(self, folder: Path) -> None:
        self.files: set[Path] = set()
        self.manifests = self._render(folder, [])

    def of(self, kind: str) -> list[Manifest]:
        return [manifest for manifest in self.manifests if manifest["kind"] == kind]

    def one(self, kind: str, name: str) -> Manifest:
        """Raises Refused unless there is exactly one."""
        found = [manifest for manifest in self.of(kind) if manifest["metadata"]["name"] == name]
        if len(found) != 1:
            raise Refused(f"{len(found)} manifests are a {kind} {name}; expected one")
        return found[0]

    def workloads(self) -> list[Manifest]:
        return self.of("Deployment") + self.of("StatefulSet")

    def _render(self, folder: Path, manifests: list[Manifest]) -> list[Manifest]:
        """What a folder makes of `manifests`; those are not empty for a component."""
        given = self._read(folder / "kustomization.yaml")[0]
        if unknown := given.keys() - _FIELDS:
            raise Refused(f"{folder}: this renderer does not know {sorted(unknown)}")
        for name in given.get("resources", ()):
            path = folder / name
            manifests = manifests + (self._render(path, []) if path.is_dir() else self._read(path))
        manifests = manifests + list(self._generated(folder, given))
        for name in given.get("components", ()):
            manifests = self._render(folder / name, manifests)
        for patch in given.get("patches", ()):
            _patch(_target(manifests, patch["target"]), self._read(folder / patch["path"])[0])
        for image in given.get("images", ()):
            _set_image(manifests, image)
        if namespace := given.get("namespace"):
            for manifest in manifests:
                if manifest["kind"] not in _OF_THE_CLUSTER:
                    manifest["metadata"]["namespace"] = namespace
        names = [(m["kind"], m["metadata"]["name"]) for m in manifests]
        if len(set(names)) < len(names):
            raise Refused(f"{folder}: a resource is there twice")
        return manifests

    def _read(self, file: Path) -> list[Any]:
        """The documents of a file. An alias of YAML becomes a value of its own, which a patch may change."""
        self.files.add(file.resolve())
        return [json.loads(json.dumps(document)) for document in yaml.safe_load_all(file.read_text(encoding="utf-8"))]

    def _generated(self, folder: Path, given: Manifest) -> Iterator[Manifest]:
        made = given.get("configMapGenerator", []) + given.get("secretGenerator", [])
        if made and given.get("generatorOptions") != {"disableNameSuffixHash": True}:
            raise Refused(f"{folder}: names with a hash are not rendered here")
        for generator in given.get("configMapGenerator", ()):
            if generator.keys() != {"name", "files"}:
                raise Refused(f"{folder}: a ConfigMap is made of a name and files here")
            self.files.update((folder / name).resolve() for name in generator["files"])
            data = {name: (folder / name).read_text(encoding="utf-8") for name in generator["files"]}
            yield {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": generator["name"]}, "data": data}
        for generator in given.get("secretGenerator", ()):
            if generator.keys() != {"name", "literals"}:
                raise Refused(f"{folder}: a Secret is made of a name and literals here")
            pairs = (literal.partition("=") for literal in generator["literals"])
            yield {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": generator["name"]},
                "type": "Opaque",
                "data": {name: base64.b64encode(value.encode()).decode() for name, _, value in pairs},
            }


def _target(manifests: list[Manifest], target: Manifest) -> Manifest:
    """The one manifest that a patch is for. Raises Refused where kustomize would patch none, in silence, or several."""
    api = "/".join(filter(None, (target.get("group"), target["version"])))
    found = [
        manifest
        for manifest in manifests
        if (manifest["apiVersion"], manifest["kind"], manifest["metadata"]["name"])
        == (api, target["kind"], target["name"])
    ]
    if len(found) != 1:
        raise Refused(f"a patch is for {target}, of which there are {len(found)}")
    return found[0]


def _patch(manifest: Manifest, operations: list[Manifest]) -> None:
    """Applies a JSON Patch (RFC 6902) of `add`, `replace`, `remove` and `test`."""
    for operation in operations:
        *path, last = (part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:])
        place: Any = manifest
        for part in path:
            place = place[int(part) if isinstance(place, list) else part]
        key: Any = last if isinstance(place, dict) or last == "-" else int(last)
        match operation["op"]:
            case "test":
                if place[key] != operation["value"]:
                    raise Refused(f"{operation['path']} is {place[key]!r}; the patch expects {operation['value']!r}")
            case "add" if isinstance(place, list):
                place.insert(len(place) if key == "-" else key, operation["value"])
            case "add":
                place[key] = operation["value"]
            case "replace":
                place[key]  # it has to be there
                place[key] = operation["value"]
            case "remove":
                del place[key]
            case other:
                raise Refused(f"{other} is no operation that is known here")


def _set_image(manifests: list[Manifest], image: Manifest) -> None:
    for manifest in manifests:
        pod = manifest.get("spec", {}).get("template", {}).get("spec", {})
        for container in pod.get("containers", ()):
            if container["image"].partition(":")[0] == image["name"]:
                container["image"] = f"{image.get('newName', image['name'])}:{image['newTag']}"
