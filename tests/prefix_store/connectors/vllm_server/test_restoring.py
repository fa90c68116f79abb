"""Prompts are restored, by a real vLLM, and answers stay what they are."""

import asyncio
import base64
import io
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch

from tests.compose.monitoring import free_port
from tests.prefix_store.connectors.vllm_server.models import random_gemma3, random_llama, smollm2
from tests.prefix_store.connectors.vllm_server.server import VllmServer, vllm_server
from tests.waiting import until

BLOCK = 32
BLOCKS = 128


def prompt(seed: int, tokens: int) -> list[int]:
    pick = random.Random(seed)  # noqa: S311
    return [pick.randrange(1_000, 40_000) for _ in range(tokens)]


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prefixes")


@pytest.fixture(scope="module")
def store_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def server(model: Path, disk: Path, store_port: int) -> Iterator[VllmServer]:
    options = {
        "memory": "256MiB",
        "disk": str(disk / "blocks"),
        "disk_size": "2GiB",
        "audit": 0,
        "address": f"http://127.0.0.1:{store_port}",
        "secret_file": str(disk / "secret"),
    }
    few = ("--num-gpu-blocks-override", str(BLOCKS), "--no-enable-prefix-caching", "--enable-prompt-embeds")
    with vllm_server(model, options, *few) as running:
        yield running


def test_the_second_prompt_is_restored(server: VllmServer, plain: VllmServer) -> None:
    """All its full blocks; the answer is that of an engine without a store."""
    tokens = prompt(1, 10 * BLOCK + 5)
    first = server.complete(tokens)
    server.settle()
    before = server.restored()
    second = server.complete(tokens)
    assert server.restored() - before == 10 * BLOCK
    assert first == second == plain.complete(tokens)


def test_a_token_is_left_to_compute(server: VllmServer) -> None:
    """Of a prompt that fills its blocks the last block is computed: its logits are wanted."""
    tokens = prompt(2, 6 * BLOCK)
    first = server.complete(tokens)
    server.settle()
    before = server.restored()
    assert server.complete(tokens) == first
    assert server.restored() - before == 5 * BLOCK


def test_the_next_turn_of_a_chat_finds_the_answer(server: VllmServer) -> None:
    """What the model has written is stored, too."""
    tokens = prompt(3, 3 * BLOCK)
    answer = server.complete(tokens, tokens=3 * BLOCK + 1)
    server.settle()
    before = server.restored()
    server.complete([*tokens, *answer, *prompt(4, 20)])
    assert server.restored() - before == 6 * BLOCK


def test_salts_separate_tenants(server: VllmServer) -> None:
    """A prompt is not restored for another `cache_salt`, nor without one; for the same it is."""
    tokens = prompt(5, 5 * BLOCK + 1)
    server.complete(tokens, cache_salt="one")
    server.settle()
    before = server.restored()
    server.complete(tokens, cache_salt="other")
    server.complete(tokens)
    assert server.restored() == before
    server.complete(tokens, cache_salt="one")
    assert server.restored() - before == 5 * BLOCK


def test_many_requests_with_few_blocks(server: VllmServer, plain: VllmServer) -> None:
    """Prefixes are shared, requests preempted and taken back; every answer is that of an engine without a store."""
    shared = prompt(6, 12 * BLOCK)
    prompts = [shared[: pick.randrange(len(shared))] + prompt(seed, 40) for seed, pick in seeds(24)]
    expected = [plain.complete(tokens, tokens=40) for tokens in prompts]
    preempted = server.metric("vllm:num_preemptions_total")
    for _ in range(2):
        with ThreadPoolExecutor(24) as threads:
            given = list(threads.map(lambda tokens: server.complete(tokens, tokens=40), prompts))
        assert [one == other for one, other in zip(given, expected, strict=True)] == [True] * len(prompts)
    assert server.metric("vllm:num_preemptions_total") > preempted
    assert server.restored() > 0


async def test_requests_that_are_taken_back(server: VllmServer, plain: VllmServer) -> None:
    """While they load, compute and save: the engine goes on, and no block is lost or wrong."""
    tokens = prompt(7, 40 * BLOCK)
    server.complete(tokens)
    server.settle()
    for place in range(30):  # at another moment each time
        body = {"model": "m", "prompt": tokens[: len(tokens) - place], "max_tokens": 64}
        await server.abandon(body, 0.004 * place)
    await until(lambda: server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting") == 0)
    await until(lambda: server.metric("vllm:kv_cache_usage_perc") == 0)
    answer = await asyncio.to_thread(server.complete, tokens)
    assert answer == await asyncio.to_thread(plain.complete, tokens)


def test_a_prompt_without_tokens_is_left_alone_and_counted(server: VllmServer, model: Path) -> None:
    """Nothing names what is in it; it is answered as without a store."""
    hidden = json.loads((model / "config.json").read_text())["hidden_size"]
    with io.BytesIO() as file:
        torch.save(torch.zeros(2 * BLOCK, hidden), file)
        numbers = base64.b64encode(file.getvalue()).decode()
    server.post("/v1/completions", {"model": "m", "prompt_embeds": numbers, "max_tokens": 2, "ignore_eos": True})
    assert server.metric("keepgate_prefix_bypassed_requests_total") == 1


def test_operators_see_the_store(server: VllmServer, store_port: int) -> None:
    """Its state, and where a prompt is, by the tokens that vLLM makes of it."""
    state = ask(store_port, "/v1/prefix")
    assert state["tiers"].keys() >= {"memory", "disk"}
    assert state["block_size"] == BLOCK
    text = {"model": "m", "prompt": "A house by the sea, and nobody at home. " * 12}
    server.post("/v1/completions", {**text, "max_tokens": 1})
    tokens = server.post("/tokenize", text)["tokens"]
    server.settle()
    found = ask(store_port, "/v1/prefix/lookup", {"tokens": tokens})
    assert found["leading_tokens"] == dict.fromkeys(("memory", "disk"), len(tokens) // BLOCK * BLOCK)


def test_a_restart_keeps_prompts(server: VllmServer, model: Path, disk: Path, plain: VllmServer) -> None:
    """The first prompt after the end of all its processes is restored from disk, without a salt and with one."""
    tokens = prompt(8, 9 * BLOCK + 3)
    server.complete(tokens)
    server.complete(tokens, cache_salt="tenant")
    server.settle()
    server.kill()
    options = {"disk": str(disk / "blocks"), "disk_size": "2GiB", "audit": 0, "secret_file": str(disk / "secret")}
    with vllm_server(model, options, "--no-enable-prefix-caching", "--max-model-len", "1024") as again:
        assert again.complete(tokens) == plain.complete(tokens)
        assert again.restored("disk") == 9 * BLOCK
        again.complete(tokens, cache_salt="tenant")
        assert again.restored("disk") == 18 * BLOCK
        for frame in (disk / "blocks" / "blocks").rglob("*"):
            if frame.is_file():
                data = bytearray(frame.read_bytes())
                data[len(data) // 2] ^= 1
                frame.write_bytes(data)
        other = [*tokens[:-2], 7, 8]
        assert again.complete(other) == plain.complete(other)
        assert again.metric("keepgate_prefix_bad_frames_total", tier="disk") > 0


def test_a_prompt_is_restored_below_the_prefix_cache_of_vllm(model: Path, disk: Path, plain: VllmServer) -> None:
    """Its own cache is asked first, and the store for what comes after that, once."""
    tokens, longer = prompt(11, 8 * BLOCK + 3), prompt(11, 12 * BLOCK + 3)
    options = {"disk": str(disk / "beside"), "audit": 0}
    for start in range(2):
        with vllm_server(model, options) as server:
            assert server.complete(longer if start else tokens) == plain.complete(longer if start else tokens)
            assert server.restored() == 8 * BLOCK * start
            server.settle()
            assert server.complete(tokens) == plain.complete(tokens)
            assert server.restored() == 8 * BLOCK * start


def test_an_audited_prefix_is_what_is_computed(model: Path, disk: Path) -> None:
    """It is computed although it could be restored, and the same numbers come out."""
    tokens = prompt(12, 8 * BLOCK + 3)
    options = {"disk": str(disk / "audited"), "audit": 1}
    with vllm_server(model, options, "--no-enable-prefix-caching") as server:
        first = server.complete(tokens)
        server.settle()
        assert server.complete(tokens) == first
        server.settle()
        server.complete(prompt(13, 3))  # figures come with a step
        assert server.metric("keepgate_prefix_audited_total") == 1
        assert server.metric("keepgate_prefix_drifted_total") == server.restored() == 0


def test_tenants_share_a_public_prefix(disk: Path) -> None:
    """As the model's own chat template writes it; what follows it is each tenant's own."""
    public = disk / "public.json"
    system = {"role": "system", "content": "The rake is behind the shed, and the spade is beside it. " * 20}
    public.write_text(json.dumps({"messages": [system]}))
    options = {"memory": "256MiB", "audit": 0, "public_prefix": [str(public)]}
    with vllm_server(smollm2(), options, "--no-enable-prefix-caching") as server:

        def ask_as(tenant: str) -> float:
            before = server.restored()
            question = {"role": "user", "content": "Where is the rake? " * 20}
            chat = {"model": "m", "max_tokens": 1, "messages": [system, question], "cache_salt": tenant}
            server.post("/v1/chat/completions", chat)
            server.settle()
            return server.restored() - before

        assert ask_as("one") == 0
        shared = ask_as("other")
        assert 200 < shared < ask_as("other")


def test_ranks_have_a_part_each(tmp_path: Path) -> None:
    """Two tensor-parallel ranks store and restore their halves of each block."""
    model = random_llama(tmp_path / "model", layers=2, hidden=128, heads=4, kv_heads=2)
    tokens = prompt(9, 6 * BLOCK + 1)
    ranks = ("--tensor-parallel-size", "2", "--no-enable-prefix-caching")
    with vllm_server(model, {"memory": "64MiB", "audit": 0}, *ranks) as server:
        first = server.complete(tokens)
        server.settle()
        assert server.complete(tokens) == first
        for worker in "01":
            assert server.metric("keepgate_prefix_restored_tokens_total", worker=worker) == 6 * BLOCK
            assert server.metric("keepgate_prefix_blocks", worker=worker, tier="memory") == 6


def test_data_parallel_engines_have_stores_of_their_own(tmp_path: Path) -> None:
    """Each at a port of its own, with one folder: what one of them has stored, the other one restores."""
    model = random_llama(tmp_path / "model", layers=2, hidden=64, heads=2, kv_heads=2)
    port = free_port()
    options = {"disk": str(tmp_path / "blocks"), "audit": 0, "address": f"http://127.0.0.1:{port}"}
    tokens = prompt(10, 6 * BLOCK + 1)
    with vllm_server(model, options, "--data-parallel-size", "2", "--no-enable-prefix-caching") as server:
        assert [ask(port + rank, "/v1/prefix")["worker"] for rank in range(2)] == [0, 1]
        first = server.complete(tokens, headers={"X-data-parallel-rank": "0"})
        server.settle()
        assert server.complete(tokens, headers={"X-data-parallel-rank": "1"}) == first
        assert server.restored("disk") == 6 * BLOCK


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memmory": "1GiB"}, "memmory is no option of this connector; did you mean memory?"),
        ({}, "there is no place for blocks; expected memory, disk, mooncake or index"),
    ],
)
def test_a_wrong_option_is_named(tmp_path: Path, options: dict[str, str], message: str) -> None:
    """And the server does not start."""
    model = random_llama(tmp_path / "model", layers=1, hidden=64, heads=2, kv_heads=2)
    with pytest.raises(RuntimeError, match="ended") as error, vllm_server(model, options):
        pass
    assert message in str(error.value)


def test_a_hybrid_model_is_refused(tmp_path: Path) -> None:
    """The server does not start, and says which layers are the reason."""
    model = random_gemma3(tmp_path / "model")
    with pytest.raises(RuntimeError, match="ended") as error, vllm_server(model, {"memory": "64MiB"}):
        pass
    assert "expected full attention in every layer" in str(error.value)


def seeds(count: int) -> Iterator[tuple[int, random.Random]]:
    for seed in range(100, 100 + count):
        yield seed, random.Random(seed)  # noqa: S311


def ask(port: int, path: str, body: dict[str, object] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(f"http://127.0.0.1:{port}{path}", data), timeout=10.0) as reply:
        return json.load(reply)
