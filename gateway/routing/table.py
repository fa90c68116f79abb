"""Which strategy each model has, changeable while requests are routed."""

from collections import OrderedDict
from collections.abc import Iterator

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


class RoutingTable:
    """The models of the settings, and a strategy for each model that is asked for."""

    def __init__(self, settings: Settings, history: PrefixHistory | None = None) -> None:
        """Raises SettingsError for names in `routing` that do not go together."""
        self.history = history or PrefixHistory(blocks_of_each(settings))
        self._loaded = LoadedModels()
        self._switched: dict[str, StrategyName] = {}
        self._strategies: OrderedDict[str, Strategy] = OrderedDict()
        self._settings = settings.routing
        self.models = ModelTable(settings.routing, settings.servers)

    def reload(self, settings: Settings) -> None:
        """Takes new settings over; strategies that an operator switched become those of the settings again.

        Raises SettingsError, and changes nothing then.
        """
        self.models = ModelTable(settings.routing, settings.servers)
        self._settings = settings.routing
        self._switched.clear()
        self._strategies.clear()
        self.history.resize(blocks_of_each(settings))
        if settings.servers:
            self.history.keep_only(map(upstream_name, settings.servers))

    def upstreams(self, model: str | None) -> tuple[str, ...]:
        """The names of the upstreams that a model is restricted to; () for all."""
        return self.models.upstreams(model)

    def name_of(self, model: str) -> StrategyName:
        """The name of a model's strategy."""
        return self._switched.get(model) or self.models.settings(model).strategy or self._settings.strategy

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

    def use(self, model: str, strategy: str) -> None:
        """Switches a model's strategy until `reload`. Raises InvalidRequest for one that there is not."""
        known = next((name for name in STRATEGIES if name == strategy), None)
        if known is None:
            raise InvalidRequest(
                f"'strategy' must be one of {', '.join(STRATEGIES)}, not {strategy[:80]!r}.", param="strategy"
            )
        if model not in self._switched and len(self._switched) >= _MAX_STRATEGIES:
            raise InvalidRequest(f"{_MAX_STRATEGIES} models have been switched; reload the settings.", param="model")
        self._switched[model] = known
        self._strategies.pop(model, None)

    def strategies(self) -> Iterator[tuple[str, StrategyName]]:
        """The models that the settings or an operator mention, each with the name of its strategy."""
        for model in sorted({*self._settings.models, *self._switched}):
            yield model, self.name_of(model)


def blocks_of_each(settings: Settings) -> int:
    """How many blocks of a prompt are remembered for each upstream."""
    return max(1, settings.routing.prefix_blocks // max(1, len(settings.servers)))
