"""Answers to similar questions that are not served, sent along as predictions."""

from typing import Any

import pytest

from cache.entries.key import namespace_for
from gateway.settings.upstreams import UpstreamSettings
from gateway.upstreams.mock import MockUpstream
from tests.gateway.client import Client, chat
from tests.gateway.proxy.test_predictions import prediction
from tests.gateway.semantic.stage import AGAIN, ANSWER, ASKED, AuditsAll, SemanticStage, until_figure, until_known

REFUSING = {"x_keepgate_max_risk": "0"}
"""Then no answer to another question is served."""


async def asked(stage: SemanticStage, mock: MockUpstream, by: str = "", **settings: Any) -> Client:
    """A gateway that knows the answer to one question, asked by this tenant."""
    client = await stage.gateway(UpstreamSettings(url=mock.url, predictions=True), **settings)
    await (client.tenant(by) if by else client).post(chat(ASKED))
    await until_known(client, 1)
    return client


async def test_the_answer_to_a_similar_question_predicts(semantic: SemanticStage, mock: MockUpstream) -> None:
    """Where it may not be served."""
    client = await asked(semantic, mock)
    before = await client.figure("predictions_total", source="neighbour")
    answer = await client.post(chat(AGAIN), **REFUSING)
    assert answer.cache == "miss"
    assert prediction(mock.received[1]) == ANSWER
    assert await client.figure("predictions_total", source="neighbour") == before + 1


async def test_an_answer_with_a_veto_predicts(semantic: SemanticStage, mock: MockUpstream) -> None:
    """It is wrong by a number, and right for the rest."""
    client = await semantic.gateway(UpstreamSettings(url=mock.url, predictions=True))
    await client.post(chat("How do I send 20 dollars to my friend in Spain?"))
    await until_known(client, 1)
    answer = await client.post(chat("How do I send 200 dollars to my friend in Spain?"))
    assert answer.headers["x-keepgate-veto"] == "numbers"
    assert prediction(mock.received[1]) == ANSWER


@pytest.mark.parametrize(
    "question", ["What is the capital of France?", "How do I cook rice?"], ids=["another subject", "another question"]
)
async def test_the_answer_to_another_question_does_not(
    semantic: SemanticStage, mock: MockUpstream, question: str
) -> None:
    """Below a similarity it would be wrong nearly always."""
    client = await asked(semantic, mock)
    await client.post(chat(question), **REFUSING)
    assert prediction(mock.received[1]) is None


async def test_another_tenants_answer_does_not(semantic: SemanticStage, mock: MockUpstream) -> None:
    """How fast its answer comes would tell a tenant what others ask."""
    client = await asked(semantic, mock, by="sk-a")
    await client.tenant("sk-b").post(chat(AGAIN), **REFUSING)
    await until_known(client, 2)
    await client.tenant("sk-a").post(chat(AGAIN), **REFUSING)
    assert [prediction(each) for each in mock.received] == [None, None, ANSWER]


async def test_a_published_answer_predicts_for_others_once_it_is_confirmed(
    semantic: SemanticStage, mock: MockUpstream
) -> None:
    """As it would be served to them only then."""
    published = {"published": (namespace_for("Bearer sk-docs"),), "confirmations": 1}
    client = await asked(semantic, mock, by="sk-docs", semantic=published)
    await client.tenant("sk-a").post(chat(AGAIN), **REFUSING)
    await until_known(client, 2)
    await client.tenant("sk-b").post(chat(AGAIN), **REFUSING)
    assert [prediction(each) for each in mock.received] == [None, None, ANSWER]


@pytest.mark.parametrize("purge", ["", "?layer=semantic", "/{entry}"], ids=["all", "the layer", "the entry"])
async def test_what_is_purged_or_deleted_predicts_nothing(
    semantic: SemanticStage, mock: MockUpstream, purge: str
) -> None:
    """It is not to be found, whatever the service still knows."""
    client = await asked(semantic, mock)
    (entry,) = (await client.get("/v1/cache/entries")).json["data"]
    path = f"/v1/cache/entries{purge.format(entry=entry['id'])}" if "entry" in purge else f"/v1/cache{purge}"
    assert (await client.send("DELETE", path)).status == 200
    await client.post(chat(AGAIN), **REFUSING)
    assert prediction(mock.received[1]) is None


async def test_an_audit_predicts_what_was_served(
    semantic: SemanticStage, mock: MockUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call in the background that compares a hit with a fresh answer."""
    monkeypatch.setattr("cache.semantic.service.service.ThresholdPolicy", AuditsAll)
    client = await asked(semantic, mock)
    before = await client.figure("predictions_total", source="audit")
    assert (await client.post(chat(AGAIN))).cache == "hit"
    await until_figure(client, "labels_from_audit", 1)
    assert prediction(mock.received[1]) == ANSWER
    assert await client.figure("predictions_total", source="audit") == before + 1


async def test_no_request_waits_for_a_prediction_where_none_waits_for_an_answer(
    semantic: SemanticStage, mock: MockUpstream
) -> None:
    """In the mode observe a lookup that is not done yet gives none, and the request is answered."""
    client = await asked(semantic, mock, mode="observe")
    assert (await client.post(chat(AGAIN))).text == ANSWER
    assert prediction(mock.received[1]) in (None, ANSWER)
