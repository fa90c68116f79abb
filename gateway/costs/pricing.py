"""What an answer is charged: its cost, and what the same request would have cost again."""

from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from gateway import metrics
from gateway.costs.cost import cost_of, prompt_caching, repeat_cost_of
from gateway.costs.machine import Machine, MachineShare
from gateway.costs.price import Price, PriceTable, published_prices
from gateway.costs.usage import TokenUsage
from gateway.settings.operations import CostSettings
from gateway.settings.upstreams import UpstreamSettings

_MAX_KNOWN = 10_000


class Source(Protocol):
    """An upstream, as far as it costs."""

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> UpstreamSettings: ...

    @property
    def machine(self) -> Machine | None: ...


class Charge(msgspec.Struct, frozen=True, gc=False):
    """What one request cost and saved, in US dollars; None for what is not known.

    `layer` is where its answer came from: "none" for an upstream, "flight" for the upstream call of another request,
    else the layer of the cache. `repeat_cost` is what the same request would have cost again: what a hit saves.
    `estimated` says that the upstream has not said the tokens: then they are what the request and what came of the
    answer have about, and what a repetition would have cost is not known.
    """

    model: str
    upstream: str
    layer: str = "none"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    written_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None
    repeat_cost: float | None = None
    saving: float | None = 0.0
    estimated: bool = False

    def joined(self) -> "Charge":
        """The charge of a request that shared this one's upstream call. No saving is estimated."""
        shared = msgspec.structs.replace(self, layer="flight", cost=0.0, saving=self.repeat_cost)
        if not self.estimated:
            return shared
        return msgspec.structs.replace(shared, prompt_tokens=0, completion_tokens=0, estimated=False)


class Pricing:
    """Charges answers."""

    def __init__(self, settings: CostSettings, sources: Callable[[], Iterable[Source]]) -> None:
        """`sources` gives the upstreams of the moment."""
        self._table = PriceTable(published_prices(), settings.prices)
        self._known: dict[tuple[str, str], tuple[Price | None, str]] = {}
        self._sources = sources

    @property
    def machines(self) -> dict[str, Machine]:
        """Those that are paid by the hour, by the names of their upstreams."""
        return {source.name: source.machine for source in self._sources() if source.machine is not None}

    def estimate(self, model: str, prompt_tokens: int, output_tokens: int) -> float:
        """What an answer costs at most at the prices of any upstream; 0 where none has a price."""
        usage = TokenUsage(prompt_tokens, output_tokens)
        costs = (self._costs(each.name, each.settings, model, usage, None)[0] for each in self._sources())
        return max((cost for cost in costs if cost is not None), default=0.0)

    def charge(
        self,
        upstream: str,
        settings: UpstreamSettings,
        model: str,
        usage: TokenUsage | None,
        share: MachineShare | None = None,
        *,
        estimated: bool = False,
    ) -> Charge:
        """The charge of an answer that the upstream has computed; `share` is ended, of a machine paid by the hour.
        `estimated` says that `usage` is.
        """
        counts = usage or TokenUsage(0)
        cost, repeat_cost = self._costs(upstream, settings, model, usage, share)
        return Charge(
            model=model,
            upstream=upstream,
            prompt_tokens=counts.prompt,
            cached_tokens=counts.read,
            written_tokens=counts.written,
            completion_tokens=counts.completion,
            cost=cost,
            repeat_cost=None if estimated else repeat_cost,
            estimated=estimated,
        )

    def refresh(self) -> None:
        """Copy what a thousand tokens cost on each machine into the metrics."""
        for upstream, machine in self.machines.items():
            if (cost := machine.cost_per_1k_tokens()) is not None:
                metrics.engine_cost.labels(upstream).set(cost)

    def _costs(
        self,
        upstream: str,
        settings: UpstreamSettings,
        model: str,
        usage: TokenUsage | None,
        share: MachineShare | None,
    ) -> tuple[float | None, float | None]:
        if share is not None:
            return share.cost, None if usage is None else _computed_again(share.cost, usage)
        if usage is None or settings.price_per_hour is not None:
            return None, None
        price, provider = self._price(upstream, settings, model)
        held = price.at(usage) if price is not None else None
        if held is None:
            return None, None
        return cost_of(usage, held), repeat_cost_of(usage, held, prompt_caching(provider))

    def _price(self, upstream: str, settings: UpstreamSettings, model: str) -> tuple[Price | None, str]:
        if (known := self._known.get((upstream, model))) is not None:
            return known
        there = settings.models.get(model, model)
        price, provider = self._table.find(upstream, settings.url, there)
        found = self._table.own(upstream, model) or price, provider  # the settings may price the name for clients
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[upstream, model] = found
        return found


def _computed_again(cost: float, usage: TokenUsage) -> float:
    """The part of a machine's cost that its prefix cache does not save: without the prompt.

    A token of the answer takes at least as long as one of the prompt. What generates nothing is computed in full.
    """
    if not usage.completion:
        return cost
    return cost * usage.completion / (usage.prompt - usage.read + usage.completion)
