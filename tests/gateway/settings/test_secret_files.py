"""Secrets of the environment that are in files."""

import asyncio
from pathlib import Path

import pytest

from gateway.commands.costs import run
from gateway.settings.fields import SettingsError
from gateway.settings.sources import load
from tests.gateway.client import chat
from tests.gateway.conftest import Stage


def refusal(environment: dict[str, str]) -> str:
    """The message, of one line, with which these variables are refused."""
    with pytest.raises(SettingsError) as caught:
        load(None, environment, {})
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_secrets_may_be_in_files(tmp_path: Path) -> None:
    """The admin key, the judge's key and the URL of Redis; the white space at their ends is no part of them."""
    for name, text in (("admin", "hush\n"), ("judge", " whisper\r\n"), ("redis", "redis://user:secret@cache:6379/2\n")):
        (tmp_path / name).write_text(text)
    settings, warnings = load(
        None,
        {
            "KEEPGATE_ADMIN_KEY_FILE": f"{tmp_path}/admin",
            "KEEPGATE_SEMANTIC_JUDGE_KEY_FILE": f"{tmp_path}/judge",
            "KEEPGATE_REDIS_FILE": f"{tmp_path}/redis",
        },
        {},
    )
    assert (settings.admin_key, settings.semantic.judge_key) == ("hush", "whisper")
    assert settings.redis == "redis://user:secret@cache:6379/2"
    assert warnings == []


def test_the_command_line_wins_over_a_file(tmp_path: Path) -> None:
    """As over any other variable, while the variable itself wins over the settings file."""
    (tmp_path / "redis").write_text("redis://from-file:6379/0")
    (tmp_path / "k.yaml").write_text("redis: redis://from-yaml:6379/0\nport: 9000\n")
    environment = {"KEEPGATE_REDIS_FILE": f"{tmp_path}/redis"}
    assert load(tmp_path / "k.yaml", environment, {})[0].redis == "redis://from-file:6379/0"
    assert load(tmp_path / "k.yaml", environment, {"redis": "none"})[0].redis == "none"


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """With the variable, and what is wrong."""
    away, empty, binary = tmp_path / "away", tmp_path / "empty", tmp_path / "binary"
    empty.write_text(" \n")
    binary.write_bytes(b"\xff\xfe")
    name = "KEEPGATE_ADMIN_KEY_FILE"
    said = f"environment: {name}: "
    assert refusal({name: str(away)}) == f"{said}cannot read the file {away}: No such file or directory"
    assert refusal({name: str(tmp_path)}) == f"{said}cannot read the file {tmp_path}: Is a directory"
    assert refusal({name: str(empty)}) == f"{said}expected a secret in the file {empty}, which is empty"
    assert refusal({name: str(binary)}) == f"{said}cannot read the file {binary}: it is no text"
    assert refusal({name: ""}) == f"{said}expected the path of a file, got nothing; unset it for the default"


def test_a_value_from_a_file_is_refused_by_the_name_of_its_variable(tmp_path: Path) -> None:
    """Without its password."""
    (tmp_path / "redis").write_text("redis://user:secret@cache:port/0")
    message = refusal({"KEEPGATE_REDIS_FILE": f"{tmp_path}/redis"})
    assert message.startswith("environment: KEEPGATE_REDIS_FILE: expected embedded, none, or a URL")
    assert "secret" not in message


def test_a_secret_is_given_once(tmp_path: Path) -> None:
    """Nobody would know which of the two counts."""
    (tmp_path / "key").write_text("hush")
    message = refusal({"KEEPGATE_ADMIN_KEY": "other", "KEEPGATE_ADMIN_KEY_FILE": f"{tmp_path}/key"})
    assert message == (
        "environment: KEEPGATE_ADMIN_KEY: expected either this or KEEPGATE_ADMIN_KEY_FILE; unset one of them"
    )


def test_what_is_no_secret_is_in_no_file(tmp_path: Path) -> None:
    """Such a variable is warned of, as any other that is no setting; settings that name files are what they were."""
    settings, warnings = load(None, {"KEEPGATE_PORT_FILE": "/x", "KEEPGATE_TRACES_FILE": "/t"}, {})
    assert (settings.port, settings.traces.file) == (8080, "/t")
    assert [warning.partition(";")[0] for warning in warnings] == ["KEEPGATE_PORT_FILE is not a setting"]


async def test_commands_take_the_admin_key_from_the_same_file(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that they work inside a container as they are; a file that is not there is named."""
    client = await stage.gateway(await stage.mock(), admin_key="hush")
    assert (await client.post(chat())).status == 200
    key = tmp_path / "key"
    monkeypatch.setenv("KEEPGATE_ADMIN_KEY_FILE", str(key))
    assert await in_thread(client.gateway.url) == 1
    assert f"KEEPGATE_ADMIN_KEY_FILE: cannot read the file {key}" in capsys.readouterr().err
    key.write_text("wrong\n")
    assert await in_thread(client.gateway.url) == 1
    assert "another admin key" in capsys.readouterr().err
    key.write_text("hush\n")
    assert await in_thread(client.gateway.url) == 0


async def in_thread(url: str) -> int:
    """The exit status of `keepgate costs`, whose requests this event loop answers."""
    return await asyncio.to_thread(run, ["--url", url])
