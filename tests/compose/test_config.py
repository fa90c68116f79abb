"""What compose.yaml means, as docker-compose itself reads it; nothing is built or started."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    command = shutil.which("docker-compose")
    if command is None:
        pytest.skip("needs docker-compose")
    unset = {name: value for name, value in os.environ.items() if name != "KEEPGATE_MODEL"}
    ask = [command, "--profile", "gpu", "config"]
    read = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True, check=True, env=unset)
    found: dict[str, Any] = yaml.safe_load(read.stdout)["services"]
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
    assert backend["command"][-2:] == ["--model", "default"]
    assert set(gateway["depends_on"]) == {"redis", "backend-gpu"}
    assert gateway["environment"]["KEEPGATE_UPSTREAMS"] == "http://backend-gpu:8081/v1"
    assert gateway["environment"]["KEEPGATE_REDIS"] == services["gateway"]["environment"]["KEEPGATE_REDIS"]
