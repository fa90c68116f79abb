"""Which model answers a request: aliases, variants and rules of the settings, applied before the request has a key."""

from collections.abc import Mapping
from typing import Any

from multidict import CIMultiDictProxy

from gateway.routing.models import ModelTable, RequestFacts, Resolved
from gateway.tenants.caller import Caller
from gateway.tenants.policies import check_model

_PROMPT_FIELDS = ("messages", "prompt", "input", "system", "instructions")


def resolved(
    models: ModelTable, model: str, fields: Mapping[str, Any], headers: CIMultiDictProxy[str], caller: Caller
) -> Resolved:
    """The model that answers, and those that answer if it does not. Raises ModelNotAllowed.

    A key that allows a model allows its variants and fallbacks, which its operator has chosen.
    """
    name = models.unaliased(model)
    check_model(caller, name)
    if not models.has_rules(name):
        return models.resolve(model, NO_FACTS)
    facts = RequestFacts(
        prompt_chars=sum(_chars(fields[field]) for field in _PROMPT_FIELDS if field in fields),
        tools=bool(fields.get("tools") or fields.get("functions")),
        team=caller.key.team if caller.key is not None else None,
        key=caller.key.name if caller.key is not None else None,
        headers=headers,
    )
    return models.resolve(model, facts)


NO_FACTS = RequestFacts()


def _chars(value: Any) -> int:
    """The length of all text in it, without the names of fields."""
    waiting, size = [value], 0
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, list):
            waiting += item
        elif isinstance(item, dict):
            waiting += item.values()
    return size
