"""Reads a YAML settings file. A duplicate key, which PyYAML would accept, is refused."""

from pathlib import Path
from typing import Any

import yaml

from gateway.settings.fields import SettingsError

Lines = dict[tuple[str, ...], int]


class _Loader(yaml.SafeLoader):
    # on and off are values of settings: texts, as in YAML 1.2, and not true and false.
    yaml_implicit_resolvers = {  # noqa: RUF012  # as the base class has it
        letter: [found for found in resolvers if letter not in "oO" or not found[0].endswith(":bool")]
        for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

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
    return read_yaml_lines(file, example)[0]


def read_yaml_lines(file: Path, example: str) -> tuple[dict[str, Any], Lines]:
    """The same, and the line of each key and of each item of a list, counted from 1."""
    lines: Lines = {}
    try:
        # A SafeLoader: only plain values come out of it.
        loader = _Loader(file.read_bytes())
        try:
            node = loader.get_single_node()
            content = None if node is None else loader.construct_document(node)
            if node is not None:
                _note_lines(node, (), lines)
        finally:
            loader.dispose()
    except OSError as error:
        raise SettingsError(f"{file}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise SettingsError(f"{file}: not valid YAML: {_reason(error)}") from error
    if content is None:
        return {}, lines
    if not isinstance(content, dict):
        raise SettingsError(f"{file}: expected keys and values, such as `{example}`")
    return content, lines


def _note_lines(node: yaml.Node, path: tuple[str, ...], lines: Lines) -> None:
    """An alias may stand in many places, and in itself: each node is walked once."""
    walked: set[int] = set()
    waiting = [(node, path)]
    while waiting:
        node, path = waiting.pop()
        if id(node) in walked:
            continue
        walked.add(id(node))
        if isinstance(node, yaml.MappingNode):
            children = [(key.value, key, value) for key, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            children = [(str(number), value, value) for number, value in enumerate(node.value)]
        else:
            continue
        for name, marked, value in children:
            lines[(*path, name)] = marked.start_mark.line + 1
            waiting.append((value, (*path, name)))


def _reason(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem} (line {mark.line + 1}, column {mark.column + 1})"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return " ".join(str(error).split())
