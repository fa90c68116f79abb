"""GET /v1/budgets of a gateway whose answers cost."""

import time

import msgspec

from gateway.settings.limits import KeySettings
from gateway.settings.operations import CostSettings
from tests.cache.valkey import Valkey
from tests.gateway.client import chat
from tests.gateway.conftest import Stage
from tests.waiting import until

ADMIN = {"x-keepgate-admin-key": "operator"}


async def test_an_operator_sees_what_is_spent_of_budgets(stage: Stage, valkey: Valkey) -> None:
    """An answer that costs four dollars is spent of the day's budget of its key and of the month's of its team."""
    prices = msgspec.convert({"prices": {"mock": {"input": 0, "output": 1e6}}}, CostSettings)  # a dollar for each token
    client = await stage.gateway(
        await stage.mock(), redis=valkey.url, keys=KeySettings(required=True), admin_key="operator", costs=prices
    )
    await client.send("PUT", "/v1/teams/web", {"limits": {"budget_per_month": 500}}, ADMIN)
    new = {"name": "app", "team": "web", "limits": {"budget_per_day": 50}}
    key = (await client.send("POST", "/v1/keys", new, ADMIN)).json
    answer = await client.tenant(key["secret"]).post(chat("one two three four", max_tokens=9))
    assert answer.status == 200
    cost = float(answer.headers["x-keepgate-cost"])

    async def is_spent() -> bool:
        budgets = (await client.send("GET", "/v1/budgets", None, ADMIN)).json["data"]
        assert [(each["kind"], each["id"], each["team"]) for each in budgets] == [
            ("key", key["id"], "web"),
            ("team", "web", ""),
        ]
        of_key, of_team = budgets
        assert (of_key["day"]["budget"], of_key["month"], of_team["day"]) == (50.0, None, None)
        assert of_team["month"]["budget"] == 500.0
        assert of_key["day"]["ends"] > time.time()
        return bool(of_key["day"]["spent"] == of_team["month"]["spent"] == cost)

    assert cost > 0
    await until(is_spent)  # a moment after the answer: until then what was reserved for it counts


async def test_tenants_do_not_see_budgets(stage: Stage, valkey: Valkey) -> None:
    """Not with a virtual key either; an unknown parameter is named; without Redis the message says what to set."""
    client = await stage.gateway(
        await stage.mock(), redis=valkey.url, keys=KeySettings(required=True), admin_key="operator"
    )
    secret = (await client.send("POST", "/v1/keys", {"name": "app"}, ADMIN)).json["secret"]
    assert (await client.tenant(secret).get("/v1/budgets")).status == 401
    wrong = await client.send("GET", "/v1/budgets?key=app", None, ADMIN)
    assert (wrong.status, wrong.json["error"]["param"]) == (400, "key")
    alone = await stage.gateway(await stage.mock(), admin_key="operator")
    refused = await alone.send("GET", "/v1/budgets", None, ADMIN)
    assert (refused.status, "KEEPGATE_REDIS" in refused.json["error"]["message"]) == (503, True)
