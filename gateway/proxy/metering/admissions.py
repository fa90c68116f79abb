"""Holds requests to the limits of their callers: what a hit and a miss count for."""

from collections.abc import Mapping
from typing import Any

from gateway.proxy.inference_request import InferenceRequest
from gateway.proxy.metering.accounting import Accounting
from gateway.tenants.admission import UNLIMITED, Admission
from gateway.tenants.caller import Caller
from gateway.tenants.limiter import Limiter

# Of English text; what a request used replaces the estimate when it ends.
_BYTES_PER_TOKEN = 4
_OUTPUT_FIELDS = ("max_completion_tokens", "max_tokens")
# Of an answer without a limit.
_USUAL_OUTPUT_TOKENS = 256
_MOST_TOKENS = 2**31


class Admissions:
    """Admits requests by the limits of their callers."""

    def __init__(self, limiter: Limiter, accounting: Accounting) -> None:
        self._limiter = limiter
        self._accounting = accounting

    async def hit(self, caller: Caller) -> None:
        """Count a hit, which costs no tokens and no money. Raises RateLimited and CacheUnavailable."""
        if caller.key is not None and self._limiter.take_hit(caller) is not True:
            await self._limiter.admit_hit(caller)

    async def miss(self, inference: InferenceRequest) -> Admission:
        """Reserve what an answer may use. Raises RateLimited, BudgetExceeded and CacheUnavailable."""
        if inference.caller.key is None:
            return UNLIMITED
        prompt_tokens = len(inference.body) // _BYTES_PER_TOKEN
        output_tokens = min(_output_tokens(inference.asked.fields) * inference.choices, _MOST_TOKENS)
        dollars = self._accounting.estimate(inference, prompt_tokens, output_tokens)
        return await self._limiter.admit(inference.caller, prompt_tokens, output_tokens, dollars)

    async def other(self, caller: Caller, body: bytes | None) -> Admission:
        """Admit a request of which the gateway does not learn what it used."""
        if caller.key is None:
            return UNLIMITED
        return await self._limiter.admit(caller, len(body or b"") // _BYTES_PER_TOKEN, 0, 0.0)


def _output_tokens(fields: Mapping[str, Any]) -> int:
    for field in _OUTPUT_FIELDS:
        value = fields.get(field)
        if type(value) is int and value > 0:
            return min(value, _MOST_TOKENS)
    return _USUAL_OUTPUT_TOKENS
