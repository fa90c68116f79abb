"""What a client's name of a model stands for."""

from typing import Any

import msgspec
import pytest
from multidict import CIMultiDict

from gateway.errors import InvalidRequest
from gateway.routing.models import ModelTable, RequestFacts, Resolved
from gateway.routing.strategies.load import LeastConnections
from gateway.routing.strategies.rotation import RoundRobin
from gateway.routing.table import RoutingTable
from gateway.settings.fields import SettingsError
from gateway.settings.settings import Settings
from gateway.settings.upstreams import RoutingSettings, UpstreamSettings

NOTHING = RequestFacts()
SERVERS = (
    UpstreamSettings(url="http://gpu-1:8000/v1", name="one"),
    UpstreamSettings(url="http://gpu-2:8000/v1"),
)
CHAT = {
    "variants": {"cheap": "small", "best": "large"},
    "rules": [
        {"use": "cheap", "max_prompt_chars": 100, "tools": False},
        {"use": "best", "teams": ["research"], "min_prompt_chars": 50},
        {"use": "best", "keys": ["ada"]},
        {"use": "cheap", "header": "x-tier: economy"},
    ],
    "fallbacks": ["other"],
}


def table(**routing: Any) -> ModelTable:
    return ModelTable(msgspec.convert(routing, RoutingSettings), SERVERS)


@pytest.mark.parametrize(
    ("facts", "variant"),
    [
        (RequestFacts(prompt_chars=100), "cheap"),
        (RequestFacts(prompt_chars=101), None),
        (RequestFacts(prompt_chars=99, tools=True), None),
        (RequestFacts(prompt_chars=101, team="research"), "best"),
        (RequestFacts(prompt_chars=49, team="research", tools=True), None),
        (RequestFacts(prompt_chars=101, team="sales"), None),
        (RequestFacts(prompt_chars=101, key="ada"), "best"),
        (RequestFacts(prompt_chars=101, headers=CIMultiDict({"X-Tier": "economy"})), "cheap"),
        (RequestFacts(prompt_chars=101, headers=CIMultiDict({"X-Tier": "premium"})), None),
    ],
)
def test_the_first_rule_that_holds_chooses_the_variant(facts: RequestFacts, variant: str | None) -> None:
    """Every condition that a rule has must hold."""
    resolved = table(models={"chat": CHAT}).resolve("chat", facts)
    model = {"cheap": "small", "best": "large", None: "chat"}[variant]
    assert resolved == Resolved(model, variant, ("other",))


def test_a_client_asks_for_a_variant_by_name() -> None:
    """MODEL:VARIANT is that variant, whatever rules say; a colon in another name means nothing."""
    models = table(models={"chat": CHAT}, aliases={"gpt-4o": "chat"})
    assert models.resolve("chat:best", RequestFacts(prompt_chars=1)).model == "large"
    assert models.resolve("gpt-4o:best", NOTHING).model == "large"
    assert models.resolve("llama3:8b", NOTHING) == Resolved("llama3:8b")
    assert models.resolve("chat:8b", NOTHING) == Resolved("chat:8b")


def test_aliases_lead_over_aliases_to_a_model() -> None:
    """In names that clients use, and in fallbacks and variants."""
    models = table(
        aliases={"a": "b", "b": "chat"},
        models={"chat": {"fallbacks": ["x"]}, "else": {"fallbacks": ["a"], "variants": {"v": "a"}}},
    )
    assert models.resolve("a", NOTHING) == Resolved("chat", None, ("x",))
    assert models.resolve("else", NOTHING).fallbacks == ("chat",)
    assert models.resolve("else:v", NOTHING) == Resolved("chat", "v", ("x",))
    assert models.names == {"a", "b", "chat", "else", "else:v"}


def test_models_may_fall_back_to_each_other() -> None:
    """Fallbacks of fallbacks are not followed, so that is no circle."""
    models = table(models={"a": {"fallbacks": ["b"]}, "b": {"fallbacks": ["a"]}})
    assert models.resolve("a", NOTHING).fallbacks == ("b",)


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        ({"aliases": {"a": "b", "b": "a"}}, "routing.aliases.a: a → b → a is a circle"),
        ({"aliases": {"a": "a"}}, "routing.aliases.a: a → a is a circle"),
        ({"aliases": {"m": "n"}, "models": {"m": {}}}, "routing.models.m: 'm' is an alias of 'n' as well"),
        ({"models": {"m": {"upstreams": ["tow"]}}}, "routing.models.m.upstreams[0]: 'tow' is no upstream; there are"),
        ({"models": {"m": {"canary": {"tow": 0.1}}}}, "routing.models.m.canary.tow: 'tow' is no upstream"),
        (
            {"models": {"m": {"canary": {"one": 0.1}, "upstreams": ["gpu-2:8000"]}}},
            "routing.models.m.canary.one: is not among the upstreams of the model",
        ),
        (
            {"models": {"m": {"canary": {"one": 0.6, "gpu-2:8000": 0.6}}}},
            "routing.models.m.canary: expected shares of 1 together at most, got 1.2",
        ),
        ({"models": {"m": {"rules": [{"use": "x"}]}}}, "routing.models.m.rules[0].use: 'x' is no variant of it"),
        ({"aliases": {"a": "m"}, "models": {"m": {"fallbacks": ["a"]}}}, "routing.models.m.fallbacks[0]: 'a' is the"),
    ],
)
def test_names_that_do_not_go_together_are_refused(routing: dict[str, Any], message: str) -> None:
    """The message names the key."""
    with pytest.raises(SettingsError) as refused:
        table(**routing)
    assert str(refused.value).startswith(message)


def test_models_that_no_upstream_lists_are_found() -> None:
    """For the operator: a target that is spelled wrong would only be found by requests."""
    models = table(aliases={"gpt": "llama"}, models={"chat": {"fallbacks": ["lama"], "variants": {"v": "chat"}}})
    assert models.unlisted({"llama"}) == ["lama"]


def routing_table(**routing: Any) -> RoutingTable:
    return RoutingTable(Settings(routing=msgspec.convert(routing, RoutingSettings)))


def test_a_strategy_is_switched_while_running() -> None:
    """It holds for its model alone, for as long as the settings say what they said when it was switched."""
    routing = routing_table(models={"m": {}})
    assert isinstance(routing.strategy("m"), LeastConnections)
    assert routing.strategy("m") is routing.strategy("m")
    routing.overrides = {"m": routing.override("m", "round-robin")}
    assert isinstance(routing.strategy("m"), RoundRobin)
    assert isinstance(routing.strategy("n"), LeastConnections)
    assert isinstance(routing.strategy(None), LeastConnections)
    assert list(routing.strategies()) == [("m", "round-robin")]
    routing.reload(Settings())
    assert (routing.name_of("m"), routing.source_of("m")) == ("round-robin", "api")
    routing.reload(Settings(routing=msgspec.convert({"models": {"m": {"strategy": "weighted"}}}, RoutingSettings)))
    assert (routing.name_of("m"), routing.source_of("m")) == ("weighted", "settings")
    with pytest.raises(InvalidRequest, match="one of least-connections"):
        routing.override("m", "fastest")
    routing.overrides = {}
    routing.reload(Settings())
    assert isinstance(routing.strategy("m"), LeastConnections)


def test_settings_that_are_refused_change_nothing() -> None:
    """A reload that fails leaves the strategies that were switched."""
    routing = routing_table()
    routing.overrides = {"m": routing.override("m", "round-robin")}
    bad = msgspec.convert({"aliases": {"a": "a"}, "strategy": "weighted"}, RoutingSettings)
    with pytest.raises(SettingsError):
        routing.reload(Settings(routing=bad))
    assert routing.name_of("m") == "round-robin"


def test_names_that_clients_invent_take_bounded_memory() -> None:
    """Each name gets a strategy, and the oldest ones are dropped."""
    routing = routing_table()
    first = routing.strategy("0")
    for number in range(2000):
        routing.strategy(str(number))
    assert routing.strategy("0") is not first
    assert len(routing._strategies) == 1024
