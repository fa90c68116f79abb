"""OpenAI's `prediction` over HTTP: answers do not change, the usage tells what became of it, errors name the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.backend.conftest import CHAT, Served, StartServer
from tests.backend.speculation.drafting import eager

PROGRAM = 'def add(a, b):\n    """Add two numbers."""\n    return a + b\n'
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": f"Repeat this program:\n\n{PROGRAM}"}],
    "max_tokens": 60,
    "temperature": 0,
}
UNPREDICTED = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}


@pytest.fixture
async def server(start_server: StartServer) -> Served:
    return await start_server(speculator=eager())


@pytest.fixture
async def answer(start_server: StartServer) -> str:
    """Of a server without drafts."""
    return text_of(await (await start_server()).post(CHAT, **ASKED))


def text_of(body: dict[str, Any]) -> str:
    return str(body["choices"][0]["message"]["content"])


def predicted_tokens(body: dict[str, Any]) -> dict[str, int]:
    details = body["usage"]["completion_tokens_details"]
    return {name: details[name] for name in UNPREDICTED}


async def test_a_right_prediction_is_accepted(server: Served, answer: str) -> None:
    """The answer is the same, and all but one token of each step counts as accepted."""
    body = await server.post(CHAT, **ASKED, prediction={"type": "content", "content": answer})
    assert text_of(body) == answer
    tokens = predicted_tokens(body)
    assert tokens["accepted_prediction_tokens"] > 40
    assert tokens["rejected_prediction_tokens"] == 0


async def test_a_prediction_may_be_in_parts_and_wrong(server: Served, answer: str) -> None:
    """Text parts are one text. What differs is rejected, and the rest is found again."""
    halfway = len(answer) // 2
    parts = [{"type": "text", "text": text} for text in (answer[:halfway], "\n\nsomething else\n\n", answer[halfway:])]
    body = await server.post(CHAT, **ASKED, prediction={"type": "content", "content": parts})
    assert text_of(body) == answer
    tokens = predicted_tokens(body)
    assert tokens["accepted_prediction_tokens"] > 30
    assert tokens["rejected_prediction_tokens"] > 0


async def test_drafts_that_nobody_predicted_are_in_no_usage(server: Served, answer: str) -> None:
    """Prompt lookup is the engine's own affair; its metrics and status tell of it, and of predictions apart."""
    body = await server.post(CHAT, **ASKED)
    assert text_of(body) == answer
    assert predicted_tokens(body) == UNPREDICTED
    async with server.client.get("/metrics") as response:
        metrics = await response.text()
    async with server.client.get("/engine") as response:
        drafts = (await response.json())["drafts"]
    counts = drafts["prompt-lookup"]
    assert 0 < counts["accepted_tokens"] < counts["proposed_tokens"]
    assert counts["speedup"] > 0
    assert f'keepgate_backend_draft_tokens_total{{method="prompt-lookup"}} {counts["proposed_tokens"]:.1f}' in metrics
    assert "prediction" not in drafts


async def test_streamed_tokens_of_one_step_are_complete(server: Served, answer: str) -> None:
    """Several tokens come in one chunk; the text and the usage are those of the whole answer."""
    body = {**ASKED, "stream": True, "stream_options": {"include_usage": True}}
    prediction = {"type": "content", "content": answer}
    async with server.client.post(
        CHAT, json={"model": server.state.model.name, **body, "prediction": prediction}
    ) as response:
        lines = (await response.text()).splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    texts = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]]
    assert "".join(texts) == answer
    assert len([text for text in texts if text]) < 20
    assert predicted_tokens(chunks[-1])["accepted_prediction_tokens"] > 40


@pytest.mark.parametrize(
    ("prediction", "param", "message"),
    [
        ("text", "prediction", "prediction: Expected `object | null`, got `str`"),
        ({"content": "text"}, "prediction.type", "prediction.type"),
        ({"type": "text", "content": "text"}, "prediction.type", "prediction.type: expected one of content"),
        ({"type": "content"}, "prediction.content", "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content", "parts of the type 'text'"),
        ({"type": "content", "content": 3}, "prediction.content", "prediction.content"),
    ],
)
async def test_a_wrong_prediction_names_the_field(server: Served, prediction: Any, param: str, message: str) -> None:
    """A 400 with one sentence."""
    asked = {"model": server.state.model.name, **ASKED, "prediction": prediction}
    async with server.client.post(CHAT, json=asked) as response:
        error = (await response.json())["error"]
    assert response.status == 400
    assert error["param"] == param
    assert message in error["message"]


async def test_an_empty_prediction_is_none(server: Served, answer: str) -> None:
    """It changes nothing."""
    body = await server.post(CHAT, **ASKED, prediction={"type": "content", "content": ""})
    assert text_of(body) == answer
    assert predicted_tokens(body) == UNPREDICTED
