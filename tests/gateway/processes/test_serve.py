"""`keepgate serve` and its embedded store: start, stop, signals and faults."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import pytest
import redis.asyncio

from gateway.upstreams.mock import MockUpstream, Reply
from tests.cache.valkey import Valkey
from tests.gateway.client import CHAT, chat
from tests.gateway.conftest import Stage
from tests.gateway.processes.serving import (
    DEADLINE,
    Serving,
    free_port,
    open_files,
    processes,
    serving,
    until_gone,
)
from tests.waiting import until


async def ask_and_keep(gateway: Serving, content: str = "hello") -> None:
    """Ask for an answer, and return when the store has it on disk."""
    assert (await gateway.ask(content)).cache == "miss"
    socket = next((state_of(gateway) / "valkey").glob("*.sock"))
    client = redis.asyncio.from_url(f"unix://{socket}")

    async def is_written() -> bool:
        return await client.dbsize() > 0

    await until(is_written, DEADLINE)
    await client.execute_command("WAITAOF", 1, 0, 5000)  # type: ignore[no-untyped-call]  # redis-py leaves it untyped
    await client.aclose()


def state_of(gateway: Serving) -> Path:
    line = next(line for line in gateway.lines if "data in " in line)
    return Path(line.partition("data in ")[2])


async def test_the_start_prints_the_url_and_ends_with_ready(stage: Stage, tmp_path: Path) -> None:
    """The last line of the start is `Ready`, after which the printed URL answers."""
    mock, port = await stage.mock(), free_port()
    async with serving(tmp_path, "--upstream", mock.url, KEEPGATE_PORT=str(port)) as gateway:
        assert gateway.url == f"http://127.0.0.1:{port}"
        assert gateway.lines[0].startswith("Keepgate ")
        assert f"embedded, data in {tmp_path}" in gateway.said
        assert mock.url in gateway.said
        assert (await gateway.send("GET", "/health")).json == {"status": "ok"}
        assert (await gateway.ask("Hi there")).text == "Hi there"
        await until_reachable(gateway)


async def test_an_unreachable_upstream_is_reported_at_the_start(tmp_path: Path) -> None:
    """An unreachable upstream is reported before the first request, and that it came up when it does."""
    port = free_port()
    async with serving(tmp_path, "--upstream", f"http://127.0.0.1:{port}/v1") as gateway:
        await gateway.until_said(f"No upstream can be reached; GET {gateway.url}/ready")
        assert (await gateway.send("GET", "/ready")).status == 503
        assert (await gateway.ask()).status == 502
        async with MockUpstream().serving(port):
            await gateway.until_said("An upstream can be reached now.")
            assert (await gateway.send("GET", "/ready")).status == 200


async def until_reachable(gateway: Serving) -> None:
    async def is_ready() -> bool:
        return (await gateway.send("GET", "/ready")).status == 200

    await until(is_ready, DEADLINE, every=0.02)


@pytest.mark.parametrize("how", ["SIGTERM", "Ctrl-C"])
async def test_a_signal_stops_everything_and_loses_nothing(stage: Stage, tmp_path: Path, how: str) -> None:
    """A signal ends the gateway with status 0 and without children, and its last answer is a hit after the next start.

    Ctrl-C in a terminal sends SIGINT to every process of the group; the children are not in it, else they would end
    before what is pending is written.
    """
    mock = await stage.mock()
    async with serving(tmp_path, "--upstream", mock.url) as gateway:
        children = gateway.children()
        assert ["valkey-server" in command or "redis-server" in command for command in children.values()] == [True]
        assert all(os.getpgid(child) != gateway.pid for child in children)
        assert (await gateway.ask()).cache == "miss"
        if how == "Ctrl-C":
            os.killpg(gateway.pid, signal.SIGINT)
        else:
            gateway.process.send_signal(signal.Signals[how])
        assert await gateway.ended() == 0
        assert gateway.lines[-1] == "Stopping."
        assert not processes().keys() & children.keys()
    start = time.monotonic()
    async with serving(tmp_path, "--upstream", mock.url) as gateway:
        assert time.monotonic() - start < 10
        assert (await gateway.ask()).cache == "hit"
    assert len(mock.received) == 1


async def test_a_signal_during_the_start_stops_what_has_started(tmp_path: Path) -> None:
    """A signal during the start of the store stops all processes."""
    async with serving(tmp_path, "--upstream", "mock:", ready=False) as gateway:
        await until(lambda: any("valkey-server" in command for command in gateway.children().values()), DEADLINE)
        children = gateway.children()
        assert await gateway.signal(signal.SIGTERM) == 0
        assert not processes().keys() & children.keys()


async def test_a_second_signal_does_not_break_off_the_stopping(stage: Stage, tmp_path: Path) -> None:
    """A second Ctrl-C changes neither the stopping of the children nor the status 0."""
    mock = await stage.mock()
    mock.hold.clear()
    async with serving(tmp_path, "--upstream", mock.url, KEEPGATE_TIMEOUTS_SHUTDOWN="1") as gateway:
        asking = asyncio.create_task(gateway.ask())
        await mock.wait_for(1)
        children = gateway.children()
        gateway.process.send_signal(signal.SIGINT)
        await gateway.until_said("Stopping.")
        assert await gateway.signal(signal.SIGINT) == 0
        assert gateway.lines.count("Stopping.") == 1
        assert not processes().keys() & children.keys()
        await asyncio.gather(asking, return_exceptions=True)


async def test_requests_under_way_are_finished_before_the_stop(stage: Stage, tmp_path: Path) -> None:
    """A running stream is finished after a signal, and new requests are refused."""
    mock = await stage.mock(Reply(text="one two three"))
    mock.hold.clear()
    async with serving(tmp_path, "--upstream", mock.url) as gateway:
        asking = asyncio.create_task(gateway.ask(stream=True))
        await mock.wait_for(1)
        gateway.process.send_signal(signal.SIGTERM)
        await gateway.until_said("Stopping.")
        mock.hold.set()
        assert (await asking).text == "one two three"
        assert await gateway.ended() == 0


async def test_a_stream_that_outlasts_the_stop_ends_in_an_error(stage: Stage, tmp_path: Path) -> None:
    """In the form of its API, without [DONE], after what has come; an answer that has not begun is 503."""
    mock = await stage.mock(Reply(when="plain", text="one", delay=60), Reply(text="one " * 300, pause=0.2))
    words = ("--upstream", mock.url, "--redis", "none", "--drain-seconds", "0.5")
    async with serving(tmp_path, *words) as gateway:
        message = {"model": "mock", "stream": True, "max_tokens": 9, "messages": [{"role": "user", "content": "m"}]}
        asking = [
            asyncio.create_task(gateway.ask(stream=True)),
            asyncio.create_task(gateway.send("POST", "/v1/messages", message)),
            asyncio.create_task(gateway.ask("plain")),
        ]
        await until(lambda: sum(each.path.endswith(CHAT) for each in mock.received) == 3, DEADLINE)
        assert await gateway.signal(signal.SIGTERM) == 0
        stream, translated, plain = await asyncio.gather(*asking)
    assert stream.events[-1] != b"[DONE]"
    assert json.loads(stream.events[-1])["error"]["code"] == "shutting_down"
    assert translated.body.rpartition(b"event: ")[2].startswith(b"error")
    assert (plain.status, plain.error["code"]) == (503, "shutting_down")


async def test_a_killed_gateway_leaves_no_child_and_starts_again(stage: Stage, tmp_path: Path) -> None:
    """The gateway after a killed one waits until the old server has ended, and then loads what was on disk."""
    mock = await stage.mock()
    async with serving(tmp_path, "--upstream", mock.url) as gateway:
        await ask_and_keep(gateway)
        old_server = gateway.child("valkey-server")
        os.kill(old_server, signal.SIGSTOP)
        gateway.process.kill()
        assert await gateway.process.wait() == -signal.SIGKILL
        async with serving(tmp_path, "--upstream", mock.url, ready=False) as next_gateway:
            await until(lambda: str(tmp_path / "valkey" / "lock") in open_files(next_gateway.pid), DEADLINE)
            for _ in range(20):
                assert not next_gateway.children()
                await asyncio.sleep(0.01)
            os.kill(old_server, signal.SIGCONT)
            await until_gone(old_server)
            await next_gateway.until_ready()
            assert (await next_gateway.ask()).cache == "hit"


async def test_two_gateways_on_one_state_directory_share_the_store(stage: Stage, tmp_path: Path) -> None:
    """One of two gateways on a state directory runs the store, and the other one does after its stop."""
    mock = await stage.mock()
    async with (
        serving(tmp_path, "--upstream", mock.url, ready=False) as one,
        serving(tmp_path, "--upstream", mock.url, ready=False) as two,
    ):
        await asyncio.gather(one.until_ready(), two.until_ready())
        owner, other = (one, two) if one.children() else (two, one)
        assert (len(owner.children()), len(other.children())) == (1, 0)
        await other.until_said(f"another gateway (process {owner.pid}) uses the state directory as well")
        await ask_and_keep(owner)
        assert (await other.ask()).cache == "hit"
        assert await owner.signal(signal.SIGTERM) == 0
        assert (await other.ask()).cache == "hit"
        await other.until_said("the embedded store is up")
        await other.until_said("redis is available again")
        assert len(other.children()) == 1
        assert (await other.ask("something else")).cache == "miss"
        assert await other.signal(signal.SIGTERM) == 0
    async with serving(tmp_path, "--upstream", mock.url) as gateway:
        assert (await gateway.ask()).cache == "hit"
        assert (await gateway.ask("something else")).cache == "hit"


async def test_a_killed_store_is_started_again_while_requests_go_on(stage: Stage, tmp_path: Path) -> None:
    """A killed store is started again with its data, and no request fails meanwhile."""
    mock = await stage.mock()
    async with serving(tmp_path, "--upstream", mock.url) as gateway:
        await ask_and_keep(gateway)
        os.kill(gateway.child("valkey-server"), signal.SIGKILL)
        answers = [await gateway.ask("hello" if n % 2 else f"new {n}") for n in range(10)]
        assert {answer.status for answer in answers} == {200}
        await gateway.until_said("the embedded store is up")
        await gateway.until_said("redis is available again")
        assert await gateway.signal(signal.SIGTERM) == 0
    async with serving(tmp_path, "--upstream", mock.url) as gateway:
        assert (await gateway.ask("hello")).cache == "hit"
        assert (await gateway.ask("new 8")).cache == "hit"


@pytest.mark.parametrize("damage", ["cut short", "zeros at the end"])
async def test_the_store_starts_on_damaged_files(stage: Stage, tmp_path: Path, damage: str) -> None:
    """The store starts on a truncated file and sets an unreadable one aside."""
    mock = await stage.mock()
    async with serving(tmp_path, "--upstream", mock.url) as gateway:
        await ask_and_keep(gateway, "first")
        entry = (await gateway.ask("second")).entry
        assert await gateway.signal(signal.SIGTERM) == 0
    (file,) = (tmp_path / "valkey" / "appendonlydir").glob("*.incr.aof")
    content = file.read_bytes()
    within_second = content.index(entry.encode()) + 100
    file.write_bytes(content[:within_second] if damage == "cut short" else content + bytes(4096))
    async with serving(tmp_path, "--upstream", mock.url) as gateway:
        # A file without a readable end is not loaded.
        assert (await gateway.ask("first")).cache == ("hit" if damage == "cut short" else "miss")
        assert (await gateway.ask("second")).cache == "miss"
        assert (tmp_path / "valkey" / "appendonlydir.damaged").exists() == (damage != "cut short")
        assert ("data is damaged" in gateway.said) == (damage != "cut short")


async def test_a_state_directory_with_a_very_long_path_works(stage: Stage, tmp_path: Path) -> None:
    """A state directory may have a path that is too long for a socket."""
    state = tmp_path / ("a" * 100) / ("b" * 100)
    mock = await stage.mock()
    async with serving(state, "--upstream", mock.url) as gateway:
        assert (await gateway.ask()).cache == "miss"
        assert await gateway.signal(signal.SIGTERM) == 0
    assert list((state / "valkey" / "appendonlydir").iterdir())
    async with serving(state, "--upstream", mock.url) as gateway:
        assert (await gateway.ask()).cache == "hit"


async def test_an_unreachable_redis_is_reported_and_does_no_harm(stage: Stage, tmp_path: Path) -> None:
    """The gateway reports an unreachable Redis, starts, and keeps answers in memory."""
    mock = await stage.mock()
    url = f"redis://user:hush@127.0.0.1:{free_port()}/0"
    async with serving(tmp_path, "--upstream", mock.url, "--redis", url) as gateway:
        assert "redis is unavailable" in gateway.said
        assert [(await gateway.ask()).cache for _ in range(2)] == ["miss", "hit"]
        assert not gateway.children()
        assert await gateway.signal(signal.SIGTERM) == 0
        assert "hush" not in gateway.said


async def test_without_a_store_nothing_is_written(stage: Stage, tmp_path: Path) -> None:
    """The option `--redis none` keeps answers in memory only."""
    mock = await stage.mock()
    async with serving(tmp_path, "--upstream", mock.url, "--redis", "none") as gateway:
        assert "memory only" in gateway.said
        assert [(await gateway.ask()).cache for _ in range(2)] == ["miss", "hit"]
        assert not gateway.children()
    assert os.listdir(tmp_path) == []


async def refusal(state: Path, *words: str, **variables: str) -> str:
    """The one line of a failed start; checks that the status is 1 and no process stays."""
    async with serving(state, *words, ready=False, **variables) as gateway:
        assert await gateway.ended() == 1
        assert len(gateway.lines) == 1, gateway.said
        return gateway.lines[0]


async def test_a_taken_port_is_reported_in_one_line(stage: Stage, tmp_path: Path) -> None:
    """A taken port ends the start with one line, with workers too."""
    mock = await stage.mock()
    for workers, others in (("1", "2"), ("2", "1")):
        async with serving(tmp_path, "--upstream", mock.url, "--workers", workers, "--redis", "none") as gateway:
            port = gateway.url.rpartition(":")[2]
            said = await refusal(tmp_path, "--upstream", mock.url, "--port", port, "--workers", others)
            assert said == f"keepgate: port: {port} is taken on 127.0.0.1; choose another with --port or KEEPGATE_PORT"


async def test_an_impossible_state_directory_is_reported_in_one_line(tmp_path: Path) -> None:
    """A state directory that cannot be used ends the start with one line."""
    file = tmp_path / "file"
    file.touch()
    said = await refusal(file, "--upstream", "mock:")
    assert said == f"keepgate: state_dir: nothing can be kept in {file}/valkey: Not a directory"
    (tmp_path / "valkey").mkdir()
    (tmp_path / "valkey" / "appendonlydir").touch()
    said = await refusal(tmp_path, "--upstream", "mock:")
    assert said.startswith("keepgate: redis: embedded: the server ended at its start: Can't open or create append-only")


async def test_a_refused_password_is_reported_in_one_line(own_valkey: Valkey, tmp_path: Path) -> None:
    """A refused password ends the start with one line that does not have the password."""
    client = redis.asyncio.from_url(own_valkey.url)
    await client.config_set("requirepass", "right")
    await client.aclose()
    for url in (f"unix://:hush@{own_valkey.socket}", own_valkey.url):
        said = await refusal(tmp_path, "--upstream", "mock:", "--redis", url)
        assert said.startswith("keepgate: redis: redis refuses the credentials of its URL")
        assert "hush" not in said
    async with serving(tmp_path, "--upstream", "mock:", "--redis", f"unix://:right@{own_valkey.socket}") as gateway:
        assert [(await gateway.ask()).cache for _ in range(2)] == ["miss", "hit"]
        assert "right" not in gateway.said


async def test_a_foreign_address_is_reported_in_one_line(tmp_path: Path) -> None:
    """A host address of another machine ends the start with one line."""
    said = await refusal(tmp_path, "--upstream", "mock:", "--host", "192.0.2.1", "--redis", "none")
    assert said.startswith("keepgate: host: cannot listen on 192.0.2.1:0: ")


async def test_a_missing_script_is_reported_in_one_line(tmp_path: Path) -> None:
    """A missing file of `mock:FILE` ends the start with one line that names it."""
    said = await refusal(tmp_path, "--upstream", "mock:no.yaml", "--redis", "none")
    assert said == "keepgate: no.yaml: cannot be read: No such file or directory"


async def test_nothing_that_a_tenant_wrote_is_logged(stage: Stage, tmp_path: Path) -> None:
    """Prompts and keys are not logged at the lowest level, for any failure of a request."""
    mock = await stage.mock(Reply(when="cut", cut_after=1), Reply(when="fail", status=500, body={"error": {}}))
    async with serving(tmp_path, "--upstream", mock.url, "--log-level", "debug") as gateway:
        for content in ("s3cret plain", "s3cret cut", "s3cret fail"):
            for stream in (False, True):
                await gateway.send("POST", CHAT, chat(content, stream=stream), Authorization="Bearer s3cret-key")
        await gateway.send("POST", CHAT, chat("x", model=["s3cret"]), Authorization="Bearer s3cret-key")
        await gateway.send("POST", "/v1/s3cret", {"a": "s3cret"})
        assert await gateway.signal(signal.SIGTERM) == 0
        assert "s3cret" not in gateway.said
