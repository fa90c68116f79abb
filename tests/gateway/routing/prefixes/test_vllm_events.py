"""What vLLM 0.32.0 has published, on 2026-11-25, with `--block-size 32` and a replay endpoint: `vllm_events.json`.

`steps` are chats in their order: the prompt's tokens as `POST /tokenize` told them, and the messages of the chat. The
pool of `llama` has 8 blocks, `gemma3` has sliding windows in three of its four groups of layers. `replay` is what the
replay endpoint of `llama` sent for the messages from the second on.
"""

import json
from base64 import b64decode
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import zmq.asyncio

from gateway.http.background_tasks import background_tasks
from gateway.routing.prefixes.event_sources import configured_source
from gateway.routing.prefixes.kv_events import EngineBlocks
from gateway.routing.prefixes.kv_subscription import Subscription
from tests.gateway.routing.prefixes.engine import Publisher
from tests.waiting import until

RECORDED = json.loads(Path(__file__).with_name("vllm_events.json").read_text())


def tokens_of(model: str, name: str) -> list[int]:
    return next(step["tokens"] for step in RECORDED[model]["steps"] if step["name"] == name)


def held_after(model: str, *chats: str) -> list[dict[str, float]]:
    """How many leading tokens of the chats' prompts are held after each step."""
    blocks, held = EngineBlocks(), []
    for step in RECORDED[model]["steps"]:
        for _, _, batch in frames_of(step["messages"]):
            blocks.apply(batch)
        held.append({name: blocks.leading(tokens_of(model, name)) for name in chats})
    return held


def frames_of(messages: Any) -> list[list[bytes]]:
    return [[b64decode(frame) for frame in message] for message in messages]


def test_blocks_are_those_of_the_tokens() -> None:
    """A turn more is the blocks after its parent; those evicted and cleared are gone, salted ones not theirs."""
    chats = ("first", "next turn", "salted", "another", "after the reset")
    assert [tuple(held.values()) for held in held_after("llama", *chats)] == [
        (64, 64, 0, 0, 0),
        (64, 96, 0, 0, 0),
        (64, 96, 0, 0, 0),
        (32, 32, 0, 160, 0),
        (0, 0, 0, 0, 32),
    ]


def test_blocks_with_a_salt_are_known_by_it() -> None:
    """Of the chat that was sent with `cache_salt`, until it is evicted."""
    blocks, held = EngineBlocks(), []
    for step in RECORDED["llama"]["steps"]:
        for _, _, batch in frames_of(step["messages"]):
            blocks.apply(batch)
        held.append(blocks.leading(tokens_of("llama", "salted"), "tenant-2"))
    assert held == [0, 0, 32, 32, 0]


def test_of_several_kinds_of_layers_those_that_see_all_count() -> None:
    """Those with a sliding window name only the last blocks of a prompt, with the tokens of all of it."""
    assert held_after("gemma3", "first", "another") == [{"first": 64, "another": 0}, {"first": 32, "another": 160}]


async def test_the_replay_is_understood() -> None:
    """Its messages carry the topic, which those of older versions and of SGLang do not."""
    messages = [frames for step in RECORDED["llama"]["steps"] for frames in frames_of(step["messages"])]
    async with AsyncExitStack() as stack:
        context = stack.enter_context(zmq.asyncio.Context())
        publisher = await stack.enter_async_context(Publisher(context).serving())
        publisher.replayed = [[b"", *messages[0]], *frames_of(RECORDED["llama"]["replay"])]
        publisher.number = len(messages)
        subscription = Subscription(configured_source(publisher.address))
        tasks = await stack.enter_async_context(background_tasks())
        tasks.start(subscription.follow())
        await until(lambda: subscription.blocks.leading(tokens_of("llama", "after the reset")) == 32)
        await publisher.wait_for_subscriber()
        await publisher.send(messages[3])  # once more
        await publisher.send(messages[4])
        await publisher.publish({"type": "AllBlocksCleared"})
        await until(lambda: subscription.blocks.leading(tokens_of("llama", "after the reset")) == 0)
        assert subscription.blocks.is_whole
