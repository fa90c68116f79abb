"""Which strategy each model has, changeable while requests are routed."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from gateway.errors import InvalidRequest
from gateway.routing.models import ModelTable, upstream_name
from gateway.routing.prefixes.history import PrefixHistory
from gateway.routing.strategies.model_aware import LoadedModels
from gateway.routing.strategies.registry import STRATEGIES, strategy_of
from gateway.routing.strategy import Strategy
from gateway.settings.settings import Settings
from gateway.settings.upstreams import Strategy as StrategyName

_MAX_STRATEGIES = 1024
"""Models that have a strategy object: clients may invent names of models without end."""


Source = Literal["settings", "api"]
"""Where the strategy of a model is from: the settings, or what an operator has set while running."""


class StrategyOverride(msgspec.Struct, frozen=True):
    """A strategy that was set while running, in place of what the settings said: once they say another, they count."""

    strategy: StrategyName
    instead_of: StrategyName


class RoutingTable:
    """The models of the settings, and a strategy for each model that is asked for."""

    def __init__(self, settings: Settings, history: PrefixHistory | None = None) -> None:
        """Raises SettingsError for names in `routing` that do not go together."""
        self.history = history or PrefixHistory(blocks_of_each(settings))
        self._loaded = LoadedModels()
        self._overrides: Mapping[str, StrategyOverride] = {}
        self._strategies: OrderedDict[str, Strategy] = OrderedDict()
        self._settings = settings.routing
        self._default = _default(settings)
        self.models = ModelTable(settings.routing, settings.servers)

    def reload(self, settings: Settings) -> None:
        """Takes new settings over; overrides of models for which they name another strategy than before count no more.

        Raises SettingsError, and changes nothing then.
        """
        self.models = ModelTable(settings.routing, settings.servers)
        self._settings = settings.routing
        self._default = _default(settings)
        self._strategies.clear()
        self.history.resize(blocks_of_each(settings))
        if settings.servers:
            self.history.keep_only(map(upstream_name, settings.servers))

    def upstreams(self, model: str | None) -> tuple[str, ...]:
        """The names of the upstreams that a model is restricted to; () for all."""
        return self.models.upstreams(model)

    @property
    def overrides(self) -> Mapping[str, StrategyOverride]:
        """By model; those that count no more as well."""
        return self._overrides

    @overrides.setter
    def overrides(self, overrides: Mapping[str, StrategyOverride]) -> None:
        for model in {*overrides, *self._overrides}:
            if overrides.get(model) != self._overrides.get(model):
                self._strategies.pop(model, None)
        self._overrides = overrides

    def override(self, model: str, strategy: str) -> StrategyOverride:
        """An override of a model's strategy. Raises InvalidRequest for one that there is not, and for too many."""
        known = next((name for name in STRATEGIES if name == strategy), None)
        if known is None:
            raise InvalidRequest(
                f"'strategy' must be one of {', '.join(STRATEGIES)}, not {strategy[:80]!r}.", param="strategy"
            )
        if model not in self._overrides and len(self._overrides) >= _MAX_STRATEGIES:
            raise InvalidRequest(
                f"{_MAX_STRATEGIES} models have been switched; DELETE /v1/routing/MODEL for some of them.",
                param="model",
            )
        return StrategyOverride(known, self._name_in_settings(model))

    def source_of(self, model: str) -> Source:
        """Where the name of a model's strategy is from."""
        override = self._overrides.get(model)
        return "api" if override is not None and override.instead_of == self._name_in_settings(model) else "settings"

    def name_of(self, model: str) -> StrategyName:
        """The name of a model's strategy."""
        is_switched = self.source_of(model) == "api"
        return self._overrides[model].strategy if is_switched else self._name_in_settings(model)

    def _name_in_settings(self, model: str) -> StrategyName:
        return self.models.settings(model).strategy or self._default

    def is_used(self, strategy: StrategyName) -> bool:
        """Whether some model has the strategy."""
        return strategy == self._default or any(name == strategy for _, name in self.strategies())

    def strategy(self, model: str | None) -> Strategy:
        """The strategy of a model; that of requests without one for None."""
        name = model or ""
        known = self._strategies.get(name)
        if known is None:
            known = strategy_of(
                self.name_of(name), self._settings, self.history, self._loaded, self.models.settings(name)
            )
            self._strategies[name] = known
            if len(self._strategies) > _MAX_STRATEGIES:
                self._strategies.popitem(last=False)
        else:
            self._strategies.move_to_end(name)
        return known

    def strategies(self) -> Iterator[tuple[str, StrategyName]]:
        """The models that the settings or an operator mention, each with the name of its strategy."""
        switched = {model for model in self._overrides if self.source_of(model) == "api"}
        for model in sorted({*self._settings.models, *switched}):
            yield model, self.name_of(model)


def blocks_of_each(settings: Settings) -> int:
    """How many blocks of a prompt are remembered for each upstream."""
    return max(1, settings.routing.prefix_blocks // (len(settings.servers) or settings.backend.replicas))


def _default(settings: Settings) -> StrategyName:
    """The strategy of a model for which none is named."""
    are_replicas = not settings.servers and settings.backend.replicas > 1
    return settings.routing.strategy or ("prefix-aware" if are_replicas else "least-connections")
