"""`keepgate serve` without upstreams: the in-repo backend on the real model."""

import os
import signal
from pathlib import Path
from typing import Any

from tests.gateway.client import CHAT, Answer, assemble
from tests.gateway.processes.serving import DEADLINE, Serving, cpu_seconds, processes, serving, until_gone
from tests.waiting import until

MODEL = "SmolLM2-135M-Instruct"
GREETING: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Say hello."}],
    "temperature": 0,
    "max_tokens": 12,
}


async def ask(gateway: Serving, **fields: Any) -> Answer:
    return await gateway.send("POST", CHAT, {**GREETING, **fields})


async def until_kept(gateway: Serving) -> None:
    """Return when the shared store has an answer; the write follows the answer."""

    async def is_kept() -> bool:
        return bool((await gateway.stats())["layers"]["exact"]["tiers"]["redis"]["entries"])

    await until(is_kept, DEADLINE, every=0.02)


async def must_wait(gateway: Serving, seed: int) -> None:
    """A miss gets 503 with Retry-After."""
    refused = await ask(gateway, seed=seed)
    assert (refused.status, refused.error["code"]) == (503, "no_upstream")
    assert int(refused.headers["Retry-After"]) > 0


async def test_a_real_model_answers_and_its_answers_outlive_it(tmp_path: Path) -> None:
    """An answer of the model is a hit in either shape, without the backend and after a restart."""
    async with serving(tmp_path, "--model", "default") as gateway:
        assert f"Ready: {MODEL} answers at {gateway.url}/v1" in gateway.said
        assert [model["id"] for model in (await gateway.send("GET", "/v1/models")).json["data"]] == [MODEL]
        computed = await ask(gateway)
        assert (computed.status, computed.cache) == (200, "miss")
        assert computed.text.strip()
        usage = computed.json["usage"]
        assert 0 < usage["completion_tokens"] <= 12
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        again = await ask(gateway)
        assert (again.cache, again.json) == ("hit", computed.json)
        streamed = await ask(gateway, stream=True, stream_options={"include_usage": True})
        assert streamed.cache == "hit"
        assert assemble(streamed.chunks)["choices"] == computed.json["choices"]
        saved = (await gateway.stats())["saved"]
        assert saved["completion_tokens"] == 2 * usage["completion_tokens"]
        assert saved["seconds"] > 0

        os.kill(gateway.child("-m backend"), signal.SIGKILL)
        await gateway.until_said("the backend was killed by signal 9; starting it again in 1 s")
        assert (await ask(gateway)).json == computed.json
        await must_wait(gateway, seed=1)
        assert (await gateway.send("GET", "/ready")).status == 503
        await gateway.until_said("Ready:", times=2)
        assert (await ask(gateway, seed=1)).cache == "miss"

        children = gateway.children()
        assert len(children) == 2
        assert await gateway.signal(signal.SIGTERM) == 0
        assert not processes().keys() & children.keys()
    async with serving(tmp_path, ready=False) as gateway:
        await gateway.until_said("in-repo backend, starting now")
        gateway.find_url()
        assert (await ask(gateway)).json == computed.json
        await must_wait(gateway, seed=2)
        await gateway.until_ready()
        # Some 8 s where nothing else runs. CPU seconds do not count other load, but its caches and clock do.
        assert sum(cpu_seconds(pid) for pid in (gateway.pid, *gateway.children())) < 25
        assert (await gateway.send("GET", "/ready")).status == 200


async def test_every_worker_knows_when_the_backend_is_there(tmp_path: Path) -> None:
    """Each worker knows at Ready that the backend answers, and serves cached answers after it was killed."""
    async with serving(tmp_path, "--workers", "2") as gateway:
        for seed in range(10):
            assert (await ask(gateway, max_tokens=1, seed=seed)).status == 200
        computed = await ask(gateway)
        await until_kept(gateway)
        os.kill(gateway.child("-m backend"), signal.SIGKILL)
        await gateway.until_said("the backend was killed by signal 9")
        for seed in range(100, 110):
            await must_wait(gateway, seed)
            assert (await ask(gateway)).json == computed.json
        await until(lambda: len(gateway.children()) == 3, DEADLINE)
        children = gateway.children()
        assert await gateway.signal(signal.SIGKILL) == -signal.SIGKILL
        await until_gone(*children)


async def test_a_missing_model_is_reported_in_one_line(tmp_path: Path) -> None:
    """A missing model ends the gateway with status 1 and the backend's own line."""
    async with serving(tmp_path, "--model", str(tmp_path / "no-model"), ready=False) as gateway:
        assert await gateway.ended() == 1
        (reason,) = (line for line in gateway.lines if "no-model" in line)
        assert reason.startswith("keepgate backend: model ")
        assert gateway.lines[-1] == reason
        assert "Traceback" not in gateway.said


async def test_the_backend_gets_its_options_from_every_source(tmp_path: Path) -> None:
    """Options of the command line, the environment and the file reach the backend and change its answers."""
    file = tmp_path / "keepgate.yaml"
    file.write_text("backend: {max_batch: 3, max_context: 512, batching: dynamic}\n")
    words = ("--config", str(file), "--kv-memory", "8MiB")
    async with serving(tmp_path, *words, KEEPGATE_BACKEND_QUANTIZATION="int4", KEEPGATE_BACKEND_THREADS="1") as gateway:
        command = gateway.children()[gateway.child("-m backend")]
        assert "--batching=dynamic" in command
        assert "--threads=1" in command
        info = (await gateway.send("GET", "/v1/model/info")).json
        assert info["max_context"] <= 512
        assert max(info["feasible_batch"].values()) <= 3
        assert info["kv_blocks"]["total"] * 16 * info["kv_bytes_per_token"] <= 8 * 2**20
        assert info["weights_precision"] == "int4"
        assert (await ask(gateway)).status == 200


async def test_an_option_that_the_model_refuses_is_the_backends_own_line(tmp_path: Path) -> None:
    """An option that the model refuses ends the gateway with status 1 and the backend's own line."""
    template = tmp_path / "broken.jinja"
    template.write_text("{% for m in messages %}")
    for variables, message in (
        ({"KEEPGATE_BACKEND_CHAT_TEMPLATE": str(template)}, f"--chat-template: {template}: the chat template does not"),
        ({"KEEPGATE_BACKEND_KV_MEMORY": "1KiB"}, "--kv-memory: 1024 bytes hold no KV block"),
    ):
        async with serving(tmp_path, ready=False, **variables) as gateway:
            assert await gateway.ended() == 1
            assert gateway.lines[-1].startswith(f"keepgate backend: {message}")
            assert "Traceback" not in gateway.said


async def test_a_wrong_option_starts_nothing(tmp_path: Path) -> None:
    """A wrong option is named in one line before a child starts."""
    async with serving(tmp_path, "--max-batch", "many", ready=False) as gateway:
        assert await gateway.ended() == 2
        assert gateway.lines == [
            "keepgate: command line: --max-batch: expected a whole number, 1 or more and below 2147483648, got 'many'"
        ]
    assert not (tmp_path / "valkey").exists()


async def test_an_older_answer_makes_the_engine_take_fewer_steps(tmp_path: Path) -> None:
    """A right prediction of the gateway's is verified by the engine, changes no token, and is in no client's usage."""
    async with serving(tmp_path) as gateway:
        asked = {**GREETING, "max_tokens": 60}
        first = await gateway.send("POST", CHAT, asked)
        again = await gateway.send("POST", CHAT, asked, Cache_Control="no-cache")
        assert (first.cache, again.cache) == ("miss", "bypass")
        assert again.json["choices"] == first.json["choices"]
        for answer in (first, again):
            details = answer.json["usage"]["completion_tokens_details"]
            assert details["accepted_prediction_tokens"] == details["rejected_prediction_tokens"] == 0
        latest, earlier = (await gateway.send("GET", "/v1/requests")).json["data"][:2]
        assert latest["prediction"] == "stale"
        assert latest["completion_tokens"] == first.json["usage"]["completion_tokens"]
        assert "prediction" not in earlier
        sources = (await gateway.stats())["predictions"]["sources"]
        assert sources["stale"]["answers"] == 1
