"""The endpoints for prefixes look up, pin, clear and describe what an engine keeps."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from backend.api.app import create_app
from backend.api.http_server import listening
from backend.api.server_state import STATE
from backend.engine.model_runner import BLOCK_SIZE
from backend.errors import ModelError
from backend.model import ServedModel
from backend.prefixes import sharing as prefix_sharing
from prefix_store.codecs.registry import CODECS
from prefix_store.store import store
from prefix_store.store.config import StoreConfig
from prefix_store.tiers.disk.disk_tier import DiskTier
from tests.backend.conftest import CHAT, COMPLETIONS, ENGINE, MODEL, Served, StartServer
from tests.prefix_store.tiers.waiting import until

WORDS = "one two three four five six seven eight nine ten eleven twelve " * 6
CONVERSATION = {"x-keepgate-reuse": "conversation"}


@pytest.fixture
async def served(start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    """A server with a prefix store that waits for every restore, so a busy machine does not change what is counted."""
    # The limits follow measured speeds; no option sets them.
    monkeypatch.setattr(prefix_sharing, "_SHORTEST_ASK", prefix_sharing._LONGEST_ASK)
    monkeypatch.setattr(store, "_SHORTEST_RESTORE", store._LONGEST_RESTORE)
    return await start_server(
        prefix_store=StoreConfig(disk=tmp_path / "kv", memory_bytes=64 * 2**20, name="engine", audit_every=0)
    )


async def ask(served: Served, prompt: str = WORDS, **headers: str) -> int:
    """Tokens that the engine did not compute; the header and usage must agree."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    async with served.client.post(COMPLETIONS, json=body, headers={**CONVERSATION, **headers}) as response:
        answer = await response.json()
        assert response.status == 200, answer
        cached = int(response.headers["x-keepgate-prefix-tokens"])
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    return cached


async def said(served: Served, method: str, path: str, status: int = 200, **given: Any) -> Any:
    async with served.client.request(method, path, **given) as response:
        assert response.status == status, await response.text()
        return await response.json()


async def kept(served: Served, blocks: int) -> None:
    opened = served.state.opened_store
    assert opened is not None
    tiers = opened.store.tiers.values()
    await until(lambda: all(tier.counts.writes >= blocks for tier in tiers), "the blocks are kept")


async def test_a_lookup_counts_leading_tokens_in_each_tier(served: Served) -> None:
    """A lookup counts a tenant's leading tokens in the engine's memory, in host memory and on disk."""
    nowhere = await said(served, "POST", "/v1/prefix/lookup", json={"model": MODEL, "prompt": WORDS})
    assert nowhere["leading_tokens"] == {"device": 0, "memory": 0, "disk": 0}
    await ask(served)
    blocks = nowhere["tokens"] // BLOCK_SIZE
    await kept(served, blocks)
    found = await said(served, "POST", "/v1/prefix/lookup", json={"prompt": WORDS + "and something else"})
    assert found["leading_tokens"] == dict.fromkeys(("device", "memory", "disk"), blocks * BLOCK_SIZE)
    assert found["engines"] == []
    other = await said(served, "POST", "/v1/prefix/lookup", json={"prompt": WORDS}, headers={"x-api-key": "another's"})
    assert other["leading_tokens"] == {"device": 0, "memory": 0, "disk": 0}


async def test_a_conversation_is_looked_up_as_it_is_asked(served: Served) -> None:
    """A lookup of messages applies the model's chat template, as a chat does."""
    messages = [{"role": "system", "content": WORDS}, {"role": "user", "content": "Hello"}]
    await served.post(CHAT, messages=messages, max_tokens=1)
    found = await said(served, "POST", "/v1/prefix/lookup", json={"messages": messages})
    assert found["leading_tokens"]["device"] == found["tokens"] // BLOCK_SIZE * BLOCK_SIZE


async def test_pin_and_unpin_count_tokens_in_each_tier(served: Served) -> None:
    """Pinning and unpinning a prompt say how many tokens they concern in each tier."""
    await ask(served)
    blocks = (await said(served, "POST", "/v1/prefix/lookup", json={"prompt": WORDS}))["tokens"] // BLOCK_SIZE
    await kept(served, blocks)
    tokens = blocks * BLOCK_SIZE
    pinned = await said(served, "POST", "/v1/prefix/pin", json={"prompt": WORDS})
    assert pinned == {"pinned_tokens": {"memory": tokens, "disk": tokens}}
    unpinned = await said(served, "POST", "/v1/prefix/unpin", json={"prompt": WORDS})
    assert unpinned == {"unpinned_tokens": {"memory": tokens, "disk": tokens}}
    assert (await said(served, "POST", "/v1/prefix/unpin", json={"prompt": WORDS}))["unpinned_tokens"]["disk"] == 0


async def test_everything_can_be_cleared(served: Served) -> None:
    """Clearing removes all blocks from the tiers and from the engine's own memory."""
    await ask(served)
    blocks = (await said(served, "POST", "/v1/prefix/lookup", json={"prompt": WORDS}))["tokens"] // BLOCK_SIZE
    await kept(served, blocks)
    assert await said(served, "DELETE", "/v1/prefix") == {"removed": 2 * blocks}
    found = await said(served, "POST", "/v1/prefix/lookup", json={"prompt": WORDS})
    assert found["leading_tokens"] == {"device": 0, "memory": 0, "disk": 0}
    assert await ask(served) == 0


async def test_blocks_saved_while_the_store_is_cleared_are_cleared_too(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that requests restored and saved again while the store was cleared are removed too."""
    await ask(served)
    opened = served.state.opened_store
    assert opened is not None
    tiers = opened.store.tiers.values()
    blocks = (await said(served, "POST", "/v1/prefix/lookup", json={"prompt": WORDS}))["tokens"] // BLOCK_SIZE
    await kept(served, blocks)
    clear, times = opened.store.clear, 0

    async def asked_meanwhile() -> int:
        nonlocal times
        times += 1
        if times > 1:
            return await clear()
        assert await ask(served) > 0
        removed = await clear()
        assert await ask(served, WORDS + "and something else " * 9) > 0
        await served.state.prefixes.settled()
        assert all(tier.counts.writes > blocks for tier in tiers), "nothing was kept anew"
        return removed

    monkeypatch.setattr(opened.store, "clear", asked_meanwhile)
    await said(served, "DELETE", "/v1/prefix")
    found = await said(served, "POST", "/v1/prefix/lookup", json={"prompt": WORDS})
    assert found["leading_tokens"] == {"device": 0, "memory": 0, "disk": 0}


async def test_the_description_and_the_metrics_agree(served: Served) -> None:
    """The description's saved tokens by tier add up, its decisions are counted, and the metrics agree."""
    assert await ask(served) == 0
    first = await ask(served)
    about = await said(served, "GET", "/v1/prefix")
    assert len(bytes.fromhex(about["namespace"])) == 16
    assert about["block_size"] == BLOCK_SIZE
    assert about["tiers"]["device"]["tokens_saved"] == first == about["tokens_saved"]
    assert about["tiers"]["memory"]["codec"] == "plain"
    blocks = first // BLOCK_SIZE
    await kept(served, blocks)
    await served.forget_own_blocks()
    assert await ask(served) == first
    about = await said(served, "GET", "/v1/prefix")
    assert about["tiers"]["memory"]["tokens_saved"] == first
    assert about["tiers"]["memory"]["hits"] == blocks == about["decisions"]["fetched_blocks"]["memory"]
    assert about["tiers"]["memory"]["gigabytes_per_second"] > 0
    assert about["tiers"]["memory"]["bytes_read"] > 0
    assert about["tiers"]["disk"]["blocks"] >= blocks
    assert about["tokens_saved"] == 2 * first
    assert (await said(served, "GET", "/engine"))["prefix_store"] == about
    async with served.client.get("/metrics") as response:
        metrics = await response.text()
    assert f'keepgate_backend_prefix_restored_tokens_total{{tier="memory"}} {float(first)}' in metrics
    assert f"keepgate_backend_prefix_cache_hits_total {float(2 * first)}" in metrics


async def test_one_shots_are_not_written_and_conversations_are(served: Served) -> None:
    """A completion is a one-shot that is not written at once, a chat is written, and a wrong header value is a 400."""
    body = {"model": MODEL, "prompt": WORDS, "max_tokens": 1}
    opened = served.state.opened_store
    assert opened is not None
    disk = opened.store.tiers["disk"]
    async with served.client.post(COMPLETIONS, json=body) as response:
        assert response.status == 200
    await until(lambda: disk.counts.rejected["not admitted"] > 0, "the blocks have been refused")
    assert disk.counts.writes == 0
    wrong = await said(served, "POST", COMPLETIONS, 400, json=body, headers={"x-keepgate-reuse": "always"})
    assert wrong["error"]["message"] == "x-keepgate-reuse: expected conversation or one-shot"
    await served.post(CHAT, messages=[{"role": "user", "content": WORDS}], max_tokens=1)
    await until(lambda: disk.counts.writes > 0, "a conversation is kept")


async def test_without_a_store_each_endpoint_is_a_404(start_server: StartServer) -> None:
    """Without a prefix store each of its endpoints is a 404 that says so."""
    served = await start_server()
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/lookup"), ("POST", "/pin"), ("POST", "/blocks")):
        answer = await said(served, method, f"/v1/prefix{path}", 404, json={"prompt": "x"})
        assert "keeps no prefixes" in answer["error"]["message"]


async def test_tenants_share_the_blocks_of_a_public_prefix(start_server: StartServer, tmp_path: Path) -> None:
    """All tenants share the whole blocks of a public prefix, and each tenant has its own blocks after it."""
    system = {"role": "system", "content": WORDS}
    file = tmp_path / "system.json"
    file.write_text(json.dumps({"messages": [system]}))
    served = await start_server(public_prefixes=(file,))
    published = await said(served, "POST", "/tokenize", json={"messages": [system], "add_generation_prompt": False})
    seen = []
    for tenant in ("a", "b", "b"):
        body = {"model": MODEL, "messages": [system, {"role": "user", "content": WORDS}], "max_tokens": 1}
        async with served.client.post(CHAT, json=body, headers={"Authorization": f"Bearer {tenant}"}) as response:
            seen.append(int(response.headers["x-keepgate-prefix-tokens"]))
    shared = published["count"] // BLOCK_SIZE * BLOCK_SIZE
    assert seen[:2] == [0, shared]
    assert seen[2] > 2 * shared - 2 * BLOCK_SIZE


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"messages": [', "Input data was truncated"),
        ('{"messages": [{"role": "system", "content": "Hi"}]}', "fill no block"),
        ('{"prompt": "a", "messages": []}', "expected either prompt or messages"),
        (None, "No such file"),
    ],
)
async def test_a_public_prefix_that_cannot_be_read_is_named(
    start_server: StartServer, tmp_path: Path, content: str | None, complaint: str
) -> None:
    """A public prefix file that cannot be used stops the start with a message that names option and file."""
    file = tmp_path / "prefix.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ModelError, match=f"--public-prefix .*prefix.json: .*{complaint}"):
        await start_server(public_prefixes=(file,))


async def test_a_lossy_store_is_not_deterministic(start_server: StartServer, tmp_path: Path) -> None:
    """The info of a lossy store says that it is not deterministic and why; an exact store is what its runner is."""
    exact = await start_server(prefix_store=StoreConfig(disk=tmp_path / "exact"))
    lossy = await start_server(prefix_store=StoreConfig(disk=tmp_path / "lossy", disk_codec=CODECS["fp8"]))
    about = [await said(served, "GET", "/v1/model/info") for served in (exact, lossy)]
    assert about[0]["deterministic"] is exact.state.model.runner.deterministic
    assert about[1]["deterministic"] is False
    assert "fp8" in about[1]["deterministic_because"]


async def test_a_stopping_server_writes_its_last_blocks(
    model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that stops writes the blocks of its last answers first, even to a slow disk."""
    write = DiskTier.write

    async def slowly(self: DiskTier, *given: Any) -> int:
        await asyncio.sleep(0.4)
        return await write(self, *given)

    monkeypatch.setattr(DiskTier, "write", slowly)
    app = create_app(model, dataclasses.replace(ENGINE, prefix_store=StoreConfig(disk=tmp_path / "kv")))
    with socket.create_server(("127.0.0.1", 0)) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        async with listening(app, sock, shutdown_timeout=1.0), ClientSession(url) as client:
            served = Served(app[STATE], client, url)
            chats = [[{"role": "user", "content": f"{number} {WORDS * 5}"}] for number in range(4)]
            await asyncio.gather(*(served.post(CHAT, messages=messages, max_tokens=1) for messages in chats))
    assert len(list((tmp_path / "kv" / "blocks").glob("*/*"))) >= 4 * len(WORDS.split()) * 5 // BLOCK_SIZE
