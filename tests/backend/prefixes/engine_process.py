"""`python -m backend` as a process of its own, as its users start, ask and lose it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from aiohttp import ClientResponse, ClientSession, ClientTimeout

from tests.backend.prefixes.models import LETTERS

DEADLINE = 10.0
"""Seconds within which every request is answered, whatever is wrong with disk, Redis and peers."""
ANSWER = 4
"""Tokens of an answer, if nothing else is asked for."""
PREFIX_TOKENS = "x-keepgate-prefix-tokens"
_seeds = count(1)


def fresh(tokens: int) -> list[int]:
    """Token ids of a prompt that was never asked before."""
    chance = Random(next(_seeds))  # noqa: S311 (a test's)
    return [chance.randrange(LETTERS) for _ in range(tokens)]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer with status 200; `prefix_tokens` is what the header says, `cached_tokens` what usage says."""

    prefix_tokens: int
    cached_tokens: int
    choices: list[Any]
    """Text, every logprob and the finish reason, to the last digit."""
    seconds: float

    @property
    def restored(self) -> int:
        """Tokens that were not computed; header and usage say the same."""
        assert self.prefix_tokens == self.cached_tokens
        return self.prefix_tokens


class EngineProcess:
    """An engine on a free port, which it keeps over restarts."""

    def __init__(self, folder: Path, model: Path, *options: str) -> None:
        """
        Args:
            folder: where its standard error is written, of all its lives.
        """
        self.model = model.name
        self.url = ""
        self._port = "0"
        self._log = folder / f"stderr-{next(_seeds)}"
        self._command = [sys.executable, "-m", "backend", "--model", str(model), "--threads", "1"]
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        assert self._process is not None, "the engine was never started"
        return self._process.pid

    @property
    def said(self) -> str:
        """What all its lives wrote to standard output, after the ready line, and to standard error."""
        return self._log.read_text("utf-8") if self._log.exists() else ""

    def launch(self, *options: str) -> None:
        """Start it with these options instead of the last ones, if there are any; `until_ready` waits for it."""
        self._options = options or self._options
        with self._log.open("ab") as log:
            command = [*self._command, "--port", self._port, *self._options]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)

    def until_ready(self) -> None:
        """Return when it serves."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self.said
        ready = json.loads(line)
        assert ready["model"] == self.model
        self.url = ready["url"]
        self._port = self.url.rpartition(":")[2]

    def restart(self, *options: str) -> None:
        """Start it at the port that it had, with other options if there are any."""
        self.launch(*options)
        self.until_ready()

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it as a power cut does."""
        assert self._process is not None
        self._process.kill()
        self._process.communicate()

    def wait(self, seconds: float) -> int:
        """Return its exit status once it has ended by itself. Raises subprocess.TimeoutExpired."""
        assert self._process is not None
        self._process.communicate(timeout=seconds)
        return self._process.returncode

    def stop(self) -> int | None:
        """End it as an operator does; a frozen one, or one that does not end, is killed. Returns its exit status."""
        if self._process is None or self._process.returncode is not None:
            return None
        self._process.terminate()
        try:
            output, _ = self._process.communicate(timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        with self._log.open("ab") as log:
            log.write(output)
        return self._process.returncode

    async def described(self) -> Any:
        """What it says of its prefix store."""
        async with ClientSession(self.url) as client, client.get("/v1/prefix") as response:
            return await response.json()

    @asynccontextmanager
    async def post(
        self,
        prompt: list[int] | str,
        *,
        reuse: str | None = "conversation",
        headers: dict[str, str] | None = None,
        path: str = "/v1/completions",
        **fields: Any,
    ) -> AsyncIterator[ClientResponse]:
        """A request, greedy if nothing else is asked for; a string for chats is what the user says."""
        said = {} if reuse is None else {"x-keepgate-reuse": reuse}
        body: dict[str, Any] = {"model": self.model, "max_tokens": ANSWER, "temperature": 0, "seed": 1}
        if path.endswith("chat/completions"):
            body |= {"messages": [{"role": "user", "content": prompt}], "logprobs": True, "top_logprobs": 5}
        else:
            body |= {"prompt": prompt, "logprobs": 5}
        timeout = ClientTimeout(total=DEADLINE)
        async with (
            ClientSession(self.url, timeout=timeout, headers=said | (headers or {})) as client,
            client.post(path, json=body | fields) as response,
        ):
            assert response.status == 200, await response.text()
            yield response

    async def ask(self, prompt: list[int] | str, **options: Any) -> Answer:
        """The whole answer to a request, within the deadline; the same options as `post`."""
        began = time.monotonic()
        async with self.post(prompt, **options) as response:
            answer = await response.json()
            seconds = time.monotonic() - began
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return Answer(int(response.headers[PREFIX_TOKENS]), cached, answer["choices"], seconds)

    async def counted(self, metric: str, **labels: str) -> float:
        """A figure of /metrics without ``keepgate_backend_``; the sum over all labels that are not named."""
        async with ClientSession(self.url) as client, client.get("/metrics") as response:
            text = await response.text()
        wanted = [f'{name}="{value}"' for name, value in labels.items()]
        lines = [line for line in text.splitlines() if line.startswith(f"keepgate_backend_{metric}")]
        found = [line for line in lines if all(label in line for label in wanted)]
        assert found, f"no metric {metric} {labels}"
        return sum(float(line.rpartition(" ")[2]) for line in found)


def start_all(engines: Iterable[EngineProcess]) -> None:
    """Start some at the same time."""
    waiting = list(engines)
    for engine in waiting:
        engine.launch()
    for engine in waiting:
        engine.until_ready()
