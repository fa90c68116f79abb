"""The gateway's metrics as Prometheus reads them, and how many series clients can make."""

import math
import re

from msgspec.structs import replace
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from gateway.settings.upstreams import HealthSettings, UpstreamSettings
from tests.gateway.client import Client, chat
from tests.gateway.conftest import Stage
from tests.waiting import until

# https://prometheus.io/docs/practices/naming/: base units, in words.
OTHER_UNITS = {
    "milliseconds",
    "ms",
    "microseconds",
    "us",
    "minutes",
    "hours",
    "sec",
    "kb",
    "mb",
    "kilobytes",
    "percent",
}
INVENTED = 150
"""More than a label has values."""


async def families(client: Client) -> list[Metric]:
    return list(text_string_to_metric_families((await client.get("/metrics")).body.decode()))


async def series(client: Client) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    return {
        (sample.name, frozenset(sample.labels.items()))
        for family in await families(client)
        for sample in family.samples
    }


async def test_names_follow_the_conventions(stage: Stage) -> None:
    """A counter, and nothing else, ends in _total; units are base units; no two families or series are the same."""
    client = await stage.gateway(await stage.mock())
    await client.post(chat())
    found = await families(client)
    assert len({family.name for family in found}) == len(found) > 30
    for family in found:
        assert re.fullmatch(r"keepgate_[a-z][a-z0-9_]*[a-z0-9]", family.name), family.name
        assert family.documentation.endswith("."), family.name
        assert not OTHER_UNITS & set(family.name.split("_")), family.name
        assert not family.name.endswith(("_count", "_sum", "_bucket", "_info")), family.name
        assert family.type in ("counter", "gauge", "histogram"), family.name
        assert "since the start" not in family.documentation, f"{family.name} counts, and is no counter"
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter"), sample.name
            assert not {"le", "quantile"} & set(sample.labels) or family.type == "histogram", sample.name
        labelled = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in family.samples]
        assert len(set(labelled)) == len(labelled), family.name


async def test_clients_make_no_series(stage: Stage) -> None:
    """Names of models, paths, methods, headers and credentials that a client makes up are no values of a label."""
    client = await stage.gateway(await stage.mock())

    async def ask(number: int) -> None:
        name = f"invented-{number}"
        await client.tenant(name).post(chat(name, model=name, user=name), x_keepgate_namespace=name, x_custom=name)
        await client.post({"model": name, "input": name}, "/v1/embeddings")
        await client.post({"model": name}, f"/v1/{name}")
        await client.post(chat(name, temperature=name))
        await client.send(name.upper(), "/v1/models")

    await ask(0)
    before = await series(client)
    for number in range(1, 20):
        await ask(number)
    assert await series(client) - before == set()
    assert not any("invented" in value for _, labels in before for _, value in labels)


async def test_invented_models_take_no_place_of_listed_ones(stage: Stage) -> None:
    """Where the upstream answers any name, and the machine's time is what costs, names are few and "mock" is one."""
    mock = await stage.mock()
    client = await stage.gateway(UpstreamSettings(url=mock.url, price_per_hour=3600.0))

    async def models() -> set[str]:
        """Those that have cost something."""
        return {dict(labels)["model"] for name, labels in await series(client) if name == "keepgate_cost_dollars_total"}

    async def mock_has_cost() -> bool:
        return await client.figure("cost_dollars_total", model="mock") > cost_before

    before, cost_before = await models(), await client.figure("cost_dollars_total", model="mock")
    for number in range(INVENTED):
        await client.post(chat(model=f"invented-{number}"))
    await client.post(chat())
    await until(mock_has_cost)
    assert len(await models() - before) <= 102


async def test_an_upstream_is_shown_as_up_down_or_gone(stage: Stage) -> None:
    """1 while it answers its health checks, 0 while it does not, and no number once the settings do not name it."""
    mock = await stage.mock()
    url = mock.url
    client = await stage.gateway(
        UpstreamSettings(url=url, name="steady"),
        UpstreamSettings(url="http://127.0.0.1:1/v1", name="away"),
        health=HealthSettings(interval=0.05, deadline=1.0),
    )
    await client.until("upstream_available", 1, upstream="steady")
    await client.until("upstream_available", 0, upstream="away")

    left = replace(client.gateway.settings, upstreams=(UpstreamSettings(url=url, name="steady"),))
    await client.gateway.reload(left)
    assert math.isnan(await client.figure("upstream_available", upstream="away"))
    assert await client.figure("upstream_available", upstream="steady") == 1
