"""The `openai` libraries against `keepgate serve` as it comes: the in-repo backend on the real model."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.clients.node import Node, NodeClient
from tests.clients.python import AsyncPythonClient, SyncPythonClient
from tests.clients.test_openai import CREATE, LibraryClient, outcome
from tests.gateway.client import assemble
from tests.gateway.processes.serving import Serving, serving

MODEL = "SmolLM2-135M-Instruct"
# The gateway's start takes seconds: the tests of this module share one, and so its event loop.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    async with serving(tmp_path_factory.mktemp("state")) as running:
        yield running


@pytest.fixture(params=["python sync", "python async", "node"])
def library(request: pytest.FixtureRequest, gateway: Serving, node: Node) -> LibraryClient:
    """A client of the gateway and a tenant of its own, so that it finds nothing of the others in the cache."""
    url, key = f"{gateway.url}/v1", f"sk-{request.param}-{request.node.originalname}"
    match request.param:
        case "node":
            return NodeClient(node, baseURL=url, apiKey=key)
        case "python sync":
            return SyncPythonClient(base_url=url, api_key=key)
    return AsyncPythonClient(base_url=url, api_key=key)


def ask(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Count from one to five."}]
    return {"model": MODEL, "messages": messages, "temperature": 0, "max_completion_tokens": 10, **fields}


async def test_an_answer_and_its_stream_agree(library: LibraryClient) -> None:
    """Streamed by the model, then from the cache in either shape: the same words, reason and usage."""
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    computed = (await outcome(library.call(CREATE, ask(**options))))["chunks"]
    fresh = assemble(computed)
    assert fresh["choices"][0]["message"]["content"].strip()
    assert fresh["choices"][0]["finish_reason"] in ("length", "stop")
    assert 0 < computed[-1]["usage"]["completion_tokens"] <= 10
    replayed = assemble((await outcome(library.call(CREATE, ask(**options))))["chunks"])
    assert replayed["choices"] == fresh["choices"]
    assert replayed["usage"] == computed[-1]["usage"]
    whole = await outcome(library.call(CREATE, ask()))
    assert whole["headers"]["x-keepgate-cache"] == "hit"
    assert whole["value"]["choices"][0]["message"]["content"] == fresh["choices"][0]["message"]["content"]
    assert whole["value"]["usage"] == computed[-1]["usage"]


async def test_what_a_plain_stream_was_answered_serves_all_shapes(library: LibraryClient) -> None:
    """An app that streams without asking for usage fills the cache for those who do ask."""
    asked = ask(max_completion_tokens=4)
    plain = (await outcome(library.call(CREATE, {**asked, "stream": True})))["chunks"]
    assert all(chunk["choices"] for chunk in plain)
    whole = await outcome(library.call(CREATE, asked))
    assert whole["headers"]["x-keepgate-cache"] == "hit"
    assert whole["value"]["usage"]["completion_tokens"] == 4
    assert whole["value"]["choices"][0]["message"]["content"] == assemble(plain)["choices"][0]["message"]["content"]


async def test_choices_and_logprobs(library: LibraryClient) -> None:
    """Several choices with their likeliest alternatives, once computed and once cached."""
    asked = ask(n=2, seed=3, temperature=1.0, logprobs=True, top_logprobs=2, max_completion_tokens=4)
    for cache in ("miss", "hit"):
        seen = await outcome(library.call(CREATE, asked))
        assert seen["headers"]["x-keepgate-cache"] == cache
        choices = seen["value"]["choices"]
        assert [choice["index"] for choice in choices] == [0, 1]
        for choice in choices:
            tokens = choice["logprobs"]["content"]
            assert "".join(token["token"] for token in tokens) == choice["message"]["content"]
            assert all(len(token["top_logprobs"]) == 2 and token["logprob"] <= 0 for token in tokens)


async def test_completions_stop_and_models(library: LibraryClient) -> None:
    """The legacy endpoint ends at the stop string, which is not part of the text."""
    params = {"model": MODEL, "prompt": "one two three four five", "max_tokens": 12, "temperature": 0, "stop": " "}
    choice = (await outcome(library.call("completions.create", params)))["value"]["choices"][0]
    assert " " not in choice["text"]
    assert choice["finish_reason"] == "stop"
    assert [model["id"] for model in (await outcome(library.call("models.list")))["value"]] == [MODEL]
    assert (await outcome(library.call("models.retrieve", MODEL)))["value"]["owned_by"] == "keepgate"


@pytest.mark.parametrize(
    ("fields", "name", "param"),
    [
        ({"temperature": 9.0}, "BadRequestError", "temperature"),
        ({"max_completion_tokens": 0}, "BadRequestError", "max_completion_tokens"),
        ({"messages": []}, "BadRequestError", "messages"),
        ({"model": "absent"}, "NotFoundError", "model"),
        ({"tools": [{"type": "function", "function": {"name": "c k"}}]}, "BadRequestError", "tools[0].function.name"),
    ],
)
async def test_what_the_model_cannot_do_names_the_field(
    library: LibraryClient, fields: dict[str, Any], name: str, param: str
) -> None:
    """A refusal says which field it is about, whichever process refuses."""
    seen = await library.call(CREATE, ask(**fields))
    assert seen["error"]["name"] == name
    assert seen["error"]["param"] == param
    assert seen["error"]["message"]
