"""A strategy by its name."""

from typing import get_args

from gateway.routing.prefixes.history import PrefixHistory
from gateway.routing.strategies.canary import Canary
from gateway.routing.strategies.load import LeastConnections, PowerOfTwo
from gateway.routing.strategies.model_aware import LoadedModels, ModelAware
from gateway.routing.strategies.prefix_aware import PrefixAware
from gateway.routing.strategies.rotation import RoundRobin, Weighted
from gateway.routing.strategy import Strategy
from gateway.settings.upstreams import ModelSettings, RoutingSettings
from gateway.settings.upstreams import Strategy as StrategyName

STRATEGIES: tuple[StrategyName, ...] = get_args(StrategyName)


def strategy_of(
    name: StrategyName,
    routing: RoutingSettings,
    history: PrefixHistory,
    loaded: LoadedModels,
    model: ModelSettings = ModelSettings(),  # noqa: B008  # frozen
) -> Strategy:
    """A new strategy for one model, with the shares that its settings give to single upstreams."""
    strategy = _plain(name, routing, history, loaded, model)
    return Canary(strategy, model.canary) if model.canary else strategy


def _plain(
    name: StrategyName, routing: RoutingSettings, history: PrefixHistory, loaded: LoadedModels, model: ModelSettings
) -> Strategy:
    if name == "prefix-aware":
        return PrefixAware(history, routing.load_bound)
    if name == "model-aware":
        return ModelAware(loaded, model.cold_start)
    if name == "power-of-two":
        return PowerOfTwo()
    if name == "weighted":
        return Weighted()
    return RoundRobin() if name == "round-robin" else LeastConnections()
