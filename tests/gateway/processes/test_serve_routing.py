"""Strategies that are set while `keepgate serve` runs, in all of its workers."""

import signal
from pathlib import Path
from typing import Any

from tests.gateway.conftest import Stage
from tests.gateway.processes.serving import DEADLINE, serving
from tests.waiting import until

# So many requests, each on its own connection, reach both of two workers, except once in 2 ** 23 runs.
MANY = 24


async def test_a_strategy_is_set_in_all_workers_and_lasts(stage: Stage, tmp_path: Path) -> None:
    """Whichever worker answers says so, after a restart too; what is deleted is gone everywhere."""
    mock = await stage.mock()
    words = ("--upstream", mock.url, "--workers", "2")
    path = "/v1/routing/org/m"

    async with serving(tmp_path, *words) as gateway:

        async def said() -> list[Any]:
            """What is said of the model, each thing once."""
            found: list[Any] = []
            for _ in range(MANY):
                routing = (await gateway.send("GET", "/v1/routing")).json
                if (one := routing["models"].get("org/m")) not in found:
                    found.append(one)
            return found

        async def is_set_everywhere() -> bool:
            return await said() == [{"strategy": "round-robin", "source": "api", "upstreams": []}]

        async def is_gone_everywhere() -> bool:
            return await said() == [None]

        switched = await gateway.send("PUT", path, {"strategy": "round-robin"})
        assert switched.json == {"model": "org/m", "strategy": "round-robin", "source": "api"}
        await until(is_set_everywhere, DEADLINE)
        await gateway.signal(signal.SIGTERM)
        async with serving(tmp_path, *words) as gateway:
            assert await is_set_everywhere()
            undone = await gateway.send("DELETE", path)
            assert undone.json == {"model": "org/m", "strategy": "least-connections", "source": "settings"}
            await until(is_gone_everywhere, DEADLINE)
