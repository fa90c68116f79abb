"""The server over HTTP, with the real model and a real client."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import ClientSession

from backend.engine.model_runner import StepInput, StepOutput
from backend.model import ServedModel
from tests.backend.conftest import CHAT, COMPLETIONS, MODEL, Served, StartServer

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
COUNTING = "1, 2, 3, 4,"


async def events(served: Served, path: str, headers: dict[str, str] | None = None, **body: Any) -> list[Any]:
    """The parsed events of a stream; the last one is the text [DONE] if the stream is whole."""
    async with served.client.post(path, json={"model": MODEL, "stream": True, **body}, headers=headers) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        return parse(await response.text())


def parse(stream: str) -> list[Any]:
    blocks = stream.split("\n\n")
    assert blocks.pop() == ""
    data = [block.removeprefix("data: ") for block in blocks]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


async def until(served: Served, condition: Callable[[], bool]) -> None:
    """Waits until the engine's thread has reached a state."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the engine's thread sets no event for a test
            await asyncio.sleep(0.005)


def all_free(served: Served) -> bool:
    engine = served.state.engine
    return engine.in_flight == 0 and engine.engine.pool.num_free == served.state.model.runner.num_blocks


async def test_a_chat_answer_has_every_field(server: Served) -> None:
    """A chat answer has each field of OpenAI's."""
    answer = await server.post(CHAT, messages=QUESTION, temperature=0, max_tokens=30)
    assert set(answer) == {"id", "object", "created", "model", "choices", "usage", "system_fingerprint"}
    assert (answer["object"], answer["model"]) == ("chat.completion", MODEL)
    (choice,) = answer["choices"]
    assert set(choice) == {"index", "message", "logprobs", "finish_reason"}
    assert choice["message"].keys() == {"role", "content", "refusal"}
    assert "Paris" in choice["message"]["content"]
    assert (choice["finish_reason"], choice["logprobs"], choice["message"]["refusal"]) == ("stop", None, None)
    usage = answer["usage"]
    assert usage["prompt_tokens"] == 37, "the template's tokens count"
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_stream_has_the_text_of_the_whole_answer(server: Served) -> None:
    """A stream has the role, the pieces of the whole answer, its finish reason and [DONE], and no usage."""
    body: dict[str, Any] = {"messages": QUESTION, "temperature": 0, "max_tokens": 30}
    whole = await server.post(CHAT, **body)
    *chunks, done = await events(server, CHAT, **body)
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    assert text == whole["choices"][0]["message"]["content"]
    assert len({c["id"] for c in chunks}) == 1
    assert all(c["object"] == "chat.completion.chunk" and "usage" not in c for c in chunks)


async def test_include_usage(server: Served) -> None:
    """With `include_usage` a last chunk without choices carries the usage, and all others have a null."""
    body: dict[str, Any] = {"messages": QUESTION, "temperature": 0, "max_tokens": 3}
    whole = await server.post(CHAT, **body)
    *chunks, last, done = await events(server, CHAT, **body, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"].pop("prompt_tokens_details")["cached_tokens"] == 32, "the whole blocks that were computed"
    assert whole["usage"].pop("prompt_tokens_details")["cached_tokens"] == 0
    assert last["usage"] == whole["usage"]


async def test_several_choices(server: Served) -> None:
    """With `n` the choices differ, stream with their index, and the prompt counts once."""
    body: dict[str, Any] = {"messages": QUESTION, "seed": 3, "temperature": 1.5, "max_tokens": 8, "n": 3}
    whole = await server.post(CHAT, **body)
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert whole["usage"]["prompt_tokens"] == 37
    *chunks, _ = await events(server, CHAT, **body)
    streamed = ["", "", ""]
    for chunk in chunks:
        choice = chunk["choices"][0]
        streamed[choice["index"]] += choice["delta"].get("content", "")
    assert streamed == texts


async def test_a_seed_gives_the_same_answer_alone_and_in_a_batch(server: Served) -> None:
    """A seed gives the same answer alone and beside seven others, and without a seed the answers differ."""
    body: dict[str, Any] = {"prompt": "My favourite", "temperature": 1.3, "max_tokens": 10}
    alone = await server.text(**body, seed=11)
    crowd = await asyncio.gather(*(server.text(**body, seed=seed) for seed in range(8, 15)))
    assert crowd[3] == alone
    assert len(set(crowd)) > 1
    assert len({await server.text(**body) for _ in range(4)}) > 1


async def test_chat_logprobs(server: Served) -> None:
    """Chat logprobs have text, bytes and alternatives for each token, and a stream has the same ones."""
    body: dict[str, Any] = {"messages": QUESTION, "temperature": 0, "max_tokens": 4, "logprobs": True}
    whole = await server.post(CHAT, **body, top_logprobs=2)
    entries = whole["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == whole["choices"][0]["message"]["content"]
    for entry in entries:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert entry["logprob"] <= 0
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert len(entry["top_logprobs"]) == 2
    *chunks, _ = await events(server, CHAT, **body, top_logprobs=2)
    streamed = [entry for c in chunks for entry in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == entries


async def test_completions_take_every_kind_of_prompt(server: Served, model: ServedModel) -> None:
    """Texts, token ids and lists of them give the same completions in the same order."""
    texts = [COUNTING, "The capital of France is"]
    ids = [model.tokenizer.fast.encode(text).ids for text in texts]
    answers = []
    for prompt in (texts, ids):
        answer = await server.post(COMPLETIONS, prompt=prompt, temperature=0, max_tokens=4)
        answers.append([(choice["index"], choice["text"]) for choice in answer["choices"]])
        assert answer["usage"]["prompt_tokens"] == len(ids[0]) + len(ids[1])
        assert answer["object"] == "text_completion"
    assert answers[0] == answers[1]
    assert await server.text(texts[0], temperature=0, max_tokens=4) == answers[0][0][1]
    single = await server.post(COMPLETIONS, prompt=ids[0], temperature=0, max_tokens=4)
    assert single["choices"][0]["text"] == answers[0][0][1]


async def test_completions_default_to_sixteen_tokens(server: Served) -> None:
    """A completion without `max_tokens` has 16 tokens, as at OpenAI."""
    answer = await server.post(COMPLETIONS, prompt=COUNTING, temperature=0)
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_echo_with_logprobs_scores_the_prompt(server: Served, model: ServedModel) -> None:
    """`echo` with `max_tokens=0` scores the prompt, and a token scores as when it was generated."""
    answer = await server.post(COMPLETIONS, prompt=COUNTING, max_tokens=0, echo=True, logprobs=1, temperature=0)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (COUNTING, "length")
    scores = choice["logprobs"]
    assert "".join(scores["tokens"]) == COUNTING
    assert scores["token_logprobs"][0] is None
    assert scores["top_logprobs"][0] is None
    assert all(value <= 0 for value in scores["token_logprobs"][1:])
    assert scores["text_offset"] == [sum(map(len, scores["tokens"][:i])) for i in range(len(scores["tokens"]))]
    assert answer["usage"]["completion_tokens"] == 0
    # A token that is scored as part of a prompt scores as it did when it was generated.
    generated = await server.post(COMPLETIONS, prompt=COUNTING, max_tokens=1, echo=True, logprobs=0, temperature=0)
    whole = generated["choices"][0]
    scored = await server.post(COMPLETIONS, prompt=whole["text"], max_tokens=0, echo=True, logprobs=0)
    assert scored["choices"][0]["logprobs"]["token_logprobs"] == whole["logprobs"]["token_logprobs"]


async def test_the_sampled_token_is_among_the_likeliest(server: Served) -> None:
    """A completion's `top_logprobs` also have the token that was sampled, as at OpenAI: one more at most."""
    fields: dict[str, Any] = {"prompt": COUNTING, "max_tokens": 12, "temperature": 2.0, "seed": 1}
    for logprobs in (0, 1):
        scores = (await server.post(COMPLETIONS, **fields, logprobs=logprobs))["choices"][0]["logprobs"]
        rows = list(zip(scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], strict=True))
        assert all(top[token] == logprob for token, logprob, top in rows)
        assert {len(top) for _, _, top in rows} <= {max(logprobs, 1), logprobs + 1}
    assert any(len(top) == 2 for _, _, top in rows)


async def test_streamed_completions(server: Served) -> None:
    """A streamed completion begins with the echo, joins to the whole text, and its last chunk has the finish reason."""
    body: dict[str, Any] = {"prompt": COUNTING, "temperature": 0, "max_tokens": 6, "echo": True}
    whole = await server.text(**body)
    *chunks, done = await events(server, COMPLETIONS, **body)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
    assert whole.startswith(COUNTING)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


async def test_equivalent_messages_give_the_same_answer(server: Served) -> None:
    """Text parts are text, a developer is a system, and an assistant's content may be null."""
    plain = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "42", "tool_call_id": "x"},
        {"role": "user", "content": "one\ntwo"},
    ]
    other = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "refusal": None, "annotations": []},
        {"role": "tool", "content": "42", "tool_call_id": "x"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    ]
    first = await server.post(CHAT, messages=plain, temperature=0, max_tokens=6)
    second = await server.post(CHAT, messages=other, temperature=0, max_completion_tokens=6)
    assert first["choices"] == second["choices"]
    assert first["usage"]["total_tokens"] == second["usage"]["total_tokens"]


async def test_stop_and_logit_bias_over_http(server: Served, model: ServedModel) -> None:
    """A stop string ends the answer before it, and a bias of -100 forbids a token."""
    full = await server.text(COUNTING, temperature=0, max_tokens=12)
    assert await server.text(COUNTING, temperature=0, max_tokens=12, stop=[" 7"]) == full[: full.index(" 7")]
    five = model.tokenizer.fast.encode("5").ids[0]
    assert "5" not in await server.text(COUNTING, temperature=0, max_tokens=3, logit_bias={str(five): -100})


async def test_models_and_info(server: Served) -> None:
    """The server lists its model, returns it by name, and describes what computes it."""
    async with server.client.get("/v1/models") as response:
        listed = await response.json()
    assert [entry["id"] for entry in listed["data"]] == [MODEL]
    async with server.client.get(f"/v1/models/{MODEL}") as response:
        assert await response.json() == listed["data"][0]
    async with server.client.get("/v1/model/info") as response:
        info = await response.json()
    assert info["deterministic"] is server.state.model.runner.deterministic
    assert info["max_context"] == 2048


async def test_health_ready_and_metrics(server: Served) -> None:
    """The probes answer 200, and the metrics count tokens and requests."""
    await server.post(COMPLETIONS, prompt=COUNTING, max_tokens=3, temperature=0)
    for path in ("/health", "/ready"):
        async with server.client.get(path) as response:
            assert response.status == 200
    async with server.client.get("/metrics") as response:
        exposition = await response.text()
    lines = dict(line.rsplit(" ", 1) for line in exposition.splitlines() if not line.startswith("#"))
    assert float(lines["keepgate_backend_generated_tokens_total"]) == 3
    assert float(lines["keepgate_backend_time_to_first_token_seconds_count"]) == 1
    assert float(lines['keepgate_backend_requests_total{endpoint="/v1/completions",status="200"}']) == 1


async def test_the_engine_says_what_it_does(server: Served) -> None:
    """`/engine` has the batch, KV blocks and rates while an answer is computed; without a prefix store it says so."""

    async def status() -> Any:
        async with server.client.get("/engine") as response:
            assert response.status == 200
            return await response.json()

    idle = await status()
    total = server.state.model.runner.num_blocks
    assert (idle["object"], idle["model"], idle["alive"]) == ("keepgate.engine", MODEL, True)
    assert idle["batch"] == {"running": 0, "waiting": 0, "max_batch": 8, "fill": 0.0, "padding": 0.0}
    assert (idle["kv_blocks"]["total"], idle["kv_blocks"]["held"]) == (total, 0)
    per_token = server.state.model.runner.kv_bytes_per_token
    assert idle["kv_blocks"]["bytes_per_block"] == idle["kv_blocks"]["tokens_per_block"] * per_token > 0
    assert idle["tokens"] == {"prompt": 0, "generated": 0, "prefill_per_second": 0.0, "decode_per_second": 0.0}
    assert idle["prefix_store"] is None

    body = {"model": MODEL, "prompt": COUNTING, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    async with server.client.post(COMPLETIONS, json=body) as response:
        await response.content.readuntil(b"\n\n")
        busy = await status()
    assert (busy["batch"]["running"], busy["batch"]["fill"]) == (1, 1 / 8)
    assert 0 < busy["kv_blocks"]["held"] < total
    prompt = await server.post("/tokenize", prompt=COUNTING)
    assert busy["tokens"]["prompt"] == prompt["count"] > 0
    assert busy["tokens"]["prefill_per_second"] == prompt["count"] / 10
    assert busy["tokens"]["decode_per_second"] > 0
    assert busy["prefix_cache"] == {"tokens_asked": prompt["count"], "tokens_found": 0}


async def test_a_client_that_leaves_frees_its_blocks(server: Served) -> None:
    """A client that disconnects during a stream, or while it waits for a whole answer, frees its blocks."""
    body = {"model": MODEL, "prompt": COUNTING, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    async with server.client.post(COMPLETIONS, json=body) as response:
        await response.content.readuntil(b"\n\n")
        assert not all_free(server)
    await until(server, lambda: all_free(server))
    async with ClientSession(server.url) as other:
        waiting = asyncio.create_task(other.post(COMPLETIONS, json={**body, "stream": False}))
        await until(server, lambda: server.state.engine.engine.pool.num_free < server.state.model.runner.num_blocks)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    await until(server, lambda: all_free(server))
    assert server.state.engine.engine.stats().generated_tokens < 1500


async def test_a_request_joins_a_running_batch(server: Served) -> None:
    """A short answer is complete while a long one is still being streamed."""
    body = {"model": MODEL, "prompt": COUNTING, "max_tokens": 1000, "ignore_eos": True, "stream": True}
    async with server.client.post(COMPLETIONS, json=body) as response:
        await response.content.readuntil(b"\n\n")
        assert len(await server.text(COUNTING, temperature=0, max_tokens=5)) > 3
        assert server.state.engine.in_flight == 1
    await until(server, lambda: all_free(server))


async def test_a_full_queue_is_a_429(start_server: StartServer) -> None:
    """A full queue is a 429 with Retry-After, until there is room again."""
    served = await start_server(max_batch=1, max_waiting=1)
    body = {"model": MODEL, "prompt": COUNTING, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    async with served.client.post(COMPLETIONS, json=body) as running:
        await running.content.readuntil(b"\n\n")
        queued = asyncio.create_task(served.text(COUNTING, max_tokens=1))
        await until(served, lambda: served.state.engine.in_flight == 2)
        async with served.client.post(COMPLETIONS, json={**body, "stream": False}) as refused:
            assert refused.status == 429
            assert int(refused.headers["Retry-After"]) >= 1
            assert (await refused.json())["error"]["code"] == "queue_full"
    assert await queued
    await until(served, lambda: all_free(served))


class FailingRunner:
    """The real runner, whose steps fail while ``fails``."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.fails = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, step: StepInput) -> StepOutput:
        if self.fails:
            raise RuntimeError("the device is gone")
        result: StepOutput = self._runner.run(step)
        return result


async def test_a_failure_in_the_middle_is_an_error_event(
    start_server: StartServer, model: ServedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """A failure during a stream is an error event without [DONE], and one before the first token is a 500."""
    runner = FailingRunner(model.runner)
    served = await start_server(runner=runner)
    secret = "a prompt that nobody may log"
    body = {"model": MODEL, "prompt": secret, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    async with served.client.post(COMPLETIONS, json=body) as response:
        await response.content.readuntil(b"\n\n")
        runner.fails = True
        rest = parse((await response.read()).decode())
    assert rest[-1]["error"]["code"] == "generation_failed"
    assert all(event["choices"][0]["finish_reason"] is None for event in rest[:-1])
    for stream in (True, False):
        async with served.client.post(COMPLETIONS, json={**body, "stream": stream}) as response:
            assert response.status == 500
            assert (await response.json())["error"]["type"] == "server_error"
    assert "the device is gone" in caplog.text
    assert secret not in caplog.text
    runner.fails = False
    assert await served.text(COUNTING, temperature=0, max_tokens=3)
    await until(served, lambda: all_free(served))


async def test_an_engine_that_cannot_go_on_ends_every_answer(
    start_server: StartServer, model: ServedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If failed requests cannot be removed, the engine ends them all the same, and the probes are 503."""
    runner = FailingRunner(model.runner)
    served = await start_server(runner=runner)

    def broken(sequence: object) -> None:
        raise RuntimeError("the books are wrong")

    monkeypatch.setattr(served.state.engine.engine.scheduler, "remove", broken)
    body = {"model": MODEL, "prompt": COUNTING, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    async with served.client.post(COMPLETIONS, json=body) as response, asyncio.timeout(20):
        await response.content.readuntil(b"\n\n")
        waiting = asyncio.create_task(served.client.post(COMPLETIONS, json={**body, "stream": False}))
        await until(served, lambda: served.state.engine.in_flight == 2)
        runner.fails = True
        assert parse((await response.read()).decode())[-1]["error"]["type"] == "server_error"
        assert (await waiting).status in (500, 503)
    assert "the books are wrong" in caplog.text
    assert served.state.engine.in_flight == 0
    for path in ("/ready", "/health"):
        async with served.client.get(path) as response:
            assert response.status == 503
    async with served.client.post(COMPLETIONS, json=body) as response:
        assert response.status == 503


async def test_stopping_ends_running_answers_with_an_error(start_server: StartServer) -> None:
    """Stopping the engine ends streams with an error event, and later requests and the probe get a 503."""
    served = await start_server()
    body = {"model": MODEL, "prompt": COUNTING, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    async with served.client.post(COMPLETIONS, json=body) as response:
        await response.content.readuntil(b"\n\n")
        await served.state.engine.stop()
        rest = parse((await response.read()).decode())
    assert rest[-1]["error"]["code"] == "unavailable"
    async with served.client.post(COMPLETIONS, json=body) as response:
        assert response.status == 503
    async with served.client.get("/ready") as response:
        assert response.status == 503


async def test_a_client_that_does_not_read_is_disconnected(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that does not read its stream is disconnected after a while, and its sequences end."""
    monkeypatch.setattr("backend.api.streaming.SEND_TIMEOUT_SECONDS", 0.2)
    served = await start_server(send_buffer=4096)
    host, port = served.url.removeprefix("http://").split(":")
    # Small buffers, and log-probabilities that make every token some kilobytes.
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    body = {"model": MODEL, "prompt": COUNTING, "max_tokens": 1900, "ignore_eos": True, "stream": True}
    data = json.dumps(body | {"logprobs": 20, "n": 8}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    await asyncio.get_running_loop().sock_sendall(sock, head + data)
    await until(served, lambda: served.state.engine.in_flight == 8)
    await until(served, lambda: all_free(served))
    assert served.state.engine.engine.stats().generated_tokens < 8 * 1900
    sock.close()
