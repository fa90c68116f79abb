"""Inspecting and changing the upstreams' prefix stores through the gateway."""

from typing import Any

import msgspec
import pytest

from cache.entries.key import namespace_for
from gateway.settings.upstreams import UpstreamSettings
from gateway.upstreams.identity import cache_salt
from tests.gateway.client import chat
from tests.gateway.conftest import Stage
from tests.gateway.processes.serving import free_port
from tests.gateway.raw_upstream import json_reply, saying
from tests.gateway.routing.prefixes.engine import Engine, tokens_of
from tests.gateway.wire import wire

EVERYWHERE = "0.0.0.0"  # noqa: S104  # an operator's setting for access from other hosts
PREFIX = "/v1/cache/prefix"
ADMIN = {"x-keepgate-admin-key": "the-admin-key"}
PROMPT = {"model": "mock", "prompt": "a system prompt"}

OPERATIONS: list[tuple[str, str, Any]] = [
    ("GET", PREFIX, None),
    ("DELETE", PREFIX, None),
    ("POST", PREFIX + "/lookup", PROMPT),
    ("POST", PREFIX + "/pin", PROMPT),
    ("POST", PREFIX + "/unpin", PROMPT),
]
operations = pytest.mark.parametrize(("method", "path", "body"), OPERATIONS)
changes = pytest.mark.parametrize(("method", "path", "body"), OPERATIONS[1:])


# Access


@operations
async def test_on_loopback_no_key_is_needed(stage: Stage, method: str, path: str, body: Any) -> None:
    """A gateway on loopback without an admin key allows operations on the prefix stores."""
    client = await stage.gateway(await stage.prefix())

    assert (await client.send(method, path, body)).status == 200


@operations
async def test_beyond_loopback_a_key_must_be_set(stage: Stage, method: str, path: str, body: Any) -> None:
    """A gateway beyond loopback without an admin key refuses operations and calls no upstream."""
    upstream = await stage.prefix()
    client = await stage.gateway(upstream, host=EVERYWHERE)
    refused = await client.send(method, path, body)

    assert (refused.status, upstream.store_asked) == (403, [])


@operations
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer sk-tenant"}, {"x-keepgate-admin-key": "wrong"}])
async def test_a_tenant_is_no_operator(
    stage: Stage, method: str, path: str, body: Any, headers: dict[str, str]
) -> None:
    """A tenant's key does not allow operations and leads to no upstream call."""
    upstream = await stage.prefix()
    client = await stage.gateway(upstream, admin_key="the-admin-key")
    refused = await client.send(method, path, body, headers)

    assert (refused.status, refused.error["code"]) == (401, "admin_key_required")
    assert upstream.store_asked == []


@operations
@pytest.mark.parametrize(
    "headers",
    [
        ADMIN,
        {"Authorization": "Bearer the-admin-key"},
        {**ADMIN, "Authorization": "Bearer the-admin-key"},
        {**ADMIN, "Authorization": "bearer  the-admin-key"},
    ],
)
async def test_the_admin_key_goes_to_no_upstream(
    stage: Stage, method: str, path: str, body: Any, headers: dict[str, str]
) -> None:
    """The admin key is sent to no upstream, neither in its own header nor as a bearer token."""
    upstream = await stage.prefix()
    client = await stage.gateway(upstream, admin_key="the-admin-key")
    answer = await client.send(method, path, body, headers)

    assert answer.status == 200
    (received,) = upstream.store_asked
    assert "the-admin-key" not in str(received.headers)


@pytest.mark.parametrize("namespace", ["authorization", "header:X-Team"])
async def test_an_operator_acts_for_the_tenant_of_the_credentials_sent(stage: Stage, namespace: str) -> None:
    """The upstream gets the tenant of the credentials beside the admin key, or none without them."""
    upstream = await stage.prefix()
    client = await stage.gateway(upstream, admin_key="the-admin-key", cache={"namespace": namespace})
    credentials = {"X-Team": "red", "x-keepgate-namespace": "blue"}
    if namespace == "authorization":
        credentials["Authorization"] = "Bearer sk-red"
    await client.send("POST", "/v1/completions", PROMPT, credentials)
    await client.send("POST", PREFIX + "/pin", PROMPT, {**credentials, **ADMIN})
    await client.send("POST", "/v1/completions", PROMPT)
    await client.send("POST", PREFIX + "/pin", PROMPT, {"Authorization": "Bearer the-admin-key"})
    tenant, tenants_pin, no_tenant, no_tenants_pin = (
        received.tenant
        for received in upstream.received
        if "completions" in received.target or "pin" in received.target
    )

    assert tenants_pin == tenant
    assert no_tenants_pin == no_tenant
    assert tenant != no_tenant


@pytest.mark.parametrize("owned_by", ["vllm", "openai"])
async def test_a_store_of_its_own_url_is_asked_with_tokens(stage: Stage, owned_by: str) -> None:
    """Those that its upstream tells, and the salt of the tenant where it has one; no credential goes there."""
    store = await stage.prefix()
    async with Engine(has_index=False).serving() as engine:
        engine.owned_by = owned_by
        settings = UpstreamSettings(url=engine.url, prefix_url=store.url.removesuffix("/v1"))
        client = await stage.gateway(settings, admin_key="the-admin-key")
        await client.gateway.router.refresh()
        red = {**ADMIN, "Authorization": "Bearer sk-red"}
        looked_up = await client.send("POST", PREFIX + "/lookup", {**PROMPT, "n": 1}, red)
        tokens = {"model": "mock", "prompt": [7, 8], "cache_salt": "own"}
        await client.send("POST", PREFIX + "/pin", tokens, red)
        await client.send("POST", PREFIX + "/unpin", PROMPT, {"Authorization": "Bearer the-admin-key"})
        described = await client.send("GET", PREFIX, None, red)
        cleared = await client.send("DELETE", PREFIX, None, red)

    reply = {"operation": "lookup", "model": None}
    assert looked_up.json == {"upstreams": {engine.url: reply}}
    assert "namespace" in described.json["upstreams"][engine.url]
    assert "removed" in cleared.json["upstreams"][engine.url]
    assert not any("authorization" in received.headers for received in store.received)
    lookup, pin, unpin = (msgspec.json.decode(each.body) for each in store.store_asked[:3])
    assert (lookup["tokens"], pin["tokens"]) == (tokens_of(PROMPT["prompt"]), [7, 8])
    namespace = namespace_for("Bearer sk-red")
    is_salted = owned_by == "vllm"
    assert lookup.get("cache_salt") == (cache_salt(namespace) if is_salted else None)
    assert pin.get("cache_salt") == (cache_salt(namespace, "own") if is_salted else "own")
    assert "cache_salt" not in unpin


async def test_each_of_several_stores_is_asked(stage: Stage) -> None:
    """Of workers that have a part each: one that cannot be reached does not hide what the others reply."""
    stores = [await stage.prefix(), await stage.prefix()]
    urls = [*(store.url.removesuffix("/v1") for store in stores), f"http://127.0.0.1:{free_port()}"]
    async with Engine(has_index=False).serving() as engine:
        client = await stage.gateway(UpstreamSettings(url=engine.url, prefix_url=tuple(urls)))
        looked_up = await client.send("POST", PREFIX + "/lookup", PROMPT)
        cleared = await client.send("DELETE", PREFIX)

    assert list(looked_up.json["upstreams"]) == list(cleared.json["upstreams"]) == urls
    assert [len(store.store_asked) for store in stores] == [2, 2]
    assert ["error" in each for each in cleared.json["upstreams"].values()] == [False, False, True]


async def test_a_prompt_that_its_upstream_makes_no_tokens_of_is_refused(stage: Stage) -> None:
    """The store is not asked, and who asks hears why."""
    store, upstream = await stage.prefix(), await stage.prefix()
    client = await stage.gateway(UpstreamSettings(url=upstream.url, prefix_url=store.url))
    refused = await client.send("POST", PREFIX + "/pin", PROMPT)

    assert (refused.status, store.store_asked) == (502, [])
    assert "/tokenize" in refused.error["message"]


HIDDEN = [
    "/v1/prefix",
    "/v1/prefix/pin",
    "/v1/prefix/lookup",
    "/v1/prefix/blocks",
    "/v1/prefix/",
    "/v1/%70refix/pin",
    "/%76%31/prefix/pin",
    "/v1//prefix/pin",
    "/v1/./prefix/pin",
    "/v1/%2E/prefix/pin",
    "/v1/prefix%2Fpin",
    "/v1/%2Fprefix/pin",
    "/v1/x/../prefix/pin",
    "/v1/x%2F..%2Fprefix/pin",
    "http://elsewhere/v1/prefix/pin",
    "/v1/prefix/pin?x=1",
    "/v1/prefix#x",
]


@pytest.mark.parametrize("target", HIDDEN)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_clients_do_not_reach_an_upstreams_store(stage: Stage, method: str, target: str) -> None:
    """Operations and blocks of an upstream's store are not relayed, for any spelling of the path."""
    upstream = await stage.prefix()
    client = await stage.gateway(upstream, admin_key="the-admin-key")
    body = msgspec.json.encode(PROMPT)
    async with wire(client) as connection:
        head = f"{method} {target} HTTP/1.1\r\nHost: g\r\nContent-Length: {len(body)}\r\n\r\n"
        await connection.send(head.encode() + body)
        refused = await connection.answer()

    expected = (400, "ambiguous_request") if "://" in target else (404, "not_found")  # of another host than its Host's
    assert (refused.status, refused.error["code"]) == expected
    assert upstream.store_asked == []


# Reports


async def test_the_report_has_each_upstreams_reply_unchanged(stage: Stage) -> None:
    """The report has each upstream's reply byte for byte, or the reason why there is none."""
    told = b'{"namespace": "ab12",  "tiers": {"disk": {"blocks": 1, "gigabytes_per_second": 1.20}}, "new": [1E30]}'
    first, second, none = await stage.prefix(), await stage.prefix("other"), await stage.mock()
    gone = "http://127.0.0.1:9/v1"
    first.refusal = (200, told)
    client = await stage.gateway(first, second, none, gone)
    answer = await client.get(PREFIX)

    assert answer.status == 200
    assert told in answer.body
    upstreams = msgspec.json.decode(answer.body.replace(told, b'"told"'))["upstreams"]
    assert list(upstreams) == [first.url, second.url, none.url, gone]
    assert upstreams[first.url] == "told"
    assert upstreams[second.url] == {"namespace": "ab12", "tiers": {"memory": {"blocks": 0}}}
    assert upstreams[none.url]["error"]["code"] == "no_prefix_store"
    assert upstreams[gone]["error"]["code"] == "upstream_unreachable"


@pytest.mark.parametrize(
    ("status", "said", "code"),
    [
        (404, b'{"detail":"Not Found"}', "no_prefix_store"),
        (405, b"", "no_prefix_store"),
        (501, b"{}", "no_prefix_store"),
        (500, b"oops", "upstream_cut"),
        (200, b"oops", "upstream_cut"),
        (200, b"[]", "upstream_cut"),
        (200, b"", "upstream_cut"),
        (200, b'{"a":' + b"[" * 100_000, "upstream_cut"),
        (200, b'{"a":"' + b"x" * 2**23 + b'"}', "upstream_cut"),
        (503, b'{"error":{"message":"still loading","code":"loading"}}', "loading"),
        (500, b'{"error":"odd"}', "upstream_cut"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_an_upstream_that_fails_is_named_with_its_reason(
    stage: Stage, status: int, said: bytes, code: str
) -> None:
    """The report names a failing upstream with its reason beside the replies of the others."""
    odd, well = await stage.prefix(), await stage.prefix()
    odd.refusal = (status, said)
    client = await stage.gateway(odd, well)
    answer = await client.get(PREFIX)

    assert answer.status == 200
    assert answer.json["upstreams"][odd.url]["error"]["code"] == code
    assert "tiers" in answer.json["upstreams"][well.url]


async def test_an_upstream_that_breaks_off_is_named_with_its_reason(stage: Stage) -> None:
    """The report names an upstream that breaks off in its head or in its body."""
    cut = await stage.raw(saying(b"HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n{"))
    rubbish = await stage.raw(saying(b"\0\0\0"))
    whole = await stage.raw(saying(json_reply(b'{"pinned": 1}')))
    client = await stage.gateway(cut, rubbish, whole)
    upstreams = (await client.send("POST", PREFIX + "/pin", PROMPT)).json["upstreams"]

    assert [upstreams[upstream.url]["error"]["code"] for upstream in (cut, rubbish)] == ["upstream_cut"] * 2
    assert upstreams[whole.url] == {"pinned": 1}


@operations
async def test_an_upstream_that_hangs_is_named_after_a_deadline(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, method: str, path: str, body: Any
) -> None:
    """The report names an upstream that does not answer within the deadline."""
    # The deadlines are no settings, and too long for a test.
    monkeypatch.setattr("gateway.api.operator.prefix_stores._REPORT_DEADLINE", 0.5)
    monkeypatch.setattr("gateway.api.operator.prefix_stores._OPERATION_DEADLINE", 0.5)
    hanging, well = await stage.prefix(), await stage.prefix()
    hanging.hang.clear()
    client = await stage.gateway(hanging, well)
    answer = await client.send(method, path, body)
    hanging.hang.set()

    assert answer.status == 200
    assert answer.json["upstreams"][hanging.url]["error"]["code"] == "upstream_timeout"
    assert "error" not in answer.json["upstreams"][well.url]


async def test_without_an_upstream_the_report_is_empty(stage: Stage) -> None:
    """The report is empty and an operation gives 503 while there is no upstream."""
    client = await stage.gateway()

    assert (await client.get(PREFIX)).json == {"upstreams": {}}
    for operation in OPERATIONS[1:]:
        answer = await client.send(*operation)
        assert (answer.status, answer.error["code"]) == (503, "no_upstream")


# Operations


@changes
async def test_an_operation_goes_to_every_upstream_that_has_the_model(
    stage: Stage, method: str, path: str, body: Any
) -> None:
    """An operation goes to every upstream that lists the model or has listed none."""
    having, other, silent = await stage.prefix("mock"), await stage.prefix("other"), await stage.prefix("mock", "x")
    client = await stage.gateway(having, other, silent)
    await client.gateway.router.refresh()
    next(u for u in client.gateway.router.upstreams if u.url == silent.url).models = None
    answer = await client.send(method, path + ("?model=mock" if method == "DELETE" else ""), body)

    assert answer.status == 200
    assert set(answer.json["upstreams"]) == {having.url, silent.url}
    assert [len(upstream.store_asked) for upstream in (having, other, silent)] == [1, 0, 1]
    (received,) = having.store_asked
    assert (received.method, received.target) == (method, path.replace("/cache", "").partition("?")[0])
    assert received.body == (msgspec.json.encode(body) if body else b"")


@changes
async def test_without_a_model_an_operation_goes_to_all(stage: Stage, method: str, path: str, body: Any) -> None:
    """An operation without a model goes to all upstreams, and the response has each result."""
    upstreams = [await stage.prefix("one"), await stage.prefix("two")]
    client = await stage.gateway(*upstreams)
    await client.gateway.router.refresh()
    answer = await client.send(method, path, {"prompt": "x"} if body else None)

    assert set(answer.json["upstreams"]) == {upstream.url for upstream in upstreams}
    assert [len(upstream.store_asked) for upstream in upstreams] == [1, 1]


async def test_emptying_reports_how_much_was_removed(stage: Stage) -> None:
    """Emptying the stores reports each upstream's number of blocks, and prompts are computed anew."""
    upstream = await stage.prefix()
    client = await stage.gateway(upstream)
    await client.post(chat("one two three"))
    emptied = await client.send("DELETE", PREFIX)
    again = await client.post(chat("one two three"), Cache_Control="no-cache")

    assert emptied.json == {"upstreams": {upstream.url: {"removed": 1}}}
    assert again.headers["x-keepgate-prefix-tokens"] == "0"


@changes
async def test_an_operation_for_an_unknown_model_is_404(stage: Stage, method: str, path: str, body: Any) -> None:
    """An operation for a model that no upstream has gives 404 and empties nothing."""
    upstream = await stage.prefix()
    client = await stage.gateway(upstream)
    await client.gateway.router.refresh()
    named = {**body, "model": "mcok"} if body else None
    refused = await client.send(method, path + ("?model=mcok" if method == "DELETE" else ""), named)

    assert (refused.status, refused.error["param"]) == (404, "model")
    assert upstream.store_asked == []


@changes
async def test_an_operation_without_any_store_is_404(stage: Stage, method: str, path: str, body: Any) -> None:
    """An operation gives 404 where no upstream has a prefix store."""
    client = await stage.gateway(await stage.mock(), await stage.mock())
    refused = await client.send(method, path, body)

    assert (refused.status, refused.error["code"]) == (404, "no_prefix_store")
    assert refused.error["message"] == "No upstream has a prefix store."


async def test_a_refusal_by_all_upstreams_is_relayed(stage: Stage) -> None:
    """A refusal that all upstreams share is relayed with status, message, field and code."""
    upstreams = [await stage.prefix(), await stage.prefix()]
    error = {"message": "messages: empty", "type": "invalid_request_error", "param": "messages", "code": "empty"}
    for upstream in upstreams:
        upstream.refusal = (422, msgspec.json.encode({"error": error}))
    client = await stage.gateway(*upstreams)
    refused = await client.send("POST", PREFIX + "/pin", PROMPT)

    assert (refused.status, refused.error) == (422, error)


async def test_different_failures_of_all_upstreams_are_all_named(stage: Stage) -> None:
    """An operation that fails differently everywhere gives 502 with every upstream and its reason."""
    failing, none = await stage.prefix(), await stage.mock()
    failing.refusal = (500, b"oops")
    client = await stage.gateway(failing, none)
    refused = await client.send("POST", PREFIX + "/unpin", PROMPT)

    assert refused.status == 502
    assert f"{failing.url}: " in refused.error["message"]
    assert f"{none.url}: " in refused.error["message"]


@pytest.mark.parametrize(
    ("method", "path", "body", "param"),
    [
        ("POST", "/pin", b"", None),
        ("POST", "/pin", b"[]", None),
        ("POST", "/pin", b"{", None),
        ("POST", "/pin", b'{"prompt":"\xff"}', None),
        ("POST", "/pin", b'{"model":"a","model":"b"}', None),
        ("POST", "/pin", {"model": 1}, "model"),
        ("POST", "/pin", {"model": ""}, "model"),
        ("POST", "/pin?model=mock", PROMPT, "model"),
        ("GET", "?model=mock", None, "model"),
        ("DELETE", "?model=", None, "model"),
        ("DELETE", "?model=mock&model=mock", None, "model"),
        ("DELETE", "?modle=mock", None, "modle"),
    ],
)
async def test_an_invalid_operation_is_refused(
    stage: Stage, method: str, path: str, body: Any, param: str | None
) -> None:
    """An invalid operation gives 400, with the field if there is one, and calls no upstream."""
    upstream = await stage.prefix()
    client = await stage.gateway(upstream)
    refused = await client.send(method, PREFIX + path, body)

    assert (refused.status, refused.error["param"]) == (400, param)
    assert upstream.store_asked == []


async def test_a_head_request_gets_the_size_of_the_report(stage: Stage) -> None:
    """A HEAD request for the report calls the upstreams and gets the size of the report."""
    upstream = await stage.prefix()
    client = await stage.gateway(upstream)
    head, report = await client.send("HEAD", PREFIX), await client.get(PREFIX)

    assert (head.status, head.headers["Content-Length"]) == (200, report.headers["Content-Length"])
    assert [received.method for received in upstream.store_asked] == ["GET", "GET"]


@pytest.mark.parametrize(("method", "path"), [("POST", ""), ("GET", "/pin"), ("POST", "/blocks"), ("POST", "/pin/x")])
async def test_other_operations_do_not_exist(stage: Stage, method: str, path: str) -> None:
    """An unknown operation reaches no upstream."""
    upstream = await stage.prefix()
    client = await stage.gateway(upstream)

    assert (await client.send(method, PREFIX + path, PROMPT)).status in (404, 405)
    assert upstream.store_asked == []
