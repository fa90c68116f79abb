"""What a key allows beside its limits. A caller without a key may do everything."""

from gateway.errors import ModelNotAllowed
from gateway.tenants.caller import Caller

_MOST_NAMED = 20


def allows_model(caller: Caller, model: str) -> bool:
    """Whether the key has no list of models, or `model`, after aliases, is on it."""
    return caller.key is None or not caller.key.models or model in caller.key.models


def check_model(caller: Caller, model: str) -> None:
    """Raises ModelNotAllowed if the key has a list of models and `model`, after aliases, is not on it."""
    if caller.key is None or allows_model(caller, model):
        return
    named = caller.key.models[:_MOST_NAMED]
    further = f" and {len(caller.key.models) - len(named)} more" if len(caller.key.models) > len(named) else ""
    raise ModelNotAllowed(
        f"The key {caller.key.name!r} does not allow the model {model[:100]!r}. It allows {', '.join(named)}{further}.",
        param="model",
    )


def reads_cache(caller: Caller) -> bool:
    """Whether the caller's requests may be answered from the cache."""
    return caller.key is None or caller.key.cache != "bypass"


def writes_cache(caller: Caller) -> bool:
    """Whether the answers to the caller's requests may be stored."""
    return caller.key is None or caller.key.cache == "use"


def priority_for(caller: Caller, asked: int) -> int:
    """The priority of a request that asks for `asked`: lower numbers come first, and none before the key's own."""
    return asked if caller.key is None else max(asked, caller.key.priority)
