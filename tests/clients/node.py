"""The npm client `openai`, driven by client.mjs."""

import asyncio
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

HERE = Path(__file__).resolve().parent


def program(name: str) -> str:
    """The path of node or npm. The tests need them: where they are missing, they fail and say so."""
    found = shutil.which(name)
    assert found, f"{name} is not on PATH; the tests of the npm client need Node.js 18 or newer and npm"
    return found


def npm_cache() -> Path:
    """Where the clients are installed that are not installed here."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "keepgate" / "tests"


def install(cache: Path) -> Path:
    """The folder that holds node_modules: here, as `make test` has it, else in `cache`, installed once."""
    if (HERE / "node_modules" / ".package-lock.json").is_file():  # npm writes it last
        return HERE
    lock = (HERE / "package-lock.json").read_bytes()
    folder = cache / f"npm-{hashlib.blake2b(lock, digest_size=8).hexdigest()}"
    if not (folder / "node_modules" / ".package-lock.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(HERE / name, folder)
        npm = [program("npm"), "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
        assert subprocess.run(npm, cwd=folder).returncode == 0, "npm ci failed; what it says is above"
    return folder


class Node:
    """A Node.js process that makes one call after the other. Its start, of a second, is paid once."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    @classmethod
    @contextmanager
    def running(cls, modules: Path) -> Iterator["Node"]:
        command = [program("node"), str(HERE / "client.mjs"), str(modules)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            yield cls(process)  # at the end its input is closed, which ends it

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        """Blocks until the call is over."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(request) + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the script failed; what it says is above"
        outcome: dict[str, Any] = msgspec.json.decode(line)
        return outcome


class NodeClient:
    """An `openai` client in a Node.js process."""

    def __init__(self, node: Node, **options: Any) -> None:
        self._node = node
        self._options = options

    async def call(
        self,
        path: str,
        params: Any = None,
        *,
        headers: dict[str, str] | None = None,
        abort_after: int | None = None,
    ) -> dict[str, Any]:
        """What client.mjs says of the call."""
        request = {
            "options": self._options,
            "path": path,
            "headers": headers or {},
            "abortAfter": abort_after,
            **({} if params is None else {"params": params}),
        }
        return await asyncio.to_thread(self._node.call, request)
