"""Aliases, variants and rules: which model answers for the one that a client names."""

from typing import Any

import msgspec
import pytest

from gateway.settings.upstreams import RoutingSettings, UpstreamSettings
from gateway.upstreams.mock import MockUpstream, Reply
from tests.gateway.client import Client, chat
from tests.gateway.conftest import Stage

ROUTING = {
    "aliases": {"gpt-4": "chat"},
    "models": {
        "chat": {
            "variants": {"cheap": "small", "best": "large"},
            "rules": [
                {"use": "best", "tools": True},
                {"use": "cheap", "max_prompt_chars": 10},
                {"use": "best", "header": "x-tier: gold"},
            ],
        }
    },
}
LONG = "a question of more than ten characters"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def routing(**values: Any) -> RoutingSettings:
    return msgspec.convert(values, RoutingSettings)


@pytest.fixture
async def routed(stage: Stage) -> tuple[Client, MockUpstream]:
    mock = await stage.mock(models=("chat", "small", "large"))
    return await stage.gateway(mock, routing=routing(**ROUTING)), mock


@pytest.mark.parametrize(
    ("model", "content", "fields", "headers", "answers"),
    [
        ("chat", LONG, {}, {}, "chat"),
        ("gpt-4", LONG, {}, {}, "chat"),
        ("chat", "short", {}, {}, "small"),
        ("gpt-4", "short", {}, {}, "small"),
        ("chat", "short", {"tools": [TOOL]}, {}, "large"),
        ("chat", LONG, {}, {"x_tier": "gold"}, "large"),
        ("chat:best", "short", {}, {}, "large"),
        ("gpt-4:cheap", LONG, {}, {}, "small"),
        ("other", "short", {}, {}, "other"),
    ],
)
async def test_the_first_rule_that_holds_decides(
    routed: tuple[Client, MockUpstream],
    model: str,
    content: str,
    fields: dict[str, Any],
    headers: dict[str, str],
    answers: str,
) -> None:
    """The upstream is asked for the model that answers, and the client is told of one that it did not name."""
    client, mock = routed
    answer = await client.post(chat(content, model=model, **fields), **headers)
    assert answer.status == 200
    assert mock.received[0].fields["model"] == answers
    assert answer.headers.get("x-keepgate-model", model) == answers


async def test_a_rule_on_a_header_holds_for_each_request(routed: tuple[Client, MockUpstream]) -> None:
    """Also where the answer to the same body without the header is in memory, and the other way round."""
    client, mock = routed
    for _ in range(3):
        assert (await client.post(chat(LONG, model="chat"))).json["model"] == "chat"
        assert (await client.post(chat(LONG, model="chat"), x_tier="gold")).json["model"] == "large"
    assert len(mock.received) == 2


async def test_names_of_one_model_share_answers(routed: tuple[Client, MockUpstream]) -> None:
    """And variants of it do not."""
    client, mock = routed
    named = ("gpt-4", "chat", "chat:best", "large", "chat:cheap")
    assert [(await client.post(chat(LONG, model=name))).cache for name in named] == [
        "miss",
        "hit",
        "miss",
        "hit",
        "miss",
    ]
    assert len(mock.received) == 3


async def test_names_of_the_settings_are_listed(routed: tuple[Client, MockUpstream]) -> None:
    """Apps that let people choose from GET /v1/models offer aliases and variants as well, each of which is found."""
    client, _ = routed
    listed = {model["id"]: model for model in (await client.get("/v1/models")).json["data"]}
    assert listed.keys() == {"chat", "small", "large", "gpt-4", "chat:cheap", "chat:best"}
    for name, model in listed.items():
        assert (await client.get(f"/v1/models/{name}")).json["id"] == model["id"] == name
    assert {model["name"] for model in (await client.get("/api/tags")).json["models"]} >= {"gpt-4"}


async def test_rules_know_the_length_of_what_is_embedded(routed: tuple[Client, MockUpstream]) -> None:
    """As that of a chat's prompt."""
    client, mock = routed
    for text in ("short", LONG):
        assert (await client.post({"model": "chat", "input": [text]}, "/v1/embeddings")).status == 200
    assert [received.fields["model"] for received in mock.received] == ["small", "chat"]


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/v1/pooling"])
async def test_an_alias_is_known_to_endpoints_that_are_not_cached(stage: Stage, path: str) -> None:
    """The upstream that has the model is asked for it."""
    other = await stage.mock(models=("other",))
    async with MockUpstream(models=("chat",), paths=(path,)).serving() as mock:
        client = await stage.gateway(other, mock, routing=routing(**ROUTING))
        await client.gateway.router.refreshed.wait()
        assert (await client.post(chat(LONG, model="gpt-4"), path)).status == 200
        assert [received.fields["model"] for received in mock.received] == ["chat"]
    assert other.received == []


async def test_only_the_name_of_the_model_changes_in_a_body(routed: tuple[Client, MockUpstream]) -> None:
    """All other bytes reach the upstream as they are."""
    client, mock = routed
    message = b'{"role":"user","content":"\\u0061 question of some \\"model\\": length"}'
    body = b'{ "messages":[%s], "model" :"gpt-4","x":1.0}' % message
    assert (await client.post(body)).status == 200
    assert mock.received[0].body == body.replace(b"gpt-4", b"chat")


async def test_a_fallback_answers_where_no_upstream_does(stage: Stage) -> None:
    """Its answer names its model, and is not stored as one of the model that was asked for."""
    broken = await stage.mock(Reply(status=503, error={"message": "no", "type": "x"}), models=("chat",))
    well = await stage.mock(models=("spare",))
    client = await stage.gateway(broken, well, routing=routing(models={"chat": {"fallbacks": ["spare"]}}))
    for _ in range(2):
        answer = await client.post(chat(LONG, model="chat"))
        assert (answer.status, answer.cache, answer.headers["x-keepgate-model"]) == (200, "miss", "spare")
    assert [received.fields["model"] for received in well.received] == ["spare", "spare"]


async def test_a_model_keeps_to_its_upstreams(stage: Stage) -> None:
    """Though others list it as well."""
    mocks = [await stage.mock() for _ in range(2)]
    servers = [UpstreamSettings(url=mock.url, name=f"u{number}") for number, mock in enumerate(mocks)]
    client = await stage.gateway(*servers, routing=routing(models={"mock": {"upstreams": ["u1"]}}))
    for number in range(6):
        assert (await client.post(chat(str(number)))).status == 200
    assert [len(mock.received) for mock in mocks] == [0, 6]


async def test_an_upstream_may_have_a_name_of_its_own_for_a_model(stage: Stage) -> None:
    """The body has it, and the answer is stored under the name that clients use."""
    mock = await stage.mock(models=("Qwen3-8B",))
    client = await stage.gateway(UpstreamSettings(url=mock.url, models={"chat": "Qwen3-8B"}))
    assert [(await client.post(chat(LONG, model="chat"))).cache for _ in range(2)] == ["miss", "hit"]
    assert mock.received[0].fields["model"] == "Qwen3-8B"
