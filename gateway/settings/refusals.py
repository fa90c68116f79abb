"""How a setting that cannot be is refused: in one line that says where it was said, and what would be right."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from gateway.settings.fields import InvalidValue, Secret, SettingsError, dotted, masked
from gateway.settings.secret_files import SUFFIX
from gateway.settings.settings import Settings

PREFIX = "KEEPGATE_"
URL_VARIABLE = "KEEPGATE_URL"
"""Where the commands of operators find the gateway."""
_ENVIRONMENT = "environment"
_COMMAND_LINE = "command line"
_MAX_SHOWN = 80
# Options of the command line that are not named as their setting is.
_OPTIONS = {"upstreams": "upstream", "mode": "semantic", "shutdown": "drain_seconds"}
_REFERENCE = "env:NAME or file:PATH"
_ANY_KEY = "..."
"""What msgspec says in place of a key of a mapping."""

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Layer:
    """What one source says. `lines` has the lines of a file at which its keys stand; `in_files` are the variables of
    the environment that were read from files.
    """

    source: str
    values: dict[str, Any]
    lines: Mapping[Path, int] = field(default_factory=dict)
    in_files: frozenset[str] = frozenset()

    def error(self, path: Path, message: str) -> SettingsError:
        """`message` goes on from the name of the setting."""
        marked = next((path[:end] for end in range(len(path), 0, -1) if path[:end] in self.lines), None)
        place = self.source if marked is None else f"{self.source}, line {self.lines[marked]}"
        return SettingsError(f"{place}: {self.name(path)}{message}")

    def name(self, path: Path) -> str:
        """A setting as it is written in this source."""
        if self.source == _ENVIRONMENT:
            name = variable(tuple(name for name in path if not name.isdecimal()))
            return name + SUFFIX if name in self.in_files else name
        if self.source == _COMMAND_LINE:
            names = [name for name in path if not name.isdecimal()]
            return "--" + _OPTIONS.get(names[-1], names[-1]).replace("_", "-")
        return dotted(path) or "settings"


def environment_layer(values: dict[str, Any], in_files: frozenset[str]) -> Layer:
    return Layer(_ENVIRONMENT, values, in_files=in_files)


def command_line_layer(values: dict[str, Any]) -> Layer:
    return Layer(_COMMAND_LINE, values)


def checked(layer: Layer) -> Settings:
    """The settings that a source alone would make. Raises SettingsError."""
    try:
        return msgspec.convert(layer.values, Settings, strict=False, dec_hook=_decode_own_type)
    except msgspec.ValidationError as error:
        raise _refusal(layer, error) from error


def refused(layer: Layer, path: Path, error: ValueError, value: Any) -> SettingsError:
    """For a value of the right type that a check refuses."""
    return layer.error(path, f": {_error_message(error, path, value)}")


def expectation(path: Path) -> tuple[Any, str]:
    """The type of a setting, and what its value should be in words."""
    kind: Any = Settings
    words = "keys and values"
    for name in path:
        kind = _member(kind, name)
        if get_origin(kind) is Annotated:
            base, *notes = get_args(kind)
            described = (note.description for note in notes if isinstance(note, Meta) and note.description)
            words = next(described, words)  # an item of a list may have none of its own
            kind = Secret if Secret in get_args(base) else base
        elif _is_struct(kind):
            words = "keys and values"
    return kind, words


def paths(struct: type[Struct]) -> list[Path]:
    """Every setting, as the keys that lead to it."""
    found: list[Path] = []
    for each in msgspec.structs.fields(struct):
        found += [(each.name, *path) for path in paths(each.type)] if _is_struct(each.type) else [(each.name,)]
    return found


def secret_paths() -> list[Path]:
    """The settings that may be in files: secrets, and the URL of Redis, which may have a password."""
    return [path for path in paths(Settings) if path == ("redis",) or expectation(path)[0] is Secret]


def variable(path: Path) -> str:
    return PREFIX + "_".join(path).upper()


def _decode_own_type(kind: Any, value: Any) -> Any:
    return kind.parse(value)


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Struct)


def _member(kind: Any, name: str) -> Any:
    """The type of what a key, or an index, leads to."""
    origin = get_origin(kind)
    if origin is Annotated:
        return _member(get_args(kind)[0], name)
    if origin in (Union, UnionType):
        return _member(next(each for each in get_args(kind) if _is_struct(each) or get_origin(each)), name)
    if origin in (tuple, dict):
        return get_args(kind)[0 if origin is tuple else 1]
    return next(each.type for each in msgspec.structs.fields(kind) if each.name == name)


def _refusal(layer: Layer, error: msgspec.ValidationError) -> SettingsError:
    reason, _, place = str(error).partition(" - at `$")
    steps = tuple(re.findall(r"\.\.\.|[^.\[\]`]+", place))
    path = _with_keys(layer.values, steps)
    if unknown := re.search(r"unknown field `(.*)`", reason):
        path = (*path, unknown[1])
        near = _nearest(path)
        return layer.error(path, " is not a setting" + (f"; did you mean {layer.name(near)}?" if near else ""))
    if missing := re.search(r"missing required field `(.*)`", reason):
        return layer.error(path, f": {missing[1]} is missing")
    return layer.error(path, f": {_error_message(error, path, _value(layer.values, path))}")


def _with_keys(values: Any, steps: Path) -> Path:
    """The path with the keys of mappings that msgspec does not tell: of those where the fault is, the first."""
    if _ANY_KEY not in steps:
        return steps
    at = steps.index(_ANY_KEY)
    before, after = steps[:at], steps[at + 1 :]
    for key, value in _value(values, before).items():
        trial: Any = {key: value}
        for step in reversed(before):
            trial = [trial] if step.isdecimal() else {step: trial}
        try:
            msgspec.convert(trial, Settings, strict=False, dec_hook=_decode_own_type)
        except msgspec.ValidationError:
            return (*before, str(key), *_with_keys(value, after))
    return before


def _error_message(error: Exception, path: Path, value: Any) -> str:
    if isinstance(error, InvalidValue):
        return str(error)
    kind, expected = expectation(path)
    if kind is Secret or expected.startswith(_REFERENCE):  # the secret itself may be there instead
        return f"expected {expected}"
    return f"expected {expected}, got {_shown(value)}"


def _shown(value: Any) -> str:
    if value is None or value == "":
        return "nothing"
    shown = (
        repr(masked(value))
        if isinstance(value, str)
        else msgspec.json.encode(_with_masks(value), enc_hook=str).decode()
    )
    return shown if len(shown) <= _MAX_SHOWN else shown[:_MAX_SHOWN] + "…"


def _with_masks(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_with_masks(item) for item in value]
    if isinstance(value, dict):
        return {key: _with_masks(item) for key, item in value.items()}
    return masked(value) if isinstance(value, str) else value


def _value(values: Any, path: Path) -> Any:
    for step in path:
        values = values[int(step)] if isinstance(values, list | tuple) else values[step]
    return values


def _nearest(path: Path) -> Path | None:
    """The setting that was probably meant: of the same name in no group, near in spelling, or of the same name."""
    try:
        siblings = [each.name for each in msgspec.structs.fields(_struct_at(path[:-1]))]
    except (StopIteration, TypeError, IndexError):
        siblings = []
    known = {".".join(known): known for known in paths(Settings)}
    same_name = [name for name, known_path in known.items() if known_path[-1] == path[-1]]
    if path[-1] in known:
        return known[path[-1]]
    if len(path) > 1 and (near := difflib.get_close_matches(path[-1], siblings, n=1)):
        return (*path[:-1], near[0])
    near = same_name or difflib.get_close_matches(".".join(path), known, n=1)
    return known[near[0]] if near else None


def _struct_at(path: Path) -> Any:
    kind: Any = Settings
    for name in path:
        kind = _member(kind, name)
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return next(each for each in get_args(kind) if _is_struct(each))
    return kind
