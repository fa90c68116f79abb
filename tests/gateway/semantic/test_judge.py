"""What the judge of answers is measured on, and the judge that asks the upstream itself."""

import pytest

from cache.semantic.judge.llm_judge import open_llm_judge
from gateway.processes.semantic_service import judge_url
from gateway.settings.cache import SemanticSettings
from gateway.settings.settings import Settings
from gateway.upstreams.mock import MODEL, MockUpstream, Reply
from tests.gateway.client import Client, chat
from tests.gateway.semantic.stage import AGAIN, ASKED, SemanticStage, figure, until_figure, until_known

POEM = "Write a poem about the sea"
LIKE_IT = "Could you compose some verses on the ocean for me"


async def test_an_exact_hit_may_be_computed_again_to_compare_both(semantic: SemanticStage, mock: MockUpstream) -> None:
    """The client gets the stored answer at once, and the fresh one tells of the judge's recall."""
    client = await semantic.gateway(mock, semantic={"audit_share": 1.0})
    await client.post(chat(ASKED))
    await until_known(client, 1)
    answer = await client.post(chat(ASKED))
    assert answer.cache == "hit"
    await until_figure(client, "agreed_with_itself", 1)
    assert len(mock.received) == 2


async def test_so_may_one_to_the_same_question_written_differently(semantic: SemanticStage, mock: MockUpstream) -> None:
    """It is an answer to the very same question too."""
    client = await semantic.gateway(mock, semantic={"audit_share": 1.0})
    await client.post(chat(ASKED))
    await until_known(client, 1)
    answer = await client.post(chat(ASKED.lower()))
    assert answer.headers["x-keepgate-layer"] == "normalized"
    await until_figure(client, "agreed_with_itself", 1)


async def test_without_audits_nothing_is_computed_again(semantic: SemanticStage, mock: MockUpstream) -> None:
    """`audit_share: 0` asks the upstream once for each answer."""
    client = await semantic.gateway(mock, semantic={"audit_share": 0.0})
    await client.post(chat(ASKED))
    await until_known(client, 1)
    for _ in range(5):
        assert (await client.post(chat(ASKED))).cache == "hit"
    assert len(mock.received) == 1


async def test_a_poem_is_not_served_to_others(semantic: SemanticStage, mock: MockUpstream) -> None:
    """Once its answers have disagreed a few times, a question that is nearly the same gets one of its own."""
    mock.replies = [Reply(text=_POEMS[0])]
    client = await semantic.gateway(mock)
    await client.post(chat(POEM))
    await until_known(client, 1)
    assert (await client.post(chat(LIKE_IT))).headers.get("x-keepgate-layer") == "semantic", "nothing is known of it"
    for count, text in enumerate(_POEMS[1:], 1):
        mock.replies = [Reply(text=text)]
        await client.post(chat(POEM), cache_control="no-cache")
        await until_figure(client, "disagreed_with_itself", count)
    assert (await client.post(chat(LIKE_IT))).cache == "miss"
    assert await figure(client, "unrepeatable") == 1


async def test_the_upstream_as_the_judge_is_charged_as_any_request(semantic: SemanticStage, mock: MockUpstream) -> None:
    """It is asked through the gateway, whose ledger counts its tokens, and whose caches keep nothing of it."""
    client = await semantic.gateway(mock)
    await client.post(chat(ASKED))
    await until_known(client, 1)
    before = (await _costs(client))["requests"]
    mock.replies = [Reply(text="SAME")]
    async with open_llm_judge(f"{client.gateway.url}/v1", "") as judge:
        assert await judge.compare(MODEL, ASKED, "a", ["b"]) == [5.0]
        assert await judge.compare(MODEL, AGAIN, "a", ["b"]) == [5.0]
    assert mock.received[-1].fields["model"] == MODEL
    assert len(mock.received) == 3, "the same comparison is not answered from the cache"
    costs = await _costs(client)
    assert costs["requests"] == before + 2
    assert costs["completion_tokens"] > 0
    assert await figure(client, "entries") == 1


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("0.0.0.0", "http://127.0.0.1:9000/v1"),  # noqa: S104  # it is bound by nobody
        ("::", "http://[::1]:9000/v1"),
        ("10.1.2.3", "http://10.1.2.3:9000/v1"),
    ],
)
def test_the_upstream_as_the_judge_is_reached_through_this_gateway(host: str, expected: str) -> None:
    """At the address that it listens on, or the loopback where it listens on all."""
    assert judge_url(Settings(host=host, port=9000, semantic=SemanticSettings(judge="upstream"))) == expected


async def _costs(client: Client) -> dict[str, int]:
    costs: dict[str, int] = (await client.get("/v1/costs?since=1h")).json["total"]
    return costs


_POEMS = (
    "The tide comes in on silver feet, it hums a song both low and sweet.",
    "Blue and endless, cold and wide, the sea has secrets deep inside.",
    "O restless water, salt and foam, you call the sailor far from home.",
    "A grey gull writes upon the breeze the only letters that it sees.",
)
