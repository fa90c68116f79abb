"""Settings of limits: what one process accepts, and virtual keys."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from gateway.settings.fields import Count, Flag, PositiveSeconds, Size, SizeField


class LimitSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one process accepts; beyond it a request gets 429, or for want of memory 503, with Retry-After at once."""

    max_requests: Count = None
    """Requests under way at the same time, without hits; by default unlimited."""
    max_connections: Count = None
    """Open connections of clients; by default unlimited."""
    memory: SizeField = Size(0)
    """Memory of the process beyond which new requests that are no hits are refused; 0 for nine tenths of what the
    machine or the container has.
    """


class KeySettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Virtual keys: docs/guides/keys.md. They are kept in Redis."""

    required: Flag = False
    """Whether every request needs one. Then a key is the tenant, and no client's credential reaches an upstream."""
    relayed: Annotated[
        tuple[Annotated[str, Meta(pattern="^/v1/.")], ...], Meta(description="paths such as /v1/fine_tuning/")
    ] = ()
    """Further endpoints of upstreams that keys may use, by how their paths begin. What an upstream keeps there is the
    operator's: all keys share it.
    """
    without_redis: Annotated[Literal["open", "closed"], Meta(description="open or closed")] = "open"
    """With Redis away: `open` serves keys that this process knows, within its share of their limits; `closed` refuses
    all with 503.
    """
    known_for: PositiveSeconds = 30.0
    """How long a process trusts what it knows of a key, if it hears of no change."""
