"""A virtual key: what an operator gives to a person or an app in place of a provider's key."""

import hashlib
import secrets
import string
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

CachePolicy = Literal["use", "read-only", "bypass"]
Count = Annotated[int, Meta(ge=1, lt=2**40)] | None
# A million dollars is 10**15 nano-dollars, which Redis' scripts add without rounding.
Dollars = Annotated[float, Meta(gt=0, le=1e6)] | None

SECRET_PREFIX = "sk-kg-"  # noqa: S105  # what every secret begins with is none
_ALPHABET = string.ascii_letters + string.digits
_SECRET_LENGTH = 43  # of 62 letters and digits: 256 bits


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a key or a team may use; None is unlimited. Budgets are in US dollars, by the day and month of UTC."""

    requests_per_minute: Count = None
    tokens_per_minute: Count = None
    concurrent_requests: Count = None
    budget_per_day: Dollars = None
    budget_per_month: Dollars = None


NO_LIMITS = Limits()


class VirtualKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key without its secret. `models` is empty for all; `team_limits` hold for all keys of the team together."""

    id: str
    name: str
    team: str = ""
    created: float
    expires: float | None = None
    revoked: bool = False
    models: tuple[str, ...] = ()
    limits: Limits = NO_LIMITS
    team_limits: Limits = NO_LIMITS
    namespace: str = ""
    """Keys with the same one share answers; "" for the key's own."""
    cache: CachePolicy = "use"
    priority: int = 0
    """Of its requests, as vLLM has it: lower numbers come first."""

    @property
    def tenant(self) -> str:
        """The text that the key's cache namespace follows from."""
        return f"namespace:{self.namespace}" if self.namespace else f"key:{self.id}"


def new_secret() -> str:
    return SECRET_PREFIX + "".join(secrets.choice(_ALPHABET) for _ in range(_SECRET_LENGTH))


def digest_of(secret: str) -> str:
    """Under which a key is stored. A fast hash will do: nobody guesses 256 random bits, however fast each try is."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()
