"""GET /v1/costs and `keepgate costs`, against a server with the ledger."""

import asyncio
import csv
import io
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import jsonschema_rs
import msgspec
import pytest
from aiohttp import web

from cache.stores.redis_store import open_redis_store
from gateway.api.app_keys import SETTINGS
from gateway.api.operator.costs import LEDGER, PRICING, CostReport, get_costs
from gateway.commands import costs
from gateway.costs.ledger import Ledger
from gateway.costs.machine import Machine
from gateway.costs.pricing import Charge, Pricing
from gateway.http.middleware import answering_errors
from gateway.settings.fields import Secret
from gateway.settings.operations import CostSettings
from gateway.settings.settings import Settings
from gateway.settings.upstreams import UpstreamSettings
from tests.cache.entries.entry_examples import entry
from tests.cache.valkey import Valkey
from tests.gateway.costs.test_pricing import Source

ADMIN = "the-admin-key"
GPU = UpstreamSettings(url="http://gpu-1:8000/v1", price_per_hour=3.6)


class Server:
    """The route of costs on a server of its own."""

    def __init__(self, url: str, session: aiohttp.ClientSession, ledger: Ledger, pricing: Pricing) -> None:
        self.url = url
        self._session = session
        self.ledger = ledger
        self.pricing = pricing

    async def get(self, query: str = "", key: str = ADMIN) -> tuple[int, str]:
        headers = {"x-keepgate-admin-key": key}
        async with self._session.get(f"{self.url}/v1/costs?{query}", headers=headers) as response:
            return response.status, await response.text()

    async def report(self, query: str = "") -> dict[str, Any]:
        """The report, which is as documented."""
        status, text = await self.get(query)
        assert status == 200, text
        decoded: dict[str, Any] = json.loads(text)
        jsonschema_rs.validator_for(msgspec.json.schema(CostReport)).validate(decoded)
        return decoded


@pytest.fixture
async def server(valkey: Valkey) -> AsyncIterator[Server]:
    async with AsyncExitStack() as stack:
        application = web.Application(middlewares=[answering_errors(lambda _, error: error.response())])
        application[SETTINGS] = Settings(admin_key=Secret(ADMIN))
        store = await stack.enter_async_context(open_redis_store(valkey.url, 0.5))
        source = Source("gpu", GPU, Machine(3.6))
        application[LEDGER] = ledger = Ledger(store, 86_400.0)
        application[PRICING] = pricing = Pricing(CostSettings(), lambda: (source,))
        application.add_routes([web.get("/v1/costs", get_costs)])
        runner = web.AppRunner(application)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        session = await stack.enter_async_context(aiohttp.ClientSession())
        ledger.record(Charge("gpt-4o", "openai", prompt_tokens=1200, completion_tokens=34, cost=1234.5), "key_1", "web")
        ledger.hit(entry(model="gpt-4o", upstream="openai", repeat_cost=0.00125), "exact", "key_1", "web")
        ledger.record(Charge("=odd, name", "gpu"), "key_2")
        yield Server(f"http://127.0.0.1:{runner.addresses[0][1]}", session, ledger, pricing)


async def test_a_report_has_rows_and_a_total(server: Server) -> None:
    """Rows by what is asked for, the highest sum first, the period, and where the prices are from."""
    answer = await server.report("by=model,key&since=24h")
    assert [(row["model"], row["key"], row["requests"], row["hits"]) for row in answer["data"]] == [
        ("gpt-4o", "key_1", 2, 1),
        ("=odd, name", "key_2", 1, 0),
    ]
    assert "team" not in answer["data"][0]
    assert (answer["total"]["cost"], answer["total"]["saving"], answer["total"]["unpriced"]) == (1234.5, 0.00125, 1)
    assert answer["by"] == ["model", "key"]
    assert answer["since"] < answer["until"]
    assert "LiteLLM" in answer["prices"]["source"]
    assert [row["requests"] for row in (await server.report("by=team&key=key_2"))["data"]] == [1]
    assert (await server.report("since=2w&until=1w"))["data"] == []


async def test_a_machine_shows_what_its_tokens_cost(server: Server) -> None:
    """The price of a thousand tokens follows from measured throughput."""
    machine_of_gpu = server.pricing.machines["gpu"]
    machine_of_gpu.end(machine_of_gpu.begin())
    machine_of_gpu.count(1000)
    (machine,) = (await server.report())["machines"]
    assert (machine["upstream"], machine["tokens"]) == ("gpu", 1000)
    assert machine["dollars_per_1k_tokens"] == pytest.approx(machine["busy_seconds"] * 0.001)


async def test_a_report_is_csv_where_asked(server: Server) -> None:
    """The rows with a head, quoted where need be."""
    _, text = await server.get("by=model&format=csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["model"] for row in rows] == ["gpt-4o", "=odd, name"]
    assert (rows[0]["cost"], rows[0]["requests"]) == ("1234.5", "2")


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("by=models", "by"),
        ("by=model,model", "by"),
        ("by=", "by"),
        ("since=yesterday", "since"),
        ("since=1h&until=2h", "since"),
        ("until=2026-99-01", "until"),
        ("format=xml", "format"),
        ("group=model", "group"),
        ("key=a&key=b", "key"),
    ],
)
async def test_a_wrong_parameter_is_named(server: Server, query: str, param: str) -> None:
    """Parameters are strict; the error names the one at fault."""
    status, text = await server.get(query)
    assert (status, json.loads(text)["error"]["param"]) == (400, param)


async def test_only_the_operator_sees_costs(server: Server) -> None:
    """Without the admin key there is no report."""
    assert (await server.get(key="another"))[0] == 401


async def test_the_command_prints_a_table(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """`keepgate costs` shows requests, hits, tokens, cost and saving; as JSON and CSV where asked."""

    async def command(*words: str, key: str = ADMIN) -> tuple[int, str, str]:
        status = await asyncio.to_thread(costs.run, [*words, "--url", server.url, "--admin-key", key])
        return status, *capsys.readouterr()

    status, text, _ = await command("--by", "model,key", "--since", "7d")
    lines = [line.split() for line in text.splitlines()]
    assert status == 0
    assert lines[0] == ["MODEL", "KEY", "REQUESTS", "HITS", "TOKENS", "COST", "SAVING"]
    assert lines[1][:4] == ["gpt-4o", "key_1", "2", "1"]
    assert lines[1][5:] == ["$1,234.50", "$0.0013"]
    assert lines[3][0] == "total"
    assert text.splitlines()[4] == "Requests without a known price, which are in no sum: 1"
    assert json.loads((await command("--json"))[1])["total"]["requests"] == 3
    assert (await command("--csv", "--by", "team"))[1].splitlines()[1].startswith("web,2,1,")
    assert (await command("--by", "nothing"))[0] == 1
    assert "admin key" in (await command(key="another"))[2]

    server.ledger.hit(entry(model="small", upstream="openai", repeat_cost=0.00001), "exact", "key_3", "lab")
    assert (await command("--team", "lab"))[1].splitlines()[1].split()[-2:] == ["$0.00", "<$0.0001"]
