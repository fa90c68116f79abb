"""`cache.regenerate`: the same sampled chat asked again at once wants another answer."""

from typing import Any

import pytest

from gateway.upstreams.mock import Reply
from tests.gateway.client import chat
from tests.gateway.conftest import Stage
from tests.gateway.proxy.aging import grow_old


@pytest.fixture(params=["without redis", "valkey"])
def redis(request: pytest.FixtureRequest) -> str:
    return "none" if request.param == "without redis" else request.getfixturevalue("valkey").url


async def test_asking_again_at_once_brings_another_answer(stage: Stage, redis: str) -> None:
    """The second request within the time is computed again, and its answer takes the place of the first."""
    mock = await stage.mock(Reply(text="heads"))
    client = await stage.gateway(mock, cache={"regenerate": 600.0}, redis=redis)
    asked = chat("flip a coin", temperature=1)
    assert (await client.post(asked)).text == "heads"
    mock.replies[:] = [Reply(text="tails")]
    again = await client.post(asked)

    assert (again.text, again.cache) == ("tails", "bypass")
    assert again.headers["Cache-Status"] == "keepgate; fwd=request; detail=regenerate"
    strict = await client.post(asked, Cache_Control="only-if-cached")
    assert (strict.text, strict.cache) == ("tails", "hit")


async def test_a_hit_counts_as_an_answer(stage: Stage, redis: str) -> None:
    """An old answer is served once, and then not again within the time; by another worker neither."""
    mock = await stage.mock(Reply(text="heads"))
    client = await stage.gateway(mock, cache={"regenerate": 600.0}, redis=redis)
    others = [client] if redis == "none" else [await stage.gateway(mock, cache={"regenerate": 600.0}, redis=redis)]
    asked = chat("flip a coin", temperature=1)
    first = await client.post(asked)
    await grow_old(client, first.entry, 3600.0)
    if (store := client.gateway.cache.redis) is not None:
        await store.flush()

    assert [(await each.post(asked)).cache for each in (client, *others)] == ["hit", "bypass"]


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1, "seed": 7}], ids=str)
async def test_an_answer_that_is_not_sampled_stays(stage: Stage, fields: dict[str, Any]) -> None:
    """A request without randomness is a hit each time."""
    client = await stage.gateway(await stage.mock(), cache={"regenerate": 600.0})
    assert [(await client.post(chat("2 + 2?", **fields))).cache for _ in range(3)] == ["miss", "hit", "hit"]
