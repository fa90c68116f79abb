"""The operations of routing, which need the admin key."""

from msgspec import Struct

from gateway.api.openapi.operation import BODY_ERRORS, JSON, Operation
from gateway.settings.upstreams import Strategy


class RoutedModel(Struct, kw_only=True):
    strategy: Strategy
    upstreams: list[str]


class RoutedUpstream(Struct, kw_only=True):
    """`latency` is in seconds until an answer begins; null while nothing is known."""

    name: str
    state: str
    weight: float
    in_flight: int
    latency: float | None
    models: list[str] | None


class Routing(Struct, kw_only=True):
    """`models` are those that are mentioned; `unlisted_models` are those that no upstream lists."""

    strategy: Strategy
    strategies: list[Strategy]
    models: dict[str, RoutedModel]
    unlisted_models: list[str]
    remembered_blocks: int
    upstreams: list[RoutedUpstream]


class StrategyChange(Struct, kw_only=True):
    strategy: Strategy


class ChangedStrategy(Struct, kw_only=True):
    model: str
    strategy: Strategy


ROUTING_OPERATIONS: dict[tuple[str, str], Operation] = {
    ("GET", "/v1/routing"): Operation(
        tag="Routing",
        summary="Each model's strategy, and the state of each upstream",
        answer={JSON: Routing},
        errors=(401, 403),
        operator=True,
    ),
    ("PUT", "/v1/routing/{model}"): Operation(
        tag="Routing",
        summary="Switch the strategy of a model, until the settings are read again",
        body={JSON: StrategyChange},
        answer={JSON: ChangedStrategy},
        errors=(*BODY_ERRORS, 401, 403),
        operator=True,
    ),
}
