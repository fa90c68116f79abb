"""The figures of reliability, as an operator sees them."""

from gateway.upstreams.mock import MockUpstream
from tests.cache.valkey import Valkey
from tests.gateway.client import DEADLINE, Client, chat
from tests.gateway.semantic.stage import AGAIN, ASKED, SemanticStage, until_known
from tests.waiting import until


async def test_a_judgement_of_one_host_is_in_the_figures_of_all(
    semantic: SemanticStage, mock: MockUpstream, valkey: Valkey
) -> None:
    """What was predicted for a similar question, and that its answer was the same, is shown by both hosts."""
    budget = {"policy": "budget"}
    hosts = [await semantic.gateway(mock, redis=valkey.url, mode="observe", semantic=budget) for _ in range(2)]
    await hosts[0].post(chat(ASKED))
    await until_known(hosts[0], 1)
    await hosts[0].post(chat(AGAIN))

    async def figures(host: Client) -> tuple[int, int, float]:
        classes = (await host.get("/v1/cache/stats")).json["layers"]["semantic"]["reliability"]
        return len(classes), sum(each["labels"] for each in classes), sum(each["observed"] for each in classes)

    for host in hosts:

        async def is_counted(host: Client = host) -> bool:
            return await figures(host) == (1, 1, 0.0)

        await until(is_counted, DEADLINE)


async def test_a_policy_without_a_budget_has_none(semantic: SemanticStage, mock: MockUpstream) -> None:
    """A fixed threshold predicts nothing that could be compared."""
    client = await semantic.gateway(mock)
    await client.post(chat(ASKED))
    assert (await client.get("/v1/cache/stats")).json["layers"]["semantic"]["reliability"] == []
