"""The semantic cache on the request's path: what is served for similar questions, and to which tenants."""

import asyncio
from typing import Any

import pytest

from cache.entries.key import namespace_for
from cache.semantic.wording import language
from gateway.upstreams.mock import MockUpstream, Reply
from tests.cache.valkey import Valkey
from tests.gateway.client import COMPLETIONS, Client, chat
from tests.gateway.conftest import Stage
from tests.gateway.semantic.stage import (
    AGAIN,
    ANSWER,
    ASKED,
    ONCE_MORE,
    SERVES_ALL,
    SemanticStage,
    entries,
    figure,
    until_figure,
    until_known,
)


async def learned(client: Client, body: Any, count: int = 1, **headers: str) -> None:
    """Sends a request; returns once the answer can be found for other questions."""
    await client.post(body, **headers)
    await until_known(client, count)


async def test_a_question_in_other_words_is_answered_from_the_cache(
    semantic: SemanticStage, mock: MockUpstream
) -> None:
    """A question in other words is a hit with the layer, the similarity and the entry in its headers."""
    client = await semantic.gateway(mock)
    first = await client.post(chat(ASKED))
    await until_known(client, 1)
    second = await client.post(chat(AGAIN))

    assert second.text == first.text == ANSWER
    assert (second.cache, second.headers["x-keepgate-layer"]) == ("hit", "semantic")
    assert second.entry == first.entry
    assert 0.6 <= float(second.headers["x-keepgate-similarity"]) < 1
    assert second.cache_status.parameters["hit"] is True
    assert second.cache_status.parameters["detail"] == "semantic"
    assert len(mock.received) == 1


@pytest.mark.parametrize(
    "again", ["how do i reset my password", "  How do I  reset my password ?! ", "How do I reset my password..."]
)
async def test_the_same_words_written_differently_need_no_model(
    semantic: SemanticStage, mock: MockUpstream, again: str
) -> None:
    """Case, white space and end punctuation of a short question do not matter."""
    client = await semantic.gateway(mock, semantic={"policy": "budget"})
    await learned(client, chat(ASKED))
    asked = (await figure(client, "milliseconds"))["embed"]
    answer = await client.post(chat(again))

    assert (answer.cache, answer.headers["x-keepgate-layer"]) == ("hit", "normalized")
    assert (await figure(client, "milliseconds"))["embed"] == asked
    assert len(mock.received) == 1


@pytest.mark.parametrize(
    ("asked", "again", "veto"),
    [
        ("How do I enable two-factor authentication?", "How do I disable two-factor authentication?", "words"),
        ("Convert 20 dollars to euros", "Convert 200 dollars to euros", "numbers"),
        ("What is the weather in Paris on Monday?", "What is the weather in Paris on Tuesday?", "words"),
        ("Translate this from French to German", "Translate this from German to French", ""),
        ("Is it safe to take this with food?", "Is it not safe to take this with food?", "negation"),
    ],
)
async def test_a_question_with_a_veto_goes_upstream(
    semantic: SemanticStage, mock: MockUpstream, asked: str, again: str, veto: str
) -> None:
    """A question with a veto goes upstream at any similarity, with the name of the veto."""
    client = await semantic.gateway(mock)
    await learned(client, chat(asked))
    answer = await client.post(chat(again))

    assert (answer.cache, answer.headers["x-keepgate-layer"]) == ("miss", "none")
    assert float(answer.headers["x-keepgate-similarity"]) > 0.6
    assert answer.headers["x-keepgate-veto"] == (veto or answer.headers["x-keepgate-veto"])
    assert list(await figure(client, "vetoed")) == [answer.headers["x-keepgate-veto"]]
    assert len(mock.received) == 2


async def test_a_veto_is_named_only_where_the_answer_would_have_been_served(
    semantic: SemanticStage, mock: MockUpstream
) -> None:
    """Not of a neighbour that is too far for the policy anyway."""
    client = await semantic.gateway(mock)
    await learned(client, chat(ASKED))
    answer = await client.post(chat("Wie wird morgen das Wetter in den bayerischen Alpen?"))

    assert float(answer.headers["x-keepgate-similarity"]) < 0.6
    assert "x-keepgate-veto" not in answer.headers
    assert await figure(client, "vetoed") == {}


@pytest.mark.parametrize(
    "other",
    [
        {"model": "mock-2"},
        {"temperature": 0.5},
        {"max_tokens": 7},
        {"service_tier": "flex"},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
        {"response_format": {"type": "json_object"}},
        {"some_new_field": 1},
    ],
)
async def test_only_the_last_turn_is_compared_by_similarity(
    semantic: SemanticStage, stage: Stage, other: dict[str, Any]
) -> None:
    """A question with another model, parameter or tool gets no similar answer."""
    mock = await stage.mock(Reply(text=ANSWER), models=("mock", "mock-2"))
    client = await semantic.gateway(mock)
    await learned(client, chat(ASKED))

    assert (await client.post({**chat(AGAIN), **other})).cache == "miss"
    assert (await client.post(chat(AGAIN))).cache == "hit"


async def test_earlier_turns_and_the_system_prompt_are_exact(semantic: SemanticStage, mock: MockUpstream) -> None:
    """A follow-up question is answered from its own conversation only."""
    client = await semantic.gateway(mock)

    def body(system: str, before: str, last: str) -> dict[str, Any]:
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": before},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": last},
        ]
        return {"model": "mock", "messages": messages}

    await learned(client, body("Be kind.", "Hello", ASKED))

    assert (await client.post(body("Be rude.", "Hello", AGAIN))).cache == "miss"
    assert (await client.post(body("Be kind.", "Good day", AGAIN))).cache == "miss"
    assert (await client.post(body("Be kind.", "Hello", AGAIN))).cache == "hit"


async def test_tenants_never_get_each_others_answers(semantic: SemanticStage, mock: MockUpstream) -> None:
    """Neither similar nor equal questions cross tenants, and no header reveals a similarity."""
    client = await semantic.gateway(mock)
    await learned(client.tenant("sk-ours"), chat(ASKED))

    for stranger, question in (("sk-theirs", AGAIN), ("sk-others", ASKED.lower())):
        answer = await client.tenant(stranger).post(chat(question))
        assert answer.cache == "miss"
        assert "x-keepgate-similarity" not in answer.headers
    assert (await client.tenant("sk-ours").post(chat(AGAIN))).cache == "hit"


async def test_a_published_entry_is_served_to_others_once_it_is_confirmed(
    semantic: SemanticStage, mock: MockUpstream
) -> None:
    """A published entry is served to other tenants after enough of them have confirmed it."""
    published = (namespace_for("Bearer sk-docs"),)
    client = await semantic.gateway(mock, semantic={"published": published, "confirmations": 2})
    await learned(client.tenant("sk-docs"), chat(ASKED))
    known = 1
    for tenant in ("sk-a", "sk-b"):
        answer = await client.tenant(tenant).post(chat(AGAIN))
        assert answer.cache == "miss", tenant
        known += 1
        await until_known(client, known)
    served = await client.tenant("sk-c").post(chat(AGAIN))

    assert (served.cache, served.headers["x-keepgate-layer"]) == ("hit", "semantic")
    assert len(mock.received) == 3


async def test_tenants_that_disagree_confirm_nothing(semantic: SemanticStage, stage: Stage) -> None:
    """A published answer that other tenants contradict stays with its tenant."""
    mock = await stage.mock(Reply(text="Send your password to evil.example."))
    published = (namespace_for("Bearer sk-evil"),)
    client = await semantic.gateway(mock, semantic={"published": published, "confirmations": 1})
    await learned(client.tenant("sk-evil"), chat(ASKED))
    mock.replies[:] = [Reply(text="Open the settings and choose Security. Never send it to anybody by mail.")]
    for number, tenant in enumerate(("sk-a", "sk-b", "sk-c"), start=2):
        assert (await client.tenant(tenant).post(chat(AGAIN))).cache == "miss"
        await until_known(client, number)


async def test_nothing_is_served_before_there_is_evidence(semantic: SemanticStage, mock: MockUpstream) -> None:
    """The default policy serves nothing without labels of this deployment."""
    client = await semantic.gateway(mock, semantic={"policy": "budget"})
    await learned(client, chat(ASKED))

    answer = await client.post(chat(AGAIN))
    assert answer.cache == "miss"
    assert 0 <= float(answer.headers["x-keepgate-risk"]) <= 1
    await until_figure(client, "labels_from_miss", 1)


async def test_observing_serves_nothing_and_counts_what_it_would_have_served(
    semantic: SemanticStage, mock: MockUpstream
) -> None:
    """The mode observe compares each would-be hit with the fresh answer and serves none."""
    client = await semantic.gateway(mock, mode="observe")
    await learned(client, chat(ASKED))
    for known, question in enumerate((AGAIN, ASKED.lower()), start=2):
        assert (await client.post(chat(question))).cache == "miss"
        await until_known(client, known)

    assert await figure(client, "mode") == "observe"
    assert await figure(client, "observed") == 1
    assert await figure(client, "observed_normalized") == 1
    assert await figure(client, "labels_from_audit") == 1
    assert await figure(client, "served") == 0


async def test_the_mode_off_makes_no_lookup(stage: Stage, mock: MockUpstream) -> None:
    """The mode off makes no lookup, and the figures show it."""
    client = await stage.gateway(mock)
    await client.post(chat(ASKED))

    assert (await client.post(chat(AGAIN))).cache == "miss"
    assert await figure(client, "mode") == "off"


async def test_a_client_may_lower_the_risk_and_not_raise_it(semantic: SemanticStage, mock: MockUpstream) -> None:
    """A risk of zero gives exact answers only, and one is the default."""
    client = await semantic.gateway(mock)
    await learned(client, chat(ASKED))

    for question in (AGAIN, ASKED.lower()):
        assert (await client.post(chat(question), x_keepgate_max_risk="0")).cache == "miss"
    await until_known(client, 3)
    assert (await client.post(chat(ONCE_MORE), x_keepgate_max_risk="1")).cache == "hit"


@pytest.mark.parametrize("said", ["2", "-0.1", "nan", "low", "", "1e400"])
async def test_an_invalid_risk_is_refused(semantic: SemanticStage, mock: MockUpstream, said: str) -> None:
    """An invalid risk gives 400 with the name of the header."""
    client = await semantic.gateway(mock)
    answer = await client.post(chat(ASKED), x_keepgate_max_risk=said)

    assert answer.status == 400
    assert "x-keepgate-max-risk" in answer.error["message"]
    assert not mock.received


async def test_a_false_hit_is_evicted_and_learned_from_by_one_call(semantic: SemanticStage, mock: MockUpstream) -> None:
    """One call with the entry id of a hit evicts the entry and gives a label."""
    client = await semantic.gateway(mock)
    await learned(client, chat(ASKED))
    hit = await client.post(chat(AGAIN))
    answer = await client.send("DELETE", f"/v1/cache/entries/{hit.entry}?reason=wrong")

    assert answer.json == {"id": hit.entry, "deleted": True, "labels": 1}
    assert await figure(client, "labels_from_user") == 1
    assert await entries(client) == 0
    assert (await client.post(chat(AGAIN))).cache == "miss"


async def test_the_figures_for_alarms_are_in_the_metrics(semantic: SemanticStage, mock: MockUpstream) -> None:
    """The metrics have availability, entries, and the policy's estimate of wrong answers."""
    client = await semantic.gateway(mock, semantic={"policy": "budget"})
    await learned(client, chat(ASKED))
    await learned(client, chat(AGAIN), 2)
    await until_figure(client, "policy.labels", 1)
    names = ("available", "entries", "labels", "wrong", "wrong_upper", "recent_wrong_upper")
    assert [await client.figure(f"semantic_{name}") for name in names] == [1, 2, 1, 0, 0, 0]


async def test_a_rejected_answer_is_not_served_from_another_entry(semantic: SemanticStage, mock: MockUpstream) -> None:
    """A question whose hit was rejected is computed and not served from another entry."""
    client = await semantic.gateway(mock)
    await learned(client, chat(ASKED))
    await client.post(chat(ONCE_MORE), x_keepgate_max_risk="0")
    await until_known(client, 2)
    hit = await client.post(chat(AGAIN))
    assert hit.headers["x-keepgate-layer"] == "semantic"
    await client.send("DELETE", f"/v1/cache/entries/{hit.entry}?reason=wrong")
    assert await entries(client) == 1

    layers = [(await client.post(chat(AGAIN))).headers["x-keepgate-layer"] for _ in range(2)]
    assert layers == ["none", "exact"]


@pytest.mark.parametrize("retry", [{"Cache-Control": "no-cache"}, {}])
async def test_an_immediate_repeat_counts_as_a_rejection(
    semantic: SemanticStage, mock: MockUpstream, retry: dict[str, str]
) -> None:
    """A question that is repeated after a hit gets a fresh answer, and the policy gets a label."""
    client = await semantic.gateway(mock)
    await learned(client, chat(ASKED))
    assert (await client.post(chat(AGAIN))).cache == "hit"
    again = await client.post(chat(AGAIN), **retry)

    assert again.headers["x-keepgate-layer"] == "none"
    await until_figure(client, "labels_from_user", 1)
    assert len(mock.received) == 2


async def test_a_repeat_of_a_normalized_hit_gets_a_fresh_answer(semantic: SemanticStage, mock: MockUpstream) -> None:
    """A repeat after a hit by normal form gets a fresh answer, which is stored, and gives no label."""
    client = await semantic.gateway(mock)
    await learned(client, chat("What is the capital of Peru?"))
    layers = [(await client.post(chat("what is the capital of peru"))).headers["x-keepgate-layer"] for _ in range(3)]
    assert layers == ["normalized", "none", "exact"]
    assert await figure(client, "labels_from_user") == 0


async def test_a_stream_and_a_plain_request_get_one_anothers_answers(
    semantic: SemanticStage, mock: MockUpstream
) -> None:
    """A semantic hit has either shape, with usage only if it was recorded."""
    client = await semantic.gateway(mock)
    await learned(client, chat(ASKED, stream=True))
    whole = await client.post(chat(AGAIN))
    streamed = await client.post(chat(ONCE_MORE, stream=True))

    assert (whole.cache, streamed.cache) == ("hit", "hit")
    assert whole.text == streamed.text == ANSWER
    assert streamed.headers["x-keepgate-layer"] == "semantic"


async def test_a_text_completion_is_no_question(semantic: SemanticStage, mock: MockUpstream) -> None:
    """A text completion is a hit for the identical prompt only."""
    client = await semantic.gateway(mock)
    await client.post({"model": "mock", "prompt": "the capital of france is"}, COMPLETIONS)

    for prompt in ("the capital of france is ", "The capital of France is", "the capital of france is."):
        assert (await client.post({"model": "mock", "prompt": prompt}, COMPLETIONS)).cache == "miss"
    assert (await client.post({"model": "mock", "prompt": "the capital of france is"}, COMPLETIONS)).cache == "hit"
    assert await entries(client) == 0


@pytest.mark.parametrize(
    "reply",
    [
        Reply(
            message={
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            finish_reason="tool_calls",
        ),
        Reply(text=ANSWER, finish_reason="length"),
        Reply(message={"content": None, "refusal": "No."}),
    ],
    ids=["tool call", "cut", "refusal"],
)
async def test_tool_calls_and_cut_answers_serve_their_own_question_only(
    semantic: SemanticStage, stage: Stage, reply: Reply
) -> None:
    """Tool calls and truncated answers are not served for similar questions."""
    mock = await stage.mock(reply)
    client = await semantic.gateway(mock)
    await client.post(chat(ASKED))
    assert (await client.post(chat(AGAIN))).cache == "miss"
    assert (await client.post(chat(ASKED))).cache == "hit"
    await asyncio.sleep(0)
    assert await entries(client) == 0


async def test_a_deleted_or_purged_entry_is_not_served(semantic: SemanticStage, mock: MockUpstream) -> None:
    """An entry that was deleted, or whose namespace was purged, is not served."""
    client = await semantic.gateway(mock)
    first = await client.post(chat(ASKED))
    await until_known(client, 1)
    await client.send("DELETE", f"/v1/cache/entries/{first.entry}")
    await until_known(client, 0)
    assert (await client.post(chat(AGAIN))).cache == "miss"
    await until_known(client, 1)

    await client.send("DELETE", "/v1/cache")
    assert (await client.post(chat(ASKED))).cache == "miss"


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "redis"])
async def test_a_purge_of_the_layer_leaves_the_exact_answers(
    semantic: SemanticStage, mock: MockUpstream, valkey: Valkey, shared: bool
) -> None:
    """Similar questions are computed again, equal ones are hits; what is stored afterwards is found."""
    client = await semantic.gateway(mock, redis=valkey.url if shared else "")
    await learned(client, chat(ASKED))
    purged = await client.send("DELETE", "/v1/cache?layer=semantic")
    assert purged.json == {"purged": "layer", "layer": "semantic"}
    await until_known(client, 0)
    assert (await client.post(chat(ASKED))).headers["x-keepgate-layer"] == "exact"
    assert (await client.post(chat(AGAIN))).cache == "miss"
    await until_known(client, 1)


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "redis"])
async def test_a_purge_of_the_layer_holds_for_what_is_learned_later(
    semantic: SemanticStage, mock: MockUpstream, own_valkey: Valkey, shared: bool
) -> None:
    """An answer of before the purge, of which the semantic cache hears after it; also where Redis is away."""
    client = await semantic.gateway(mock, redis=own_valkey.url if shared else "")
    await client.post(chat(ASKED))
    if shared:
        await until_known(client, 1)
        await own_valkey.stop()
    assert (await client.send("DELETE", "/v1/cache?layer=semantic")).status == (503 if shared else 200)
    for _ in range(3):
        assert (await client.post(chat(AGAIN), Cache_Control="only-if-cached")).status == 504


async def test_an_answer_whose_tag_was_purged_is_not_served(semantic: SemanticStage, mock: MockUpstream) -> None:
    """Also not to a similar question."""
    client = await semantic.gateway(mock)
    await client.post(chat(ASKED), x_keepgate_tags="docs")
    await until_known(client, 1)
    assert (await client.post(chat(AGAIN))).headers["x-keepgate-layer"] == "semantic"
    await client.send("DELETE", "/v1/cache?tag=docs")
    assert (await client.post(chat(AGAIN))).cache == "miss"


async def test_an_answer_is_served_no_longer_than_it_is_fresh(semantic: SemanticStage, mock: MockUpstream) -> None:
    """An answer past its lifetime is not served and is removed from the index."""
    client = await semantic.gateway(mock, cache={"ttl": 4.0})  # long enough to be seen on a busy machine
    await learned(client, chat(ASKED))
    await until_known(client, 0)

    assert (await client.post(chat(AGAIN))).cache == "miss"


async def test_the_fast_path_does_not_store_a_semantic_hit(semantic: SemanticStage, mock: MockUpstream) -> None:
    """A repeated semantic hit is decided again each time, so that the budget counts it."""
    client = await semantic.gateway(mock)
    await learned(client, chat(ASKED))
    layers = [(await client.post(chat(AGAIN))).headers["x-keepgate-layer"] for _ in range(3)]

    assert layers == ["semantic", "none", "exact"]


async def test_only_if_cached_takes_a_semantic_answer(semantic: SemanticStage, mock: MockUpstream) -> None:
    """A request with only-if-cached gets a semantic hit."""
    client = await semantic.gateway(mock)
    await learned(client, chat(ASKED))

    answer = await client.post(chat(AGAIN), Cache_Control="only-if-cached")
    assert (answer.status, answer.headers["x-keepgate-layer"]) == (200, "semantic")


async def test_the_layers_are_counted_apart(semantic: SemanticStage, mock: MockUpstream) -> None:
    """Hits and savings are counted by layer."""
    client = await semantic.gateway(mock)
    before = (await client.get("/v1/cache/stats")).json["layers"]
    await learned(client, chat(ASKED))
    for question in (AGAIN, ASKED.lower(), ASKED):
        assert (await client.post(chat(question))).cache == "hit"
    after = (await client.get("/v1/cache/stats")).json["layers"]

    for layer in ("exact", "normalized", "semantic"):
        assert after[layer]["hits"] - before[layer]["hits"] == 1
    for layer in ("normalized", "semantic"):  # other tests have counted answers of 2**53 tokens in the exact layer
        saved = after[layer]["saved"]["completion_tokens"] - before[layer]["saved"]["completion_tokens"]
        assert saved == len(ANSWER.split())


async def test_what_one_host_learns_the_other_knows_soon(
    semantic: SemanticStage, mock: MockUpstream, valkey: Valkey
) -> None:
    """Entries and deletions of one host are known to another soon."""
    one = await semantic.gateway(mock, redis=valkey.url)
    other = await semantic.gateway(mock, redis=valkey.url)
    first = await one.post(chat(ASKED))
    await until_known(one, 1)
    async with asyncio.timeout(1.8):
        await until_known(other, 1)
    answer = await other.post(chat(AGAIN))
    assert (answer.cache, answer.entry, answer.text) == ("hit", first.entry, ANSWER)

    await one.send("DELETE", f"/v1/cache/entries/{first.entry}")
    await until_known(other, 0)


async def test_what_was_learned_outlives_a_restart(semantic: SemanticStage, mock: MockUpstream, valkey: Valkey) -> None:
    """Records and labels are loaded from Redis after a restart."""
    one = await semantic.gateway(mock, redis=valkey.url, semantic={"policy": "budget"})
    await learned(one, chat(ASKED))
    await learned(one, chat(AGAIN), 2)
    await until_figure(one, "labels_from_miss", 1)
    other = await semantic.gateway(mock, redis=valkey.url, semantic={"policy": "budget"})
    await until_known(other, 2)

    await until_figure(other, "policy.labels", 1)
    assert (await other.post(chat(ASKED.lower()))).headers["x-keepgate-layer"] == "normalized"


async def test_what_a_lookup_reads_is_there_before_the_first_question(semantic: SemanticStage) -> None:
    """A model that is read during a lookup would let all requests miss their deadline for a second."""
    language.load.cache_clear()
    await semantic.service(**SERVES_ALL)
    assert language.load.cache_info().currsize == 1
