"""What the semantic cache says of a request that is explained."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from gateway.commands import cache
from gateway.upstreams.mock import MockUpstream
from tests.cache.valkey import Valkey
from tests.gateway.client import Client, chat
from tests.gateway.semantic.stage import AGAIN, ASKED, SemanticStage, until_known

EXPLAIN = "/v1/cache/explain"


async def explained(client: Client, body: Any, **headers: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The verdict of the semantic layer, and the nearest entries."""
    answer = await client.send("POST", EXPLAIN, body, {name.replace("_", "-"): said for name, said in headers.items()})
    assert answer.status == 200, answer.body
    _, semantic = answer.json["layers"]
    return semantic, answer.json["nearest"]


async def test_a_similar_question_is_explained_and_nothing_is_learned(
    semantic: SemanticStage, mock: MockUpstream, valkey: Valkey
) -> None:
    """With the entry, its similarity, and the field by which it is no exact hit; figures stay as they were."""
    client = await semantic.gateway(mock, redis=valkey.url)
    entry = (await client.post(chat(ASKED))).entry
    await until_known(client, 1)
    before = (await client.get("/v1/cache/stats")).json["layers"]["semantic"]
    verdict, nearest = await explained(client, chat(AGAIN))
    assert (verdict["verdict"], verdict["entry"]) == ("hit", entry)
    assert "is at or above 0.6" in verdict["reason"]
    assert nearest[0]["entry"]["id"] == entry
    assert 0.6 <= nearest[0]["similarity"] < 1
    assert nearest[0]["differences"] == [{"field": "messages[0]", "change": "changed", "here": "user", "there": "user"}]
    after = (await client.get("/v1/cache/stats")).json["layers"]["semantic"]
    assert {name: after.get(name) for name in ("asked", "served", "entries")} == {
        name: before.get(name) for name in ("asked", "served", "entries")
    }


@pytest.mark.parametrize(
    ("body", "verdict", "reason"),
    [
        (chat(ASKED.lower()), "hit", "the same question was asked, written differently"),
        (chat(ASKED, temperature=0.3), "miss", "nothing was asked in the same context"),
        (chat("How do I reset my router?"), "miss", "the veto"),
        (chat("word " * 500), "miss", "too long to be compared"),
    ],
)
async def test_the_reason_is_a_sentence(
    semantic: SemanticStage, mock: MockUpstream, body: Any, verdict: str, reason: str
) -> None:
    """Of the step that decided."""
    client = await semantic.gateway(mock)
    await client.post(chat(ASKED))
    await until_known(client, 1)
    found, _ = await explained(client, body)
    assert found["verdict"] == verdict, found
    assert reason in found["reason"]


async def test_neighbours_are_compared_together_as_a_lookup_does(semantic: SemanticStage, mock: MockUpstream) -> None:
    """A new word is a veto against one question, and no more than a feature where two have the answer."""
    client = await semantic.gateway(mock, semantic={"policy": "budget"})
    other, with_a_word = "How can I reset my password today?", "How do I reset my old password?"
    first = await client.post(chat(ASKED))
    await until_known(client, 1)
    alone, (near,) = await explained(client, chat(with_a_word))
    assert "the veto 'words' forbids the answer; without it: it has learned from 0 of the 60" in alone["reason"]
    assert (near["has_answer"], near["veto"]) == (True, "words")

    second = await client.post(chat(other))
    await until_known(client, 2)
    together, nearest = await explained(client, chat(with_a_word))
    assert together["reason"].startswith("it has learned from")
    assert {each["entry"]["id"] for each in nearest} == {first.entry, second.entry}
    assert [(each["has_answer"], each["veto"]) for each in nearest] == [(True, ""), (True, "")]
    assert {each["name"]: each["log_odds"] for each in together["features"]}["inserted"] > 1
    await client.post(chat(with_a_word))
    decided = (await client.get("/v1/cache/semantic/decisions")).json["data"][0]
    assert (decided["features"], decided["entry"]) == (together["features"], together["entry"])


async def test_a_command_tells_features_from_vetoes(
    semantic: SemanticStage, mock: MockUpstream, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What makes the risk is in a line of its own."""
    client = await semantic.gateway(mock, semantic={"policy": "budget"})
    await client.post(chat(ASKED))
    await until_known(client, 1)
    file = tmp_path / "request.json"
    for question, said in (("How do I reset my router?", "has the likeliest answer, veto: words"), (AGAIN, "overlap ")):
        file.write_text(json.dumps(chat(question)))
        assert await asyncio.to_thread(cache.run, ["explain", str(file), "--url", client.gateway.url]) == 0
        shown = capsys.readouterr().out
        assert said in shown
        assert re.search(r"log odds of a wrong answer: uncertainty \+\d", shown)


async def test_what_is_only_observed_would_not_be_served(semantic: SemanticStage, mock: MockUpstream) -> None:
    """The mode is part of the reason."""
    client = await semantic.gateway(mock, mode="observe")
    await client.post(chat(ASKED))
    await until_known(client, 1)
    found, _ = await explained(client, chat(AGAIN))
    assert found["verdict"] == "miss"
    assert "in the mode observe it is compared and not served" in found["reason"]


async def test_a_client_that_allows_no_risk_is_told(semantic: SemanticStage, mock: MockUpstream) -> None:
    """Its header counts as it would for the request."""
    client = await semantic.gateway(mock)
    await client.post(chat(ASKED))
    await until_known(client, 1)
    found, _ = await explained(client, chat(AGAIN), x_keepgate_max_risk="0")
    assert found["verdict"] == "miss"
