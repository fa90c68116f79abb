"""The whole stack, built once for all tests that are marked `compose`."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compose import base_images, build_context
from tests.compose.engine import Engine, engine
from tests.compose.stack import SERVICES, Stack

IMAGES = ("prepare", "backend", "gateway", "gateway-semantic")


@pytest.fixture(scope="session")
def docker() -> Iterator[Engine]:
    """An engine that has the base images."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with engine() as running:
        base_images.provide(running)
        yield running


@pytest.fixture(scope="session")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What the images are built from."""
    folder = build_context.prepare(tmp_path_factory.mktemp("context"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def built(docker: Engine, context: Path) -> Iterator[Stack]:
    """Everything built from this checkout and running; nothing of it is left afterwards, also when it is stopped."""
    stack = Stack(docker, context, f"keepgate-test-{os.getpid()}")
    try:
        print("Building the images ...", flush=True)
        began = time.monotonic()
        stack.compose("build", *IMAGES)
        print(f"Built in {time.monotonic() - began:.0f} s. Starting the services ...", flush=True)
        began = time.monotonic()
        stack.up("gateway")
        question = {"model": stack.model(), "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        assert stack.post(question).status == 200
        stack.first_answer_after = time.monotonic() - began
        print(f"First answer after {stack.first_answer_after:.0f} s.", flush=True)
        yield stack
    finally:
        stack.compose("down", "--volumes", "--rmi", "local", "--remove-orphans")


@pytest.fixture
def stack(built: Stack) -> Stack:
    """The same with all services well, whatever a test before has done to them."""
    if not built.healthy().issuperset(SERVICES):
        built.up()
    return built
