"""The gateway in front of engines that publish what they hold."""

from contextlib import AsyncExitStack

import zmq.asyncio

from gateway.settings.upstreams import RoutingSettings, UpstreamSettings
from tests.gateway.conftest import Stage
from tests.gateway.routing.prefixes.engine import Engine, Publisher, stored, tokens_of
from tests.waiting import until


async def test_a_prompt_goes_where_its_blocks_are(stage: Stage) -> None:
    """Though the gateway has sent nothing there: others may have, or it was started again."""
    async with AsyncExitStack() as stack:
        context = stack.enter_context(zmq.asyncio.Context())
        engines = [await stack.enter_async_context(Engine(has_index=False).serving()) for _ in range(2)]
        publishers = [await stack.enter_async_context(Publisher(context).serving()) for _ in range(2)]
        upstreams = [
            UpstreamSettings(url=engine.url, name=name, kv_events=publisher.address)
            for name, engine, publisher in zip("ab", engines, publishers, strict=True)
        ]
        client = await stage.gateway(*upstreams, routing=RoutingSettings(strategy="prefix-aware"))
        held = [f"{word} " * 40 for word in ("one", "other")]
        for publisher, prompt in zip(publishers, held, strict=True):
            await publisher.wait_for_subscriber()
            await publisher.publish(stored(tokens_of(prompt)))

        async def are_known() -> bool:
            described = (await client.send("GET", "/v1/routing")).json["upstreams"]
            return [upstream["kv_blocks"] for upstream in described] == [20, 20]

        await until(are_known)
        for number in range(3):
            # Without events the first request of all would go to the first upstream.
            for engine, prompt in reversed(list(zip(engines, held, strict=True))):
                body = {"model": "mock", "prompt": f"{prompt}and {number}", "max_tokens": 1}
                assert (await client.send("POST", "/v1/completions", body)).status == 200
                assert engine.completed[-1:] == [body["prompt"]]
        assert [len(engine.completed) for engine in engines] == [3, 3]
