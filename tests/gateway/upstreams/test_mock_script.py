"""`mock:FILE.yaml`: the scripted upstream that stands in for a model."""

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.settings.fields import SettingsError
from gateway.upstreams.mock import MockUpstream, Reply, load_script
from tests.gateway.client import COMPLETIONS, chat
from tests.gateway.conftest import Stage

SCRIPT = """
replies:
  - when: weather
    message:
      content: null
      tool_calls:
        - {id: call_1, type: function, function: {name: weather, arguments: '{"city": "Oslo"}'}}
    finish_reason: tool_calls
  - when: busy
    status: 429
    headers: {Retry-After: "7"}
    error: {message: Slow down., type: rate_limit_error, param: null, code: rate_limited}
  - when: think
    message: {reasoning_content: Hm., content: "42"}
  - when: exact
    body: {id: chatcmpl-1, object: chat.completion, created: 1, model: m, choices: []}
  - when: events
    events:
      - {id: c, object: chat.completion.chunk, created: 1, model: m, choices: [
          {index: 0, delta: {content: hi}, finish_reason: stop}]}
      - "[DONE]"
  - when: cut
    text: one two three
    cut_after: 2
  - text: I know nothing of that.
    finish_reason: length
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "script.yaml"
    file.write_text(SCRIPT)
    return file


async def test_replies_follow_the_script(stage: Stage, script: Path) -> None:
    """The first reply whose `when` is in the last user message is sent, else the one without `when`."""
    client = await stage.gateway(f"mock:{script}")
    called = (await client.post(chat("How is the weather?"))).json["choices"][0]
    assert called["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert (called["message"]["role"], called["finish_reason"]) == ("assistant", "tool_calls")
    thought = (await client.post(chat("think"))).json["choices"][0]
    assert (thought["message"]["reasoning_content"], thought["message"]["content"]) == ("Hm.", "42")
    rest = (await client.post(chat("anything"))).json["choices"][0]
    assert (rest["message"]["content"], rest["finish_reason"]) == ("I know nothing of that.", "length")
    several = [{"role": "user", "content": "weather"}, {"role": "assistant", "content": "think"}]
    last = await client.post({"model": "mock", "messages": [*several, {"role": "user", "content": "busy"}]})
    assert last.status == 429


async def test_an_error_is_sent_as_it_is_scripted(stage: Stage, script: Path) -> None:
    """A scripted error has its status, headers and OpenAI's error object, for streams as well."""
    client = await stage.gateway(f"mock:{script}")
    for stream in (False, True):
        refused = await client.post(chat("busy", stream=stream))
        assert (refused.status, refused.headers["Retry-After"]) == (429, "7")
        assert refused.error == {
            "message": "Slow down.",
            "type": "rate_limit_error",
            "param": None,
            "code": "rate_limited",
        }


async def test_streams_follow_the_script(stage: Stage, script: Path) -> None:
    """A stream has the scripted chunks or events, and breaks where the script says."""
    client = await stage.gateway(f"mock:{script}")
    called = (await client.post(chat("weather", stream=True))).response["choices"][0]
    assert called["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert called["finish_reason"] == "tool_calls"
    assert [chunk["id"] for chunk in (await client.post(chat("events", stream=True))).chunks] == ["c"]
    cut = await client.post(chat("cut", stream=True))
    assert b"[DONE]" not in cut.body
    assert b"upstream_cut" in cut.events[-1]


async def test_a_scripted_body_is_sent_whole(stage: Stage, script: Path) -> None:
    """A scripted body has its own fields only."""
    async with (
        MockUpstream(load_script(script)).serving() as mock,
        aiohttp.ClientSession() as session,
        session.post(f"{mock.url}/chat/completions", json=chat("exact")) as response,
    ):
        body = await response.json()
    assert body == {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "choices": []}


async def test_without_a_script_the_question_comes_back(stage: Stage) -> None:
    """The upstream `mock:` answers with the prompt and counts words as tokens."""
    client = await stage.gateway("mock:")
    parts = [{"type": "text", "text": "one two"}, {"type": "text", "text": "three"}]
    for content in ("one two three", parts):
        answer = await client.post(chat(content))
        assert answer.text == "one two three"
        assert answer.json["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    assert (await client.post({"model": "mock", "prompt": "to be or"}, COMPLETIONS)).text == "to be or"
    streamed = await client.post(chat("to be", stream=True, stream_options={"include_usage": True}))
    assert streamed.text == "to be"
    assert streamed.chunks[-1]["usage"]["total_tokens"] == 4
    assert (await client.get("/v1/models")).json["data"][0]["id"] == "mock"
    assert (await client.get("/v1/models/mock")).json["id"] == "mock"
    missing = await client.get("/v1/models/other")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")


async def test_requests_are_recorded(stage: Stage) -> None:
    """Each request is recorded with its path, headers and body, even if its client disconnects."""
    mock = await stage.mock(Reply(text="x"))
    client = await stage.gateway(mock)
    await client.post(chat("hello", user="u-1"), Authorization="Bearer k")
    (received,) = mock.received
    assert received.path == "/v1/chat/completions"
    assert received.headers["Authorization"] == "Bearer k"
    assert received.fields == chat("hello", user="u-1")
    mock.hold.clear()
    async with client.stream(chat("never mind", stream=True)) as stream:
        await stream.event()
    await mock.wait_for_cancelled(1)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("replies: [", "not valid YAML: "),
        ("replies: []\nreplies: []", "not valid YAML: replies appears twice (line 2, column 1)"),
        ("- text: x", "expected keys and values, such as `replies: []`"),
        ("reply: []", "reply"),
        ("replies: [{txt: hello}]", "txt"),
        ("replies: [{status: ok}]", "replies[0].status"),
        ("replies: [{text: [1]}]", "replies[0].text"),
    ],
)
def test_an_invalid_script_is_reported_in_one_line(tmp_path: Path, text: str, reason: str) -> None:
    """The message on an invalid script has the file, the key and the expectation in one line."""
    file = tmp_path / "s.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load_script(file)
    message: Any = str(caught.value)
    assert str(file) in message
    assert reason in message
    assert "\n" not in message
