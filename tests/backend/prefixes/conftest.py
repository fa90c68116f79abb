"""A small model, engines as processes, and a real Valkey for each module, which may break it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.backend.prefixes.engine_process import EngineProcess, start_all
from tests.backend.prefixes.models import write_model
from tests.cache.valkey import Valkey

SECRET = "a secret of all engines of these tests"
Start = Callable[..., EngineProcess]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model, named as the model is."""
    return write_model(tmp_path_factory.mktemp("first") / "tiny", seed=1)


@pytest.fixture(scope="session")
def alike(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same name and shapes, with other weights."""
    return write_model(tmp_path_factory.mktemp("second") / "tiny", seed=2)


@pytest.fixture(scope="session")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the secret that engines share."""
    file = tmp_path_factory.mktemp("secret") / "secret"
    file.write_text(SECRET, "utf-8")
    file.chmod(0o600)
    return file


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Start]:
    """Makes engines of the small model, or of another, which the module stops; none may have logged the secret."""
    made: list[EngineProcess] = []
    folder = tmp_path_factory.mktemp("said")

    def make(*options: str, model: Path = tiny) -> EngineProcess:
        engine = EngineProcess(folder, model, "--kv-memory", "16MiB", *options)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.stop()
    for engine in made:
        assert SECRET not in engine.said
        assert "Traceback" not in engine.said, engine.said


@pytest.fixture(scope="module")
def start(launch: Start) -> Start:
    """Makes an engine and waits until it serves."""

    def started(*options: str, **how: Path) -> EngineProcess:
        engine = launch(*options, **how)
        start_all([engine])
        return engine

    return started


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[EngineProcess]:
    """An engine without a store, which computes every prompt whole: its answers are the expected ones."""
    engine = EngineProcess(tmp_path_factory.mktemp("plain"), tiny, "--kv-memory", "16MiB", "--no-prefix-sharing")
    start_all([engine])
    yield engine
    engine.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def index() -> AsyncIterator[Valkey]:
    """A Valkey server of the module, which is empty whenever it is started again."""
    # A unix socket's path may have 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="kg-"))
    server = Valkey(folder, "--appendonly", "no")
    await server.start()
    yield server
    await server.stop()
    shutil.rmtree(folder)
