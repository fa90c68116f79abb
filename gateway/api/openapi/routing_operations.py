"""The operations of routing and of upstreams, which need the admin key."""

from msgspec import Struct

from gateway.api.openapi.operation import BODY_ERRORS, JSON, Operation
from gateway.api.operator.engines import EngineList
from gateway.routing.table import Source
from gateway.settings.upstreams import Strategy


class RoutedModel(Struct, kw_only=True):
    """`source` is where the strategy is from: the settings, or what was set with PUT /v1/routing/{model}."""

    strategy: Strategy
    source: Source
    upstreams: list[str]


class RoutedUpstream(Struct, kw_only=True):
    """`latency` is in seconds until an answer begins; null while nothing is known. `kv_blocks` are those that it holds
    by its KV cache events, as far as this worker knows; null without `kv_events`.
    """

    name: str
    state: str
    weight: float
    in_flight: int
    latency: float | None
    models: list[str] | None
    kv_blocks: int | None


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
    source: Source


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
        summary="Set the strategy of a model, in all workers and gateways that share Redis",
        body={JSON: StrategyChange},
        answer={JSON: ChangedStrategy},
        errors=(*BODY_ERRORS, 401, 403, 503),
        operator=True,
    ),
    ("DELETE", "/v1/routing/{model}"): Operation(
        tag="Routing",
        summary="Let the settings say the strategy of a model again",
        answer={JSON: ChangedStrategy},
        errors=(401, 403, 503),
        operator=True,
    ),
    ("GET", "/v1/engines"): Operation(
        tag="Routing",
        summary="What each upstream that is Keepgate's engine does now",
        description="Batch, queue, padding, KV blocks, tokens a second, and the tiers of its prefix store. Each"
        " upstream is asked, and has two seconds.",
        answer={JSON: EngineList},
        errors=(400, 401, 403),
        operator=True,
    ),
}
