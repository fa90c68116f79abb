"""Where settings come from, and how one that cannot be is refused: in one line that says where it was said.

Later sources win: defaults, the YAML file, the environment (`KEEPGATE_PORT`, `KEEPGATE_CACHE_TTL`, …), the command
line.
"""

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from gateway.settings.cache import SemanticSettings
from gateway.settings.fields import (
    InvalidValue,
    Secret,
    SettingsError,
    check_judge,
    check_store,
    check_upstream,
    masked,
)
from gateway.settings.prefix_defaults import SECRET_VARIABLE
from gateway.settings.settings import Settings

PREFIX = "KEEPGATE_"
_ENVIRONMENT = "environment"
_COMMAND_LINE = "command line"
_MAX_SHOWN = 80
# Options of the command line that are not named as their setting is.
_OPTIONS = {"upstreams": "upstream", "mode": "semantic"}

_LISTS = (
    ("upstreams",),
    ("quantized_variants",),
    ("cors_origins",),
    ("cache", "key_headers"),
    ("semantic", "published"),
    ("prompt_cache", "kinds"),
    ("backend", "public_prefix"),
)

Keys = tuple[str, ...]


def load(file: Path | None, environment: Mapping[str, str], arguments: Mapping[str, Any]) -> tuple[Settings, list[str]]:
    """The settings, and warnings about variables that look meant for Keepgate but are none of its settings.

    `arguments` holds what the command line said, None for what it did not; a dot in a name leads into a group. Raises
    SettingsError.
    """
    warnings: list[str] = []
    layers: list[tuple[str, dict[str, Any]]] = []
    if file is not None:
        from gateway.settings.yaml_file import read_yaml  # PyYAML, only where there is YAML

        layers.append((str(file), read_yaml(file, example="port: 8080")))
    layers.append((_ENVIRONMENT, _from_environment(environment, warnings)))
    layers.append((_COMMAND_LINE, _from_command_line(arguments)))
    merged: dict[str, Any] = {}
    for source, layer in layers:
        _check(source, layer)  # each on its own, so that the message can say who said it
        merged = _merge(merged, layer)
    settings = _check("settings", merged)
    if bool(settings.semantic.judge_url) != bool(settings.semantic.judge_model):
        missing = "judge_model" if settings.semantic.judge_url else "judge_url"
        raise SettingsError(f"semantic.{missing}: expected one, for a judge is a model of a server; both, or none")
    if settings.upstreams:
        warnings += [
            f"{source}: {_key(source, path)} is not used: it is for the in-repo backend, and upstreams are named"
            for source, layer in layers
            for path in _given(layer)
            if path[0] in ("model", "backend")
        ]
    return settings, warnings


def _check(source: str, values: dict[str, Any]) -> Settings:
    try:
        settings = msgspec.convert(values, Settings, strict=False, dec_hook=_decode_own_type)
    except msgspec.ValidationError as error:
        raise SettingsError(_refusal(source, values, error)) from error
    urls = [(check_upstream, server.url, ("upstreams",)) for server in settings.servers]
    for check, url, path in (*urls, (check_store, settings.redis, ("redis",))):
        try:
            check(url)
        except ValueError as error:
            raise SettingsError(f"{source}: {_key(source, path)}: {_error_message(error, path, url)}") from error
    _check_judge(source, settings.semantic)
    return settings


def _check_judge(source: str, semantic: SemanticSettings) -> None:
    """Raises SettingsError unless a server and its model are named together."""
    path = ("semantic", "judge_url")
    try:
        if semantic.judge_url:
            check_judge(semantic.judge_url)
    except ValueError as error:
        given = _error_message(error, path, semantic.judge_url)
        raise SettingsError(f"{source}: {_key(source, path)}: {given}") from error


def _decode_own_type(kind: Any, value: Any) -> Any:
    return kind.parse(value)


def _refusal(source: str, values: Any, error: msgspec.ValidationError) -> str:
    reason, _, place = str(error).partition(" - at `$")
    path = tuple(re.findall(r"[^.\[\]`]+", place))
    if unknown := re.search(r"unknown field `(.*)`", reason):
        path = (*path, unknown[1])
        near = _nearest(path)
        hint = f"; did you mean {_key(source, near)}?" if near else ""
        return f"{source}: {_key(source, path)} is not a setting{hint}"
    return f"{source}: {_key(source, path)}: {_error_message(error, path, _value(values, path))}"


def _error_message(error: Exception, path: Keys, value: Any) -> str:
    if isinstance(error, InvalidValue):
        return str(error)
    kind, expected = _expectation(path)
    if kind is Secret:
        return f"expected {expected}"
    return f"expected {expected}, got {_shown(value)}"


def _shown(value: Any) -> str:
    if value is None or value == "":
        return "nothing"
    shown = repr(masked(value)) if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()
    return shown if len(shown) <= _MAX_SHOWN else shown[:_MAX_SHOWN] + "…"


def _expectation(path: Keys) -> tuple[Any, str]:
    """The type of a setting, and what its value should be in words. `path` may go on into a list."""
    kind: Any = Settings
    for name in path:
        fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
        kind = fields[name]
        if get_origin(kind) is Annotated:
            base, *notes = get_args(kind)
            words = next(note.description for note in notes if isinstance(note, Meta))
            return (Secret if Secret in get_args(base) else base), str(words)
    return kind, "keys and values"


def _value(values: Any, path: Keys) -> Any:
    for step in path:
        values = values[int(step)] if isinstance(values, list | tuple) else values[step]
    return values


def _key(source: str, path: Keys) -> str:
    """A setting as it is written in its source."""
    names = [name for name in path if not name.isdecimal()]
    if source == _ENVIRONMENT:
        return _variable(tuple(names))
    if source == _COMMAND_LINE:
        return "--" + _OPTIONS.get(names[-1], names[-1]).replace("_", "-")
    return ".".join(names) or "settings"


def _nearest(path: Keys) -> Keys | None:
    """The setting that was probably meant: near in spelling, or of the same name elsewhere."""
    known = {".".join(known): known for known in _paths(Settings)}
    written = ".".join(path)
    same_name = [name for name, known_path in known.items() if known_path[-1] == path[-1]]
    near = same_name or difflib.get_close_matches(written, known, n=1)
    return known[near[0]] if near else None


def _from_environment(environment: Mapping[str, str], warnings: list[str]) -> dict[str, Any]:
    known = {_variable(path).removeprefix(PREFIX): path for path in _paths(Settings)}
    values: dict[str, Any] = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable == SECRET_VARIABLE:
            continue
        name = variable.removeprefix(PREFIX)
        path = known.get(name)
        if path is None:
            near = difflib.get_close_matches(name, known, n=1)
            warnings.append(f"{variable} is not a setting" + (f"; did you mean {PREFIX}{near[0]}?" if near else ""))
            continue
        if not text.strip(" ,"):
            words = _expectation(path)[1]
            raise SettingsError(f"{_ENVIRONMENT}: {variable}: expected {words}, got nothing; unset it for the default")
        is_list = path in _LISTS
        value: Any = [item.strip() for item in text.split(",") if item.strip()] if is_list else text
        _put(values, path, value)
    return values


def _from_command_line(arguments: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in arguments.items():
        if value is not None:
            _put(values, tuple(name.split(".")), value)
    return values


def _put(values: dict[str, Any], path: Keys, value: Any) -> None:
    for key in path[:-1]:
        values = values.setdefault(key, {})
    values[path[-1]] = value


def _given(values: Mapping[str, Any]) -> list[Keys]:
    """The settings that a source names."""
    paths: list[Keys] = []
    for key, value in values.items():
        paths += [(key, *path) for path in _given(value)] if isinstance(value, dict) else [(key,)]
    return paths


def _variable(path: Keys) -> str:
    return PREFIX + "_".join(path).upper()


def _paths(struct: type[Struct]) -> list[Keys]:
    """Every setting, as the keys that lead to it."""
    paths: list[Keys] = []
    for field in msgspec.structs.fields(struct):
        nested = isinstance(field.type, type) and issubclass(field.type, Struct)
        paths += [(field.name, *path) for path in _paths(field.type)] if nested else [(field.name,)]
    return paths


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged
