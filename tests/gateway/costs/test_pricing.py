"""What an answer is charged, and that stored answers keep it."""

from dataclasses import dataclass

import msgspec
import pytest
import xxhash

from cache.entries.entry import Entry, decode_entry, encode_entry
from gateway.costs.machine import Machine, MachineShare
from gateway.costs.pricing import Charge, Pricing
from gateway.costs.usage import TokenUsage
from gateway.settings.operations import CostSettings, PriceSettings
from gateway.settings.upstreams import UpstreamSettings
from tests.cache.entries.entry_examples import entry

HOSTED = UpstreamSettings(url="https://api.openai.com/v1", models={"chat": "gpt-4o"})
MACHINE = UpstreamSettings(url="http://gpu-1:8000/v1", price_per_hour=7.2)


@dataclass(frozen=True)
class Source:
    """What is charged for."""

    name: str
    settings: UpstreamSettings
    machine: Machine | None = None


def pricing(own: dict[str, PriceSettings] | None = None) -> Pricing:
    sources = (Source("hosted", HOSTED), Source("gpu", MACHINE, Machine(3.6)))
    return Pricing(CostSettings(prices=own or {}), lambda: sources)


def test_a_hosted_answer_has_its_cost_and_saving() -> None:
    """The price is that of the model's name at the upstream; a repetition reads the prompt from its cache."""
    usage = TokenUsage(1300, 100, read=0)
    for model in ("gpt-4o", "chat"):
        charge = pricing().charge("hosted", HOSTED, model, usage)
        assert (charge.model, charge.upstream, charge.layer) == (model, "hosted", "none")
        assert charge.cost == pytest.approx(1300 * 2.5e-6 + 100 * 10e-6)
        assert charge.repeat_cost == pytest.approx(20 * 2.5e-6 + 1280 * 1.25e-6 + 100 * 10e-6)
        assert charge.saving == 0
    joined = charge.joined()
    assert (joined.layer, joined.cost, joined.saving) == ("flight", 0, charge.repeat_cost)
    assert joined.prompt_tokens == 1300


def test_the_settings_may_price_the_name_that_clients_use() -> None:
    """A price for the client's name of a model goes before the table's for its name there."""
    own = pricing({"hosted/chat": PriceSettings(input=100, output=0)})
    assert own.charge("hosted", HOSTED, "chat", TokenUsage(1000)).cost == pytest.approx(0.1)
    assert own.charge("hosted", HOSTED, "gpt-4o", TokenUsage(1000)).cost == pytest.approx(0.0025)


@pytest.mark.parametrize(
    ("model", "usage"),
    [("nobody-knows", TokenUsage(10, 10)), ("gpt-4o", None), ("gpt-4o", TokenUsage(1, tier="batch"))],
)
def test_what_is_not_known_is_not_nothing(model: str, usage: TokenUsage | None) -> None:
    """An unknown model, usage or service tier has no cost; it is never 0."""
    charge = pricing().charge("hosted", HOSTED, model, usage)
    assert charge.cost is None
    assert charge.repeat_cost is None
    assert charge.joined().saving is None


def test_a_machine_is_paid_by_the_hour() -> None:
    """Its answers cost their share; a repetition saves what its prefix cache would not have."""
    machines = pricing()
    assert machines.machines["gpu"].price_per_hour == 3.6
    assert "hosted" not in machines.machines
    share = MachineShare(0.0)
    share.cost = 0.01
    charge = machines.charge("gpu", MACHINE, "gpt-4o", TokenUsage(400, 100, read=100), share)
    assert charge.cost == 0.01
    assert charge.repeat_cost == pytest.approx(0.0025)
    assert machines.charge("gpu", MACHINE, "e5", TokenUsage(400), share).repeat_cost == 0.01
    assert machines.charge("gpu", MACHINE, "gpt-4o", None, share).repeat_cost is None
    assert machines.charge("gpu", MACHINE, "gpt-4o", TokenUsage(1)).cost is None


def test_an_entry_keeps_its_cost() -> None:
    """What an answer cost comes back with it."""
    kept = entry(cost=0.25, repeat_cost=0.125, cached_tokens=3, written_tokens=4, upstream="gpu")
    assert decode_entry(encode_entry(kept)) == kept


def test_an_entry_from_before_costs_were_kept_is_read() -> None:
    """It has no cost, which is not 0."""
    kept = entry()
    payload = msgspec.msgpack.encode(list(msgspec.structs.astuple(kept))[:13])
    old = decode_entry(b"KGE1" + xxhash.xxh3_64_digest(payload) + payload)
    assert old == kept
    assert (old.cost, old.repeat_cost, old.upstream) == (None, None, "")
    assert Entry.__struct_fields__[12] == "content_type"


def test_a_charge_is_of_no_layer_by_default() -> None:
    """Charges that were computed have the layer of the header of a miss."""
    assert Charge("m", "u").layer == "none"
