"""What compose.yaml asks for; nothing is built or started."""

import re
from argparse import Namespace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from backend.commands.command_line import Parser
from backend.commands.serve import add_arguments

BACKENDS = ("backend", "backend-gpu")
EVERYWHERE = "0.0.0.0"  # noqa: S104  # within a container


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    text = (Path(__file__).resolve().parents[2] / "compose.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)["services"]
    return found


def test_without_a_profile_nothing_asks_for_a_gpu(services: dict[str, Any]) -> None:
    """Then these start: the store, the engine on the CPU, and the gateway in front of it."""
    assert {name for name, service in services.items() if "profiles" not in service} == {"redis", "backend", "gateway"}
    assert "deploy" not in services["backend"]


def test_the_gpu_profile_reserves_a_device(services: dict[str, Any]) -> None:
    """For the engine that its gateway waits for and asks, in the same image as the other one."""
    backend, gateway = services["backend-gpu"], services["gateway-gpu"]
    assert backend["profiles"] == gateway["profiles"] == ["gpu"]
    assert backend["deploy"]["resources"]["reservations"]["devices"] == [
        {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    ]
    assert backend["build"] == services["backend"]["build"]
    assert backend["command"][-2:] == ["--model", "${KEEPGATE_MODEL:-default}"]
    assert set(gateway["depends_on"]) == {"redis", "backend-gpu"}
    assert gateway["environment"]["KEEPGATE_UPSTREAMS"] == "http://backend-gpu:8081/v1"
    assert gateway["environment"]["KEEPGATE_REDIS"] == services["gateway"]["environment"]["KEEPGATE_REDIS"]


def told(service: dict[str, Any]) -> Namespace:
    """What the engine's own command line understands, with the variables that have defaults left out."""
    program, command, *words = (re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in service["command"])
    assert (program, command) == ("keepgate", "backend")
    parser = Parser()
    add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize("name", BACKENDS)
def test_engines_keep_what_they_prefilled(services: dict[str, Any], name: str) -> None:
    """On a volume, with the secret beside it, and with an index that is not among the answers."""
    options = told(services[name])
    (folder,) = (mount.partition(":")[2] for mount in services[name]["volumes"] if mount.startswith("prefixes:"))
    assert options.prefix_disk.is_relative_to(folder)
    assert options.prefix_secret_file.parent == Path(folder)
    assert options.prefix_disk_size == 4 * 2**30
    answers = urlsplit(services["gateway"]["environment"]["KEEPGATE_REDIS"])
    index = urlsplit(options.prefix_index)
    assert index.netloc == answers.netloc
    assert index.path != answers.path


def test_engines_that_share_a_volume_share_the_secret(services: dict[str, Any]) -> None:
    """Each can use what the other has left, and they find each other by names of their own containers."""
    first, second = (told(services[name]) for name in BACKENDS)
    assert first.prefix_secret_file == second.prefix_secret_file
    assert first.prefix_disk == second.prefix_disk
    assert (first.prefix_name, first.prefix_address) == (second.prefix_name, second.prefix_address) == ("", "")
    assert first.host == second.host == EVERYWHERE
