"""A request to be sent to an upstream, in each form in which it can be put."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from gateway.errors import GatewayError
from gateway.routing.strategy import UNKNOWN
from gateway.upstreams.upstream import NO_HEADERS, Attempt


class RouteCall(Struct, frozen=True, kw_only=True):
    """What the router needs to know of a request. `headers` and `own` are as for `Upstream.request`."""

    method: str
    headers: Mapping[str, str]
    attempts: Sequence[Attempt]
    """An upstream gets the first of which it is not known to lack something."""
    model: str | None = None
    otherwise: GatewayError | None = None
    """Raised where no candidate has what any attempt needs; None if the last one needs nothing."""
    own: Mapping[str, str] = NO_HEADERS
    namespace: str = ""
    """Names the tenant to an upstream that is sent the operator's credential in place of the client's."""
    blocks: tuple[int, ...] = ()
    """As in `RouteRequest`."""
    held: Mapping[str, float] = UNKNOWN
    """As in `RouteRequest`."""
    priority: int = 0
    """Lower numbers come first in the queue of an upstream."""
    deadline: float | None = None
    """For the whole answer, a time of the event loop; None for the setting `timeouts.total`."""
    fallbacks: Sequence[tuple[str, Sequence[Attempt]]] = ()
    """The request for other models, which are asked in this order when no upstream of `model` answers."""
    is_repeatable: bool = True
    """Whether it can be sent again when an upstream may have worked on it already. False for what changes a state."""
