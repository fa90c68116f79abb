"""Marks for upstreams' own prompt caches, and what is reported of these caches."""

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic.types
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.proxy.prompt_caches.keys import PER_MINUTE, CacheKeys
from gateway.proxy.prompt_caches.prefixes import TTL, PrefixStatistics
from gateway.proxy.prompt_caches.prompt import read_prompt
from gateway.settings.cache import PromptCacheSettings
from gateway.surfaces.usage import PromptCacheTokens, prompt_cache_tokens
from gateway.upstreams.mock import Reply
from tests.gateway.client import CHAT, Answer, Client, chat
from tests.gateway.conftest import Stage
from tests.gateway.upstreams.billing_upstream import AnthropicCache, BillingUpstream

MESSAGES = "/v1/messages"
LONG = "You answer in short sentences. " * 200
"""Some 1,500 tokens."""
MARK = {"type": "ephemeral"}


@pytest.fixture
async def billing() -> AsyncIterator[BillingUpstream]:
    async with BillingUpstream().serving() as upstream:
        yield upstream


async def marking(stage: Stage, upstream: BillingUpstream, kind: str) -> Client:
    settings = PromptCacheSettings(mode="mark", kinds=(f"{upstream.address}={kind}",))
    client = await stage.gateway(upstream.url, prompt_cache=settings)
    await client.gateway.router.refresh()
    return client


def message(*said: str, **fields: Any) -> dict[str, Any]:
    """The body of a request for a message; what is said is the user's and the assistant's by turns."""
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)]
    return {"model": "mock", "max_tokens": 5, "system": LONG, "messages": messages, **fields}


def encoded(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def usage(answer: Answer) -> anthropic.types.Usage:
    return anthropic.types.Message.model_validate(answer.json).usage


def marks(body: bytes) -> int:
    return body.count(b'"cache_control"')


async def test_a_repeated_system_prompt_is_written_once_and_then_read(stage: Stage, billing: BillingUpstream) -> None:
    """The second request with a system prompt has it written, later ones read it; the client's bytes stay."""
    client = await marking(stage, billing, "anthropic")
    bodies = [message(f"question {number}") for number in range(4)]
    bills = [usage(await client.send("POST", MESSAGES, body)) for body in bodies]

    assert [bool(bill.cache_creation_input_tokens) for bill in bills] == [False, True, False, False]
    assert [bool(bill.cache_read_input_tokens) for bill in bills] == [False, False, True, True]
    wrapped = b'[{"type":"text","text":%s,"cache_control":{"type":"ephemeral"}}]'
    text = json.dumps(LONG).encode()
    assert billing.bodies[0] == msgspec.json.encode(bodies[0])
    assert billing.bodies[3] == msgspec.json.encode(bodies[3]).replace(text, wrapped % text)


async def test_conversations_that_go_on_have_their_end_marked(stage: Stage, billing: BillingUpstream) -> None:
    """Once conversations of a tenant have gone on, each turn reads all that the turn before sent."""
    client = await marking(stage, billing, "anthropic")
    for conversation in range(5):
        said = [f"conversation {conversation}: {'begin ' * 50}"]
        for turn in range(4):
            await client.send("POST", MESSAGES, message(*said))
            said += ["an answer " * 50, f"and {turn}?"]
    last = usage(await client.send("POST", MESSAGES, message(*said)))

    assert last.input_tokens == 0
    assert (last.cache_read_input_tokens or 0) > 5 * (last.cache_creation_input_tokens or 0) > 0
    assert max(map(marks, billing.bodies)) <= 3


async def test_prompts_that_do_not_come_again_are_not_marked(stage: Stage, billing: BillingUpstream) -> None:
    """Of prompts without a common prefix no token is written."""
    client = await marking(stage, billing, "anthropic")
    for number in range(6):
        await client.send("POST", MESSAGES, message("What is it about?", system=f"{number} {LONG}"))
    assert [marks(body) for body in billing.bodies] == [0] * 6


async def test_tenants_do_not_share_what_is_known_of_prefixes(stage: Stage, billing: BillingUpstream) -> None:
    """A prefix that another tenant sent counts as new."""
    client = await marking(stage, billing, "anthropic")
    for number in range(4):
        await client.tenant(f"key {number}").send("POST", MESSAGES, message(f"question {number}"))
    assert [marks(body) for body in billing.bodies] == [0] * 4


@pytest.mark.parametrize(
    "body",
    [
        message("and now?", system=[{"type": "text", "text": LONG, "cache_control": MARK}]),
        message("and now?", cache_control=MARK),
        message("and now?", system="short"),
    ],
    ids=["a breakpoint of the client's", "automatic breakpoints", "a short prompt"],
)
async def test_what_the_client_marks_or_is_too_short_stays(
    stage: Stage, billing: BillingUpstream, body: dict[str, Any]
) -> None:
    """Bodies with breakpoints of the client's and short ones reach the upstream as they are."""
    client = await marking(stage, billing, "anthropic")
    sent = [{**body, "max_tokens": number} for number in range(1, 5)]
    for each in sent:
        await client.send("POST", MESSAGES, each)
    assert billing.bodies == [msgspec.json.encode(each) for each in sent]


async def test_nothing_is_marked_unless_it_is_switched_on(stage: Stage, billing: BillingUpstream) -> None:
    """With the settings as shipped every body arrives as it was sent."""
    client = await stage.gateway(billing.url)
    await client.gateway.router.refresh()
    for body in (bodies := [message(f"question {number}") for number in range(4)]):
        await client.send("POST", MESSAGES, body)
    assert billing.bodies == [msgspec.json.encode(body) for body in bodies]


async def test_a_mark_is_no_part_of_the_key(stage: Stage, billing: BillingUpstream) -> None:
    """A request whose body was marked is a hit when it comes again."""
    client = await marking(stage, billing, "anthropic")
    for number in range(3):
        assert (await client.send("POST", MESSAGES, message(f"question {number}"))).cache == "miss"
    assert marks(billing.bodies[-1]) == 1
    assert (await client.send("POST", MESSAGES, message("question 2"))).cache == "hit"


async def test_chats_are_marked_where_the_upstream_understands_it(stage: Stage, billing: BillingUpstream) -> None:
    """The kind `cache-control` has breakpoints in content parts of chats; no other kind has."""
    system = {"role": "system", "content": LONG}
    for kind, expected in (("cache-control", [0, 1, 1]), ("anthropic", [0, 0, 0]), ("none", [0, 0, 0])):
        billing.bodies.clear()
        client = await marking(stage, billing, kind)
        for number in range(3):
            asked = chat(f"{kind} {number}")
            await client.post({**asked, "messages": [system, *asked["messages"]]})
        assert [marks(body) for body in billing.bodies] == expected
    assert b'"content":[{"type":"text","text":' not in billing.bodies[-1]


async def test_conversations_share_a_cache_key_with_their_system_prompt(stage: Stage, billing: BillingUpstream) -> None:
    """Chats of a tenant with the same system prompt have the same key; the client's own key stays."""
    client = await marking(stage, billing, "openai")

    async def key(text: str, tenant: str, **fields: Any) -> Any:
        asked = chat("a question", **fields)
        messages = [{"role": "system", "content": text}, *asked["messages"]]
        await client.tenant(tenant).send("POST", CHAT, {**asked, "messages": messages})
        return json.loads(billing.bodies[-1]).get("prompt_cache_key")

    first = await key(LONG, "ann", seed=1)
    assert first is not None
    assert await key(LONG, "ann", seed=2) == first
    assert await key(f"{LONG} Be kind.", "ann") != first
    assert await key(LONG, "ben") != first
    assert await key(LONG, "ann", seed=3, prompt_cache_key="mine") == "mine"
    assert await key("short", "ann") is None


@pytest.mark.parametrize(("kind", "refused"), [("cache-control", "cache_control"), ("openai", "prompt_cache_key")])
async def test_an_upstream_that_refuses_marks_gets_none(stage: Stage, kind: str, refused: str) -> None:
    """A request whose mark is refused is sent again without, and the upstream is remembered."""
    async with BillingUpstream(refuses=refused).serving() as upstream:
        client = await marking(stage, upstream, kind)
        messages = [{"role": "system", "content": LONG}, {"role": "user", "content": "hello"}]
        answers = [await client.post({"model": "mock", "messages": messages, "seed": n}) for n in range(4)]
        assert [answer.status for answer in answers] == [200] * 4
        assert sum(refused.encode() in body for body in upstream.bodies) == 1


async def test_a_marked_stream_shows_no_usage_that_was_not_asked_for(stage: Stage) -> None:
    """A stream is marked and asked for its usage at once, and its client gets what it asked for."""
    mock = await stage.mock()
    kinds = (f"{mock.url.removeprefix('http://').removesuffix('/v1')}=openai",)
    client = await stage.gateway(mock, prompt_cache=PromptCacheSettings(mode="mark", kinds=kinds))
    answer = await client.post(chat(LONG, stream=True))
    assert {"prompt_cache_key", "stream_options"} <= mock.received[-1].fields.keys()
    assert answer.text == LONG
    assert not any("usage" in chunk for chunk in answer.chunks)


async def test_an_upstream_of_another_kind_leaves_a_request_unmarked(stage: Stage, billing: BillingUpstream) -> None:
    """Where upstreams of two kinds may get a request, it is not marked."""
    async with BillingUpstream().serving() as other:
        settings = PromptCacheSettings(mode="mark", kinds=(f"{billing.address}=openai", f"{other.address}=none"))
        client = await stage.gateway(billing.url, other.url, prompt_cache=settings)
        await client.post(chat(LONG))
        assert b"prompt_cache_key" not in (billing.bodies or other.bodies)[0]


USAGES = {
    "OpenAI": {"prompt_tokens_details": {"cached_tokens": 6}},
    "OpenRouter": {"prompt_tokens_details": {"cached_tokens": 6, "cache_write_tokens": 3}},
    "DeepSeek": {"prompt_cache_hit_tokens": 6, "prompt_cache_miss_tokens": 4},
    "Moonshot": {"cached_tokens": 6},
    "a proxy to Anthropic": {"cache_read_input_tokens": 6, "cache_creation_input_tokens": 3},
}


@pytest.mark.parametrize("said", USAGES.values(), ids=USAGES)
async def test_every_form_of_usage_is_reported_alike(stage: Stage, said: dict[str, Any]) -> None:
    """Cached tokens are counted, shown and rendered for other clients; a chat client gets the upstream's own fields."""
    asked = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12, **said}
    choice = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
    body = {"id": "x", "object": "chat.completion", "created": 1, "model": "mock", "choices": [choice], "usage": asked}
    mock = await stage.mock(Reply(body=body))
    client = await stage.gateway(mock)
    answer = await client.post(chat(max_tokens=5))
    rendered = await client.send("POST", MESSAGES, {**chat(), "max_tokens": 5})
    response = await client.send("POST", "/v1/responses", {"model": "mock", "input": "hello", "max_output_tokens": 5})

    assert answer.json == body
    assert rendered.cache == "hit"
    written = 3 if "3" in str(said) else 0
    assert usage(rendered).cache_read_input_tokens == 6
    assert usage(rendered).cache_creation_input_tokens == written
    assert usage(rendered).input_tokens == 4 - written
    assert response.json["usage"]["input_tokens_details"]["cached_tokens"] == 6
    shown = (await client.get("/v1/cache/stats")).json["prefix"]["upstreams"][mock.url]
    assert shown["prompt_tokens"] >= 10
    assert await client.figure("upstream_cached_prompt_tokens_total", upstream=mock.url) == shown["prefix_tokens"]
    assert await client.figure("upstream_cache_write_prompt_tokens_total", upstream=mock.url) == shown["written_tokens"]


async def test_native_messages_are_reported_with_what_they_wrote(stage: Stage, billing: BillingUpstream) -> None:
    """Prompt tokens of native Messages are counted from the first on, with what was written and read."""
    client = await marking(stage, billing, "anthropic")
    bills = [usage(await client.send("POST", MESSAGES, message(f"question {number}"))) for number in range(3)]

    shown = (await client.get("/v1/cache/stats")).json["prefix"]["upstreams"][billing.url]
    assert shown["written_tokens"] == sum(bill.cache_creation_input_tokens or 0 for bill in bills) > 0
    assert shown["prefix_tokens"] == sum(bill.cache_read_input_tokens or 0 for bill in bills) > 0
    rest = sum(bill.input_tokens for bill in bills)
    assert shown["prompt_tokens"] == shown["written_tokens"] + shown["prefix_tokens"] + rest


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3), st.lists, max_leaves=4)
)
def test_usage_of_wrong_types_says_nothing(value: Any) -> None:
    """What is no count of tokens is left out, wherever it stands."""
    names = ("prompt_tokens_details", "cache_read_input_tokens", "prompt_cache_hit_tokens", "cached_tokens")
    counts = [name for name in names[1:] if type(value) is int and 0 <= value <= 2**53]
    found = prompt_cache_tokens(dict.fromkeys(names, value))
    assert found == (PromptCacheTokens(value, 0) if counts else None)
    assert prompt_cache_tokens(value) is None


TEXTS = st.text(max_size=20) | st.sampled_from(["", "  ", '"]}', "messages", '{"role":"user","content":"', "é\n\\"])
PARTS = st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}) | st.fixed_dictionaries(
    {"type": st.sampled_from(["thinking", "image", "tool_use", "tool_result", "image_url"]), "content": TEXTS}
)
CONTENT = TEXTS | st.lists(PARTS, max_size=3)
ODD: st.SearchStrategy[Any] = st.none() | st.integers() | st.just({}) | st.lists(st.integers(), max_size=2)
TURNS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "system", "developer"]), "content": CONTENT | ODD}
    )
    | ODD,
    max_size=6,
)
BODIES = st.fixed_dictionaries(
    {"model": st.just("mock")},
    optional={
        "metadata": TURNS,  # what looks like the conversation and is not
        "system": CONTENT | ODD,
        "tools": st.lists(st.fixed_dictionaries({"name": TEXTS}) | ODD, max_size=3) | ODD,
        "messages": TURNS | ODD | TEXTS,
        "instructions": TEXTS | ODD,
        "input": TEXTS | TURNS | ODD,
    },
)
WRITTEN = st.sampled_from([{"separators": (",", ":")}, {"indent": 1}, {"ensure_ascii": False}, {}])


def plain(value: Any) -> Any:
    """The value without breakpoints; a text for a single block of text."""
    if isinstance(value, list):
        if len(value) == 1 and isinstance(value[0], dict) and value[0].keys() - {"cache_control"} == {"type", "text"}:
            return value[0]["text"] if value[0]["type"] == "text" else value
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items() if name != "cache_control"}
    return value


def breakpoints(value: Any) -> int:
    """How many there are in a value."""
    if isinstance(value, dict):
        return ("cache_control" in value) + sum(map(breakpoints, value.values()))
    return sum(map(breakpoints, value)) if isinstance(value, list) else 0


@given(BODIES, WRITTEN, st.sampled_from(["messages", "chat.completions", "responses", "completions"]), st.data())
def test_a_marked_body_means_the_same(fields: Any, written: Any, family: str, data: st.DataObject) -> None:
    """Without its breakpoints a marked body is the client's, whatever that is and however it is written."""
    body = json.dumps(fields, **written).encode("utf-8", "surrogatepass")
    prompt = read_prompt(family, "mock", body)
    if prompt is None:
        return
    assert prompt.head <= len(prompt.prefixes)
    assert [prefix.size for prefix in prompt.prefixes] == sorted(prefix.size for prefix in prompt.prefixes)
    ends = data.draw(st.sets(st.integers(0, len(prompt.prefixes) - 1), max_size=3))
    marked = prompt.with_breakpoints(sorted(ends))
    read = json.loads(marked)
    assert plain(read) == plain(fields)
    assert breakpoints(read) <= len(ends)
    assert (marked == body) == (breakpoints(read) == 0)
    assert {**json.loads(prompt.with_key("k"))} == {**fields, "prompt_cache_key": "k"}


def test_names_with_escape_sequences_are_not_read() -> None:
    """A body whose names are written with escape sequences is left alone, and one that may hide a breakpoint too."""
    body = json.dumps(message("hello", user="x")).encode()
    assert read_prompt("messages", "mock", body.replace(b'"user"', b'"us\\u0065r"')) is None
    hidden = read_prompt("messages", "mock", body.replace(b"short", b"cache\\u005fcontrol"))
    assert hidden is not None
    assert hidden.has_breakpoints()
    accented = read_prompt("messages", "mock", body.replace(b"short", b"\\u00e9t\\u00e9"))
    assert accented is not None
    assert not accented.has_breakpoints()


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=30), st.integers(1, 12))
def test_statistics_choose_few_prefixes_and_stay_small(prompts: list[list[int]], limit: int) -> None:
    """At most three prefixes pay, in order, and no more prefixes are kept than allowed."""
    statistics = PrefixStatistics(max_prefixes=limit)
    for number, prompt in enumerate(prompts):
        digests = [bytes(prompt[: end + 1]) for end in range(len(prompt))]
        chosen = statistics.see(f"tenant {number % 3}", digests, 1)
        assert chosen == sorted(set(chosen))
        assert len(chosen) <= 3
        assert all(0 <= index < len(digests) for index in chosen)
        assert len(statistics) <= limit


def test_a_prefix_counts_again_within_the_time_to_live_only() -> None:
    """A prefix that comes once in each TTL is never marked; one that came twice before is, when it comes back."""
    now = 0.0
    statistics = PrefixStatistics(lambda: now)
    found: list[list[int]] = []
    for pause in (0.0, TTL + 1, TTL + 1, 1.0, TTL + 1):
        now += pause
        found.append(statistics.see("ann", [b"system", b"question %d" % len(found)], 1))
    assert found == [[], [], [], [0], [0]]


def test_a_share_of_wrong_guesses_stops_marks() -> None:
    """Prefixes that always come twice and never a third time are soon not marked any more."""
    statistics = PrefixStatistics()
    marked = []
    for number in range(20):
        for question in range(2):
            digests = [b"system %d" % number, b"question %d %d" % (number, question)]
            marked.append(bool(statistics.see("ann", digests, 1)))
    assert any(marked[:10])
    assert not any(marked[10:])


def test_a_busy_beginning_is_cut_into_shares() -> None:
    """Above the rate of a machine the conversations of a beginning get several keys, and each keeps its own."""
    now = 0.0
    keys = CacheKeys(lambda: now)
    conversations = [b"conversation %d" % number for number in range(20)]
    slow = set()
    for conversation in conversations:
        slow.add(keys.key("ann", b"system", conversation))
        now += 60 / PER_MINUTE
    fast = [keys.key("ann", b"system", conversation) for conversation in conversations * 8]
    assert len(slow) == 1
    assert len(set(fast)) > 4
    assert fast[-20:] == [keys.key("ann", b"system", conversation) for conversation in conversations]


def test_billing_looks_back_twenty_blocks() -> None:
    """The billing of these tests finds an earlier breakpoint within 20 blocks and not beyond."""
    for added, expected in ((19, True), (20, False)):
        cache = AnthropicCache()
        block = {"type": "text", "text": LONG}
        cache.bill("", message(system=[{**block, "cache_control": MARK}]))
        said = [{"type": "text", "text": f"{n}"} for n in range(added)]
        said[-1]["cache_control"] = MARK  # type: ignore[assignment]  # a dict among texts
        body = {**message(system=[block]), "messages": [{"role": "user", "content": said}]}
        assert bool(cache.bill("", body).read) is expected
