"""The credential that separates tenants, and the headers that are part of a key."""

import hmac

from aiohttp.hdrs import AUTHORIZATION
from multidict import CIMultiDictProxy, istr

# Names the tenant to an upstream that separates tenants, where no credential of the caller does.
NAMESPACE_HEADER = "x-keepgate-namespace"
# Where some providers' clients put the key that others send as a bearer token.
KEY_HEADERS = ("x-api-key", "api-key")
CREDENTIAL_HEADERS = frozenset({"authorization", "cookie", *KEY_HEADERS})
_BEARER = "Bearer "
_ANTHROPIC = ("anthropic-version", "anthropic-beta")
# Every request is asked for these: looking up an istr takes half the time of a plain string.
_ANSWER_HEADERS = tuple(map(istr, (*_ANTHROPIC, "openai-beta", "openai-organization", "openai-project")))
_KEY_NAMES = tuple(map(istr, KEY_HEADERS))
OTHER_HEADERS = frozenset({*KEY_HEADERS, *_ANTHROPIC})
"""Of other forms of API: an upstream that has only OpenAI's does not expect them."""


def credential(headers: CIMultiDictProxy[str], namespace_setting: str) -> str:
    """The text that identifies the caller's tenant; "" if none does.

    With `authorization` that is the Authorization header, and the headers that some providers use in its place. The
    same key is the same tenant, in whichever of them it stands.
    """
    if namespace_setting == "shared":
        return ""
    if namespace_setting != "authorization":
        # All values: the first may be the client's own, before one that a proxy added.
        return "\n".join(headers.getall(namespace_setting.removeprefix("header:"), ()))
    tokens = headers.getall(AUTHORIZATION, [])
    given = [(name, value) for name in _KEY_NAMES if name in headers for value in headers.getall(name)]
    if len(given) == 1 and (not tokens or tokens == [_BEARER + given[0][1]]):
        return _BEARER + given[0][1]
    # A line break, which no header can contain, separates the two kinds.
    return "\n".join((*tokens, *(f"\n{name}: {value}" for name, value in given)))


def carries(text: str, secret: str) -> bool:
    """Whether a credential is this secret, in one of the headers for it; compared in constant time."""
    given = text.partition(_BEARER)[2] or text.rpartition(": ")[2]
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), secret.encode())


def bearer(headers: CIMultiDictProxy[str]) -> dict[str, str]:
    """The Authorization header for an upstream that wants the key of `x-api-key` there."""
    if "Authorization" in headers:
        return {}
    key = next((headers[name] for name in KEY_HEADERS if name in headers), None)
    return {} if key is None else {"Authorization": _BEARER + key}


def answer_headers(headers: CIMultiDictProxy[str], further: tuple[str, ...], is_translated: bool = False) -> str:
    """The headers that the client sends and that may change an answer, as text for the key; "" for most requests.

    `further` are the names that the operator adds. Of a request that `is_translated` no upstream sees Anthropic's.
    """
    sent = [name for name in (*_ANSWER_HEADERS, *further) if name in headers]
    if is_translated:
        sent = [name for name in sent if name not in OTHER_HEADERS]
    return "".join([f"\n{name}: {value}" for name in sent for value in headers.getall(name)])
