"""Virtual keys in front of the cache and the upstreams."""

import asyncio
from typing import Any

import msgspec
import pytest

from gateway.settings.limits import KeySettings
from gateway.settings.operations import CostSettings, LogSettings
from gateway.settings.upstreams import RoutingSettings, UpstreamSettings
from gateway.upstreams.mock import MockUpstream, Reply
from tests.cache.valkey import Valkey
from tests.gateway.client import CHAT, Client, chat
from tests.gateway.conftest import Stage
from tests.waiting import until

ADMIN = {"x-keepgate-admin-key": "operator"}


@pytest.fixture
async def keyed(stage: Stage, valkey: Valkey) -> tuple[Client, MockUpstream]:
    """A gateway that asks for keys, in front of an upstream with a credential of the operator's."""
    mock = await stage.mock()
    return await gateway_of(stage, valkey, mock), mock


async def gateway_of(stage: Stage, valkey: Valkey, mock: MockUpstream, **settings: Any) -> Client:
    return await stage.gateway(
        UpstreamSettings(url=mock.url, api_key="env:TEST_UPSTREAM_KEY"),
        redis=valkey.url,
        keys=KeySettings(required=True),
        admin_key="operator",
        **settings,
    )


@pytest.fixture(autouse=True)
def credential(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_UPSTREAM_KEY", "sk-operator")


async def key(client: Client, name: str, **fields: Any) -> Client:
    """The gateway, called with a new key."""
    made = await client.send("POST", "/v1/keys", {"name": name, **fields}, ADMIN)
    assert made.status == 200, made.body
    return client.tenant(made.json["secret"])


async def test_a_request_needs_a_key(keyed: tuple[Client, MockUpstream]) -> None:
    """Without one, and with one that is not valid, it is 401 on every path that serves tenants."""
    client, mock = keyed
    for path in ("/v1/chat/completions", "/v1/embeddings", "/v1/messages", "/api/chat", "/v1/files", "/v1/x"):
        answer = await client.post(chat(), path)
        assert answer.status == 401, path
        assert b"key" in answer.body
        assert (await client.tenant("sk-kg-" + "x" * 43).post(chat(), path)).status == 401
    assert (await client.get("/v1/models")).status == 401
    assert (await client.get("/health")).status == 200
    assert mock.received == []


async def test_only_the_operators_credential_reaches_the_upstream(keyed: tuple[Client, MockUpstream]) -> None:
    """A virtual key is the gateway's alone, in whichever header it comes."""
    client, mock = keyed
    secret = (await client.send("POST", "/v1/keys", {"name": "a"}, ADMIN)).json["secret"]
    for number, headers in enumerate(({"Authorization": f"Bearer {secret}"}, {"x_api_key": secret})):
        assert (await client.post(chat(str(number)), **headers)).status == 200
    for received in mock.received:
        assert received.headers["Authorization"] == "Bearer sk-operator"
        assert secret not in str(received.headers)
        assert received.headers["x-keepgate-namespace"]
    assert len({received.headers["x-keepgate-namespace"] for received in mock.received}) == 1


async def test_a_key_is_a_tenant(keyed: tuple[Client, MockUpstream]) -> None:
    """Keys share no answers, unless the operator gives them one namespace."""
    client, mock = keyed
    one, other = await key(client, "one"), await key(client, "other")
    team = [await key(client, name, namespace="team") for name in ("first", "second")]
    assert [(await each.post(chat())).cache for each in (one, other, one, *team)] == [
        "miss",
        "miss",
        "hit",
        "miss",
        "hit",
    ]
    assert len(mock.received) == 3


async def test_a_key_with_models_gets_no_other(keyed: tuple[Client, MockUpstream]) -> None:
    """Nor an answer of another model that its namespace has stored, in none of the ways to a hit."""
    client, mock = keyed
    every = await key(client, "every", namespace="shared")
    some = await key(client, "some", namespace="shared", models=["small"])
    assert (await every.post(chat())).cache == "miss"
    assert (await every.post(chat())).cache == "hit"
    refused = await some.post(chat())
    assert (refused.status, refused.error["code"], refused.error["param"]) == (403, "model_not_allowed", "model")
    assert (await some.post(chat(model="small"))).status == 200
    assert (await some.post({"model": "mock", "input": "a"}, "/v1/embeddings")).status == 403
    assert len(mock.received) == 2


async def test_a_key_with_models_is_shown_no_other(stage: Stage, valkey: Valkey) -> None:
    """An app offers the models that are listed, in each form: those that would not be refused."""
    mock = await stage.mock(models=("small", "large", "old"))
    client = await gateway_of(stage, valkey, mock, routing=RoutingSettings(aliases={"old": "small"}))
    some, every = await key(client, "some", models=["small"]), await key(client, "every")
    assert [model["id"] for model in (await some.get("/v1/models")).json["data"]] == ["small", "old"]
    assert [model["name"] for model in (await some.get("/api/tags")).json["models"]] == ["small", "old"]
    assert len((await every.get("/v1/models")).json["data"]) == 3


@pytest.mark.parametrize("body", ['{"model":"mock","x":NaN}', '{"model":"mock","x":"%s"}' % ("x" * 2**19), '{"x":1}'])
async def test_a_key_with_models_gets_no_other_from_a_relayed_endpoint(
    keyed: tuple[Client, MockUpstream], body: str
) -> None:
    """However long the body is or few servers read it; and none whose model is not known."""
    client, mock = keyed
    some, every = await key(client, "some", models=["small"]), await key(client, "every")
    refused = await some.post(body.encode(), "/v1/pooling")
    assert (refused.status, refused.error["code"]) == (403, "model_not_allowed")
    assert mock.received == []
    await every.post(body.encode(), "/v1/pooling")
    assert (await some.post({"model": "small"}, "/v1/pooling")).status == 200
    assert len(mock.received) == 2


@pytest.mark.parametrize(
    "path",
    [
        "/v1/vector_stores/vs_1/search",
        "/v1/fine_tuning/jobs",
        "/v1/load_lora_adapter",
        "/v1/chat/completions/chatcmpl-1",
        "/v1//chat/completions",
        "/v1/chat/completions/",
        "/v1/pooling/x",
    ],
)
async def test_a_key_gets_nothing_that_an_upstream_keeps(keyed: tuple[Client, MockUpstream], path: str) -> None:
    """That is the operator's, by whose credential all keys would share it."""
    client, mock = keyed
    refused = await (await key(client, "a")).post(chat(), path)
    assert (refused.status, refused.error["code"]) == (403, "endpoint_not_allowed")
    other = await key(client, "b")
    assert (await other.get(path)).status == 403
    assert (await other.send("DELETE", "/v1/models/mock")).status == 403
    assert (await other.get("/v1/models/mock")).status == 200
    assert mock.received == []


async def test_an_operator_lists_further_endpoints_for_keys(stage: Stage, valkey: Valkey) -> None:
    """By how their paths begin."""
    mock = await stage.mock()
    settings = KeySettings(required=True, relayed=("/v1/fine_tuning/",))
    client = await stage.gateway(mock, redis=valkey.url, keys=settings, admin_key="operator")
    caller = await key(client, "a")
    assert (await caller.post(chat(), "/v1/fine_tuning/jobs")).status == 200
    assert (await caller.post(chat(), "/v1/fine_tuning")).status == 403
    assert [received.path for received in mock.received] == ["/v1/fine_tuning/jobs"]


@pytest.mark.parametrize(("model", "status"), [("small", 400), ("mock", 403)])
async def test_the_model_of_a_form_is_that_of_its_field(
    keyed: tuple[Client, MockUpstream], model: str, status: int
) -> None:
    """The upstream, which refuses all forms, gets the one whose model the key has."""
    some = await key(keyed[0], "some", models=["small"])
    form = f'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n{model}\r\n--b--\r\n'
    kind = "multipart/form-data; boundary=b"
    assert (await some.post(form.encode(), "/v1/images/edits", Content_Type=kind)).status == status


async def test_a_rule_for_a_team_or_a_key_holds_for_it_alone(stage: Stage, valkey: Valkey) -> None:
    """Also where keys share answers, and the answer of one to the same bytes is in memory."""
    mock = await stage.mock(models=("chat", "large", "small"))
    rules = [{"use": "best", "teams": ["gold"]}, {"use": "cheap", "keys": ["poor"]}]
    models = {"chat": {"variants": {"best": "large", "cheap": "small"}, "rules": rules}}
    client = await gateway_of(stage, valkey, mock, routing=msgspec.convert({"models": models}, RoutingSettings))
    assert (await client.send("PUT", "/v1/teams/gold", {"limits": {}}, ADMIN)).status == 200
    callers = {
        "large": await key(client, "rich", namespace="shared", team="gold"),
        "chat": await key(client, "other", namespace="shared"),
        "small": await key(client, "poor", namespace="shared"),
    }
    for _ in range(3):
        for model, caller in callers.items():
            assert (await caller.post(chat("hello", model="chat"))).json["model"] == model
    assert len(mock.received) == 3


async def test_the_policy_of_a_key_is_kept(keyed: tuple[Client, MockUpstream]) -> None:
    """`bypass` neither reads nor writes, `read-only` does not write."""
    client, _ = keyed
    use, read, bypass = [
        await key(client, policy, namespace="shared", cache=policy) for policy in ("use", "read-only", "bypass")
    ]
    assert [(await each.post(chat())).cache for each in (read, read, bypass, bypass)] == [
        "miss",
        "miss",
        "bypass",
        "bypass",
    ]
    assert [(await each.post(chat())).cache for each in (use, use, read, bypass)] == ["miss", "hit", "hit", "bypass"]


async def test_the_list_of_requests_says_who_was_refused_and_why(keyed: tuple[Client, MockUpstream]) -> None:
    """The key and its team, the reason of a bypass, and the entry of an answer that was stored or served."""
    client, _ = keyed
    await client.send("PUT", "/v1/teams/web", {"limits": {}}, ADMIN)
    limited = await key(client, "limited", team="web", limits={"requests_per_minute": 3})
    entry = (await limited.post(chat())).entry
    await limited.post(chat())
    await limited.post(chat(), Cache_Control="no-store")
    assert (await limited.post(chat("other"))).status == 429
    found = (await client.send("GET", "/v1/requests", None, ADMIN)).json["data"]
    assert {each["team"] for each in found} == {"web"}
    assert len({each["key"] for each in found}) == 1
    told = [tuple(each.get(name, "") for name in ("cache", "reason", "error", "entry")) for each in found]
    assert told == [
        ("", "", "rate_limit_exceeded", ""),
        ("bypass", "no-store", "", ""),
        ("hit", "", "", entry),
        ("miss", "", "", entry),
    ]


async def test_hits_count_for_the_limit_of_requests(keyed: tuple[Client, MockUpstream]) -> None:
    """A limit of five a minute admits five requests, whether or not the cache has the answer."""
    client, mock = keyed
    limited = await key(client, "limited", limits={"requests_per_minute": 5})
    answers = [await limited.post(chat()) for _ in range(7)]
    assert [answer.status for answer in answers] == [200] * 5 + [429] * 2
    assert answers[-1].error["code"] == "rate_limit_exceeded"
    assert int(answers[-1].headers["Retry-After"]) in range(1, 63)
    assert len(mock.received) == 1
    assert (await client.get("/v1/cache/stats", **{"x_keepgate_admin_key": "operator"})).status == 200


async def test_an_answer_that_is_broken_off_is_paid(stage: Stage, valkey: Valkey) -> None:
    """By what was sent of it: who leaves before the usage has got the rest for nothing otherwise."""
    mock = await stage.mock(Reply(events=[{"choices": [{"index": 0, "delta": {"content": "a"}}]}] * 50, pause=0.01))
    prices = {"mock": {"input": 0, "output": 1e6}}  # a dollar for each word
    client = await gateway_of(stage, valkey, mock, costs=msgspec.convert({"prices": prices}, CostSettings))
    limited = await key(client, "limited", limits={"budget_per_day": 30})
    async with limited.stream(chat("one", stream=True, max_tokens=25)) as stream:
        for _ in range(15):
            await stream.event()
    await client.until("flights", 0)
    assert (await limited.post(chat("two", max_tokens=20))).error["code"] == "insufficient_quota"
    assert (await limited.post(chat("two", max_tokens=2))).status == 200


async def test_what_a_broken_off_answer_is_charged_is_what_is_told_of_it(
    stage: Stage, valkey: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    """Budget, costs, statistics, the list of requests and the log have one sum, which each of a request marks."""
    mock = await stage.mock(Reply(events=[{"choices": [{"index": 0, "delta": {"content": "a"}}]}] * 500, pause=0.01))
    prices = {"mock": {"input": 0, "output": 1e6}}  # a dollar for each token
    costs, log = msgspec.convert({"prices": prices}, CostSettings), LogSettings(requests="all")
    client = await gateway_of(stage, valkey, mock, costs=costs, log=log)
    caplog.set_level("INFO", "keepgate.requests")
    limited = await key(client, "limited", limits={"budget_per_day": 3000})
    async with limited.stream(chat("one", stream=True)) as stream:
        for _ in range(15):
            await stream.event()

    async def requests() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await client.send("GET", "/v1/requests", None, ADMIN)).json["data"]
        return found

    async def is_told() -> bool:
        return bool(await requests())

    await until(is_told)
    (told,) = await requests()
    tokens, cost = told["completion_tokens"], told["cost"]
    assert (told["status"], told["cache"], told["estimated"]) == (499, "miss", True)
    assert "error" not in told
    assert 15 <= tokens == cost < 500
    (budget,) = (await client.send("GET", "/v1/budgets", None, ADMIN)).json["data"]
    assert budget["day"]["spent"] == cost
    total = (await client.send("GET", "/v1/costs?since=1h", None, ADMIN)).json["total"]
    assert {name: total[name] for name in ("requests", "completion_tokens", "cost", "saving", "unpriced")} == {
        "requests": 1,
        "completion_tokens": tokens,
        "cost": cost,
        "saving": 0,
        "unpriced": 0,
    }
    assert total["estimated"] == 1
    window = (await client.send("GET", "/v1/cache/stats", None, ADMIN)).json["windows"]["1h"]
    assert (window["computed"], window["completion_tokens"], window["cost"]) == (1, tokens, cost)
    (line,) = [record.message for record in caplog.records if "/v1/chat/completions 499" in record.message]
    assert f"completion_tokens={tokens}" in line
    assert "estimated=True" in line


async def test_who_leaves_a_shared_answer_pays_for_all_of_it(stage: Stage, valkey: Valkey) -> None:
    """Another client goes on to read what the first has begun: the first is told the sum at its end, once."""
    mock = await stage.mock(Reply(text="a " * 20, pause=0.01))
    prices = {"mock": {"input": 0, "output": 1e6}}
    client = await gateway_of(stage, valkey, mock, costs=msgspec.convert({"prices": prices}, CostSettings))
    limited = await key(client, "limited", limits={"budget_per_day": 3000}, namespace="both")
    other = await key(client, "other", namespace="both")
    before = await client.figure("collapsed_requests_total")
    async with limited.stream(chat("one", stream=True)) as first:
        await first.event()
        second = asyncio.create_task(other.post(chat("one", stream=True)))
        await client.until("collapsed_requests_total", before + 1)
    assert (await second).status == 200
    found = (await client.send("GET", "/v1/requests", None, ADMIN)).json["data"]
    charged = {each["status"]: (each.get("layer"), each["cost"], each["saving"]) for each in found}
    cost = charged[499][1]
    assert charged == {499: (None, cost, 0.0), 200: ("flight", 0.0, cost)}
    assert not any(each.get("estimated") for each in found)
    (budget,) = (await client.send("GET", "/v1/budgets", None, ADMIN)).json["data"]
    assert budget["day"]["spent"] == cost


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat("a " * 60)), ("/v1/embeddings", {"input": "a " * 60})])
async def test_tokens_are_limited_without_prices(stage: Stage, valkey: Valkey, path: str, body: dict[str, Any]) -> None:
    """Whether or not costs are computed."""
    mock = await stage.mock()
    client = await gateway_of(stage, valkey, mock, costs=CostSettings(enabled=False))
    limited = await key(client, "limited", limits={"tokens_per_minute": 50})
    asked = [{**body, "model": "mock", "user": "u", "seed": number} for number in range(2)]
    answers = [await limited.post(each, path, Cache_Control="no-cache") for each in asked]
    assert [answer.status for answer in answers] == [200, 429]


async def test_counted_tokens_count_as_requests(keyed: tuple[Client, MockUpstream]) -> None:
    """They are an upstream's work as well."""
    limited = await key(keyed[0], "limited", limits={"requests_per_minute": 2})
    answers = [await limited.post(chat(str(number)), "/v1/messages/count_tokens") for number in range(3)]
    assert [answer.status for answer in answers][2] == 429
    assert [answer.status for answer in answers][:2] == [404, 404]  # the upstream has neither this nor a tokenizer


async def test_slots_are_those_of_requests_under_way(keyed: tuple[Client, MockUpstream]) -> None:
    """A second request at the same time is refused where one is allowed, and the next one is not."""
    client, mock = keyed
    limited = await key(client, "limited", limits={"concurrent_requests": 1})
    mock.hold.clear()
    first = asyncio.create_task(limited.post(chat("a")))
    await mock.wait_for(1)
    assert (await limited.post(chat("b"))).status == 429
    mock.hold.set()
    assert (await first).status == 200
    assert (await limited.post(chat("b"))).status == 200


async def test_a_budget_is_that_of_the_price_table(stage: Stage, valkey: Valkey) -> None:
    """What is spent is spent: a request that the rest does not cover is refused, and a hit costs nothing."""
    mock = await stage.mock()
    prices = {"mock": {"input": 1e6, "output": 1e6}}  # a dollar for each word
    client = await gateway_of(stage, valkey, mock, costs=msgspec.convert({"prices": prices}, CostSettings))
    limited = await key(client, "limited", limits={"budget_per_day": 100})
    asked = chat("one two", max_tokens=2)
    first = await limited.post(asked)
    assert (first.status, first.headers["x-keepgate-cost"]) == (200, "4")
    assert (await limited.post(asked)).headers["x-keepgate-saving"] == "4"
    refused = await limited.post(chat("one two", max_tokens=98))
    assert (refused.status, refused.error["code"]) == (429, "insufficient_quota")
