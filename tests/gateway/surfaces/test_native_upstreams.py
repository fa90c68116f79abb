"""Upstreams that have a form of API themselves: they get the client's bytes, and their answers serve all clients."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.gateway.conftest import Stage
from tests.gateway.surfaces.dialects import CALLERS, DIALECTS, KEY, TRANSLATED, Dialect, Question, names
from tests.gateway.surfaces.native_answers import PLAIN, SAID, STREAMS
from tests.gateway.surfaces.native_upstream import CHAT, EVENTS, MESSAGES, RESPONSES, Given, NativeUpstream
from tests.waiting import until

Start = Callable[..., Awaitable[NativeUpstream]]

NATIVE_CALLERS = [(dialect, stream) for dialect in TRANSLATED for stream in (False, True)]
natives = pytest.mark.parametrize(
    ("dialect", "stream"),
    NATIVE_CALLERS,
    ids=[f"{dialect.name}{' stream' if stream else ''}" for dialect, stream in NATIVE_CALLERS],
)
QUESTION = Question(tool="look")
VERSION = {"anthropic_version": "2023-06-01"}


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts an upstream that has chat completions and these other paths."""
    async with AsyncExitStack() as stack:

        async def start(*paths: str) -> NativeUpstream:
            chosen = (CHAT, *paths)
            upstream = NativeUpstream({path: PLAIN[path] for path in chosen}, {path: STREAMS[path] for path in chosen})
            return await stack.enter_async_context(upstream.serving())

        yield start


def odd_bytes(body: dict[str, Any]) -> bytes:
    """A body as no library writes it: in another order, with white space, escapes and a null."""
    reversed_ = dict(reversed(body.items()))
    return json.dumps({**reversed_, "x_unknown": None}, indent=3).replace("weather", "we\\u0061ther").encode()


@natives
async def test_bytes_pass_unchanged(stage: Stage, start: Start, dialect: Dialect, stream: bool) -> None:
    """An upstream that has the client's form of API gets body, headers and query as they are; so does the client."""
    upstream = await start(dialect.path)
    client = await stage.gateway(upstream.url)
    given = (STREAMS if stream else PLAIN)[dialect.path]
    (upstream.streams if stream else upstream.plain)[dialect.path] = Given(
        given.body, given.content_type, headers={"request-id": "req_1", "anthropic-ratelimit-tokens-limit": "9"}
    )
    body = odd_bytes(dialect.body(QUESTION, stream))
    own = {"x_api_key": "sk-1", "X_Custom": "Ü", "User_Agent": "an-app/1.0", "anthropic_beta": "a,b", **VERSION}
    answer = await client.post(body, dialect.path + "?beta=true&a=%2F+b", **own)
    (asked,) = upstream.asked

    assert (asked.path, asked.body) == (dialect.path + "?beta=true&a=%2F+b", body)
    sent = {name.replace("_", "-"): value for name, value in own.items()}
    assert {name: asked.headers[name] for name in sent} == sent
    assert "Authorization" not in asked.headers
    assert (answer.status, answer.body) == (200, given.body)
    assert answer.headers["Content-Type"].partition(";")[0] == given.content_type
    assert (answer.headers["request-id"], answer.headers["anthropic-ratelimit-tokens-limit"]) == ("req_1", "9")
    assert answer.cache == "miss"


@natives
async def test_its_answer_is_cached_for_all(stage: Stage, start: Start, dialect: Dialect, stream: bool) -> None:
    """An answer in another form than chat completions is a hit for all clients, who read it with their libraries."""
    upstream = await start(dialect.path)
    client = await stage.gateway(upstream.url)
    # Without a header of Anthropic's, which would be part of the key.
    first = await client.tenant(KEY).post(dialect.body(QUESTION, stream), dialect.path)
    callers = [(other, streams) for other, streams in CALLERS if other.path != MESSAGES]
    said = [await other.ask(client, QUESTION, streams) for other, streams in callers]
    again = await client.tenant(KEY).post(dialect.body(QUESTION), dialect.path)

    lost = dialect.name == "ollama"  # it does not count the cached tokens of a prompt
    expected = [other.can_say(SAID) for other, _ in callers]
    assert first.cache == "miss"
    assert [one.without_cached() if lost else one for one in said] == [
        one.without_cached() if lost else one for one in expected
    ]
    assert again.cache == "hit"
    assert again.json == json.loads(PLAIN[dialect.path].body) or stream
    assert upstream.paths == [dialect.path]


@natives
async def test_its_library_reads_it(stage: Stage, start: Start, dialect: Dialect, stream: bool) -> None:
    """The library of this form of API reads the upstream's answer, and the replayed one, streamed and not."""
    upstream = await start(dialect.path)
    client = await stage.gateway(upstream.url)
    said = [await dialect.ask(client, QUESTION, streams) for streams in (stream, stream, not stream)]

    assert said == [dialect.can_say(SAID)] * 3
    assert upstream.paths == [dialect.path]


async def test_headers_of_anthropic_tell_answers_apart(stage: Stage, start: Start) -> None:
    """Where an upstream reads them, another version or beta is another request; where none does, it is the same."""
    native, other = await start(MESSAGES), await start()
    variants: list[dict[str, str]] = [
        {},
        VERSION,
        {**VERSION, "anthropic_beta": "a"},
        {**VERSION, "anthropic_beta": "b"},
    ]
    body = DIALECTS[1].body(QUESTION)
    of_native = await stage.gateway(native.url)
    apart = [(await of_native.post(body, MESSAGES, **variant)).cache for variant in variants * 2]
    of_other = await stage.gateway(other.url)
    same = [(await of_other.post(body, MESSAGES, **variant)).cache for variant in variants * 2]

    assert apart == ["miss"] * 4 + ["hit"] * 4
    assert same == ["miss"] + ["hit"] * 7
    assert (len(native.asked), len(other.asked)) == (4, 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", TRANSLATED, ids=names(TRANSLATED))
async def test_a_key_becomes_a_bearer_token(stage: Stage, start: Start, dialect: Dialect, stream: bool) -> None:
    """An upstream of chat completions gets the key where it expects it, and no header of another API."""
    upstream = await start()
    client = await stage.gateway(upstream.url)
    own = {"anthropic_beta": "a", "api_key": "", **VERSION, "x_custom": "1", "x_api_key": "sk-1"}
    del own["api_key"]
    await client.post(dialect.body(QUESTION, stream), dialect.path, **own)
    again = await client.tenant("sk-1").post(DIALECTS[0].body(QUESTION), CHAT)
    (asked,) = upstream.asked

    assert asked.headers.getall("Authorization") == ["Bearer sk-1"]
    assert asked.headers["x-custom"] == "1"
    assert not [name for name in asked.headers if name.lower() in ("x-api-key", "api-key")]
    assert not [name for name in asked.headers if name.lower().startswith("anthropic-")]
    assert again.cache == "hit"


@natives
async def test_some_upstreams_have_it(stage: Stage, start: Start, dialect: Dialect, stream: bool) -> None:
    """Of two upstreams each gets what it has, and either answer is there for later requests."""
    native, other = await start(dialect.path), await start()
    client = (await stage.gateway(native.url, other.url)).tenant(KEY)
    statuses = set()
    for number in range(8):
        question = Question(f"Question {number}", tool="look")
        # Several at once, so that both upstreams are busy.
        answers = await asyncio.gather(
            *(client.post(dialect.body(Question(f"{number} {n}"), stream), dialect.path) for n in range(4)),
            client.post(dialect.body(question, stream), dialect.path),
        )
        statuses |= {answer.status for answer in answers}
        assert not stream or all(dialect.is_whole(answer.body) for answer in answers)
        assert (await client.post(DIALECTS[0].body(question), CHAT)).cache == "hit"

    assert statuses == {200}
    assert set(native.paths) <= {dialect.path}
    assert set(other.paths) <= {CHAT}
    assert len(native.asked) + len(other.asked) == 40


@natives
async def test_an_upstream_loses_it(stage: Stage, start: Start, dialect: Dialect, stream: bool) -> None:
    """An upstream that no longer has the form of API is asked for chat completions after each 404, which may be about
    one model.
    """
    upstream = await start(dialect.path)
    client = (await stage.gateway(upstream.url)).tenant(KEY)
    before = await client.post(dialect.body(QUESTION, stream), dialect.path)
    del upstream.plain[dialect.path], upstream.streams[dialect.path]
    after = [await client.post(dialect.body(Question(str(n)), stream), dialect.path) for n in range(3)]
    again = await client.post(dialect.body(QUESTION, stream), dialect.path)

    assert (before.status, again.status, again.cache) == (200, 200, "hit")
    assert [answer.status for answer in after] == [200] * 3
    assert upstream.paths == [dialect.path, *[dialect.path, CHAT] * 3]


@natives
async def test_an_unknown_model_is_the_upstreams_error(
    stage: Stage, start: Start, dialect: Dialect, stream: bool
) -> None:
    """A native upstream's 404 about a model reaches the client as an error, and does not disable the form of API."""
    upstream = await start(dialect.path)
    client = (await stage.gateway(upstream.url)).tenant(KEY)
    answers = upstream.streams if stream else upstream.plain
    good = dict(answers)
    refusal = Given(b'{"type":"error","error":{"type":"not_found_error","message":"no such model"}}', status=404)
    answers[dialect.path] = answers[CHAT] = refusal
    refused = await client.post({**dialect.body(QUESTION, stream), "model": "nope"}, dialect.path)
    answers |= good
    await client.post(dialect.body(QUESTION, stream), dialect.path)

    assert refused.status == 404
    assert "no such model" in dialect.error_message(refused.body)
    assert upstream.paths == [dialect.path, CHAT, dialect.path]


@pytest.mark.parametrize("status", [400, 401, 429, 500, 529])
@natives
async def test_its_errors_pass_unchanged(
    stage: Stage, start: Start, dialect: Dialect, stream: bool, status: int
) -> None:
    """An upstream's error in the client's form is passed on with status, body and headers, and is not stored."""
    upstream = await start(dialect.path)
    client = (await stage.gateway(upstream.url)).tenant(KEY)
    answers = upstream.streams if stream else upstream.plain
    good = answers[dialect.path]
    answers[dialect.path] = Given(b'{"odd": "error"}', status=status, headers={"Retry-After": "7", "request-id": "r"})
    refused = await client.post(dialect.body(QUESTION, stream), dialect.path)
    answers[dialect.path] = good
    after = await client.post(dialect.body(QUESTION, stream), dialect.path)

    assert (refused.status, refused.body) == (status, b'{"odd": "error"}')
    assert (refused.headers["Retry-After"], refused.headers["request-id"]) == ("7", "r")
    assert (after.status, after.cache, after.body) == (200, "miss", good.body)
    assert upstream.paths == [dialect.path] * 2


@pytest.mark.parametrize("dialect", TRANSLATED, ids=names(TRANSLATED))
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
async def test_a_cut_stream_is_not_stored(stage: Stage, start: Start, dialect: Dialect, share: float) -> None:
    """A native stream that breaks reaches the client with an error in its form at the end, and nothing is stored."""
    upstream = await start(dialect.path)
    client = (await stage.gateway(upstream.url)).tenant(KEY)
    good = STREAMS[dialect.path]
    piece = good.body[: int(len(good.body) * share)]
    upstream.streams[dialect.path] = Given(piece, good.content_type, cut=True)
    broken = await client.post(dialect.body(QUESTION, True), dialect.path)
    upstream.streams[dialect.path] = good
    after = await client.post(dialect.body(QUESTION, True), dialect.path)

    assert dialect.error_event(broken.body)
    assert not dialect.is_whole(broken.body)
    assert (after.cache, after.body) == ("miss", good.body)


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
@natives
async def test_others_wait_for_a_native_answer(
    stage: Stage, start: Start, dialect: Dialect, stream: bool, is_cut: bool
) -> None:
    """Clients of all forms share a native call in flight.

    When it breaks, each gets an error in its own form; those that have got nothing of a stream share another call.
    """
    upstream = await start(dialect.path)
    client = (await stage.gateway(upstream.url)).tenant(KEY)
    answers = upstream.streams if stream else upstream.plain
    good = answers[dialect.path]
    answers[dialect.path] = Given(
        good.body[: len(good.body) // 2] if is_cut else good.body, good.content_type, cut=is_cut
    )
    upstream.hold.clear()
    before = await client.figure("collapsed_requests_total")
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(client.post(dialect.body(QUESTION, stream), dialect.path))
        await until(lambda: len(upstream.asked) == 1)
        others = [tasks.create_task(client.post(other.body(QUESTION, s), other.path)) for other, s in CALLERS]
        await client.until("collapsed_requests_total", before + len(CALLERS))
        upstream.hold.set()
    results = [first.result(), *(task.result() for task in others)]

    assert upstream.paths[0] == dialect.path
    assert len(upstream.paths) == (2 if stream and is_cut else 1)
    for (other, streams), answer in zip([(dialect, stream), *CALLERS], results, strict=True):
        if not is_cut:
            assert answer.status == 200
            assert not streams or other.is_whole(answer.body)
        elif (other, streams) == (dialect, stream) and stream:
            assert answer.status == 200
            assert other.error_event(answer.body)
        elif answer.status != 200 or not stream:
            assert answer.status == 502
            assert other.error_message(answer.body)


async def test_a_field_of_the_client_alone_needs_no_translation(stage: Stage, start: Start) -> None:
    """What chat completions cannot say goes to an upstream that has the form of API, and is refused elsewhere."""
    native, other = await start(MESSAGES, RESPONSES), await start()
    messages = {**DIALECTS[1].body(Question()), "container": "container_1"}
    responses = {**DIALECTS[2].body(Question()), "prompt": {"id": "pmpt_1"}}
    for_native, for_other = await stage.gateway(native.url), await stage.gateway(other.url)
    for path, body, dialect, name in (
        (MESSAGES, messages, DIALECTS[1], "container"),
        (RESPONSES, responses, DIALECTS[2], "prompt"),
    ):
        assert (await for_native.post(body, path)).status == 200
        refused = await for_other.post(body, path)
        assert refused.status == 400
        assert f"'{name}'" in dialect.error_message(refused.body)
    assert other.asked == []


async def test_a_stream_without_its_content_type_is_no_stream(stage: Stage, start: Start) -> None:
    """A native answer of another type than a stream's is relayed and, if it is whole, stored."""
    upstream = await start(MESSAGES)
    client = (await stage.gateway(upstream.url)).tenant(KEY)
    upstream.streams[MESSAGES] = PLAIN[MESSAGES]
    first = await client.post(DIALECTS[1].body(QUESTION, True), MESSAGES)
    again = await client.post(DIALECTS[1].body(QUESTION, True), MESSAGES)

    assert first.body == PLAIN[MESSAGES].body
    assert again.cache == "hit"
    assert again.headers["Content-Type"] == EVENTS
    assert DIALECTS[1].is_whole(again.body)


@pytest.mark.parametrize(
    ("path", "number", "state"),
    [(MESSAGES, 1, {"container": "container_1"}), (RESPONSES, 2, {"conversation": "conv_1"})],
)
async def test_a_request_about_state_at_the_provider_is_not_cached(
    stage: Stage, start: Start, path: str, number: int, state: dict[str, Any]
) -> None:
    """What such a request refers to changes with every turn, so it is answered by the upstream each time."""
    upstream = await start(path)
    client = await stage.gateway(upstream.url)
    body = {**DIALECTS[number].body(Question()), **state}
    assert [(await client.post(body, path)).cache for _ in range(2)] == ["bypass", "bypass"]
    assert len(upstream.asked) == 2


async def test_an_answer_that_the_upstream_does_not_keep_is_not_given_for_one_that_it_keeps(
    stage: Stage, start: Start
) -> None:
    """Its id could not be continued there."""
    client = await stage.gateway((await start(RESPONSES)).url)
    body = DIALECTS[2].body(Question())
    assert (await client.post({**body, "store": False}, RESPONSES)).cache == "miss"
    assert (await client.post(body, RESPONSES)).cache == "miss"
    assert (await client.post(body, RESPONSES)).cache == "hit"
