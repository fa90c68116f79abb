"""/tokenize, /detokenize, /v1/model/info, priorities and deadlines over HTTP."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from backend.engine.model_runner import BLOCK_SIZE
from backend.model import ServedModel
from backend.models.generation_config import SamplingDefaults
from tests.backend.api.test_server import QUESTION, all_free, until
from tests.backend.api.test_tools import TOOLS
from tests.backend.chat import tool_templates
from tests.backend.conftest import CHAT, COMPLETIONS, EMBEDDINGS, MODEL, Served, StartServer


async def call(served: Served, path: str, **body: Any) -> dict[str, Any]:
    async with served.client.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        answer: dict[str, Any] = await response.json()
        return answer


async def test_detokenize_inverts_tokenize(server: Served) -> None:
    """`/detokenize` restores the text that `/tokenize` was given, special tokens included."""
    text = "Hé, 世界! <|im_end|>\n"
    answer = await call(server, "/tokenize", prompt=text, model=MODEL, return_token_strs=True)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 2048
    assert "<|im_end|>" in answer["token_strs"]
    assert await call(server, "/detokenize", tokens=answer["tokens"]) == {"prompt": text}
    assert (await call(server, "/tokenize", prompt=""))["tokens"] == []
    assert await call(server, "/detokenize", tokens=[]) == {"prompt": ""}


async def test_token_texts_are_one_for_each_token(server: Served, model: ServedModel) -> None:
    """`/tokenize` returns a text for each token, with a replacement character where a token is part of a character."""
    answer = await call(server, "/tokenize", prompt="a  b世<|im_end|>c", return_token_strs=True)
    assert len(answer["token_strs"]) == answer["count"]
    shown = [model.tokenizer.token_bytes.shown(token) for token in answer["tokens"]]
    assert b"".join(shown).decode() == "a  b世<|im_end|>c"
    assert answer["token_strs"] == [content.decode("utf-8", "replace") for content in shown]


async def test_the_event_loop_runs_while_token_texts_are_made(server: Served) -> None:
    """The event loop serves other tasks while the texts of very many tokens are made."""
    body = {"prompt": "a b " * 75_000, "return_token_strs": True}
    turns, began, longest = 0, time.perf_counter(), 0.0
    last = began
    asked = asyncio.create_task(_received(server, body))
    while not asked.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        turns, longest, last = turns + 1, max(longest, now - last), now
    assert await asked > 1_000_000
    assert turns > 20
    assert longest < (last - began) / 2, "the time in which nothing else was done, however busy the machine is"


async def _received(served: Served, body: dict[str, Any]) -> int:
    async with served.client.post("/tokenize", json=body) as response:
        assert response.status == 200
        return len(await response.read())


async def test_the_tokens_of_a_chat(server: Served) -> None:
    """`/tokenize` of messages gives the tokens that a chat counts, and fewer without the generation prompt."""
    answer = await call(server, "/tokenize", messages=QUESTION)
    usage = (await server.post(CHAT, messages=QUESTION, max_tokens=1))["usage"]
    assert answer["count"] == usage["prompt_tokens"]
    assert answer["token_strs"] is None
    closed = await call(server, "/tokenize", messages=QUESTION, add_generation_prompt=False)
    assert answer["tokens"][: closed["count"]] == closed["tokens"]
    text = (await call(server, "/detokenize", tokens=answer["tokens"][closed["count"] :]))["prompt"]
    assert text == "<|im_start|>assistant\n"


async def test_the_tokens_of_a_chat_that_goes_on(server: Served) -> None:
    """With `continue_final_message` they are those of the chat that continues its last message, which stays open."""
    begun = [*QUESTION, {"role": "assistant", "content": "Sure,"}]
    fields: dict[str, Any] = {"messages": begun, "add_generation_prompt": False, "continue_final_message": True}
    answer = await call(server, "/tokenize", **fields)
    assert answer["count"] == (await server.post(CHAT, **fields, max_tokens=1))["usage"]["prompt_tokens"]
    assert (await call(server, "/detokenize", tokens=answer["tokens"]))["prompt"].endswith("Sure,")
    async with server.client.post("/tokenize", json={**fields, "messages": QUESTION}) as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, "continue_final_message")


async def test_tools_are_tokens_too(start_server: StartServer) -> None:
    """`/tokenize` counts tools where the chat template has a place for them."""
    served = await start_server(template=tool_templates.HERMES)
    without = await call(served, "/tokenize", messages=QUESTION)
    with_tools = await call(served, "/tokenize", messages=QUESTION, tools=TOOLS)
    assert with_tools["count"] > without["count"]


async def test_model_info(server: Served, model: ServedModel) -> None:
    """The model info says what computes, how many sequences fit, and how much KV memory is in use."""
    async with server.client.get("/v1/model/info") as response:
        info = await response.json()
    assert info["id"] == MODEL
    assert info["architecture"] == "llama"
    assert info["runner"] == model.runner.name
    assert info["deterministic"] is model.runner.deterministic
    assert info["deterministic_because"]
    assert info["weights_precision"] == info["kv_precision"] == model.runner.weights_precision
    assert info["kv_bytes_per_token"] == 2 * 30 * 3 * 64 * (2 if info["kv_precision"] == "float16" else 4)
    blocks = info["kv_blocks"]
    assert blocks["total"] == blocks["free"] == model.runner.num_blocks
    assert blocks["held"] == blocks["cached"] == 0
    assert blocks["tokens_per_block"] == BLOCK_SIZE
    assert info["feasible_batch"]["2048"] == min(8, model.runner.num_blocks * BLOCK_SIZE // 2048)
    assert info["feasible_batch"]["512"] == 8, "the batch's own limit holds too"
    await server.text("one two three four five six seven eight nine ten " * 4, max_tokens=2)
    await until(server, lambda: all_free(server))
    async with server.client.get("/v1/model/info") as response:
        blocks = (await response.json())["kv_blocks"]
    assert blocks["cached"] > 0
    assert blocks["free"] == blocks["total"]


async def test_a_callers_deadline_is_a_504(server: Served) -> None:
    """An answer that exceeds the caller's deadline is a 504, and one within it is an answer."""
    body = {"model": MODEL, "prompt": "1, 2,", "max_tokens": 1900, "ignore_eos": True}
    short = {"x-request-timeout": "0.05"}
    async with server.client.post(COMPLETIONS, json=body, headers=short) as response:
        assert response.status == 504
        assert (await response.json())["error"]["code"] == "deadline_exceeded"
    async with server.client.post(
        COMPLETIONS, json={**body, "max_tokens": 2}, headers={"x-request-timeout": "60"}
    ) as response:
        assert response.status == 200
    async with server.client.post(
        EMBEDDINGS, json={"model": MODEL, "input": ["word " * 500] * 8}, headers={"x-request-timeout": "0.001"}
    ) as response:
        assert response.status == 504
    await until(server, lambda: all_free(server))


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf", "100000"])
async def test_a_wrong_deadline_is_named(server: Served, value: str) -> None:
    """A deadline that is not a sensible number of seconds is a 400 that names the header."""
    body = {"model": MODEL, "prompt": "1, 2,", "max_tokens": 1}
    async with server.client.post(COMPLETIONS, json=body, headers={"x-request-timeout": value}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "x-request-timeout"


async def test_priority_reaches_the_engine(start_server: StartServer) -> None:
    """With room for one sequence, the more urgent of two waiting requests is answered first."""
    served = await start_server(max_batch=1, max_waiting=8)
    order: list[str] = []

    async def ask(name: str, priority: int) -> None:
        await served.text("1, 2, 3,", max_tokens=4, temperature=0, priority=priority)
        order.append(name)

    running = asyncio.create_task(served.text("a b c", max_tokens=60, ignore_eos=True))
    await until(served, lambda: served.state.engine.engine.stats().running == 1)
    waiting = [asyncio.create_task(ask("late", 5))]
    await until(served, lambda: served.state.engine.engine.stats().waiting == 1)
    waiting.append(asyncio.create_task(ask("urgent", -5)))
    await asyncio.gather(running, *waiting)
    assert order == ["urgent", "late"]


async def test_what_the_model_recommends_holds_where_a_request_says_nothing(start_server: StartServer) -> None:
    """Chats and completions without a temperature are sampled as the model's authors recommend; one that is given
    counts. `/v1/model/info` tells what holds.
    """
    served = await start_server(sampling=SamplingDefaults(temperature=0.0))
    asked = {"messages": [{"role": "user", "content": "Tell me about rivers."}], "max_tokens": 12}

    async def chat(**fields: Any) -> str:
        answer = await served.post(CHAT, **asked, **fields)
        return str(answer["choices"][0]["message"]["content"])

    greedy = await chat(temperature=0)
    assert [await chat(seed=seed) for seed in range(3)] == [greedy] * 3
    assert len({await chat(seed=seed, temperature=1.5) for seed in range(3)}) > 1
    prompt = await served.text("The river", max_tokens=12, temperature=0)
    assert [await served.text("The river", max_tokens=12, seed=seed) for seed in range(3)] == [prompt] * 3
    async with served.client.get("/v1/model/info") as response:
        told = (await response.json())["sampling_defaults"]
    assert told == {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


async def test_the_bundled_model_is_sampled_as_its_authors_do(server: Served) -> None:
    """A client that sets nothing gets sensible answers of so small a model."""
    async with server.client.get("/v1/model/info") as response:
        told = (await response.json())["sampling_defaults"]
    assert (told["temperature"], told["top_p"]) == (0.2, 0.9)
