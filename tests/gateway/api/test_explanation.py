"""Explaining requests: what each layer would say, and in what a request differs from the nearest entries."""

from typing import Any

import pytest

from gateway.settings.limits import KeySettings
from tests.cache.valkey import Valkey
from tests.gateway.client import CHAT, COMPLETIONS, Client, chat
from tests.gateway.conftest import HASTY, Stage
from tests.gateway.proxy.aging import grow_old

EXPLAIN = "/v1/cache/explain"
SYSTEM = {"role": "system", "content": "Be brief."}


async def explained(client: Client, body: Any, query: str = "", **headers: str) -> dict[str, Any]:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = await client.send("POST", f"{EXPLAIN}?{query}", body, sent)
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json
    return found


def verdict(found: dict[str, Any], layer: str = "exact") -> tuple[str, str]:
    (one,) = [each for each in found["layers"] if each["layer"] == layer]
    return one["verdict"], one["reason"]


@pytest.fixture(params=["memory", "redis"])
async def client(stage: Stage, valkey: Valkey, request: pytest.FixtureRequest) -> Client:
    """A gateway with and without Redis."""
    shared = {"redis": valkey.url} if request.param == "redis" else {}
    return await stage.gateway(await stage.mock(models=("mock", "other")), cache={"ttl": 1000}, **shared)


async def test_a_hit_is_foretold(client: Client) -> None:
    """With the entry that answers, whatever the client's transport; and nothing is changed by asking."""
    entry = (await client.post(chat("hello"))).entry
    found = await explained(client, chat("hello", stream=True))
    assert found["key"] == entry
    assert verdict(found) == ("hit", "the answer is in memory, 0 s old")
    assert found["layers"][0]["entry"] == entry
    assert verdict(found, "semantic")[0] == "off"
    assert found["nearest"] == []


async def test_a_miss_names_the_fields_by_which_it_misses(client: Client) -> None:
    """The entry that is most alike comes first; values are shown where they say nothing of a person."""
    body = {"model": "mock", "messages": [SYSTEM, {"role": "user", "content": "What is 7 x 8?"}], "temperature": 0.5}
    near = (await client.post(body)).entry
    far = (await client.post({**body, "model": "other", "top_p": 0.1})).entry
    asked = {**body, "temperature": 0, "messages": [SYSTEM, {"role": "user", "content": "what is 7 x 9"}]}
    found = await explained(client, asked)
    assert verdict(found) == ("miss", "no entry has its key")
    assert [each["entry"]["id"] for each in found["nearest"]] == [near, far]
    assert found["nearest"][0]["differences"] == [
        {"field": "temperature", "change": "changed", "here": 0, "there": 0.5},
        {"field": "messages[1]", "change": "changed", "here": "user", "there": "user"},
    ]
    assert [each["field"] for each in found["nearest"][1]["differences"]] == [
        "model",
        "temperature",
        "top_p",
        "messages[1]",
    ]
    assert (await client.post(asked)).cache == "miss"


async def test_a_word_in_the_question_is_a_difference(client: Client) -> None:
    """The newest entries that differ in little are near, and not those of a request that has little in common."""
    stored = (await client.post(chat("What is the capital of France?"))).entry
    await client.post(chat("Other", temperature=1, top_p=0.5, seed=1, max_tokens=9))
    found = await explained(client, chat("What is the largest city of France?"))
    assert verdict(found) == ("miss", "no entry has its key")
    (near,) = found["nearest"]
    assert near["entry"]["id"] == stored
    assert near["differences"] == [{"field": "messages[0]", "change": "changed", "here": "user", "there": "user"}]
    assert "semantic.mode" in verdict(found, "semantic")[1]
    assert (await explained(client, chat("What is the capital of France?")))["nearest"] == []


async def test_the_operator_is_told_that_another_tenant_has_the_answer(stage: Stage, valkey: Valkey) -> None:
    """Whose request it is decides; a tenant is not told of others."""
    admin = {"x_keepgate_admin_key": "the-admin-key"}
    client = await stage.gateway(await stage.mock(), redis=valkey.url, admin_key="the-admin-key")
    app = client.tenant("any")
    namespace = (await app.post(chat("hello"))).entry.partition(".")[0]
    found = await explained(client, chat("hello"), **admin)
    assert (verdict(found)[0], found["elsewhere"]) == ("miss", [namespace])
    assert verdict(await explained(app, chat("hello")))[0] == "hit"
    assert (await explained(client.tenant("other"), chat("hello")))["elsewhere"] == []
    assert (await explained(client, chat("hello again"), **admin))["elsewhere"] == []
    refused = await client.send("POST", f"{EXPLAIN}?key=any", chat("hello"), {"x-keepgate-admin-key": "the-admin-key"})
    assert (refused.status, "bearer token" in refused.error["message"]) == (404, True)


async def test_other_reasons_are_told(client: Client) -> None:
    """A stale answer, a request's own Cache-Control, an answer that lacks usage."""
    entry = (await client.post(chat("hello"))).entry
    found = await explained(client, chat("hello"), cache_control="no-store")
    assert verdict(found) == ("bypass", "the request says no-store")
    assert verdict(found, "semantic")[0] == "bypass"
    await grow_old(client, entry, 500)
    found = await explained(client, chat("hello"), cache_control="max-age=100")
    assert verdict(found) == ("miss", "the answer is 500 s old, and the request's Cache-Control wants another age")
    await grow_old(client, entry, 1000)
    assert verdict(await explained(client, chat("hello"))) == (
        "miss",
        "the answer is 1500 s old, and its lifetime is 1000 s",
    )


async def test_every_form_of_api_is_explained(client: Client) -> None:
    """By its path, also with a query."""
    entry = (await client.post({"model": "mock", "prompt": "Once"}, path=COMPLETIONS)).entry
    found = await explained(client, {"model": "mock", "prompt": "Once"}, f"path={COMPLETIONS}")
    assert (verdict(found)[0], found["key"]) == ("hit", entry)
    found = await explained(client, {"model": "mock", "prompt": "once!"}, f"path={COMPLETIONS}")
    assert [each["entry"]["id"] for each in found["nearest"]] == [entry]
    assert found["nearest"][0]["differences"] == [{"field": "prompt", "change": "changed"}]
    message = {"model": "mock", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
    assert verdict(await explained(client, message, "path=/v1/messages"))[0] == "miss"
    other = await explained(client, chat("hello"), f"path={CHAT}%3Fapi-version=2")
    assert other["key"] != (await explained(client, chat("hello")))["key"]


async def test_tenants_are_never_mixed(stage: Stage, valkey: Valkey) -> None:
    """A tenant explains its own requests; the operator those of whom it names."""
    client = await stage.gateway(await stage.mock(), redis=valkey.url, admin_key="the-admin-key")
    ours, theirs = client.tenant("sk-ours"), client.tenant("sk-theirs")
    entry = (await ours.post(chat("a secret question"))).entry
    assert verdict(await explained(ours, chat("a secret question")))[0] == "hit"
    found = await explained(theirs, chat("a secret question", temperature=1))
    assert verdict(found)[0] == "miss"
    assert found["nearest"] == []
    namespace = entry.partition(".")[0]
    answer = await theirs.send("POST", f"{EXPLAIN}?namespace={namespace}", chat("a secret question"))
    assert answer.status == 401
    admin = {"x_keepgate_admin_key": "the-admin-key"}
    found = await explained(client, chat("a secret question"), f"namespace={namespace}", **admin)
    assert (verdict(found)[0], found["layers"][0]["entry"]) == ("hit", entry)
    assert b"secret" not in (await client.send("POST", EXPLAIN, chat("A secret question!"))).body


async def test_the_operator_names_a_virtual_key(stage: Stage, valkey: Valkey) -> None:
    """By its id or its name; its rights are those of its requests."""
    admin = {"x-keepgate-admin-key": "the-admin-key"}
    client = await stage.gateway(
        await stage.mock(), redis=valkey.url, admin_key="the-admin-key", keys=KeySettings(required=True)
    )
    made = await client.send("POST", "/v1/keys", {"name": "alice"}, admin)
    tenant = client.tenant(made.json["secret"])
    entry = (await tenant.post(chat("hello"))).entry
    for name in ("alice", made.json["id"]):
        answer = await client.send("POST", f"{EXPLAIN}?key={name}", chat("hello"), admin)
        assert answer.json["layers"][0]["entry"] == entry
    assert (await client.send("POST", f"{EXPLAIN}?key=nobody", chat("hello"), admin)).status == 404
    assert (await client.send("POST", EXPLAIN, chat("hello"))).status == 401


@pytest.mark.parametrize(
    ("query", "body", "status", "field"),
    [
        ("paht=/v1/messages", chat(), 400, "paht"),
        ("path=/v1/embeddings", chat(), 400, "path"),
        ("path=/v1/models", chat(), 400, "path"),
        ("namespace=a.b", chat(), 400, "namespace"),
        ("namespace=a&key=b", chat(), 400, "key"),
        ("key=b", chat(), 400, "key"),
        ("", {"messages": []}, 400, "model"),
        ("", [], 400, None),
    ],
)
async def test_a_bad_question_names_its_field(
    stage: Stage, query: str, body: Any, status: int, field: str | None
) -> None:
    """With what would be right."""
    client = await stage.gateway(await stage.mock())
    answer = await client.send("POST", f"{EXPLAIN}?{query}", body)
    assert (answer.status, answer.error["param"]) == (status, field)


async def test_an_outage_of_the_store_is_told(stage: Stage, own_valkey: Valkey) -> None:
    """The exact layer says that it failed, and the rest is answered."""
    client = await stage.gateway(await stage.mock(), redis=own_valkey.url, cache={"memory": 0, **HASTY})
    await client.post(chat("hello"))
    own_valkey.freeze()
    found = await explained(client, chat("hello again"))
    own_valkey.thaw()
    assert verdict(found)[0] == "failed"
    assert found["nearest"] == []
