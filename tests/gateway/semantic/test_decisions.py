"""What an operator sees of decisions: the last ones with their verdicts, and what other deltas would have served."""

import asyncio
import json
import logging
import re
from typing import Any

import pytest

from cache.semantic.policy.posterior import FEATURE_NAMES
from cache.semantic.wording.comparison import FEATURE_NAMES as TEXT_FEATURE_NAMES
from cache.semantic.wording.comparison import VETOES
from gateway.commands import cache
from gateway.upstreams.mock import MODEL, MockUpstream, Reply
from tests.cache.valkey import Valkey
from tests.gateway.client import DEADLINE, Client, chat
from tests.gateway.semantic.stage import ASKED, SemanticStage, figure, until_known
from tests.waiting import until

LIKE_IT = "I forgot my password, what are the steps to reset it?"
OTHER = "Please tell me the way to set a forgotten password anew"
DECISIONS = "/v1/cache/semantic/decisions"
WHAT_IF = "/v1/cache/semantic/what-if"
BUDGET: dict[str, Any] = {"policy": "budget"}


async def decisions(client: Client, **query: object) -> list[dict[str, Any]]:
    asked = "&".join(f"{name}={value}" for name, value in query.items())
    answer = await client.get(f"{DECISIONS}?{asked}")
    assert answer.status == 200, answer.body
    found: list[dict[str, Any]] = answer.json["data"]
    return found


async def until_judged(client: Client) -> dict[str, Any]:
    """The newest decision, once its verdict is known."""

    async def is_judged() -> bool:
        found = await decisions(client)
        return bool(found and found[0]["verdict"])

    await until(is_judged, DEADLINE)
    return (await decisions(client))[0]


async def test_a_would_be_hit_is_shown_with_its_verdict(semantic: SemanticStage, mock: MockUpstream) -> None:
    """In `observe`: similarity, and what the judge says of the fresh answer, which is another one."""
    client = await semantic.gateway(mock, mode="observe")
    first = await client.post(chat(ASKED))
    await until_known(client, 1)
    mock.replies = [Reply(text="That is not possible: write to the support, who set a new one for you.")]
    second = await client.post(chat(LIKE_IT))
    shown = await until_judged(client)
    assert (shown["outcome"], shown["reason"], shown["source"]) == ("observed", "", "miss")
    assert shown["verdict"] in ("different", "unsure")
    assert (shown["entry"], shown["key"], shown["model"]) == (first.entry, second.entry, MODEL)
    assert shown["namespace"] == first.entry.partition(".")[0]
    assert 0.6 <= shown["similarity"] < 1
    assert (shown["risk"], shown["limit"], shown["max_risk"]) == (None, None, 1.0)
    assert (shown["veto"], shown["features"]) == ("", [])


async def test_a_refusal_says_why(semantic: SemanticStage, mock: MockUpstream) -> None:
    """The budget policy is not warm yet, with a veto or without; and with the features that make the risk."""
    client = await semantic.gateway(mock, semantic=BUDGET)
    await client.post(chat(ASKED))
    await until_known(client, 1)
    await client.post(chat(LIKE_IT))
    warming = await until_judged(client)
    assert (warming["outcome"], warming["reason"], warming["verdict"]) == ("refused", "warm-up", "same")
    assert warming["veto"] == ""
    names = {feature["name"] for feature in warming["features"]}
    assert {"constant", "similarity", "overlap", "novelty", "uncertainty"} <= names <= {*FEATURE_NAMES, "uncertainty"}
    assert all(each["log_odds"] == each["weight"] * each["value"] != 0 for each in warming["features"])
    assert 0 < warming["risk"] <= 1
    await client.post(chat("How do I reset my router?"))
    vetoed = (await decisions(client))[0]
    assert (vetoed["outcome"], vetoed["reason"]) == ("refused", "warm-up")
    assert vetoed["veto"] in VETOES
    assert 0 < vetoed["risk"] <= 1
    assert not {feature["name"] for feature in vetoed["features"]} & {*TEXT_FEATURE_NAMES}


async def test_what_only_a_veto_kept_back_is_vetoed(semantic: SemanticStage, mock: MockUpstream) -> None:
    """By its name; where it would not be served anyway, the policy's reason stands, and the veto beside it."""
    client = await semantic.gateway(mock)
    await client.post(chat(ASKED))
    await until_known(client, 1)
    for question, outcome, reason in (
        ("How do I not reset my password?", "vetoed", "negation"),
        ("How do I reset my router?", "refused", "similarity"),
    ):
        await client.post(chat(question))
        shown = (await decisions(client))[0]
        assert (shown["outcome"], shown["reason"]) == (outcome, reason)
        assert shown["veto"] in VETOES


async def test_what_is_served_is_shown_as_served(semantic: SemanticStage, mock: MockUpstream) -> None:
    """And, after the user has rejected it, as that; a request that allows no risk gets nothing, and says so."""
    client = await semantic.gateway(mock)
    await client.post(chat(ASKED))
    await until_known(client, 1)
    assert (await client.post(chat(OTHER), x_keepgate_max_risk="0.5")).cache == "miss"
    assert (await decisions(client))[0]["reason"] == "max-risk"
    assert (await client.post(chat(LIKE_IT))).cache == "hit"
    served = (await decisions(client))[0]
    assert (served["outcome"], served["reason"], served["verdict"]) == ("served", "", None)
    await client.post(chat(LIKE_IT), cache_control="no-cache")
    rejected = await until_judged(client)
    assert (rejected["outcome"], rejected["verdict"], rejected["source"]) == ("served", "different", "user")


async def test_pages_and_filters(semantic: SemanticStage, mock: MockUpstream) -> None:
    """Newest first, each decision once over all pages; filters choose, and wrong ones are refused by name."""
    client = await semantic.gateway(mock)
    await client.post(chat(ASKED))
    await until_known(client, 1)
    for greeting in ("Hi", "Hello", "Good morning"):
        await client.post(chat(f"{greeting}, {LIKE_IT}"))
    seen, query = [], {"limit": 2}
    while True:
        page = (await client.get(f"{DECISIONS}?{'&'.join(f'{k}={v}' for k, v in query.items())}")).json
        assert len(page["data"]) <= 2
        seen += [each["id"] for each in page["data"]]
        if page["next"] is None:
            break
        query["cursor"] = page["next"]
    assert len(seen) == 3
    assert seen == sorted(set(seen), reverse=True)
    assert len(await decisions(client, outcome="served")) == 3
    assert await decisions(client, outcome="vetoed") == await decisions(client, verdict="different") == []
    namespace = (await decisions(client))[0]["namespace"]
    assert len(await decisions(client, namespace=namespace, model=MODEL)) == 3
    assert await decisions(client, namespace="0" * 20) == await decisions(client, model="other") == []
    for wrong in ("outcome=x", "verdict=x", "limit=101", "limit=0", "cursor=x", "y=1"):
        refused = await client.get(f"{DECISIONS}?{wrong}")
        assert (refused.status, refused.error["param"]) == (400, wrong.partition("=")[0])


async def test_texts_are_shown_only_where_the_operator_says_so(semantic: SemanticStage, mock: MockUpstream) -> None:
    """`semantic.show_questions`; without it no text leaves the semantic cache."""
    for shows, texts in ((False, (None, None)), (True, (LIKE_IT, ASKED))):
        client = await semantic.gateway(mock, semantic={"show_questions": shows})
        await client.post(chat(ASKED))
        await until_known(client, 1)
        await client.post(chat(LIKE_IT))
        (shown,) = await decisions(client)
        assert (shown["question"], shown["stored_question"]) == texts


@pytest.mark.parametrize("end", ["/entries/{stored}", "/entries/{own}", "?layer=semantic", "", "expires"])
async def test_texts_go_with_what_they_belong_to(semantic: SemanticStage, mock: MockUpstream, end: str) -> None:
    """With the stored entry, with the question's own, with a purge, and when the answer expires; no others do."""
    lives: dict[str, Any] = {"cache": {"ttl": 4.0}} if end == "expires" else {}  # to be seen on a busy machine
    client = await semantic.gateway(mock, semantic={"show_questions": True, "threshold": 0.99}, **lives)
    first = await client.post(chat(ASKED))
    await until_known(client, 1)
    second = await client.post(chat(LIKE_IT))
    await until_known(client, 2)
    assert (await decisions(client))[0]["question"] == LIKE_IT
    other = await client.post(chat("Who painted the ceiling of the Sistine Chapel?"))
    await until_known(client, 3)
    await client.send("DELETE", f"/v1/cache/entries/{other.entry}")
    await until_known(client, 2)
    assert (await decisions(client))[0]["question"] == LIKE_IT
    if end != "expires":
        await client.send("DELETE", "/v1/cache" + end.format(stored=first.entry, own=second.entry))

    async def are_gone() -> bool:
        (shown,) = await decisions(client)
        return shown["question"] is shown["stored_question"] is None

    await until(are_gone, DEADLINE)


async def test_texts_go_with_a_purge_on_another_host(
    semantic: SemanticStage, mock: MockUpstream, valkey: Valkey
) -> None:
    """Each process hears of it by Redis."""
    one, other = [await semantic.gateway(mock, redis=valkey.url, semantic={"show_questions": True}) for _ in range(2)]
    await one.post(chat(ASKED))
    await until_known(one, 1)
    await one.post(chat(LIKE_IT))
    assert (await decisions(one))[0]["question"] == LIKE_IT
    await other.send("DELETE", "/v1/cache")

    async def are_gone() -> bool:
        return (await decisions(one))[0]["question"] is None

    await until(are_gone, DEADLINE)


async def test_no_text_of_a_decision_is_in_a_log(
    semantic: SemanticStage, mock: MockUpstream, caplog: pytest.LogCaptureFixture
) -> None:
    """Even where it is shown to operators."""
    with caplog.at_level(logging.DEBUG):
        client = await semantic.gateway(mock, semantic={"show_questions": True})
        await client.post(chat(ASKED))
        await until_known(client, 1)
        await client.post(chat(LIKE_IT))
        assert await decisions(client)
    assert not any(text in record.getMessage() for record in caplog.records for text in (ASKED, LIKE_IT))


async def test_decisions_are_for_the_operator(semantic: SemanticStage, mock: MockUpstream) -> None:
    """A tenant sees neither those of others nor its own."""
    client = await semantic.gateway(mock, admin_key="the-admin-key")
    for path in (DECISIONS, WHAT_IF):
        for headers in ({}, {"authorization": "Bearer tenant"}):
            assert (await client.get(path, **headers)).status == 401
        assert (await client.get(path, x_keepgate_admin_key="the-admin-key")).status == 200


async def test_what_other_deltas_would_serve(semantic: SemanticStage, mock: MockUpstream, valkey: Valkey) -> None:
    """Each of them counts each request that the policy decides; a list in the request may name others."""
    client = await semantic.gateway(mock, redis=valkey.url, mode="observe", semantic={**BUDGET, "delta": 0.03})
    await client.post(chat(ASKED))
    await until_known(client, 1)
    await client.post(chat(LIKE_IT))
    await until_judged(client)
    body = (await client.get(WHAT_IF)).json
    assert (body["delta"], body["step"]) == (0.03, 3600)
    assert [each["delta"] for each in body["data"]] == [0.005, 0.01, 0.02, 0.03]
    for each in body["data"]:
        assert (each["requests"], each["hits"], each["wrong"], each["wrong_upper"]) == (2, 0, 0, 0)
        assert len(each["points"]) == 24
        assert sum(point["requests"] for point in each["points"]) == 2
    body = (await client.get(f"{WHAT_IF}?delta=0.2,0.04&step=1m&steps=3")).json
    assert [(each["delta"], each["requests"]) for each in body["data"]] == [(0.04, 2), (0.2, 2)]
    assert [len(each["points"]) for each in body["data"]] == [3, 3]
    for wrong in ("delta=0", "delta=x", "delta=0.6", "step=1d", "steps=0", "y=1"):
        refused = await client.get(f"{WHAT_IF}?{wrong}")
        assert (refused.status, refused.error["param"]) == (400, wrong.partition("=")[0])


async def test_without_a_budget_there_is_no_other(semantic: SemanticStage, mock: MockUpstream) -> None:
    """And without a semantic cache there are no decisions."""
    client = await semantic.gateway(mock)
    assert (await client.get(WHAT_IF)).json == {"object": "list", "delta": None, "step": 3600, "data": []}
    without = await semantic.stage.gateway(mock)
    assert (await without.get(DECISIONS)).json == {"object": "list", "data": [], "next": None}
    assert (await without.get(WHAT_IF)).json["data"] == []


async def test_a_service_that_is_gone_is_named(semantic: SemanticStage, mock: MockUpstream) -> None:
    """With 503, since it may come back."""
    client = await semantic.gateway(mock)
    await semantic.end_services()
    for path in (DECISIONS, WHAT_IF):
        refused = await client.get(path)
        assert refused.status == 503
        assert "The semantic cache does not answer" in refused.error["message"]


async def test_commands_list_them(
    semantic: SemanticStage, mock: MockUpstream, capsys: pytest.CaptureFixture[str]
) -> None:
    """`keepgate cache decisions` has a line for each, and both texts if they are shown; `what-if` one a delta."""
    client = await semantic.gateway(mock, mode="observe", semantic={**BUDGET, "show_questions": True})

    async def run(*words: str) -> list[str]:
        assert await asyncio.to_thread(cache.run, [*words, "--url", client.gateway.url]) == 0
        return capsys.readouterr().out.splitlines()

    assert await run("decisions") == ["No decision near a stored question."]
    first = await client.post(chat(ASKED))
    await until_known(client, 1)
    await client.post(chat(LIKE_IT))
    await until_judged(client)
    heads, line, _, *texts = await run("decisions", "--outcome", "refused")
    assert heads.split()[:4] == ["TIME", "OUTCOME", "REASON", "VERDICT"]
    assert line.split()[1:5] == ["refused", "warm-up", "same", "(miss)"]
    assert f"  {first.entry}  " in line
    assert re.search(r"  uncertainty \+\d+\.\d\d, ", line)
    assert texts == [LIKE_IT, ASKED]
    heads, *lines = await run("what-if", "--delta", "0.01,0.3")
    assert [line.split() for line in lines] == [
        ["0.01", "2", "0", "0.0%", "0", "0", "0.00%", "0.00%", "as", "set"],
        ["0.3", "2", "0", "0.0%", "0", "0", "0.00%", "0.00%"],
    ]
    assert json.loads("".join(await run("what-if", "--json")))["delta"] == 0.01


async def test_a_request_may_ask_for_a_threshold_where_the_operator_allows_it(
    semantic: SemanticStage, mock: MockUpstream
) -> None:
    """It is served outside the budget, which has not learned enough to serve anything; vetoes and its own risk hold."""
    client = await semantic.gateway(mock, semantic={**BUDGET, "request_threshold": 0.6})
    await client.post(chat(ASKED))
    await until_known(client, 1)
    served = await client.post(chat(LIKE_IT), x_keepgate_threshold="0.6")
    assert (served.cache, served.headers["x-keepgate-layer"]) == ("hit", "semantic")
    assert "x-keepgate-risk" not in served.headers
    shown = (await decisions(client))[0]
    assert (shown["outcome"], shown["threshold"], shown["risk"]) == ("served", 0.6, None)
    for body, headers, reason in (
        (chat(OTHER), {"x_keepgate_threshold": "0.99"}, "similarity"),
        (chat("How do I not reset my password?"), {"x_keepgate_threshold": "0.6"}, "negation"),
        (chat(f"Well, {LIKE_IT}"), {"x_keepgate_threshold": "0.6", "x_keepgate_max_risk": "0.1"}, "max-risk"),
    ):
        explained = (await client.send("POST", "/v1/cache/explain", body, _named(headers))).json["layers"][1]
        assert explained["verdict"] == "miss"
        assert (await client.post(body, **headers)).cache == "miss"
        assert (await decisions(client))[0]["reason"] == reason
    assert await figure(client, "by_threshold") == 4
    assert await figure(client, "policy.requests") == 1, "only the first one was the budget's"
    assert await figure(client, "policy.labels") == 0
    assert (await client.get(WHAT_IF)).json["data"][0]["requests"] == 1


def _named(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}


@pytest.mark.parametrize(("lowest", "asked"), [(None, "0.9"), (0.9, "0.8"), (0.9, "1.1"), (0.9, "nan"), (0.9, "high")])
async def test_a_threshold_that_is_not_allowed_is_refused(
    semantic: SemanticStage, mock: MockUpstream, lowest: float | None, asked: str
) -> None:
    """With what would be allowed."""
    client = await semantic.gateway(mock, semantic={"request_threshold": lowest})
    refused = await client.post(chat(ASKED), x_keepgate_threshold=asked)
    assert refused.status == 400
    assert "x-keepgate-threshold" in refused.error["message"]
    assert ("semantic.request_threshold" if lowest is None else "from 0.9 to 1") in refused.error["message"]
