"""What clients see of the server's limits, priorities and prefix sharing."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from tests.backend.conftest import CHAT, COMPLETIONS, EMBEDDINGS, MODEL, Served, StartServer

COUNTING = "1, 2, 3, 4,"
LONG = {"model": MODEL, "prompt": COUNTING, "max_tokens": 1900, "ignore_eos": True}


async def test_a_request_that_takes_too_long_ends(start_server: StartServer) -> None:
    """A request over `max_seconds` is a 504, or an error event in a stream, and its blocks are free again."""
    served = await start_server(max_seconds=0.3)
    async with served.client.post(COMPLETIONS, json=LONG) as response:
        assert response.status == 504
        error = (await response.json())["error"]
    assert error["code"] == "deadline_exceeded"
    assert "the request's deadline passed after" in error["message"]
    async with served.client.post(COMPLETIONS, json={**LONG, "stream": True}) as response:
        assert response.status == 200
        assert (await response.text()).split("data: ")[-1].startswith('{"error":{"message":"the request\'s deadline')
    assert served.state.engine.engine.pool.num_free == served.state.model.runner.num_blocks
    # A caller's own limit does not lift the server's.
    started = time.monotonic()
    async with served.client.post(COMPLETIONS, json=LONG, headers={"x-request-timeout": "3600"}) as response:
        assert response.status == 504
    assert time.monotonic() - started < 60


async def test_a_deadline_counts_from_the_request_head(server: Served) -> None:
    """A caller's deadline counts from the arrival of the request's head, so a slow body uses it up."""
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps({**LONG, "max_tokens": 1}).encode()
    seconds = 0.5
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\nExpect: 100-continue\r\n"
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(60):
        writer.write(f"{head}x-request-timeout: {seconds}\r\n\r\n".encode())
        assert b" 100 " in await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(seconds)
        writer.write(data)
        assert b" 504 " in await reader.readline()
    writer.close()


async def test_urgent_requests_pass_those_that_wait(start_server: StartServer) -> None:
    """With one place in the batch, the request with the smallest priority gets it, though it came last."""
    served = await start_server(max_batch=1)
    ended: list[str] = []

    async def ask(name: str, priority: int) -> None:
        await served.text(COUNTING, max_tokens=5, ignore_eos=True, priority=priority)
        ended.append(name)

    body = {**LONG, "max_tokens": 300, "priority": 5, "stream": True}
    async with asyncio.timeout(60), served.client.post(COMPLETIONS, json=body) as running:
        await running.content.readuntil(b"\n\n")
        async with asyncio.TaskGroup() as group:
            group.create_task(ask("second", 5))
            group.create_task(ask("urgent", 0))
            rest = await running.text()
            ended.append("first")
    assert ended[0] == "urgent"
    assert rest.endswith("data: [DONE]\n\n"), "it was preempted, and went on"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
        (COMPLETIONS, {"prompt": COUNTING, "max_tokens": 1}),
        (EMBEDDINGS, {"input": COUNTING}),
    ],
    ids=["chat", "completions", "embeddings"],
)
async def test_fcfs_refuses_priorities(start_server: StartServer, path: str, body: dict[str, object]) -> None:
    """The policy `fcfs` refuses a priority other than 0 by name, and answers requests without one."""
    served = await start_server(scheduling_policy="fcfs")
    for priority in (-1, 1):
        async with served.client.post(path, json={"model": MODEL, **body, "priority": priority}) as response:
            assert response.status == 400
            error = (await response.json())["error"]
        assert error["param"] == "priority"
        assert error["message"].startswith("priority: ")
    for nothing in (0, None):
        await served.post(path, **body, priority=nothing)


@pytest.mark.parametrize(("shares", "cached"), [(True, 32), (False, 0)], ids=["sharing", "no sharing"])
async def test_usage_counts_cached_tokens(start_server: StartServer, shares: bool, cached: int) -> None:
    """`usage` counts the whole cached blocks of a repeated prompt, and none with prefix sharing off."""
    prompt = "one two three four five six seven eight nine ten " * 4
    served = await start_server(shares_prefixes=shares)
    seen = []
    for _ in range(2):
        answer = await served.post(COMPLETIONS, prompt=prompt, max_tokens=4, temperature=0)
        assert 32 < answer["usage"]["prompt_tokens"] <= 48
        seen.append((answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["text"]))
    assert [tokens for tokens, _ in seen] == [0, cached]
    assert seen[0][1] == seen[1][1]


@pytest.mark.parametrize("header", ["Authorization", "x-api-key", "api-key", "x-keepgate-namespace"])
async def test_tenants_do_not_find_each_others_blocks(start_server: StartServer, header: str) -> None:
    """A tenant's prompt is no prefix hit for another tenant, whichever header names the tenants."""
    served = await start_server()
    body = {"model": MODEL, "prompt": "one two three four five six seven eight nine ten " * 4, "max_tokens": 1}
    cached = []
    for key in ("Bearer a", "Bearer b", "Bearer a"):
        async with served.client.post(COMPLETIONS, json=body, headers={header: key}) as response:
            cached.append((await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 0, 32]


async def test_a_request_without_a_token_has_no_time_to_first_token(start_server: StartServer) -> None:
    """A request that expires while it waits does not count in the time to first token."""
    served = await start_server()
    async with served.client.post(COMPLETIONS, json=LONG, headers={"x-request-timeout": "0.000001"}) as response:
        assert response.status == 504
    async with served.client.get("/metrics") as response:
        said = await response.text()
    assert "keepgate_backend_time_to_first_token_seconds_count 0.0" in said
