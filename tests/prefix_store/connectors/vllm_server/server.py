"""A vLLM server as a process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from tests.compose.monitoring import free_port

ROOT = Path(__file__).resolve().parents[4]
_START_SECONDS = 180.0
_REQUEST_SECONDS = 60.0


@dataclass
class VllmServer:
    """A running server."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Any:
        """The JSON of an answer."""
        request = Request(  # noqa: S310
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json", **(headers or {})}
        )
        with urlopen(request, timeout=_REQUEST_SECONDS) as reply:  # noqa: S310
            return json.load(reply)

    def complete(
        self, prompt: Sequence[int], tokens: int = 16, headers: Mapping[str, str] | None = None, **fields: Any
    ) -> list[int]:
        """The tokens of a greedy answer to a prompt of tokens."""
        body = {"model": "m", "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "return_token_ids": True}
        answer = self.post("/v1/completions", {**body, "ignore_eos": True, **fields}, headers)
        found: list[int] = answer["choices"][0]["token_ids"]
        return found

    async def abandon(self, body: Mapping[str, Any], seconds: float) -> None:
        """Sends a request, and breaks its connection after so many seconds."""
        host, port = self.url.removeprefix("http://").split(":")
        data = json.dumps(body).encode()
        _, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(data)}\r\n"
        writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + data)
        await writer.drain()
        await asyncio.sleep(seconds)
        writer.transport.abort()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a figure's series that have these labels."""
        with urlopen(self.url + "/metrics", timeout=_REQUEST_SECONDS) as reply:  # noqa: S310
            lines = reply.read().decode().splitlines()
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        found = [line for line in lines if re.match(rf"{name}[{{ ]", line) and all(one in line for one in wanted)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def restored(self, tier: str = "") -> float:
        """Tokens restored so far."""
        return self.metric("keepgate_prefix_restored_tokens_total", **({"tier": tier} if tier else {}))

    def settle(self) -> None:
        """Waits until no request has blocks, so that all saves have ended."""
        until = time.monotonic() + _REQUEST_SECONDS
        while self.metric("vllm:kv_cache_usage_perc"):
            if time.monotonic() > until:
                raise TimeoutError(f"blocks are still in use: {self.said[-2000:]}")

    def kill(self) -> None:
        """As a machine that goes down: every process of the server at once."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def said(self) -> str:
        """Its log."""
        return self.log.read_text(errors="replace")


@contextmanager
def vllm_server(
    model: Path,
    options: Mapping[str, Any] | None,
    *arguments: str,
    connector: str = "KeepgateConnector",
    environment: Mapping[str, str] | None = None,
) -> Iterator[VllmServer]:
    """Starts a server and waits until it answers.

    Args:
        options: of the connector; None: there is none.

    Raises:
        RuntimeError: it ends instead; with the last of its log.
    """
    port = free_port()
    command = [
        *(str(Path(os.environ["TEST_VLLM"]) / "bin" / "vllm"), "serve", str(model), "--served-model-name", "m"),
        *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048", "--enforce-eager"),
        *("--block-size", "32", "--dtype", "float32", *arguments),
    ]
    if options is not None:
        transfer = {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": dict(options)}
        if connector == "KeepgateConnector":
            transfer["kv_connector_module_path"] = "prefix_store.connectors.vllm"
        command += ["--kv-transfer-config", json.dumps(transfer)]
    variables = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # One thread each: pinned threads of two servers wait for each other on a machine with few processors.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **(environment or {}),
    }
    log = Path(tempfile.mkstemp(prefix="vllm-", suffix=".log")[1])
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=variables, start_new_session=True)
    server = VllmServer(process, f"http://127.0.0.1:{port}", log)
    try:
        _wait(server)
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
        log.unlink()


def _wait(server: VllmServer) -> None:
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until:
        if server.process.poll() is not None:
            raise RuntimeError(f"vLLM has ended: {server.said[-6000:]}")
        try:
            urlopen(server.url + "/health", timeout=1.0).close()  # noqa: S310
            return
        except OSError:
            time.sleep(0.2)  # the process has no way to say that it is ready
    raise RuntimeError(f"vLLM was not ready after {_START_SECONDS:g} s: {server.said[-6000:]}")
