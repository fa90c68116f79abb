"""Reads a YAML settings file. A duplicate key, which PyYAML would accept, is refused."""

from pathlib import Path
from typing import Any

import yaml

from gateway.settings.fields import SettingsError


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or not key.tag.endswith(":str"):
                raise yaml.MarkedYAMLError(problem="a key must be text", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value} appears twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(file: Path, example: str) -> dict[str, Any]:
    """The keys and values of a file, unchecked; `example` is what one may look like.

    Raises SettingsError, naming the file and, where there is one, the line.
    """
    try:
        # A SafeLoader: only plain values come out of it.
        content = yaml.load(file.read_bytes(), _Loader)  # noqa: S506
    except OSError as error:
        raise SettingsError(f"{file}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise SettingsError(f"{file}: not valid YAML: {_reason(error)}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"{file}: expected keys and values, such as `{example}`")
    return content


def _reason(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem} (line {mark.line + 1}, column {mark.column + 1})"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return " ".join(str(error).split())
