"""A hub id fetches the files that the engine reads and no others; offline, the files fetched before are used."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from backend.model_loader.weights import load_weights, read_config
from tests.backend.random_models import KINDS, save

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NOT_READ = ("README.md", "pytorch_model.bin", "consolidated.safetensors", "original/params.json", "onnx/m.safetensors")
RESOLVE = (
    "from backend.model_loader.source import resolve_model; print(resolve_model('org/tiny', lambda _: None).directory)"
)


class Hub:
    """The part of the hub's interface that a download uses, over a directory of files."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.fetched: list[str] = []
        app = web.Application()
        app.router.add_get("/api/models/org/tiny/revision/main", self._revision)
        app.router.add_get("/api/models/org/tiny/tree/{commit}", self._tree)
        app.router.add_get("/org/tiny/resolve/{commit}/{path:.+}", self._file)
        self.server = TestServer(app)

    async def _revision(self, request: web.Request) -> web.Response:
        siblings = [{"rfilename": name} for name in self.files]
        return web.json_response({"id": "org/tiny", "modelId": "org/tiny", "sha": COMMIT, "siblings": siblings})

    async def _tree(self, request: web.Request) -> web.Response:
        entries = [
            {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}  # noqa: S324 - an identity
            for name, content in self.files.items()
        ]
        return web.json_response(entries)

    async def _file(self, request: web.Request) -> web.Response:
        content = self.files[request.match_info["path"]]
        if request.method == "GET":
            self.fetched.append(request.match_info["path"])
        etag = hashlib.sha1(content).hexdigest()  # noqa: S324 - an identity
        return web.Response(body=content, headers={"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[Hub]:
    save(KINDS["smollm3"], tmp_path / "model")
    files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    hub = Hub({**files, "tokenizer.json": b"{}", "chat_template.jinja": b"", **dict.fromkeys(NOT_READ, b"not read")})
    async with hub.server:
        yield hub


async def resolve(endpoint: str, home: Path, **environment: str) -> tuple[int, str]:
    """Exit status and last line of a process that resolves org/tiny, which reads the hub's settings when it starts."""
    status, lines = await python(endpoint, home, "-c", RESOLVE, **environment)
    return status, lines[-1]


async def python(endpoint: str, home: Path, *arguments: str, **environment: str) -> tuple[int, list[str]]:
    """Exit status and lines of a process that knows a hub."""
    variables = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **environment}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *arguments),
        env=variables,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode().strip().splitlines()


async def test_the_files_that_are_read_are_fetched_once(hub: Hub, tmp_path: Path) -> None:
    """The files that are read are fetched once, and used offline later without a request."""
    endpoint = str(hub.server.make_url("/")).rstrip("/")
    status, directory = await resolve(endpoint, tmp_path / "home", HF_HUB_OFFLINE="0")
    assert status == 0, directory
    config = read_config(Path(directory))
    assert len(load_weights(Path(directory), config).layers) == 4
    assert set(hub.fetched) == set(hub.files) - set(NOT_READ)
    hub.fetched.clear()
    assert await resolve(endpoint, tmp_path / "home", HF_HUB_OFFLINE="1") == (0, directory)
    assert not hub.fetched


async def test_an_unknown_model_offline_is_one_message(hub: Hub, tmp_path: Path) -> None:
    """A model that was never fetched is one message offline, without a request."""
    endpoint = str(hub.server.make_url("/")).rstrip("/")
    status, message = await resolve(endpoint, tmp_path / "home", HF_HUB_OFFLINE="1")
    assert status == 1
    assert "ModelError: model 'org/tiny': neither a local path nor to be had from the hub" in message
    assert not hub.fetched


async def test_a_hub_that_does_not_answer_is_one_message(tmp_path: Path) -> None:
    """A hub that does not answer is one message that names the model."""
    status, message = await resolve("http://127.0.0.1:9", tmp_path / "home", HF_HUB_OFFLINE="0")
    assert status == 1
    assert "ModelError: model 'org/tiny': neither a local path nor to be had from the hub" in message


async def test_a_plan_fetches_the_config_alone(hub: Hub, tmp_path: Path) -> None:
    """`keepgate plan` fetches config.json only, and prints one message where there is no hub."""
    endpoint = str(hub.server.make_url("/")).rstrip("/")
    plan = ("-m", "backend.commands.plan", "org/tiny", "--memory", "1GB")
    status, lines = await python(endpoint, tmp_path / "home", *plan, HF_HUB_OFFLINE="0")
    assert status == 0, lines
    assert any(line.startswith("org/tiny: smollm3") for line in lines)
    assert hub.fetched == ["config.json"]
    status, lines = await python("http://127.0.0.1:9", tmp_path / "other", *plan, HF_HUB_OFFLINE="0")
    assert status == 1
    assert lines[-1].startswith("keepgate plan: model 'org/tiny': neither a local path nor to be had from the hub")
    assert len(lines) < 4
