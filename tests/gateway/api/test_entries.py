"""Listing the entries of the cache."""

from collections.abc import Mapping
from typing import Any

import pytest

from gateway.upstreams.mock import Reply
from tests.cache.valkey import Valkey
from tests.gateway.client import Client, chat
from tests.gateway.conftest import Stage
from tests.gateway.proxy.aging import grow_old

ENTRIES = "/v1/cache/entries"
ADMIN = "the-admin-key"


async def listed(client: Client, query: str = "") -> dict[str, Any]:
    answer = await client.send("GET", f"{ENTRIES}?{query}", None, {"x-keepgate-admin-key": ADMIN})
    assert answer.status == 200, answer.body
    page: dict[str, Any] = answer.json
    return page


def ids(page: Mapping[str, Any]) -> list[str]:
    return [entry["id"] for entry in page["data"]]


@pytest.fixture(params=["memory", "redis"])
async def client(stage: Stage, valkey: Valkey, request: pytest.FixtureRequest) -> Client:
    """A gateway with and without Redis."""
    shared = {"redis": valkey.url} if request.param == "redis" else {}
    upstream = await stage.mock(models=("mock", "other"))
    return await stage.gateway(upstream, admin_key=ADMIN, **shared)


async def test_entries_are_listed_the_newest_first(client: Client) -> None:
    """With model, age, size, cost, hits and the options of their request, and without text of anybody."""
    first = await client.post(chat("one two three", temperature=0.5))
    second = await client.post(chat("four", model="other", user="ada"))
    assert (await client.post(chat("four", model="other"))).cache == "hit"
    page = await listed(client)
    assert ids(page) == [second.entry, first.entry]
    assert (page["next"], page["searched"]) == (None, 2)
    newest, oldest = page["data"]
    assert (newest["model"], newest["hits"], newest["options"]) == ("other", 1, {})
    assert (oldest["model"], oldest["hits"], oldest["options"]) == ("mock", 0, {"temperature": 0.5})
    assert (oldest["messages"], oldest["layers"], oldest["bytes"]) == (1, ["exact"], len(first.body))
    assert (oldest["cost"]["prompt_tokens"], oldest["stale"]) == (3, False)
    assert "answer" not in newest


async def test_pages_lead_to_every_entry(client: Client) -> None:
    """Each once, with the cursor of the page before."""
    made = [(await client.post(chat(f"question {number}"))).entry for number in range(7)]
    found: list[str] = []
    query = "limit=3"
    while True:
        page = await listed(client, query)
        found += ids(page)
        if page["next"] is None:
            break
        query = f"limit=3&cursor={page['next'].replace(' ', '%20')}"
    assert found == made[::-1]


async def test_entries_are_filtered(client: Client) -> None:
    """By model, namespace, age, hits and text of the answer, alone and together."""
    ours, theirs = client.tenant("sk-ours"), client.tenant("sk-theirs")
    old = (await ours.post(chat("an old question"))).entry
    await grow_old(client, old, 500)
    other = (await ours.post(chat("a word", model="other"))).entry
    strange = (await theirs.post(chat("Strange words"))).entry
    for _ in range(2):
        await theirs.post(chat("Strange words"))
    mine = f"namespace={other.partition('.')[0]}"
    for query, expected in [
        ("", {old, other, strange}),
        ("model=other", {other}),
        ("model=nothing", set()),
        (mine, {old, other}),
        (f"{mine}&model=mock", {old}),
        ("min_age=400", {old}),
        ("max_age=400", {other, strange}),
        ("min_hits=1", {strange}),
        ("order=hits", {strange}),
        ("min_hits=3", set()),
        ("text=STRANGE", {strange}),
        ("layer=exact", {old, other, strange}),
        ("layer=semantic", set()),
        (f"{mine}&text=words", set()),
    ]:
        assert set(ids(await listed(client, query))) == expected, query


async def test_a_deleted_or_purged_entry_is_not_listed(client: Client) -> None:
    """By any way in which it goes."""
    kept = (await client.post(chat("kept"))).entry
    deleted = (await client.post(chat("deleted"))).entry
    await client.post(chat("purged", model="other"))
    admin = {"x-keepgate-admin-key": ADMIN}
    assert (await client.send("DELETE", f"{ENTRIES}/{deleted}", None, admin)).status == 200
    assert (await client.send("DELETE", "/v1/cache?model=other", None, admin)).status == 200
    assert ids(await listed(client)) == [kept]


async def test_a_tenant_sees_its_own_entries_only(client: Client) -> None:
    """Whatever it asks for; the operator sees all."""
    ours, theirs = client.tenant("sk-ours"), client.tenant("sk-theirs")
    own, foreign = (await ours.post(chat("a"))).entry, (await theirs.post(chat("b"))).entry
    page = (await ours.get(ENTRIES)).json
    assert ids(page) == [own]
    for query in ("namespace=" + foreign.partition(".")[0], "key=key_1"):
        assert (await ours.get(f"{ENTRIES}?{query}")).status == 401
    assert (await ours.get(f"{ENTRIES}?order=hits&min_hits=1")).json["data"] == []


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("modell=m", "modell"),
        ("limit=0", "limit"),
        ("limit=501", "limit"),
        ("limit=many", "limit"),
        ("min_age=-1", "min_age"),
        ("max_age=nan", "max_age"),
        ("min_hits=x", "min_hits"),
        ("order=oldest", "order"),
        ("layer=prefix", "layer"),
        ("cursor=nonsense", "cursor"),
        ("order=hits&cursor=1.5", "cursor"),
        ("key=a&namespace=b", "key"),
    ],
)
async def test_a_bad_query_names_its_field(stage: Stage, valkey: Valkey, query: str, field: str) -> None:
    """With what would be right."""
    client = await stage.gateway(await stage.mock(), redis=valkey.url)
    answer = await client.get(f"{ENTRIES}?{query}")
    assert answer.status == 400
    assert answer.error["param"] == field


async def test_hits_of_all_gateways_are_counted(stage: Stage, valkey: Valkey) -> None:
    """An entry's hits are those of every gateway that shares the Redis."""
    upstream = await stage.mock(Reply(text="an answer"))
    one, two = [await stage.gateway(upstream, redis=valkey.url) for _ in range(2)]
    entry = (await one.post(chat())).entry
    assert (await two.post(chat())).cache == "hit"
    assert (await one.post(chat())).cache == "hit"
    await listed(one)
    page = await listed(two)
    assert [(each["id"], each["hits"]) for each in page["data"]] == [(entry, 2)]
