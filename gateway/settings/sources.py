"""Where settings come from.

Later sources win: defaults, the YAML file, the environment (`KEEPGATE_PORT`, `KEEPGATE_CACHE_TTL`, …; secrets also in
files, `KEEPGATE_ADMIN_KEY_FILE`), the command line.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_origin

import msgspec

from gateway.settings.fields import SettingsConflict, SettingsError, check_model_server, check_store, check_upstream
from gateway.settings.prefix_defaults import INDEX_VARIABLE, SECRET_VARIABLE
from gateway.settings.refusals import (
    PREFIX,
    URL_VARIABLE,
    Layer,
    checked,
    command_line_layer,
    environment_layer,
    expectation,
    paths,
    refused,
    secret_paths,
    variable,
)
from gateway.settings.secret_files import SUFFIX, secrets_in_files
from gateway.settings.settings import Settings

Keys = tuple[str, ...]

# What other commands read from the same environment.
_OF_COMMANDS = frozenset({URL_VARIABLE, SECRET_VARIABLE, INDEX_VARIABLE})


def load(
    file: Path | None,
    environment: Mapping[str, str],
    arguments: Mapping[str, Any],
    check: Callable[[Settings], None] = lambda settings: None,
) -> tuple[Settings, list[str]]:
    """The settings, and warnings about variables that look meant for Keepgate but are none of its settings.

    `arguments` holds what the command line said, None for what it did not; a dot in a name leads into a group. `check`
    may raise SettingsConflict. Raises SettingsError.
    """
    unknown: dict[str, str] = {}
    layers: list[Layer] = []
    if file is not None:
        from gateway.settings.yaml_file import read_yaml_lines  # PyYAML, only where there is YAML

        layers.append(Layer(str(file), *read_yaml_lines(file, example="port: 8080")))
    in_files = secrets_in_files(environment, frozenset(map(variable, secret_paths())))
    given = {name: text for name, text in environment.items() if name.removesuffix(SUFFIX) not in in_files}
    layers.append(environment_layer(_from_environment({**given, **in_files}, unknown), frozenset(in_files)))
    layers.append(command_line_layer(_from_command_line(arguments)))
    merged: dict[str, Any] = {}
    for layer in layers:
        _check(layer, checked(layer))  # each on its own, so that the message can say who said it
        merged = _merge(merged, layer.values)
    named = set(_variables_in(merged))
    warnings = [text for name, text in unknown.items() if name not in named]
    settings = checked(Layer("settings", merged))
    try:
        _check_all(settings)
        check(settings)
    except SettingsConflict as conflict:
        raise _last_to_name(layers, conflict.path).error(conflict.path, conflict.message) from conflict
    if settings.upstreams:
        warnings += [
            f"{layer.source}: {layer.name(path)} is not used: it is for the in-repo backend, and upstreams are named"
            for layer in layers
            for path in _given(layer.values)
            if path[0] in ("model", "backend")
        ]
    return settings, warnings


def _check(layer: Layer, settings: Settings) -> None:
    """Raises SettingsError for a URL that cannot be."""
    for number, server in enumerate(settings.servers):
        path: Keys = ("upstreams", str(number))
        if not isinstance(settings.upstreams[number], str):
            path = (*path, "url")
        _check_url(layer, path, server.url, check_upstream)
    _check_url(layer, ("redis",), settings.redis, check_store)
    for name in ("judge", "model_url"):
        if (url := getattr(settings.semantic, name)) not in ("", "embedding", "upstream"):
            _check_url(layer, ("semantic", name), url, check_model_server)


def _check_url(layer: Layer, path: Keys, url: str, check: Any) -> None:
    try:
        check(url)
    except ValueError as error:
        raise refused(layer, path, error, url) from error


def _check_all(settings: Settings) -> None:
    """Raises SettingsConflict for settings that do not go together, whichever sources they are from."""
    _check_judge(settings)
    if settings.semantic.model_url and settings.semantic.model == "default":
        raise SettingsConflict(("semantic", "model"), ": expected the name of a model at the server of model_url")
    if settings.semantic.model_key and not settings.semantic.model_url:
        raise SettingsConflict(("semantic", "model_url"), ": expected a server's URL, for there is a key for it")
    names: set[str] = set()
    for number, server in enumerate(settings.servers):
        if server.name in names:
            path = ("upstreams", str(number), "name")
            raise SettingsConflict(path, f": {server.name!r} is the name of another upstream as well")
        names.update(filter(None, [server.name]))
    if bool(settings.tls.certificate) != bool(settings.tls.key):
        missing = "key" if settings.tls.certificate else "certificate"
        raise SettingsConflict(
            ("tls", missing), ": expected the path of a file, for TLS needs a certificate and its key"
        )
    if settings.keys.required and settings.redis == "none":
        raise SettingsConflict(
            ("keys", "required"), ": virtual keys are kept in Redis; set redis to a URL or to embedded"
        )


def _check_judge(settings: Settings) -> None:
    judge, model = settings.semantic.judge, settings.semantic.judge_model
    if judge == "embedding" and model:
        raise SettingsConflict(
            ("semantic", "judge"), ": expected upstream or a URL, for there is a judge_model; or none of both"
        )
    if judge not in ("embedding", "upstream") and not model:
        raise SettingsConflict(("semantic", "judge_model"), ": expected the name of a model at the judge's server")
    if judge == "upstream" and settings.tls.certificate:
        raise SettingsConflict(
            ("semantic", "judge"), ": expected this gateway's https URL in place of upstream, for it has a certificate"
        )


def _last_to_name(layers: list[Layer], path: Keys) -> Layer:
    """The source that names a setting, or most of it; the last of several."""
    return max(reversed(layers), key=lambda layer: _depth(layer.values, path))


def _depth(values: Any, path: Keys) -> int:
    """How much of a path a source names."""
    for depth, name in enumerate(path):
        try:
            values = values[int(name) if isinstance(values, list) else name]
        except (KeyError, IndexError, TypeError, ValueError):
            return depth
    return len(path)


def _variables_in(values: Any) -> Iterator[str]:
    """The variables that settings name as `env:NAME`."""
    if isinstance(values, dict | list | tuple):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _variables_in(value)
    elif isinstance(values, str) and values.startswith("env:"):
        yield values.removeprefix("env:")


def _from_environment(environment: Mapping[str, str], unknown: dict[str, str]) -> dict[str, Any]:
    """What the environment says; `unknown` gets a warning for each variable that is no setting, by its name."""
    known = {variable(path).removeprefix(PREFIX): path for path in paths(Settings)}
    values: dict[str, Any] = {}
    for name, text in environment.items():
        if not name.startswith(PREFIX) or name in _OF_COMMANDS:
            continue
        path = known.get(name.removeprefix(PREFIX))
        if path is None:
            near = difflib.get_close_matches(name.removeprefix(PREFIX), known, n=1)
            unknown[name] = f"{name} is not a setting" + (f"; did you mean {PREFIX}{near[0]}?" if near else "")
            continue
        kind, words = expectation(path)
        if not text.strip(" ,"):
            raise SettingsError(f"environment: {name}: expected {words}, got nothing; unset it for the default")
        _put(values, path, _from_text(name, kind, text))
    return values


def _from_text(name: str, kind: Any, text: str) -> Any:
    """What a variable says: a list with commas, keys and values as JSON, anything else as it is."""
    if get_origin(kind) not in (tuple, dict):
        return text
    if get_origin(kind) is tuple and not text.lstrip().startswith("["):
        return [item.strip() for item in text.split(",") if item.strip()]
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise SettingsError(f"environment: {name}: expected JSON: {error}") from error


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
    found: list[Keys] = []
    for key, value in values.items():
        found += [(key, *path) for path in _given(value)] if isinstance(value, dict) else [(key,)]
    return found


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged
