"""Collected where TEST_VLLM names an environment with vLLM: `make test-vllm` makes one."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.prefix_store.connectors.vllm_server.models import smollm2
from tests.prefix_store.connectors.vllm_server.server import VllmServer, vllm_server

collect_ignore_glob = [] if "TEST_VLLM" in os.environ else ["test_*.py"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2, which answers in words."""
    return smollm2()


@pytest.fixture(scope="session")
def plain(model: Path) -> Iterator[VllmServer]:
    """vLLM without a connector, and without its own prefix cache, whose faults would be in the reference."""
    with vllm_server(model, None, "--no-enable-prefix-caching") as server:
        yield server
