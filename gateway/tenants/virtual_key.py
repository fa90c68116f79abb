"""A virtual key: what an operator gives to a person or an app in place of a provider's key."""

from typing import Literal

import msgspec

CachePolicy = Literal["use", "read-only", "bypass"]


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a key or a team may use; None is unlimited. Budgets are in US dollars, by the day and month of UTC."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    budget_per_day: float | None = None
    budget_per_month: float | None = None


class VirtualKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A key without its secret. `models` is empty for all; `team_limits` hold for all keys of the team together."""

    id: str
    name: str
    team: str = ""
    created: float
    expires: float | None = None
    revoked: bool = False
    models: tuple[str, ...] = ()
    limits: Limits = Limits()
    team_limits: Limits = Limits()
    namespace: str = ""
    """Keys with the same one share answers; "" for the key's own."""
    cache: CachePolicy = "use"
    priority: int = 0
    """Of its requests, as vLLM has it: lower numbers come first."""
