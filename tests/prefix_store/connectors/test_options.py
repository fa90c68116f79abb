"""The options of a connector: what they become, and that every mistake is named."""

import argparse
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from backend.commands.prefix_options import add_prefix_arguments
from prefix_store.codecs.registry import codec_named
from prefix_store.connectors.options import ConnectorOptions, Listening, listening, read_options


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KEEPGATE_PREFIX_INDEX", "KEEPGATE_PREFIX_SECRET"):
        monkeypatch.delenv(name, raising=False)


def test_options_become_a_store(tmp_path: Path) -> None:
    """Each worker has its own port and name."""
    secret = tmp_path / "secret"
    options = read_options(
        {
            "memory": "1GiB",
            "memory_codec": "int8",
            "disk": str(tmp_path / "kv"),
            "disk_size": 10_000_000,
            "index": "redis://localhost",
            "name": "engine",
            "secret_file": str(secret),
            "address": "https://10.0.0.1:9700/at",
            "audit": 7,
        }
    )
    config = options.config(1)
    assert config.memory_bytes == 2**30
    assert config.memory_codec == codec_named("int8")
    assert (config.disk, config.disk_bytes) == (tmp_path / "kv", 10_000_000)
    assert config.disk_codec == codec_named("plain")
    assert (config.index, config.name) == ("redis://localhost", "engine-1")
    assert config.address == "https://10.0.0.1:9701/at"
    assert config.secret == secret.read_text().strip()
    assert config.audit_every == 7
    assert options.config(0).name == "engine"
    assert options.config(0).secret == config.secret


def test_the_names_are_those_of_the_engines_command_line() -> None:
    """But for the host to listen at: the in-repo engine serves its store where it answers requests."""
    parser = argparse.ArgumentParser()
    add_prefix_arguments(parser)
    names = {name.removeprefix("prefix_") for name in vars(parser.parse_args([]))}
    assert {*ConnectorOptions.__struct_fields__} == {*names, "listen"}


def test_what_is_not_given_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index and the secret; an empty index in the options is none."""
    monkeypatch.setenv("KEEPGATE_PREFIX_INDEX", "redis://index")
    monkeypatch.setenv("KEEPGATE_PREFIX_SECRET", "a secret of the fleet")
    config = read_options({"memory": 1}).config(0)
    assert (config.index, config.secret) == ("redis://index", "a secret of the fleet")
    assert read_options({"memory": 1, "index": ""}).config(0).index == ""


def test_an_engine_without_a_name_is_called_by_its_address_or_process() -> None:
    """Both are its own, for every worker."""
    at = read_options({"memory": 1, "address": "http://10.0.0.1:9700"})
    assert [at.config(worker).name for worker in range(2)] == ["10.0.0.1:9700", "10.0.0.1:9701"]
    assert read_options({"memory": 1}).config(0).name == f"{socket.gethostname()}:{os.getpid()}"


@pytest.mark.parametrize(
    ("options", "worker", "at"),
    [
        ({}, 0, None),
        ({"address": "http://10.0.0.1:9700"}, 2, Listening("10.0.0.1", 9702)),
        ({"address": "http://[::1]:9700"}, 1, Listening("::1", 9701)),
        ({"address": "http://engine:9700", "listen": "0.0.0.0"}, 0, Listening("0.0.0.0", 9700)),  # noqa: S104
    ],
)
def test_a_worker_opens_the_port_of_its_address(options: dict[str, Any], worker: int, at: Listening | None) -> None:
    """At the address's host, or the one that is given for that."""
    assert listening(read_options(options), worker) == at


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memroy": 1}, "memroy is no option of this connector; did you mean memory?"),
        ({"xyz": 1}, "xyz is no option of this connector, expected one of memory, memory_codec"),
        ({"memory": [1]}, r"\.memory"),
        ({"audit": "often"}, r"\.audit"),
        ({"public_prefix": "file"}, r"\.public_prefix"),
        ({"memory": "8 gigs"}, "memory: '8 gigs' is no size"),
        ({"memory": -1}, "^memory is -1, expected at least 0"),
        ({"memory": 1, "audit": -1}, "^audit is -1"),
        ({"memory": "1000000GiB"}, "^memory is [0-9,]+, expected at most the [0-9,]+ bytes of memory of this machine"),
        ({"memory": 1, "disk_size": -1}, "^disk_size is -1"),
        ({"memory": 1, "disk_size": "many"}, "disk_size: 'many' is no size"),
        ({"memory": 1, "memory_codec": "zip"}, "memory_codec: codec is 'zip', expected one of plain"),
        ({"disk": "kv", "disk_codec": "zip"}, "disk_codec: codec is 'zip'"),
        ({"memory": 1, "mooncake_codec": "zip"}, "mooncake_codec: codec is 'zip'"),
        ({"disk": "kv", "memory": 1, "disk_codec": "int8", "memory_codec": "fp8"}, "_codec is "),
        ({"disk": "file/kv"}, "disk file/kv: Not a directory"),
        ({"mooncake": "none.json"}, "mooncake: .*none.json"),
        ({"memory": 1, "address": "10.0.0.1:9700"}, "address is '10.0.0.1:9700'"),
        ({"memory": 1, "address": "http://10.0.0.1"}, "address is 'http://10.0.0.1', expected a URL with a port"),
        ({"memory": 1, "address": "http://10.0.0.1:x"}, "address is 'http://10.0.0.1:x': Port could not be cast"),
        ({"memory": 1, "address": "ftp://10.0.0.1:9700"}, "address is 'ftp://10.0.0.1:9700', expected http://"),
        ({"memory": 1, "secret_file": "no/secret"}, "secret_file no/secret: it cannot be read or made"),
        ({"memory": 1, "secret_file": "short"}, "secret_file short: the secret has 5 bytes"),
        ({}, "there is no place for blocks; expected memory, disk, mooncake or index"),
        ({"memory": "0"}, "there is no place for blocks"),
    ],
)
def test_a_mistake_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    """The message has the option, and what would be right."""
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("short").write_text("short")
    with pytest.raises(ValueError, match=r".") as raised:
        read_options(options).config(0)
    assert re.search(message, str(raised.value)), raised.value


def test_an_option_of_another_connector_is_refused() -> None:
    """Engines have the options that they can honour."""
    with pytest.raises(ValueError, match="audit is no option of this connector"):
        read_options({"audit": 1}, without=("audit",))


def test_the_last_worker_needs_a_port_that_exists() -> None:
    """Ports end at 65535."""
    options = read_options({"memory": 1, "address": "http://10.0.0.1:65535"})
    assert options.config(0).address
    with pytest.raises(ValueError, match="address"):
        options.config(1)
