"""No secret of the settings is in an output: errors, representations, logs, responses, command lines of processes."""

import contextlib
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from gateway.settings.fields import SettingsError
from gateway.settings.settings import Settings
from gateway.settings.sources import load
from gateway.settings.upstreams import UpstreamSettings
from tests.gateway.client import Client, chat
from tests.gateway.conftest import Stage

MARK = "mark-of-a-secret"
KEEPGATE = Path(sys.executable).with_name("keepgate")


def everywhere(folder: Path) -> dict[str, Any]:
    """Settings with the mark in every place for a secret."""
    key = folder / "key"
    key.write_text(MARK)
    return {
        "port": 0,
        "redis": f"redis://user:{MARK}@127.0.0.1:1/0",
        "admin_key": MARK,
        "state_dir": str(folder),
        "upstreams": [{"url": "http://127.0.0.1:1/v1", "api_key": f"file:{key}"}],
        "batches": {"enabled": False},
        "semantic": {
            **{"judge": "http://127.0.0.1:1/v1", "judge_model": "judge", "judge_key": MARK},
            **{"model_url": "http://127.0.0.1:1/v1", "model": "embedder", "model_key": MARK},
        },
    }


# What is written in place of a secret, or beside one.
MISTAKES: dict[str, dict[str, Any]] = {
    "a list for a key": {"admin_key": [MARK]},
    "an object for a key": {"admin_key": {"key": MARK}},
    "a list for the judge's key": {"semantic": {"judge_key": [MARK]}},
    "a list for the embedding server's key": {"semantic": {"model_key": [MARK]}},
    "an embedding server with a password": {"semantic": {"model_url": f"https://user:{MARK}@gpu/v1"}},
    "a key for the name of one": {"upstreams": [{"url": "http://a", "api_key": MARK}]},
    "keys for the names of some": {"upstreams": [{"url": "http://a", "api_key": [MARK]}]},
    "a key of encryption for its name": {"encryption": {"key": MARK}},
    "old keys of encryption for their names": {"encryption": {"old_keys": [MARK]}},
    "one old key": {"encryption": {"old_keys": MARK}},
    "a redis with a bad port": {"redis": f"redis://user:{MARK}@cache:port/0"},
    "a redis of another scheme": {"redis": f"http://user:{MARK}@cache"},
    "a redis with a bad database": {"redis": f"redis://user:{MARK}@cache/x"},
    "a redis with its password as an option": {"redis": f"redis://cache?password={MARK}"},
    "a redis with an unknown option": {"redis": f"redis://:{MARK}@cache?colour=red"},
    "a redis in a list": {"redis": [f"redis://user:{MARK}@cache"]},
    "an upstream with a password": {"upstreams": [f"https://user:{MARK}@gpu/v1"]},
    "an upstream with a password among settings": {"upstreams": [{"url": f"https://user:{MARK}@gpu/v1"}]},
    "a judge with a password": {"semantic": {"judge": f"https://user:{MARK}@gpu/v1"}},
    "an unknown setting beside a secret": {"admin_key": MARK, "colour": "red"},
    "a bad port beside a secret": {"admin_key": MARK, "port": "many"},
}


@pytest.mark.parametrize("values", MISTAKES.values(), ids=MISTAKES.keys())
@pytest.mark.parametrize("source", ["file", "environment", "arguments"])
def test_a_refused_setting_does_not_show_a_secret(tmp_path: Path, source: str, values: Mapping[str, Any]) -> None:
    """Neither its error, nor the traceback of it, whichever source says it."""
    file = None
    variables: dict[str, str] = {}
    arguments: dict[str, Any] = {}
    if source == "file":
        file = tmp_path / "keepgate.yaml"
        file.write_text(yaml.safe_dump(dict(values)))
    for path, value in _leaves(values):
        if source == "environment":
            text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
            variables["KEEPGATE_" + "_".join(path).upper()] = text
        elif source == "arguments":
            arguments[".".join(path)] = value
    shown = ""
    try:
        settings, warnings = load(file, variables, arguments)
        shown = f"{settings!r} {settings} {warnings}"  # as text from a variable it may be right
    except SettingsError as error:
        shown = "".join(traceback.format_exception(error))
    assert MARK not in shown


def _leaves(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and name in ("semantic", "encryption"):
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value


def test_a_representation_shows_no_secret(tmp_path: Path) -> None:
    """Of the settings, and of each part of them."""
    settings, warnings = load(_written(tmp_path), {}, {})
    parts = [getattr(settings, name) for name in Settings.__struct_fields__]
    shown = f"{settings!r} {settings} {settings.servers!r} {settings.semantic!r} {[settings.admin_key]} {warnings}"
    assert MARK not in shown
    assert MARK not in "".join(repr(part) for part in parts if not isinstance(part, str))


def test_a_file_that_is_no_yaml_is_not_quoted(tmp_path: Path) -> None:
    """Its error names the line."""
    file = tmp_path / "keepgate.yaml"
    file.write_text(f"admin_key: {MARK}\nredis: 'redis://user:{MARK}@cache\nport: [1\n")
    with pytest.raises(SettingsError) as caught:
        load(file, {}, {})
    assert MARK not in str(caught.value)


@contextlib.contextmanager
def running(*words: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """`keepgate serve`, and what it has printed when the block ends."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("KEEPGATE_")}
    process = subprocess.Popen(
        [KEEPGATE, "serve", *words],
        env={**plain, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    printed: list[str] = []
    try:
        yield process, printed
    finally:
        process.terminate()
        printed.append(process.communicate(timeout=30)[0])


def _written(folder: Path) -> Path:
    file = folder / "keepgate.yaml"
    file.write_text(yaml.safe_dump(everywhere(folder)))
    return file


def test_processes_show_no_secret(tmp_path: Path) -> None:
    """On the command line of the gateway or of a worker, and in what they print at the highest level."""
    file = _written(tmp_path)
    with running("--config", str(file), "--workers", "2", "--log-level", "debug") as (process, printed):
        assert process.stdout is not None
        early = []
        for line in process.stdout:
            early.append(line)
            if line.startswith("No upstream"):  # printed when the workers have been started
                break
        lines = [_command_line(process.pid), *map(_command_line, _descendants(process.pid))]
        assert len(lines) > 1
    assert MARK not in "\n".join(lines)
    assert MARK not in "".join(early) + printed[0]


def _command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def _descendants(pid: int) -> Iterator[int]:
    for child in _children().get(pid, []):
        yield child
        yield from _descendants(child)


def _children() -> dict[int, list[int]]:
    """The processes of the system by the one that has started them (proc(5))."""
    found: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            found.setdefault(parent, []).append(int(stat.parent.name))
    return found


async def test_no_response_shows_a_secret(stage: Stage, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Errors, pages, figures and the description of the API, with and without the admin key; nor does the log."""
    caplog.set_level(logging.DEBUG)
    given = everywhere(tmp_path)
    servers = tuple(msgspec.convert(given["upstreams"], list[UpstreamSettings]))
    client = await stage.gateway(admin_key=given["admin_key"], upstreams=servers)
    said = [await _said(client, path) for path in PATHS]
    said.append((await client.post(chat("hello"), Authorization="Bearer other")).body)
    for headers in ({"X-Keepgate-Admin-Key": MARK}, {"Authorization": "Bearer wrong"}):
        said += [await _said(client, path, **headers) for path in PATHS]
    assert MARK.encode() not in b"".join(said)
    assert MARK not in caplog.text


PATHS = (
    *("/", "/openapi.json", "/health", "/ready", "/metrics", "/v1/models", "/v1/cache/stats", "/v1/cache/prefix"),
    *("/v1/cache/entries/x", "/nowhere", "/v1/other", "/v1/keys", "/v1/costs", "/v1/routing"),
)


async def _said(client: Client, path: str, **headers: str) -> bytes:
    answer = await client.send("GET", path, None, {name.replace("_", "-"): text for name, text in headers.items()})
    return answer.body + repr(answer.headers).encode()
