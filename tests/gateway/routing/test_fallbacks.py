"""Other models that answer when no upstream of the one asked for does."""

import time

import pytest

from gateway.settings.upstreams import ModelSettings, RoutingSettings
from gateway.upstreams.mock import Reply
from tests.gateway.client import chat
from tests.gateway.conftest import Stage
from tests.gateway.routing.failing_upstreams import QUICK, hangs, is_well, named, refuses, resets
from tests.gateway.upstreams.upstream_examples import nothing_listens

FALLBACKS = RoutingSettings(
    models={
        "mock": ModelSettings(upstreams=("main",), fallbacks=("small", "tiny")),
        "small": ModelSettings(upstreams=("spare",)),
        "tiny": ModelSettings(upstreams=("last",)),
    }
)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_fallback_answers_and_is_not_stored(stage: Stage, stream: bool) -> None:
    """Its answer names its model, and when the model asked for is back, that one answers."""
    main = await stage.raw(resets)
    spare = await stage.mock(Reply(text="by small"), models=("small",))
    servers = named(main.url, "main"), named(spare.url, "spare"), named(nothing_listens(), "last")
    client = await stage.gateway(*servers, retries=QUICK, routing=FALLBACKS)
    await client.gateway.router.refresh()
    fallbacks = await client.figure("fallbacks_total")
    answers = [await client.post(chat(stream=stream)) for _ in range(2)]

    assert [(a.status, a.text, a.cache, a.headers["x-keepgate-model"]) for a in answers] == [
        (200, "by small", "miss", "small")
    ] * 2
    assert [received.fields["model"] for received in spare.received] == ["small"] * 2
    assert await client.figure("fallbacks_total") == fallbacks + 2

    main.conversation = is_well
    answer = await client.post(chat(stream=stream))
    assert (answer.text, answer.cache) == ("ok", "miss")
    assert "x-keepgate-model" not in answer.headers
    assert (await client.post(chat(stream=stream))).cache == "hit"
    # Who asks for the fallback itself is not given what another one was told.
    assert (await client.post(chat(model="small", stream=stream))).cache == "miss"


async def test_fallbacks_are_asked_in_their_order(stage: Stage) -> None:
    """The second one is asked when the first one fails as well, if with an error of its own."""
    for spare in (await stage.raw(resets), await stage.raw(refuses(b"404 Not Found"))):
        last = await stage.mock(Reply(text="by tiny"), models=("tiny",))
        servers = named(nothing_listens(), "main"), named(spare.url, "spare"), named(last.url, "last")
        client = await stage.gateway(*servers, retries=QUICK, routing=FALLBACKS)
        answer = await client.post(chat())

        assert (answer.text, answer.headers["x-keepgate-model"]) == ("by tiny", "tiny")
        assert len(spare.connections) == 1


async def test_the_error_is_that_of_the_model_asked_for(stage: Stage) -> None:
    """What fallbacks say of themselves would mislead a client that has named another model."""
    main, other = (
        await stage.raw(refuses(b"503 Service Unavailable", b"Retry-After: 9")),
        await stage.raw(refuses(b"400 Bad Request")),
    )
    servers = named(main.url, "main"), named(other.url, "spare"), named(other.url, "last")
    client = await stage.gateway(*servers, retries=QUICK, routing=FALLBACKS)
    answer = await client.post(chat())

    assert (answer.status, answer.headers["Retry-After"], len(other.connections)) == (503, "9", 2)
    assert "x-keepgate-model" not in answer.headers

    servers = named(nothing_listens(), "main"), named(other.url, "spare"), named(nothing_listens(), "last")
    client = await stage.gateway(*servers, retries=QUICK, routing=FALLBACKS)
    answer = await client.post(chat())
    assert (answer.status, answer.error["code"]) == (502, "upstream_unreachable")
    assert "upstream main" in answer.error["message"]
    assert "upstream last" in answer.error["message"]


async def test_a_model_whose_upstreams_are_gone_has_its_fallbacks(stage: Stage) -> None:
    """They answer also where no upstream is left that could be asked for the model."""
    spare = await stage.mock(Reply(text="by small"), models=("small",))
    servers = named(nothing_listens(), "main"), named(spare.url, "spare"), named(nothing_listens(), "last")
    client = await stage.gateway(*servers, retries=QUICK, routing=FALLBACKS)
    router = client.gateway.router
    router.remove(router.upstreams[0])
    assert (await client.post(chat())).text == "by small"
    router.remove(router.upstreams[0])
    answer = await client.post(chat("again"))
    assert (answer.status, answer.error["code"]) == (502, "upstream_unreachable")


async def test_no_fallback_is_asked_when_the_deadline_is_over(stage: Stage) -> None:
    """A request ends at its deadline, with one error."""
    main, spare = await stage.raw(hangs), await stage.raw(is_well)
    servers = named(main.url, "main"), named(spare.url, "spare"), named(spare.url, "last")
    client = await stage.gateway(*servers, retries=QUICK, routing=FALLBACKS)
    began = time.monotonic()
    answer = await client.post(chat(), x_request_timeout="0.2")

    assert (answer.status, answer.error["code"]) == (504, "upstream_timeout")
    assert time.monotonic() - began < 2
    assert not spare.connections


async def test_a_request_that_fails_everywhere_reaches_few_upstreams(stage: Stage) -> None:
    """After two upstreams of its model have failed at a request, one of each fallback is asked."""
    raws = [await stage.raw(refuses(b"500 Internal Server Error")) for _ in range(6)]
    models = {
        "mock": ModelSettings(upstreams=("0", "1", "2"), fallbacks=("small",)),
        "small": ModelSettings(upstreams=("3", "4", "5")),
    }
    servers = [named(raw.url, f"{number}") for number, raw in enumerate(raws)]
    client = await stage.gateway(*servers, retries=QUICK, routing=RoutingSettings(models=models))
    await client.gateway.router.refresh()

    assert (await client.post(chat())).status == 500
    assert sum(len(raw.connections) for raw in raws[:3]) == 2
    assert sum(len(raw.connections) for raw in raws[3:]) == 1
