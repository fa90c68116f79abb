"""Settings that are read again while the gateway runs."""

import asyncio
import json
import os
import pty
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.settings.reloading import reloaded
from gateway.settings.settings import Settings
from gateway.upstreams.mock import Reply
from tests.gateway.client import CHAT, chat
from tests.gateway.conftest import Stage
from tests.gateway.processes.serving import KEEPGATE, serving

_IN_A_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # standard input becomes the terminal of this session
os.execv(sys.argv[1], sys.argv[1:])
"""


def write(file: Path, text: str) -> None:
    """Replace the file at once, as editors and mounted configurations do."""
    other = file.with_suffix(".new")
    other.write_text(text)
    other.replace(file)


async def test_a_hangup_reads_the_settings_again(stage: Stage, tmp_path: Path) -> None:
    """After SIGHUP requests go to the upstream that the file names now; what needs a new start is said."""
    first, second = await stage.mock(Reply(text="one")), await stage.mock(Reply(text="two"))
    file = tmp_path / "keepgate.yaml"
    write(file, f"upstreams: ['{first.url}']\n")
    async with serving(tmp_path, "--config", str(file), "--redis", "none") as gateway:
        assert (await gateway.ask("a")).text == "one"
        write(file, f"upstreams: ['{second.url}']\nsemantic: {{delta: 0.02}}\n")
        gateway.process.send_signal(signal.SIGHUP)
        await gateway.until_said("settings read again; changed: upstreams, semantic")
        await gateway.until_said("semantic has changed, which takes effect at the next start")
        assert (await gateway.ask("b")).text == "two"
        assert (await gateway.ask("a")).cache == "hit"
    assert len(first.received) == len(second.received) == 1


async def test_a_file_that_changes_is_read_again(stage: Stage, tmp_path: Path) -> None:
    """A change of the file is enough."""
    mock = await stage.mock()
    file = tmp_path / "keepgate.yaml"
    write(file, f"upstreams: ['{mock.url}']\n")
    async with serving(tmp_path, "--config", str(file), "--redis", "none") as gateway:
        write(file, f"upstreams: ['{mock.url}']\nmax_body: 1KiB\n")
        await gateway.until_said("settings read again; changed: max_body")
        assert (await gateway.ask("x" * 2000)).status == 413


async def test_settings_read_again_are_in_the_audit_log(stage: Stage, tmp_path: Path) -> None:
    """One line for all workers names what has changed; of settings that were refused there is none."""
    mock = await stage.mock()
    file, audit_file = tmp_path / "keepgate.yaml", tmp_path / "audit.jsonl"
    start = f"upstreams: ['{mock.url}']\nworkers: 2\nlog: {{audit_file: '{audit_file}'}}\n"
    write(file, start)
    async with serving(tmp_path, "--config", str(file), "--redis", "none") as gateway:
        write(file, start + "max_body: much\n")
        await gateway.until_said("the settings stay as they are")
        write(file, start + "max_body: 1KiB\n")
        await gateway.until_said("settings read again; changed: max_body")
    entries = [json.loads(line) for line in audit_file.read_text().splitlines()]
    assert [(entry["action"], entry["subject"]) for entry in entries] == [("settings.read", "max_body")]


async def test_a_bad_file_changes_nothing(stage: Stage, tmp_path: Path) -> None:
    """The message has the line and the key, and the gateway goes on as before."""
    mock = await stage.mock()
    file = tmp_path / "keepgate.yaml"
    write(file, f"upstreams: ['{mock.url}']\n")
    async with serving(tmp_path, "--config", str(file), "--redis", "none") as gateway:
        write(file, "upstreams: ['mock:']\ntimeouts:\n  idle: soon\n")
        await gateway.until_said(f"the settings stay as they are: {file}, line 3: timeouts.idle: expected seconds")
        assert (await gateway.ask("still here")).text == "still here"
    assert len(mock.received) == 1


async def test_every_worker_takes_over_new_settings(stage: Stage, tmp_path: Path) -> None:
    """After a reload no worker sends to the former upstream."""
    first, second = await stage.mock(Reply(text="one")), await stage.mock(Reply(text="two"))
    file = tmp_path / "keepgate.yaml"
    write(file, f"upstreams: ['{first.url}']\nworkers: 2\n")
    async with serving(tmp_path, "--config", str(file), "--redis", "none") as gateway:
        write(file, f"upstreams: ['{second.url}']\nworkers: 2\n")
        await gateway.until_said("settings read again; changed: upstreams")
        await asyncio.sleep(0.5)  # the other worker says nothing when it has read its line
        before = len(first.received)
        answers = [await gateway.ask(str(number)) for number in range(20)]
        assert {answer.text for answer in answers} == {"two"}
        assert len(first.received) == before


async def test_a_hundred_reloads_under_load_fail_no_request(stage: Stage, tmp_path: Path) -> None:
    """Requests, streams among them, go on over new settings on connections that stay open."""
    mocks = [await stage.mock(Reply(pause=0.001)) for _ in range(2)]
    client = await stage.gateway(*mocks)
    gateway, settings = client.gateway, client.gateway.settings
    done = asyncio.Event()
    sent = 0

    async def load(number: int) -> None:
        nonlocal sent
        while not done.is_set():
            sent += 1
            text = f"{number} asks {sent}"
            answer = await client.post(chat(text, stream=bool(sent % 2)))
            assert answer.status == 200
            assert text.encode() in answer.body or sent % 2

    async with asyncio.TaskGroup() as tasks:
        for number in range(8):
            tasks.create_task(load(number))
        for number in range(100):
            chosen = tuple(mock.url for mock in mocks[number % 2 :])
            wanted = msgspec.structs.replace(settings, upstreams=chosen, max_body=2**20 + number)
            assert await gateway.reload(wanted) == []
            await asyncio.sleep(0.005)
        done.set()
    assert sent > 100


def test_what_waits_for_the_next_start_is_left_as_it_is() -> None:
    """A running gateway keeps its port and its store, and takes over the rest."""
    running = Settings(upstreams=("http://a",))
    wanted = Settings(upstreams=("http://b",), port=1, redis="none", max_body=running.max_body + 1)  # type: ignore[arg-type]
    settings, waiting = reloaded(running, wanted)
    assert waiting == ["port", "redis"]
    assert settings == Settings(upstreams=("http://b",), max_body=wanted.max_body)
    assert reloaded(running, Settings())[1] == ["upstreams"]


async def test_a_closed_terminal_is_the_end(stage: Stage, tmp_path: Path) -> None:
    """A gateway in the foreground of a terminal ends with it; SIGHUP while the terminal is there reads the settings."""
    mock = await stage.mock()
    terminal, standard_input = pty.openpty()
    environment: dict[str, Any] = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _IN_A_TERMINAL, str(KEEPGATE)),
        *("serve", "--port", "0", "--redis", "none", "--upstream", mock.url),
        stdin=standard_input,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    os.close(standard_input)
    assert process.stderr is not None
    async with asyncio.timeout(30):
        while b"Ready" not in await process.stderr.readline():
            pass
        process.send_signal(signal.SIGHUP)
        assert b"settings read again" in await process.stderr.readline()
        os.close(terminal)
        assert b"Stopping" in await process.stderr.readline()
        assert await process.wait() == 0


async def test_all_workers_drain_at_the_same_time(stage: Stage, tmp_path: Path) -> None:
    """After SIGTERM no worker accepts a connection, streams under way end, and no later than `--drain-seconds`."""
    mock = await stage.mock(Reply(when="short", text="a b c d e f", pause=0.15), Reply(text="a b c", pause=60))
    words = ("--upstream", mock.url, "--redis", "none", "--workers", "2", "--drain-seconds", "3")
    async with serving(tmp_path, *words) as gateway:
        short = [asyncio.create_task(gateway.ask(f"short {number}", stream=True)) for number in range(6)]
        long = [asyncio.create_task(gateway.ask(f"long {number}", stream=True)) for number in range(2)]
        await mock.wait_for(8)
        began = asyncio.get_running_loop().time()
        gateway.process.send_signal(signal.SIGTERM)
        await gateway.until_said("Stopping")
        for answer in await asyncio.gather(*short):
            assert answer.body.endswith(b"data: [DONE]\n\n")
        with pytest.raises(OSError):  # noqa: PT011  # refused: nothing listens
            await gateway.send("POST", CHAT, chat("new"))
        assert await gateway.ended() == 0
        # Each worker gives its last requests 3 s, all at the same time, and some more to be cancelled.
        assert asyncio.get_running_loop().time() - began < 3 + 5
        await asyncio.gather(*long, return_exceptions=True)
