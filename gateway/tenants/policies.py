"""What a key allows beside its limits. A caller without a key may do everything."""

from gateway.errors import EndpointNotAllowed, ModelNotAllowed
from gateway.tenants.caller import Caller

_MOST_NAMED = 20
# At upstreams, beside what the gateway answers itself.
_RELAYED = frozenset(
    {"/v1/embeddings", "/v1/moderations", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/v1/classify"}
    | {"/v1/pooling", "/v1/tokenize", "/v1/detokenize", "/v1/audio/transcriptions", "/v1/audio/translations"}
    | {"/v1/audio/speech", "/v1/images/generations", "/v1/images/edits", "/v1/images/variations"}
)
_RESPONSE = "/v1/responses/"
_MODEL = "/v1/models/"


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


def check_endpoint(caller: Caller, method: str, path: str, further: tuple[str, ...]) -> None:
    """Raises EndpointNotAllowed for an endpoint of an upstream that a key may not use.

    It may use what answers from the request alone, and what is known by an id that nobody guesses; `further` are the
    beginnings of other paths. The rest would show or change, with the operator's credential, what belongs to all keys.
    """
    if caller.key is None or path in _RELAYED or path.startswith((_RESPONSE, *further)):
        return
    if method == "GET" and path.startswith(_MODEL):
        return
    raise EndpointNotAllowed("Keys may not use this endpoint. The setting keys.relayed lists further ones.")


def reads_cache(caller: Caller) -> bool:
    """Whether the caller's requests may be answered from the cache."""
    return caller.key is None or caller.key.cache != "bypass"


def writes_cache(caller: Caller) -> bool:
    """Whether the answers to the caller's requests may be stored."""
    return caller.key is None or caller.key.cache == "use"


def priority_for(caller: Caller, asked: int) -> int:
    """The priority of a request that asks for `asked`: lower numbers come first, and none before the key's own."""
    return asked if caller.key is None else max(asked, caller.key.priority)
