"""What compose.yaml asks for; nothing is built or started."""

from pathlib import Path
from typing import Any

import pytest
import yaml


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
