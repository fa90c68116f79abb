"""Reading a request, and what is refused early."""

import msgspec
import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.errors import InvalidRequest
from gateway.proxy.inference_request import InferenceRequest, parse_request
from gateway.routing.models import ModelTable
from gateway.routing.router import Router
from gateway.settings.settings import Settings
from gateway.settings.upstreams import RoutingSettings
from gateway.tenants.caller import Caller
from gateway.tenants.credentials import credential

HEADERS = CIMultiDictProxy(CIMultiDict({"Authorization": "Bearer a"}))


def read(body: bytes) -> InferenceRequest:
    return parse_request(
        "/v1/chat/completions",
        "",
        body,
        HEADERS,
        Caller("public", ""),
        Settings(),
        Router(),
        ModelTable(RoutingSettings(), ()),
    )


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","messages":[{"role":"user","content":"a"}],"messages":[{"role":"user","content":"b"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"a","content":"b"}]}',
        b'{"model":"m","messages":[],"x":{"y":[{"z":1,"\\u007a":2}]}}',
    ],
)
def test_a_repeated_field_is_refused(body: bytes) -> None:
    """A body with a repeated field gives 400, since servers differ in which value they use."""
    with pytest.raises(InvalidRequest, match="twice") as refused:
        read(body)
    assert refused.value.code == "repeated_key"


def test_a_body_of_millions_of_values_is_refused_before_it_is_decoded() -> None:
    """A body of millions of values is refused before it is decoded, and as much text is not."""
    with pytest.raises(InvalidRequest, match="values") as refused:
        read(b'{"model":"m","messages":[' + b",".join([b"[]"] * 1_000_000) + b"]}")
    assert refused.value.code == "too_many_values"

    text = msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": "well, " * 40_000}]})
    assert read(text).model == "m"


@pytest.mark.parametrize("rest", [b"", b',"tool_choice":"auto"', b',"tool_choice":"none","parallel_tool_calls":true'])
def test_an_empty_list_is_no_tools(rest: bytes) -> None:
    """Chat UIs send one, OpenAI and vLLM refuse it: the request is the same as without, and its other bytes stay."""
    plain = b'{"model":"m","messages":[{"role":"user","content":"1.00"}],"top_p":1.00}'
    found, expected = read(plain[:-1] + b',"tools": []' + rest + b"}"), read(plain)
    assert (found.key, found.body) == (expected.key, plain)


def test_a_tool_that_must_be_called_is_not_forgotten() -> None:
    """The upstream says that there is none."""
    body = read(b'{"model":"m","messages":[],"tools":[],"tool_choice":"required"}').body
    assert body == b'{"model":"m","messages":[],"tool_choice":"required"}'


def test_every_credential_counts() -> None:
    """Different sets of credentials, in any headers, give different namespaces."""
    sets: list[list[tuple[str, str]]] = [
        [],
        [("Authorization", "k")],
        [("x-api-key", "k")],
        [("x-api-key", "k"), ("api-key", "k")],
        [("Authorization", "Bearer l"), ("x-api-key", "k")],
        [("Authorization", "EMPTY"), ("api-key", "k")],
        [("Authorization", "EMPTY"), ("api-key", "l")],
        [("Authorization", "k"), ("Authorization", "l")],
        [("Authorization", "api-key: k")],
        [("Authorization", "x-api-key: k")],
    ]
    seen = [credential(CIMultiDictProxy(CIMultiDict(headers)), "authorization") for headers in sets]

    assert len(set(seen)) == len(sets)
    assert seen[0] == ""


def test_a_key_is_one_tenant_in_any_header() -> None:
    """The same key as a bearer token, in x-api-key, in api-key, or in two of them gives one namespace."""
    bearer = ("Authorization", "Bearer k")
    sets = [[bearer], [("x-api-key", "k")], [("api-key", "k")], [bearer, ("x-api-key", "k")]]
    seen = {credential(CIMultiDictProxy(CIMultiDict(headers)), "authorization") for headers in sets}
    assert seen == {"Bearer k"}
