"""Everything an operator can say, read once, checked, and frozen.

Later sources win: defaults, the YAML file, the environment (`KEEPGATE_PORT`, `KEEPGATE_CACHE_TTL`, …), the command
line.
"""

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

PREFIX = "KEEPGATE_"

Seconds = Annotated[float, Meta(ge=0)]
PositiveSeconds = Annotated[float, Meta(gt=0)]


class SettingsError(Exception):
    """A setting that cannot be; the message names its source, its key, and what would be right."""


class Size(int):
    """A number of bytes, written as 1048576 or "1MiB"."""

    _UNITS: ClassVar = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}

    @classmethod
    def parse(cls, value: Any) -> "Size":
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
        if match is None or match[2].upper() not in cls._UNITS:
            raise ValueError(f"Expected a size such as 256MiB, got {value!r}")
        return cls(float(match[1]) * cls._UNITS[match[2].upper()])


class Secret(str):
    """Text that never shows in a log or a traceback."""

    def __repr__(self) -> str:
        return "'***'"


class CacheSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`namespace` says what sets tenants apart: `authorization` (a digest of that header), `header:NAME`, or `shared`.

    `sampled` is for requests with a temperature and no seed: `reuse` one answer, keep `variants` of them and draw,
    or `bypass` the cache.
    """

    enabled: bool = True
    ttl: Seconds = 86_400.0
    memory: Size = Size(256 * 2**20)
    redis_deadline: PositiveSeconds = 0.02
    embedded_memory: Size = Size(512 * 2**20)
    namespace: Annotated[str, Meta(pattern=r"^(authorization|shared|header:[A-Za-z0-9-]+)$")] = "authorization"
    sampled: Literal["reuse", "variants", "bypass"] = "reuse"
    variants: Annotated[int, Meta(ge=2, le=64)] = 3
    stale_while_revalidate: Seconds = 0.0
    stale_if_error: Seconds = 0.0
    max_answer: Size = Size(8 * 2**20)


class TimeoutSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds. `first_byte` is for the upstream to begin, `idle` between two pieces of its answer."""

    connect: PositiveSeconds = 5.0
    first_byte: PositiveSeconds = 600.0
    idle: PositiveSeconds = 120.0
    client: PositiveSeconds = 60.0
    shutdown: Seconds = 10.0


class Settings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`upstreams` are base URLs of OpenAI-compatible servers; with none, the in-repo backend is started on `model`.

    `redis` is `embedded`, `none`, or a URL.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535)] = 8080
    workers: Annotated[int, Meta(ge=1, le=256)] = 1
    upstreams: tuple[str, ...] = ()
    model: str = "default"
    redis: str = "embedded"
    admin_key: Secret | None = None
    state_dir: str | None = None
    max_body: Size = Size(32 * 2**20)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    cache: CacheSettings = CacheSettings()
    timeouts: TimeoutSettings = TimeoutSettings()

    def state_path(self) -> Path:
        """Where what must outlive a restart is kept (XDG base directory specification)."""
        if self.state_dir:
            return Path(self.state_dir).expanduser()
        base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
        return Path(base).expanduser() / "keepgate"


def load(file: Path | None, environment: Mapping[str, str], arguments: Mapping[str, Any]) -> tuple[Settings, list[str]]:
    """The settings, and warnings about variables that look meant for Keepgate but are none of its settings.

    `arguments` holds what the command line said, None for what it did not. Raises SettingsError.
    """
    warnings: list[str] = []
    layers: list[tuple[str, dict[str, Any]]] = []
    if file is not None:
        layers.append((str(file), _read_file(file)))
    layers.append(("environment", _from_environment(environment, warnings)))
    layers.append(("command line", {key: value for key, value in arguments.items() if value is not None}))
    merged: dict[str, Any] = {}
    for source, layer in layers:
        _check(source, layer)
        merged = _merge(merged, layer)
    return _check("settings", merged), warnings


def _check(source: str, values: dict[str, Any]) -> Settings:
    try:
        settings = msgspec.convert(values, Settings, strict=False, dec_hook=_decode_own_type)
        _check_meaning(settings)
    except (msgspec.ValidationError, ValueError) as error:
        raise SettingsError(_readable(source, str(error))) from error
    return settings


def _check_meaning(settings: Settings) -> None:
    for url in settings.upstreams:
        if not re.match(r"^(https?://[^/\s]+|mock:)", url):
            raise ValueError(f"Expected a URL such as http://127.0.0.1:8000/v1, got {url!r} - at `$.upstreams`")
    if settings.redis not in ("embedded", "none") and not re.match(r"^(rediss?|unix)://", settings.redis):
        raise ValueError(
            f"Expected `embedded`, `none` or a URL such as redis://127.0.0.1:6379/0, got {settings.redis!r}"
            " - at `$.redis`"
        )


def _readable(source: str, error: str) -> str:
    reason, _, path = error.partition(" - at `$.")
    key = path.rstrip("`") or "settings"
    if source == "environment" and path:
        key = PREFIX + key.replace(".", "_").upper()
    elif source == "command line" and path:
        key = "--" + key.replace("_", "-")
    return f"{source}: {key}: {reason}"


def _decode_own_type(kind: type, value: Any) -> Any:
    if kind is Size:
        return Size.parse(value)
    if kind is Secret and isinstance(value, str) and value:
        return Secret(value)
    raise ValueError("Expected text that is not empty")


def _read_file(file: Path) -> dict[str, Any]:
    import yaml  # only where there is a file: `keepgate --help` does not pay for it

    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{file}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file}: not YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"{file}: expected keys and values, such as `port: 8080`")
    return content


def _from_environment(environment: Mapping[str, str], warnings: list[str]) -> dict[str, Any]:
    known = {PREFIX + "_".join(path).upper(): path for path in _paths(Settings)}
    values: dict[str, Any] = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX):
            continue
        path = known.get(variable)
        if path is None:
            near = difflib.get_close_matches(variable, known, n=1)
            warnings.append(f"{variable} is not a setting" + (f"; did you mean {near[0]}?" if near else ""))
            continue
        value: Any = [item.strip() for item in text.split(",") if item.strip()] if path == ("upstreams",) else text
        target = values
        for key in path[:-1]:
            target = target.setdefault(key, {})
        target[path[-1]] = value
    return values


def _paths(struct: type[Struct]) -> list[tuple[str, ...]]:
    paths: list[tuple[str, ...]] = []
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
