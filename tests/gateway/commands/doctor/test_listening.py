"""The port: free, taken by another program, or by a running gateway."""

import asyncio
import contextlib
import os
import socket
import threading

import pytest

from gateway.commands.doctor.listening import _listener, check_listening
from gateway.settings.settings import Settings
from tests.gateway.conftest import Stage
from tests.gateway.processes.serving import free_port


async def test_a_free_port_is_ok() -> None:
    """A port that nobody listens on is free, and port 0 is any."""
    port = free_port()
    (free,) = await check_listening(Settings(port=port))
    assert (free.status, free.summary) == ("ok", f"127.0.0.1:{port} is free")
    (any_port,) = await check_listening(Settings(port=0))
    assert any_port.status == "ok"


async def test_another_program_is_named_with_its_process() -> None:
    """What listens and is no gateway is a problem; on Linux the finding has its process."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        (taken,) = await check_listening(Settings(port=port))
    assert taken.status == "problem"
    assert f"127.0.0.1:{port} is taken by another program" in taken.summary
    assert f"process {os.getpid()}" in taken.summary
    assert "--port" in taken.advice


def test_a_program_that_opens_and_closes_files_is_named() -> None:
    """What it closes while its open files are looked through does not hide the one that listens."""
    stopped = threading.Event()

    def open_and_close() -> None:
        while not stopped.is_set():
            with contextlib.ExitStack() as files:
                for _ in range(50):
                    files.enter_context(open(os.devnull, "rb"))

    with contextlib.ExitStack() as lower:  # numbers that the files get, below that of the socket
        for _ in range(60):
            lower.enter_context(open(os.devnull, "rb"))
        server = socket.create_server(("127.0.0.1", 0))
    with server:
        churning = threading.Thread(target=open_and_close)
        churning.start()
        try:
            named = {_listener(server.getsockname()[1]) for _ in range(20)}
        finally:
            stopped.set()
            churning.join()
    (name,) = named
    assert name.endswith(f"process {os.getpid()}")


async def test_a_server_that_never_answers_is_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener that accepts and says nothing does not hold the check up."""
    monkeypatch.setattr("gateway.commands.doctor.listening._SECONDS", 0.2)

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    async with server:
        (taken,) = await check_listening(Settings(port=server.sockets[0].getsockname()[1]))
    assert "another program" in taken.summary


async def test_a_running_gateway_is_recognised(stage: Stage) -> None:
    """A Keepgate that serves there is ok: it answers /health, and says whether it can reach an upstream."""
    client = await stage.gateway(await stage.mock())
    await client.gateway.router.refreshed.wait()
    (found,) = await check_listening(Settings(port=client.gateway.port))
    assert found.status == "ok"
    assert "a running Keepgate" in found.summary
    assert "can reach an upstream" in found.summary


async def test_a_gateway_without_an_upstream_is_a_warning(stage: Stage) -> None:
    """A Keepgate that serves there and can reach no upstream is worth a warning."""
    client = await stage.gateway(f"http://127.0.0.1:{free_port()}/v1")
    (found,) = await check_listening(Settings(port=client.gateway.port))
    assert (found.status, "can reach no upstream" in found.summary) == ("warning", True)


@pytest.mark.parametrize(
    ("host", "words"), [("no.such.host.invalid", "is no address"), ("192.0.2.7", "no address of this machine")]
)
async def test_a_host_that_cannot_be_listened_on_is_named(host: str, words: str) -> None:
    """A name without an address, and an address of another machine, are problems of the setting `host`."""
    (found,) = await check_listening(Settings(host=host, port=free_port()))
    assert found.status == "problem"
    assert found.summary.startswith("host: ")
    assert words in found.summary
