"""The backend as a process: its ready line, its clean stop, and its error messages."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from aiohttp import ClientSession

from tests.backend.conftest import COMPLETIONS, MODEL


@asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs a program, and kills it afterwards if it still runs."""
    running = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield running
    finally:
        if running.returncode is None:
            running.kill()
        await running.communicate()


BACKEND = ("-m", "backend", "--port", "0", "--kv-memory", "64MiB", "--threads", "2")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_the_backend_prints_a_ready_line_and_stops_cleanly(signum: signal.Signals) -> None:
    """The backend prints one JSON line when it is ready; a signal ends streams with an error event and status 0."""
    async with process(*BACKEND) as backend:
        assert backend.stdout is not None
        ready = json.loads(await backend.stdout.readline())
        assert ready.keys() == {"event", "url", "model"}
        assert (ready["event"], ready["model"]) == ("ready", MODEL)
        body = {"model": MODEL, "prompt": "1, 2,", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        async with ClientSession(ready["url"]) as client, client.post(COMPLETIONS, json=body) as response:
            await response.content.readuntil(b"\n\n")
            backend.send_signal(signum)
            rest = (await response.read()).decode()
        assert json.loads(rest.split("data: ")[-1])["error"]["code"] == "unavailable"
        assert "[DONE]" not in rest
        stdout, stderr = await backend.communicate()
        assert backend.returncode == 0
    assert stdout == b""
    assert b"Traceback" not in stderr
    assert b"serving SmolLM2-135M-Instruct with" in stderr


async def test_exit_with_parent_ends_the_backend() -> None:
    """With ``--exit-with-parent`` the backend ends when the process that started it is killed."""
    script = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, *{BACKEND!r}, '--exit-with-parent'], stdout=subprocess.PIPE)\n"
        "sys.stdout.write(child.stdout.readline().decode()); sys.stdout.flush()\n"
        "sys.stdin.read()\n"
    )
    async with process("-c", script) as parent:
        assert parent.stdout is not None
        ready = json.loads(await parent.stdout.readline())
        parent.kill()
        # Its stderr is the parent's pipe, which closes when the last of both is gone.
        async with asyncio.timeout(60):
            await parent.communicate()
    host, port = ready["url"].removeprefix("http://").split(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "/nowhere"), "a directory with config.json and safetensors"),
        (("--kv-memory", "much"), "expected for example 512MiB"),
        (("--max-context", "1"), "'1' is out of range, expected 2 or more"),
        (("--threads", "100000"), "'100000' is out of range, expected 1 to"),
        (("--kv-memory", "0.0000001KB"), "'0.0000001KB' is out of range, expected 1 byte to"),
        (("--kv-memory", "9" * 400), "999…' is out of range, expected 1 byte to"),
        (("--kv-memory", "1KiB"), "hold no KV block"),
        (("--kv-memory", "9000GiB"), "--kv-memory: 9663676416000 bytes are more than the"),
        (("--port", "70000"), "expected 0 to 65535"),
        (("--max-batch", "0"), "expected 1 or more"),
        (("--max-seconds", "0"), "expected seconds, more than 0"),
        (("--max-wait-ms", "soon"), "expected milliseconds, 0 or more"),
        (("--batching", "greedy"), "choose from 'continuous', 'dynamic', 'static'"),
        (("--scheduling-policy", "lottery"), "choose from 'fcfs', 'priority'"),
        (("--kv-mem", "1GiB"), "unrecognized arguments: --kv-mem"),
        (("--chat-template", "/nowhere.jinja"), "--chat-template: /nowhere.jinja: cannot be read: No such file"),
        (("--device", "gpu"), "choose from 'auto', 'cpu', 'cuda'"),
        pytest.param(
            ("--device", "cuda"),
            "--device cuda: torch sees no CUDA device; expected auto or cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
        (("--chat-template", "/"), "--chat-template: /: cannot be read: Is a directory"),
    ],
)
async def test_a_wrong_argument_is_one_clear_message(arguments: tuple[str, ...], message: str) -> None:
    """A wrong argument is one line on stderr without a traceback, and the status is not 0."""
    async with process("-m", "backend", "--port", "0", *arguments) as backend:
        _, stderr = await backend.communicate()
        assert backend.returncode
    said = [line for line in stderr.decode().splitlines() if not line.startswith("[backend ")]
    assert len(said) == 1
    assert message in said[0]


async def test_chat_template_replaces_the_models_template(tmp_path: Path) -> None:
    """``--chat-template`` replaces the model's template, keeps its special tokens, and shows in the model info."""
    file = tmp_path / "shout.jinja"
    file.write_text("{{ bos_token }}{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}")
    async with process(*BACKEND, "--device", "cpu", "--chat-template", str(file)) as backend:
        assert backend.stdout is not None
        ready = json.loads(await backend.stdout.readline())
        async with ClientSession(ready["url"]) as client:
            async with client.post("/tokenize", json={"messages": [{"role": "user", "content": "Hé"}]}) as response:
                tokens = (await response.json())["tokens"]
            async with client.post("/detokenize", json={"tokens": tokens}) as response:
                assert await response.json() == {"prompt": "<|im_start|>USER: Hé\n"}
            async with client.get("/v1/model/info") as response:
                info = await response.json()
        assert (info["chat"], info["chat_template"], info["tools"]) == (True, "replaced", "generic")


async def test_a_taken_port_is_known_at_once() -> None:
    """A taken port is reported before the model is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        async with process("-m", "backend", "--port", str(taken.getsockname()[1])) as backend:
            _, stderr = await backend.communicate()
            assert backend.returncode == 1
    assert b"cannot listen on 127.0.0.1" in stderr
    assert b"loading" not in stderr


async def test_the_command_line_imports_no_torch() -> None:
    """The command line's module imports neither torch, aiohttp nor numpy."""
    script = "import sys, backend.commands.serve; print([m for m in ('torch', 'aiohttp', 'numpy') if m in sys.modules])"
    async with process("-c", script) as python:
        stdout, _ = await python.communicate()
    assert stdout.strip() == b"[]"
